"""From a loaded model to text: pieces that join to the decoded whole, chat, what is never drawn, where it ends."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxpp import cli
from jaxpp.conversion import load
from jaxpp.data import Tokenizer
from jaxpp.serve import sample as module
from jaxpp.serve.generate import generate
from jaxpp.serve.sample import prompt_ids, sample
from tests import formats


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return formats.write(tmp_path_factory.mktemp("hf") / "llama")


@pytest.fixture(scope="module")
def model(directory: Path) -> Any:
    return load(directory)


def greedy(model: Any, ids: Sequence[int], count: int) -> list[int]:
    """Append the argmax of the model's own logits, among the ids that the tokenizer knows."""
    found = list(ids)
    for _ in range(count):
        found.append(int(np.asarray(model(np.array([found])))[0, -1, : model.tokenizer.vocab_size].argmax()))
    return found[len(ids) :]


def test_a_continuation_is_the_argmax(model: Any) -> None:
    pieces = list(sample(model, "hello", max_new_tokens=6, temperature=0))
    expected = greedy(model, model.tokenizer.encode("hello").tolist(), 6)
    assert not {255, 256} & set(expected), "a text that ends at once tests nothing"
    assert "".join(pieces) == model.tokenizer.decode(expected)


def test_an_answer_follows_the_chat_template(directory: Path, model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    rendered = "<user>hello<assistant>"
    expected = model.tokenizer.decode(greedy(model, model.tokenizer.encode(rendered, special=True).tolist(), 6))
    words = ["--prompt", "hello", "--max_new_tokens", "6", "--temperature", "0"]
    assert cli.main(["generate", str(directory), *words, "--chat"]) == 0
    assert capsys.readouterr().out == expected + "\n"
    assert cli.main(["generate", str(directory), *words, "--mesh", "fsdp:2 tensor:2"]) == 0
    plain = model.tokenizer.decode(greedy(model, model.tokenizer.encode("hello").tolist(), 6))
    assert capsys.readouterr().out == "hello" + plain + "\n" != expected + "\n"


def test_a_user_cannot_end_a_turn(model: Any) -> None:
    ids = prompt_ids(model.tokenizer, "a<|endoftext|>b")
    assert 256 not in ids and prompt_ids(model.tokenizer, "<|endoftext|>", chat=True).count(256) == 1


def test_rows_beyond_the_tokenizer_are_never_drawn(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table has 264 rows, the tokenizer 257."""
    hot: dict[str, Any] = dict(max_positions=128, temperature=100.0, top_k=0)
    free, held = (list(generate(model, [1], 60, **hot, num_tokens=most)) for most in (None, 100))
    assert max(free) >= 100 > max(held)
    asked: dict[str, Any] = {}
    monkeypatch.setattr(module, "generate", lambda *_, **given: iter(asked.update(given) or ()))
    assert list(sample(model, "x", max_new_tokens=5)) == [] and asked["num_tokens"] == 257


def test_it_ends_at_every_end_that_the_documents_name(directory: Path, model: Any, tmp_path: Path) -> None:
    first = greedy(model, model.tokenizer.encode("hello").tolist(), 6)
    path = formats.write(tmp_path)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [256, first[3]]}))
    pieces = sample(load(path), "hello", max_new_tokens=6, temperature=0)
    assert "".join(pieces) == model.tokenizer.decode(first[: first.index(first[3])])


@pytest.mark.parametrize(
    "text", ["caf\u00e9 \u6771\u4eac \U0001f600!", "\U0001f468\u200d\U0001f469\u200d\U0001f467 ok", "a \ufffd b"]
)
def test_pieces_never_end_inside_a_character(text: str, monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    ids = model.tokenizer.encode(text).tolist()
    monkeypatch.setattr(module, "generate", lambda *_, **__: iter(ids))
    pieces = list(sample(model, "prompt", max_new_tokens=1))
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece or "\ufffd" in text for piece in pieces)
    cut = "caf\u00e9".encode()[:-1]
    monkeypatch.setattr(module, "generate", lambda *_, **__: iter(cut))
    assert "".join(sample(model, "prompt", max_new_tokens=1)) == "caf\ufffd"


def test_pieces_keep_their_spaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece decoded alone would lose the space in front of it."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    words = {"</s>": 0, "\u2581the": 1, "\u2581quick": 2, "\u2581fox": 3, "<unk>": 4, "es": 5}
    backend = Backend(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer = Tokenizer(backend)
    pieces = list(module._text(tokenizer, [1], iter([2, 3, 5, 3] * 5)))
    assert pieces[:4] == [" quick", " fox", "es", " fox"] and "".join(pieces) == " quick foxes fox" * 5


def test_what_is_missing(tmp_path: Path, model: Any) -> None:
    with pytest.raises(ValueError, match="the checkpoint has no tokenizer; put its tokenizer.json beside the weights"):
        sample(load(formats.write(tmp_path, vocab=None)), "x")
    with pytest.raises(ValueError, match="no chat template; a base model continues text: leave chat out"):
        prompt_ids(Tokenizer.bytes(), "x", chat=True)
    with pytest.raises(ValueError, match="the prompt is empty"):
        sample(model, "")
