"""Perplexity: each token predicted once, with the context it should have; the dumb full forward is the oracle."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpp import cli
from jaxpp.conversion import load
from jaxpp.data import Tokenizer
from jaxpp.serve.perplexity import Score, Windows, score_texts, windows_for
from tests import formats

TEXT = "the quick brown fox jumps over the lazy dog, \u00e9 and \u6771 too"
WHOLE = Windows(96, 96, 2)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return formats.write(tmp_path_factory.mktemp("hf") / "llama")


@pytest.fixture(scope="module")
def model(directory: Path) -> Any:
    return load(directory)


def dumb(model: Any, ids: np.ndarray, start: int = 1) -> float:
    """Sum the loss of ids from `start` on by one forward pass over all of them."""
    logits = jax.nn.log_softmax(jnp.asarray(model(ids[None]))[0])
    return -float(sum(logits[at - 1, ids[at]] for at in range(start, len(ids))))


@given(length=st.integers(0, 70), size=st.integers(1, 20), data=st.data())
def test_each_target_counts_once(length: int, size: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(1, size))
    ids = np.arange(100, 100 + length, dtype=np.int32)
    counted: list[int] = []
    for row in Windows(size, stride).cut(ids):
        real = int(row["segments"].sum())
        assert np.array_equal(row["tokens"][:real] + 1, row["targets"][:real])
        assert np.array_equal(row["positions"][:real], np.arange(real)) and not row["segments"][real:].any()
        new = np.flatnonzero(row["weights"])
        counted += row["targets"][new].tolist()
        # New ones are the last, and see as much as the window and the text allow.
        assert new[-1] == real - 1 and len(new) <= (size if counted[0] == row["targets"][new[0]] else stride)
        seen = row["tokens"][0]
        assert seen == 100 or (real == size and new[0] == size - len(new))
    assert counted == ids[1:].tolist()


def test_one_window_is_the_full_forward(model: Any) -> None:
    tokenizer = model.tokenizer
    scores = score_texts(model, tokenizer, [TEXT, "ab", "a", ""], WHOLE)
    ids = tokenizer.encode(TEXT)
    assert scores[0].num_tokens == len(ids) - 1 == len(TEXT.encode()) - 1
    assert scores[0].nats == pytest.approx(dumb(model, ids), rel=1e-5)
    assert scores[0].num_bytes == len(TEXT.encode()) - 1, "the first byte is given, not predicted"
    assert scores[0].bits_per_byte == pytest.approx(scores[0].nats / math.log(2) / scores[0].num_bytes)
    assert scores[0].perplexity == pytest.approx(math.exp(scores[0].loss))
    assert [score.num_tokens for score in scores[1:]] == [1, 0, 0]
    assert scores[2] == scores[3] == Score() and (Score().loss, Score().perplexity, Score().bits_per_byte) == (0, 1, 0)
    assert sum(scores, Score()).nats == pytest.approx(scores[0].nats + scores[1].nats)


def test_windows_have_their_context_and_no_more(model: Any) -> None:
    ids = model.tokenizer.encode(TEXT)
    found = score_texts(model, model.tokenizer, [TEXT], Windows(16, 5, 3))[0]
    wanted, done = dumb(model, ids[:17]), 16
    while done < len(ids) - 1:
        end = min(done + 5, len(ids) - 1)
        part = ids[end - 16 : end + 1]
        wanted += dumb(model, part, len(part) - (end - done))
        done = end
    assert found.nats == pytest.approx(wanted, rel=1e-5) and found.num_tokens == len(ids) - 1


def test_a_mesh_gives_what_one_device_gives(directory: Path, model: Any) -> None:
    texts = [TEXT, TEXT[::-1] * 3, "short"]
    windows = Windows(24, 12, 3)
    wanted = [score.nats for score in score_texts(model, model.tokenizer, texts, windows)]
    for mesh in ("data:8", "tensor:2 fsdp:2"):
        other = load(directory, mesh)
        found = score_texts(other, other.tokenizer, texts, windows)
        np.testing.assert_allclose([score.nats for score in found], wanted, rtol=1e-5)


def test_rows_that_stand_for_no_token_do_not_count(tmp_path: Path) -> None:
    """B32: a vocabulary that a mesh does not split is filled up; zeros are no logits."""
    path = formats.write(tmp_path, "llama32", vocab=261)
    one, two = (
        score_texts(model, model.tokenizer, [TEXT], WHOLE)[0].nats for model in (load(path), load(path, "tensor:2"))
    )
    assert two == pytest.approx(one, rel=1e-5)


def test_only_the_first_tokens_of_each_text(model: Any) -> None:
    tokenizer = model.tokenizer
    cut = TEXT.encode().index("\u6771".encode()) + 1  # inside a character
    found = score_texts(model, tokenizer, [TEXT], WHOLE, max_tokens=cut)[0]
    assert (found.num_tokens, found.num_bytes) == (cut - 1, cut - 1)
    assert found.nats == pytest.approx(dumb(model, tokenizer.encode(TEXT)[:cut]), rel=1e-5)


def test_a_begin_of_text_where_the_model_expects_it(model: Any) -> None:
    """Then the first token of the text is predicted too, and the begin stands for no byte."""
    from tokenizers import Tokenizer as Backend

    backend = Backend.from_str(Tokenizer.bytes().to_json())
    backend.add_special_tokens(["<s>"])
    tokenizer = Tokenizer(backend, begin_of_text=257, add_bos=True)
    found = score_texts(model, tokenizer, ["abc"], WHOLE)[0]
    assert (found.num_tokens, found.num_bytes) == (3, 3)
    assert found.nats == pytest.approx(dumb(model, np.array([257, 97, 98, 99])), rel=1e-5)


def test_bytes_of_a_tokenizer_that_is_not_byte_level(model: Any) -> None:
    """As in SentencePiece: spaces are part of the tokens, and the first one is not of the text."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    words = {"</s>": 0, "\u2581the": 1, "\u2581d\u00e9j\u00e0": 2, "\u2581fox": 3, "<unk>": 4}
    backend = Backend(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    found = score_texts(model, Tokenizer(backend), ["the d\u00e9j\u00e0 fox"], WHOLE)[0]
    assert (found.num_tokens, found.num_bytes) == (2, len(" d\u00e9j\u00e0 fox".encode()))


def test_the_windows_of_a_model_and_wrong_ones(model: Any) -> None:
    assert windows_for(model.config) == Windows(128, 64, 8)
    assert windows_for(model.config, 100, 0, 2) == Windows(100, 50, 2)
    assert windows_for(model.config, 1).stride == 1
    for wrong in ((0, 1, 1), (4, 0, 1), (4, 5, 1), (4, 2, 0)):
        with pytest.raises(ValueError, match="(is|are) needed"):
            Windows(*wrong)
    with pytest.raises(ValueError, match="a window of 129 tokens; this model takes 128 or fewer"):
        score_texts(model, model.tokenizer, ["a"], Windows(129, 1))


def test_a_loss_that_is_no_number_shows(tmp_path: Path) -> None:
    """B34: weights of NaN give no perplexity that looks like one."""

    def spoil(tensors: dict[str, np.ndarray]) -> None:
        tensors["model.norm.weight"][3] = np.nan

    model = load(formats.write(tmp_path, change=spoil))
    with pytest.raises(ValueError, match="loss of text 1 is nan; not finite: final_norm/scale"):
        score_texts(model, model.tokenizer, ["abc"], WHOLE)


def test_the_table_of_the_command(directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "texts").mkdir()
    for name, count in (("a", 1), ("b", 3)):
        (tmp_path / "texts" / f"{name}.txt").write_text(TEXT * count)
    words = ["eval", str(directory), "--mesh", "tensor:2", "--window", "32", "--text"]
    assert cli.main([*words, str(tmp_path / "texts" / "a.txt"), str(tmp_path / "texts" / "*.txt")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["text", "a.txt", "a.txt", "b.txt", "all"]
    assert lines[0].split()[1:] == ["tokens", "bytes", "loss", "perplexity", "bits/byte"]
    size = len(TEXT.encode())
    assert re.fullmatch(rf"a\.txt +{size - 1} +{size - 1} +\d\.\d{{4}} +[\d.]+ +\d+\.\d{{4}}", lines[1])
    assert (
        lines[1] == lines[2] and lines[4].split()[1] == "all 3".split()[1] and lines[4].split()[2] == str(5 * size - 3)
    )
    assert len({len(line) for line in lines}) == 1
    assert cli.main([*words, str(tmp_path / "texts" / "a.txt"), "--max_tokens", "9"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and lines[1].split()[1] == "8", "one text needs no sum"
