"""The vocabulary of a GGUF file as a tokenizer: both kinds, and what each says of its ends and beginnings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jaxpp.convert.gguf import open_gguf
from jaxpp.data.token_bytes import byte_characters
from tests.convert.gguf_files import llama_file


def vocabulary(**settings: Any) -> dict[str, Any]:
    return {f"/tokenizer.ggml.{key}": value for key, value in settings.items()}


def sentencepiece(**settings: Any) -> dict[str, Any]:
    """Return a vocabulary of byte tokens, letters and a few words with falling scores."""
    bytes_of = [f"<0x{byte:02X}>" for byte in range(256)]
    words = ["\u2581a", "\u2581b", "ab", "abab", "a", "b", "\u2581"]
    tokens = ["<unk>", "<s>", "</s>", *bytes_of, *words, "<turn>", "  "]
    types = [2, 3, 3, *[6] * 256, *[1] * len(words), 3, 4]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(words))] + [-1000.0, -1000.0]
    own = {"model": "llama", "tokens": tokens, "token_type": types, "scores": scores}
    return vocabulary(**{**own, "bos_token_id": 1, "eos_token_id": 2, **settings})


def test_sentencepiece_vocabulary(tmp_path: Path) -> None:
    checkpoint = open_gguf(llama_file(tmp_path / "a.gguf", sentencepiece(eot_token_id=266)))
    tokenizer = checkpoint.tokenizer()
    assert tokenizer is not None
    named = {token: index for index, token in enumerate(checkpoint.metadata["tokenizer.ggml.tokens"])}

    def spelled(text: str, **how: bool) -> list[str]:
        return [tokenizer.token(index) for index in tokenizer.encode(text, **how)]

    # "_a" scores above "ab", so it is joined first although "ab" would lead to a longer word.
    assert spelled("ab") == ["\u2581a", "b"] and spelled("bab") == ["\u2581b", "ab"]
    assert spelled("c") == ["\u2581", "<0x63>"] and spelled("a  b") == ["\u2581a", "  ", "\u2581b"]
    assert spelled("<turn>a", special=True, begin=True) == ["<s>", "<turn>", "\u2581a"]
    assert named["<turn>"] not in tokenizer.encode("<turn>")
    assert tokenizer.end_of_text == 2 and tokenizer.ends == {2, 266}
    assert tokenizer.begin_of_text == 1 and tokenizer.add_bos
    for text in ("ab abab c", "\u6771\U0001f600 a", "a\n\tb"):
        assert tokenizer.decode(tokenizer.encode(text, begin=True)) == text
    bare = open_gguf(llama_file(tmp_path / "b.gguf", sentencepiece(add_space_prefix=False, add_bos_token=False)))
    tokenizer = bare.tokenizer()
    assert tokenizer is not None and not tokenizer.add_bos
    assert tokenizer.encode("ab", begin=True).tolist() == [named["ab"]]


def byte_level(**settings: Any) -> dict[str, Any]:
    tokens = [*byte_characters(), "12", "ab", "<|eot_id|>", "<|start|>", "<tool>"]
    types = [1] * 258 + [3, 3, 4]
    own = {"model": "gpt2", "tokens": tokens, "token_type": types, "merges": ["1 2", "a b"], "eos_token_id": 258}
    return vocabulary(**{**own, **settings})


@pytest.mark.parametrize(
    ("pre", "numbers", "begins"),
    [
        ("smollm", ["1", "2"], False),
        ("qwen2", ["1", "2"], False),
        ("llama-bpe", ["12"], True),
        ("gpt-2", ["12"], False),
    ],
)
def test_byte_level_vocabulary(pre: str, numbers: list[str], begins: bool, tmp_path: Path) -> None:
    template = {"/tokenizer.chat_template": "{{ bos_token }}{% for m in messages %}{{ m.content }}<tool>{% endfor %}"}
    metadata = {**byte_level(pre=pre, bos_token_id=259), **template}
    checkpoint = open_gguf(llama_file(tmp_path / "a.gguf", metadata))
    tokenizer = checkpoint.tokenizer()
    assert tokenizer is not None and tokenizer.add_bos == begins and tokenizer.begin_of_text == 259
    assert [tokenizer.token(index) for index in tokenizer.encode("12")] == numbers
    assert checkpoint.chat_template == tokenizer.chat_template
    assert tokenizer.chat([{"role": "user", "content": "ab"}]).tolist() == [259, 257, 260]
    text = "ab 12 \u6771<|eot_id|>\r\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.token_bytes[tokenizer.encode(text)].sum() == len(text.encode())
    assert checkpoint.attributes["bos_token_id"] == 259 and checkpoint.attributes["eos_token_id"] == 258


def test_wrong_vocabularies_are_refused(tmp_path: Path) -> None:
    wrong = {
        "pre-tokenizer 'klingon' is not known; these are: gpt-2": byte_level(pre="klingon"),
        "model 'bert' is not supported; gpt2 and llama are": byte_level(model="bert"),
        "no pair of tokens": byte_level(merges=["ab"]),
        "without tokenizer.ggml.merges": vocabulary(model="gpt2", tokens=["a", "</s>"], eos_token_id=1),
        "no scores of their own": sentencepiece(scores=[0.0] * 268),
        "3 tokens, 2 of them different": vocabulary(model="gpt2", tokens=["a", "a", "b"]),
        "vocabulary and merges do not fit": byte_level(merges=["q z"]),
    }
    for message, metadata in wrong.items():
        with pytest.raises(ValueError, match=message) as error:
            open_gguf(llama_file(tmp_path / "a.gguf", metadata)).tokenizer()
        assert str(error.value).startswith("a.gguf: ") and "\n" not in str(error.value)
    assert open_gguf(llama_file(tmp_path / "a.gguf")).tokenizer() is None
