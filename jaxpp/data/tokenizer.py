"""Text to token ids and back, and how many bytes each token stands for.

Byte-level BPE writes a byte as one printable character, so a token's length in characters is
its length in bytes, whatever the text. That makes bits per byte exact and comparable between
tokenizers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxpp.data.config import BYTE_TOKENS

if TYPE_CHECKING:
    import tokenizers

END_OF_TEXT = "<|endoftext|>"
"""The token that ends a document in tokenizers trained here."""

END_OF_TEXT_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")
"""Tokens that end a document in published tokenizers, looked up in this order."""

# Pre-tokenizers that only cut the text; "Removed" pieces are refused apart.
_CUTTING = {"ByteLevel", "Digits", "Split", "Punctuation", "UnicodeScripts"}


class Tokenizer:
    """Encode, decode and describe a tokenizer of the `tokenizers` library.

    Special tokens are never produced from text: a document that spells out the end-of-text
    token is encoded as plain characters.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        """Wrap a backend; it is owned by the wrapper from then on.

        Raises:
            ValueError: the vocabulary has no end-of-text token under a usual name.
        """
        # A saved tokenizer may carry truncation and padding, which would cut documents in silence.
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True
        self._backend = backend
        vocabulary = backend.get_vocab(with_added_tokens=True)
        name = next((name for name in END_OF_TEXT_NAMES if name in vocabulary), None)
        if name is None:
            raise ValueError(
                f"the tokenizer ({len(vocabulary)} tokens) has no end-of-text token; "
                f"add one of {', '.join(END_OF_TEXT_NAMES)}"
            )
        # Where it is an ordinary token, a document that spells it out would end there.
        backend.add_special_tokens([name])
        self.end_of_text: int = vocabulary[name]
        self.vocab_size: int = max(vocabulary.values()) + 1

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> Tokenizer:
        """Train a byte-level BPE; the same texts give the same tokenizer.

        Args:
            texts: the text to learn from, streamed once.
            vocab_size: upper bound in tokens, end-of-text included; a small text gives fewer.
        """
        from tokenizers import Tokenizer as Backend
        from tokenizers import models, pre_tokenizers, trainers

        if vocab_size < BYTE_TOKENS + 1:
            raise ValueError(
                f"vocab_size is {vocab_size}; a byte-level tokenizer needs {BYTE_TOKENS + 1} "
                f"or more: {BYTE_TOKENS} bytes and the end of text"
            )
        backend = _byte_level(Backend(models.BPE()))
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        backend.train_from_iterator(texts, trainer)
        return cls(backend)

    @classmethod
    def bytes(cls) -> Tokenizer:
        """Return the tokenizer of 257 tokens: id = byte, and 256 ends the text.

        >>> Tokenizer.bytes().encode("hi").tolist()
        [104, 105]
        """
        from tokenizers import Tokenizer as Backend
        from tokenizers import models

        vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
        backend = _byte_level(Backend(models.BPE(vocab=vocabulary, merges=[])))
        backend.add_special_tokens([END_OF_TEXT])
        return cls(backend)

    @classmethod
    def from_json(cls, text: str) -> Tokenizer:
        """Read the text of a `tokenizer.json`.

        Raises:
            ValueError: the text is not one, or it has no end-of-text token.
        """
        from tokenizers import Tokenizer as Backend

        try:
            backend = Backend.from_str(text)
        except Exception as error:  # the library raises bare Exception on malformed input
            reason = " ".join(str(error).split())
            raise ValueError(f"this is not a tokenizer.json: {reason}") from error
        return cls(backend)

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Read a `tokenizer.json` file.

        Raises:
            ValueError: the file is missing or malformed, with its path in the message.
        """
        try:
            return cls.from_json(Path(path).expanduser().read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(
                f"tokenizer {str(path)!r} cannot be read: {error.strerror}; "
                "give bpe, bytes or the path of a tokenizer.json"
            ) from error
        except ValueError as error:
            raise ValueError(f"tokenizer {str(path)!r}: {error}") from error

    def to_json(self) -> str:
        """Return the text of a `tokenizer.json` that `from_json` reads back."""
        return self._backend.to_str()

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of a text, int32 [tokens], with no token added at either end."""
        return np.asarray(self._backend.encode(text, add_special_tokens=False).ids, np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text, int32 [tokens], encoded on all cores."""
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, np.int32) for encoding in encodings]

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        """Return the text of the ids, without special tokens."""
        return self._backend.decode([int(token) for token in ids], skip_special_tokens=True)

    @cached_property
    def fingerprint(self) -> str:
        """Return a digest of the vocabulary; it outlives changes of the file format."""
        vocabulary = sorted(self._backend.get_vocab(with_added_tokens=True).items())
        return hashlib.blake2b(json.dumps(vocabulary).encode(), digest_size=16).hexdigest()

    @cached_property
    def token_bytes(self) -> np.ndarray:
        """Return the UTF-8 bytes that each token stands for, int32 [vocab]; 0 for specials.

        They sum to `len(text.encode())` over the ids of any text (of the text in NFC, where the
        tokenizer has that normalizer).

        Raises:
            ValueError: the tokenizer is not byte-level, so no such count exists.
        """
        _require_exact_bytes(json.loads(self.to_json()))
        lengths = np.zeros(self.vocab_size, np.int32)
        for token, index in self._backend.get_vocab(with_added_tokens=False).items():
            lengths[index] = len(token)
        for index, token in self._backend.get_added_tokens_decoder().items():
            lengths[index] = 0 if token.special else len(token.content.encode())
        return lengths


def _byte_level(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    from tokenizers import decoders, pre_tokenizers

    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def _byte_characters() -> list[str]:
    """Return the printable character that byte-level BPE writes for each byte."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = iter(range(BYTE_TOKENS, 2 * BYTE_TOKENS))
    return [chr(byte if byte in printable else next(hidden)) for byte in range(BYTE_TOKENS)]


def _require_exact_bytes(description: dict[str, Any]) -> None:
    """Refuse a tokenizer whose tokens do not partition the bytes of a text."""
    model = description["model"]
    cutters = _flat(description["pre_tokenizer"], "pretokenizers")
    normalizers = _flat(description["normalizer"], "normalizers")
    affixes = [model.get("continuing_subword_prefix"), model.get("end_of_word_suffix")]
    exact = (
        model["type"] == "BPE"
        and set(_byte_characters()) <= model["vocab"].keys()
        and not any(affixes)
        and any(cutter["type"] == "ByteLevel" for cutter in cutters)
        and all(map(_keeps_text, cutters))
        and all(normalizer["type"] == "NFC" for normalizer in normalizers)
        and not any(added["lstrip"] or added["rstrip"] for added in _plain_added(description))
    )
    if not exact:
        kinds = ", ".join(part["type"] for part in normalizers + cutters) or "no pre-tokenizer"
        raise ValueError(
            f"bytes per token are exact only for a byte-level BPE that adds and removes nothing; "
            f"this tokenizer is {model['type']} with {kinds}"
        )


def _flat(part: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    if part is None:
        return []
    if part["type"] != "Sequence":
        return [part]
    return [leaf for child in part[key] for leaf in _flat(child, key)]


def _keeps_text(cutter: dict[str, Any]) -> bool:
    removes = cutter.get("behavior") == "Removed"
    return cutter["type"] in _CUTTING and not removes and not cutter.get("add_prefix_space", False)


def _plain_added(description: dict[str, Any]) -> list[dict[str, Any]]:
    return [added for added in description["added_tokens"] if not added["special"]]
