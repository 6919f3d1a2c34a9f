"""Text as it comes: whole characters, the tokenizer's spaces, and nothing of the text that ends the answer."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from jaxpp.data import Tokenizer
from jaxpp.serve.text import TextStream

BYTES = Tokenizer.bytes()
TEXTS = [
    "caf\u00e9 \u6771\u4eac \U0001f600!",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 ok",
    "a \ufffd b",
    "\u00e9" * 40,
]


@pytest.fixture(scope="module")
def falling_back() -> Tokenizer:
    """A tokenizer as Llama's: spaces in front of words, and bytes for what is no word; id = byte + 1."""
    words = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}}
    for word in ("\u2581", "\u2581the", "\u2581fox", "es", "</s>"):
        words[word] = len(words)
    backend = Backend(models.BPE(words, [], byte_fallback=True, unk_token="<unk>"))
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    return Tokenizer(backend)


def merged(*tokens: bytes) -> Tokenizer:
    """Return a byte-level tokenizer with these tokens from id 257 on."""
    letters = [BYTES.token(byte) for byte in range(256)]
    words = {letter: byte for byte, letter in enumerate(letters)} | {"<|endoftext|>": 256}
    for token in tokens:
        words["".join(letters[byte] for byte in token)] = len(words)
    backend = Backend(models.BPE(words, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return Tokenizer(backend)


def pieces(tokenizer: Tokenizer, ids: Sequence[int], prompt: Sequence[int] = (), stop: Sequence[str] = ()) -> list[str]:
    stream = TextStream(tokenizer, prompt, stop)
    return [*(stream.push(token) for token in ids), stream.flush()]


def said(text: str, stop: Sequence[str], cuts: Sequence[int] = ()) -> tuple[str, str | None]:
    """Return what is said of a text whose tokens end at these places, and the stop text found."""
    encoded = text.encode()
    ends = sorted({*(cut for cut in cuts if cut < len(encoded)), len(encoded)})
    tokens = [encoded[start:end] for start, end in zip([0, *ends], ends, strict=False) if end > start]
    vocabulary = list(dict.fromkeys(token for token in tokens if len(token) > 1))
    stream = TextStream(merged(*vocabulary), [], stop)
    found = "".join(stream.push(257 + vocabulary.index(t) if len(t) > 1 else t[0]) for t in tokens)
    return found + stream.flush(), stream.stopped


def dumb(text: str, stop: Sequence[str]) -> tuple[str, str | None]:
    """Return the same by looking at every beginning of the text."""
    for end in range(len(text) + 1):
        found = [one for one in stop if text[:end].endswith(one)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_are_whole_characters_and_join_to_the_text(text: str, falling_back: Tokenizer) -> None:  # B170
    encoded = text.encode()
    for tokenizer, first in ((BYTES, 0), (falling_back, 1)):
        found = pieces(
            tokenizer, [byte + first for byte in encoded], [byte + first for byte in "\u6771\u4eac".encode()]
        )
        assert "".join(found) == text
        assert all("\ufffd" not in piece or "\ufffd" in text for piece in found)


def test_a_character_of_four_tokens_comes_in_one_piece(falling_back: Tokenizer) -> None:  # B170
    encoded = list("\U0001f600".encode())
    assert pieces(BYTES, encoded) == ["", "", "", "\U0001f600", ""]
    assert pieces(falling_back, [byte + 1 for byte in encoded]) == ["", "", "", "\U0001f600", ""]


def test_what_is_certain_in_a_token_does_not_wait_for_the_character_behind_it() -> None:
    tokenizer = merged(b"ab\xc3", b"\xa9\xe2\x98", b"\x83c")
    assert pieces(tokenizer, [257, 258, 259, 256, 97]) == ["ab", "\u00e9", "\u2603c", "", "a", ""]


def test_a_space_that_opens_the_text_does_not_break_the_character_behind_it(falling_back: Tokenizer) -> None:
    encoded = [byte + 1 for byte in " \U0001f600 \U0001f600".encode()]
    assert pieces(falling_back, encoded) == [*[""] * 4, "\U0001f600", " ", *[""] * 3, "\U0001f600", ""]


def test_bytes_that_are_no_character_become_marks(falling_back: Tokenizer) -> None:
    assert pieces(BYTES, b"caf\xc3") == ["c", "a", "f", "", "\ufffd"]
    assert pieces(BYTES, b"\xc3a") == ["", "\ufffda", ""]
    assert "".join(pieces(BYTES, b"\xff" * 300)) == "\ufffd" * 300
    # Alone these two are one mark each; behind the bytes of a character the tokenizer would make marks of that, too.
    assert pieces(falling_back, [byte + 1 for byte in b"\xc3\xa9\xe2\x98"]) == ["", "\u00e9", "", "", "\ufffd\ufffd"]
    assert pieces(falling_back, [*(byte + 1 for byte in b"\xc3\xa9\xe2"), 258]) == ["", "\u00e9", "", "\ufffd the", ""]


def test_random_bytes_join_to_the_decoded_whole() -> None:
    rng = random.Random(0)
    for _ in range(200):
        tokens = [
            rng.choice([b"\xff", b"\xe2", b"\x98", b"\x83", b"\xf0\x9f", b"\x98\x80\xe2", b"a"]) for _ in range(40)
        ]
        vocabulary = [b"\xf0\x9f", b"\x98\x80\xe2"]
        tokenizer = merged(*vocabulary)
        ids = [token[0] if len(token) == 1 else 257 + vocabulary.index(token) for token in tokens]
        assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


def test_tokens_that_all_end_inside_a_character_join_to_the_decoded_whole() -> None:
    tokenizer, ids = merged(b"\xf0\x9f", b"\x98\x80\xf0\x9f"), [257, *[258] * 14, 0xFF, 97]
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids) == "\U0001f600" * 14 + "\ufffd\ufffda"


def test_pieces_keep_their_spaces(falling_back: Tokenizer) -> None:
    """A piece decoded alone would lose the space in front of it."""
    words = {"</s>": 0, "\u2581the": 1, "\u2581quick": 2, "\u2581fox": 3, "<unk>": 4, "es": 5}
    backend = Backend(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    found = pieces(Tokenizer(backend), [2, 3, 5, 3] * 5, [1])
    assert found[:4] == [" quick", " fox", "es", " fox"] and "".join(found) == " quick foxes fox" * 5
    space, the, fox, es, end = (falling_back._backend.get_vocab()[t] for t in ("▁", "▁the", "▁fox", "es", "</s>"))
    assert pieces(falling_back, [the, es, fox], [fox]) == [" the", "es", " fox", ""]
    assert pieces(falling_back, [the, es, fox]) == ["the", "es", " fox", ""], "a text begins without its space"
    assert pieces(falling_back, [space, the, end, fox], [end]) == ["", " the", "", " fox", ""]
    assert pieces(falling_back, [end] * 20 + [the, fox], [the]) == [""] * 20 + [" the", " fox", ""]


def test_the_prompt_is_read_from_a_whole_character_on(falling_back: Tokenizer) -> None:
    """The last eight tokens of this prompt begin inside a character."""
    prompt, answer = ([byte + 1 for byte in text.encode()] for text in ("\u6771\u4eac\u6771", "\u4eac\u6771"))
    assert "".join(pieces(falling_back, answer, prompt)) == "\u4eac\u6771"
    assert "".join(pieces(BYTES, "\u2603".encode()[1:], "\u2603".encode()[:1])) == "\ufffd\ufffd"


def test_a_stop_over_two_tokens_is_found_and_nothing_of_it_is_sent() -> None:  # B169
    stream = TextStream(merged(b"xa", b"by"), [], ["ab"])
    assert [stream.push(257), stream.push(258)] == ["x", ""] and stream.stopped == "ab"
    assert stream.push(120) == stream.flush() == ""


def test_a_stop_inside_one_token_cuts_it() -> None:
    assert said("one ENDtwo", ["END"], [4]) == ("one ", "END")
    assert said("END", ["END"]) == ("", "END")


def test_what_could_begin_a_stop_is_held_back_and_no_more() -> None:
    assert pieces(BYTES, b"a<|x<|y", stop=["<|end|>"]) == ["a", "", "", "<|x", "", "", "<|y", ""]
    assert pieces(BYTES, b"aab", stop=["aac"]) == ["", "", "aab", ""]
    assert pieces(BYTES, b"aaac", stop=["aac"]) == ["", "", "a", "", ""]
    assert pieces(BYTES, b"x<|en", stop=["<|end|>"])[-1] == "<|en", "the answer ended: it is text"


def test_the_stop_that_is_first_complete_counts_and_of_those_the_longest() -> None:
    for cuts in ([], [1], [2], [1, 2, 3, 4]):
        assert said("xabcd", ["abcd", "bc"], cuts) == ("xa", "bc")
        assert said("xabcd", ["abc", "ab"], cuts) == ("x", "ab")
        assert said("xabcd", ["bc", "abc", "c"], cuts) == ("x", "abc")


def test_a_stop_that_begins_in_the_prompt_is_none() -> None:
    assert pieces(BYTES, b"b ab", list(b"xa"), ["ab"]) == ["b", " ", "", "", ""]


def test_a_stop_may_hold_characters_of_several_bytes_and_marks() -> None:
    assert said("x\u6771\u4eacy", ["\u4eac"], range(8)) == ("x\u6771", "\u4eac")
    stream = TextStream(BYTES, [], ["\ufffd"])
    assert [stream.push(97), stream.push(0xC3), stream.flush(), stream.stopped] == ["a", "", "", "\ufffd"]


def test_a_stop_that_touches_unheeded_tokens_is_none() -> None:
    stream = TextStream(BYTES, [], ["ab"])
    found = [stream.push(byte, heed=at >= 3) for at, byte in enumerate(b"abab")]
    assert found == ["a", "b", "a", "b"] and stream.stopped is None
    assert [stream.push(97), stream.push(98)] == ["", ""] and stream.stopped == "ab"
    held = TextStream(BYTES, [], ["ab"])
    assert [held.push(97), held.push(98, heed=False), held.flush()] == ["", "ab", ""]
    between = TextStream(BYTES, [], ["ab"])
    assert [between.push(97), between.push(120, heed=False), between.push(98), between.stopped] == ["", "ax", "b", None]


@pytest.mark.parametrize("seed", range(5))
def test_any_stops_in_any_tokens_are_found_as_by_looking_at_every_beginning(seed: int) -> None:
    rng, stopped = random.Random(seed), 0

    def text(least: int, most: int) -> str:
        return "".join(rng.choice("aab\u00e9") for _ in range(rng.randint(least, most)))

    for _ in range(60):
        whole, stop = text(0, 14), [text(1, 6) for _ in range(rng.randint(0, 3))]
        expected = dumb(whole, stop)
        stopped += expected[1] is not None
        cuts = [at for at in range(30) if rng.random() < 0.5]
        assert said(whole, stop, cuts) == expected, (whole, stop, cuts)
    assert 10 < stopped < 55


def test_the_work_of_a_token_grows_neither_with_the_answer_nor_with_the_stops() -> None:
    decoded: list[int] = []

    class Counting:
        def decode(self, ids: Any) -> str:
            decoded.append(len(ids))
            return BYTES.decode(ids)

    stream = TextStream(Counting(), list(b"hello"), ["a" * 20_000 + "b"])  # type: ignore[arg-type]
    for token in [*b"xy\xff\xff" * 500, *[256] * 500, *b"\xff" * 1000, *b"a" * 1000]:
        stream.push(token)
    assert sum(decoded) / 4500 < 40 and max(decoded) < 40
    assert stream.flush() == "a" * 1000
