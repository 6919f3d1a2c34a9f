"""The tokenizer: exact bytes, exact round trips, no special token out of text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from jaxpp.data import Tokenizer
from jaxpp.data.tokenizer import END_OF_TEXT

TRAINING = ["the cat sat on the mat\r\n\r\n" * 20, "def f(x):\n    return x\n" * 20, "naïve 東京"]


@pytest.fixture(scope="module", params=["trained", "bytes", "reloaded"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """Return each kind of tokenizer that this project makes."""
    if request.param == "bytes":
        return Tokenizer.bytes()
    trained = Tokenizer.train(TRAINING, 320)
    return trained if request.param == "trained" else Tokenizer.from_json(trained.to_json())


def odd_texts(number: int) -> list[str]:
    """Return random text over all planes, spaces, controls, combining marks and specials."""
    random = np.random.default_rng(0)
    pools = [[*range(0, 0x250)], [*range(0x300, 0x370)], [*range(0x2000, 0x2070), 0x2581, 0xFEFF]]
    pools += [[*range(0x1F600, 0x1F650), 0x10FFFF, 0x200D], [9, 10, 13, 32, 32, 32, 0xA0, 0x3000]]
    characters = [chr(code) for pool in pools for code in pool]
    pieces = [*characters, END_OF_TEXT, "</s>", "the cat", "  ", "\r\n"] + list("<|endoftext|>") * 20
    return ["".join(random.choice(pieces, int(random.integers(0, 40)))) for _ in range(number)]


def test_bytes_sum_and_text_returns(tokenizer: Tokenizer) -> None:
    texts = odd_texts(400)
    for text, batched in zip(texts, tokenizer.encode_batch(texts), strict=True):
        ids = tokenizer.encode(text)
        assert ids.dtype == np.int32 and np.array_equal(ids, batched)
        assert tokenizer.token_bytes[ids].sum() == len(text.encode())
        assert tokenizer.decode(ids) == text
        assert tokenizer.end_of_text not in ids


def test_ids_fit_the_vocabulary(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_bytes.shape == (tokenizer.vocab_size,)
    assert tokenizer.token_bytes[tokenizer.end_of_text] == 0
    assert np.count_nonzero(tokenizer.token_bytes == 0) == 1
    assert tokenizer.decode([tokenizer.end_of_text]) == ""


def test_training_is_deterministic_and_bounded() -> None:
    first, second = Tokenizer.train(TRAINING, 290), Tokenizer.train(iter(TRAINING), 290)
    assert first.to_json() == second.to_json() and first.vocab_size == 290
    assert Tokenizer.train(["ab"], 4096).vocab_size == 258
    assert len(first.encode("the cat sat")) < len("the cat sat")
    assert first.fingerprint == second.fingerprint != Tokenizer.train(TRAINING, 280).fingerprint
    with pytest.raises(ValueError, match="vocab_size is 256"):
        Tokenizer.train(TRAINING, 256)


def test_byte_tokens_are_bytes() -> None:
    text = "h\u00e9\n\x00\u6771"
    assert Tokenizer.bytes().encode(text).tolist() == list(text.encode())


def edited(change: Callable[[dict], None]) -> Tokenizer:
    description = json.loads(Tokenizer.bytes().to_json())
    change(description)
    return Tokenizer.from_json(json.dumps(description))


@pytest.mark.parametrize("name", ["</s>", "<|end_of_text|>", "<|im_end|>", "<eos>"])
def test_usual_ends_of_text_are_found(name: str) -> None:
    tokenizer = edited(lambda d: d["added_tokens"][0].update(content=name))
    assert tokenizer.end_of_text == 256
    assert tokenizer.encode(name).tolist() == list(name.encode())


def test_ordinary_end_of_text_becomes_special() -> None:
    tokenizer = edited(lambda d: d["added_tokens"][0].update(special=False))
    assert tokenizer.encode(END_OF_TEXT).tolist() == list(END_OF_TEXT.encode())
    assert tokenizer.token_bytes[tokenizer.end_of_text] == 0


def test_missing_end_of_text_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no end-of-text token; add one of <\|endoftext\|>"):
        edited(lambda d: d["added_tokens"].clear())


def test_saved_truncation_and_padding_do_not_act() -> None:
    backend = Backend.from_str(Tokenizer.bytes().to_json())
    backend.enable_truncation(3)
    backend.enable_padding(length=9)
    tokenizer = Tokenizer.from_json(backend.to_str())
    assert len(tokenizer.encode("abcdef")) == 6
    assert [len(ids) for ids in tokenizer.encode_batch(["a", "abcdef"])] == [1, 6]


def test_added_words_and_nfc_are_counted_exactly() -> None:
    backend = Backend.from_str(Tokenizer.bytes().to_json())
    backend.add_tokens(["\u6771\u4eac"])
    backend.normalizer = normalizers.NFC()
    tokenizer = Tokenizer(backend)
    ids = tokenizer.encode("in \u6771\u4eac e\u0301")
    assert len(ids) == 7 and tokenizer.token_bytes[ids].sum() == len("in \u6771\u4eac \u00e9".encode())


def sentencepiece_like() -> Backend:
    backend = Backend(models.BPE(vocab={"\u2581a": 0, "a": 1, "\u2581": 2}, merges=[("\u2581", "a")]))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["</s>"])
    return backend


def changed_bytes(**parts: object) -> Backend:
    backend = Backend.from_str(Tokenizer.bytes().to_json())
    for name, part in parts.items():
        setattr(backend, name, part)
    return backend


def stripping() -> Backend:
    backend = Backend.from_str(Tokenizer.bytes().to_json())
    backend.add_tokens([AddedToken("word", lstrip=True)])
    return backend


@pytest.mark.parametrize(
    "backend",
    [
        sentencepiece_like(),
        stripping(),
        changed_bytes(normalizer=normalizers.Lowercase()),
        changed_bytes(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)),
        changed_bytes(
            pre_tokenizer=pre_tokenizers.Sequence(
                [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(False)]
            )
        ),
    ],
    ids=["sentencepiece", "stripping", "lowercase", "prefix space", "removed spaces"],
)
def test_inexact_bytes_are_refused(backend: Backend) -> None:
    tokenizer = Tokenizer(backend)
    with pytest.raises(ValueError, match="exact only for a byte-level BPE"):
        _ = tokenizer.token_bytes


def test_bad_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        Tokenizer.load(path)
    path.write_text("{}")
    with pytest.raises(ValueError, match="is not a tokenizer") as error:
        Tokenizer.load(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)
    path.write_text(Tokenizer.bytes().to_json())
    assert Tokenizer.load(path).vocab_size == 257


def test_ends_may_be_given() -> None:
    backend = Backend.from_str(Tokenizer.bytes().to_json())
    tokenizer = Tokenizer(backend, ends=[97, 256])
    assert tokenizer.end_of_text == 97 and tokenizer.ends == {97, 256}
    assert tokenizer.decode([98, 97]) == "b" and tokenizer.token_bytes[97] == 0
    assert Tokenizer.bytes().ends == {256} and Tokenizer.bytes().begin_of_text is None
    with pytest.raises(ValueError, match="no token 999; its ids end at 256"):
        Tokenizer(Backend.from_str(Tokenizer.bytes().to_json()), ends=[256, 999])


def test_special_tokens_in_text_on_request() -> None:
    tokenizer = Tokenizer.bytes()
    text = f"a{END_OF_TEXT}b"
    assert tokenizer.encode(text, special=True).tolist() == [97, 256, 98]
    assert tokenizer.encode(text).tolist() == list(text.encode()) == tokenizer.encode(text, begin=True).tolist()
    assert [ids.tolist() for ids in tokenizer.encode_batch([text])] == [list(text.encode())]
