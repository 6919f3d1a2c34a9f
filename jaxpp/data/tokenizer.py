"""Text to token ids and back: the tokenizers that we train, and those of published checkpoints."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxpp.data import chat, vocabulary
from jaxpp.data.config import BYTE_TOKENS
from jaxpp.data.token_bytes import byte_characters, require_exact_bytes

if TYPE_CHECKING:
    import tokenizers

END_OF_TEXT = "<|endoftext|>"
"""The token that ends a document in tokenizers trained here."""

END_OF_TEXT_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")
"""Tokens that end a document in published tokenizers, looked up in this order."""


class Tokenizer:
    """Encode, decode and describe a tokenizer of the `tokenizers` library.

    Unless asked to, it produces no special token from text: a document that spells out the end-of-text token is
    encoded as plain characters.

    Attributes:
        end_of_text: the id that ends a document.
        ends: the ids that end a generated text; `end_of_text` is one of them.
        begin_of_text: the id that begins a document, or None.
        add_bos: whether the model expects `begin_of_text` in front of every text.
        chat_template: jinja2 template that writes a conversation, or None.
        vocab_size: highest id plus one; a model's table may have more rows.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        ends: Sequence[int] = (),
        begin_of_text: int | None = None,
        add_bos: bool | None = None,
        chat_template: str | None = None,
    ) -> None:
        """Wrap a backend; it is owned by the wrapper from then on.

        Args:
            backend: the tokenizer of the library.
            ends: ids that end a text, the one that ends a document first; empty: found by its usual name.
            begin_of_text: id that begins a text; None: the one that the backend's post-processor adds, if any.
            add_bos: put `begin_of_text` in front of texts; None: where the backend's post-processor does.
            chat_template: jinja2 template.

        Raises:
            ValueError: the vocabulary has no such id, or no end-of-text token under a usual name.
        """
        # A saved tokenizer may carry truncation and padding, which would cut documents in silence.
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True
        self._backend = backend
        ids = backend.get_vocab(with_added_tokens=True)
        self.vocab_size: int = max(ids.values(), default=-1) + 1
        ends = tuple(ends) or (_usual_end(ids),)
        added = _first_added(backend)
        begin = added if begin_of_text is None else begin_of_text
        for token in ends if begin is None else (*ends, begin):
            self._make_special(token)
        self.end_of_text: int = ends[0]
        self.ends: frozenset[int] = frozenset(ends)
        self.begin_of_text: int | None = begin
        self.add_bos: bool = begin is not None and (added == begin if add_bos is None else add_bos)
        self.chat_template: str | None = chat_template

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

        ids = {character: byte for byte, character in enumerate(byte_characters())}
        backend = _byte_level(Backend(models.BPE(vocab=ids, merges=[])))
        backend.add_special_tokens([END_OF_TEXT])
        return cls(backend)

    @classmethod
    def from_json(cls, text: str, **settings: Any) -> Tokenizer:
        """Read the text of a `tokenizer.json`; `settings` are those of the constructor.

        Raises:
            ValueError: the text is not one, or it has no end-of-text token.
        """
        return cls(vocabulary.parse(text), **settings)

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

    def encode(self, text: str, special: bool = False, begin: bool = False) -> np.ndarray:
        """Return the ids of a text, int32 [tokens]; nothing is added at the end.

        Args:
            text: any text.
            special: special tokens that the text spells out become their ids. Only for text that we wrote ourselves,
                such as a rendered chat template: a user's text could otherwise end a turn.
            begin: put `begin_of_text` in front, if the model expects it there.
        """
        backend = self._backend_of_specials if special else self._backend
        ids = backend.encode(text, add_special_tokens=False).ids
        return np.asarray([self.begin_of_text, *ids] if begin and self.add_bos else ids, np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text, int32 [tokens], encoded on all cores."""
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, np.int32) for encoding in encodings]

    def chat(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> np.ndarray:
        """Return the ids of a conversation, ready for the model's answer, int32 [tokens].

        The template writes the begin of text itself, so none is added.

        Args:
            messages: each with ``role`` and ``content``.
            variables: those of `jaxpp.data.chat.render`.

        Raises:
            ValueError: there is no chat template, or it refuses these messages.
        """
        if self.chat_template is None:
            raise ValueError("this tokenizer has no chat template; a base model continues text: use encode")
        begin = None if self.begin_of_text is None else self.token(self.begin_of_text)
        named: dict[str, Any] = {"bos_token": begin or "", "eos_token": self.token(self.end_of_text), **variables}
        return self.encode(chat.render(self.chat_template, messages, **named), special=True)

    def token(self, index: int) -> str:
        """Return the token of an id as the vocabulary writes it.

        Raises:
            ValueError: there is none.
        """
        token = self._backend.id_to_token(index)
        if token is None:
            raise ValueError(f"the tokenizer has no token {index}; its ids end at {self.vocab_size - 1}")
        return token

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        """Return the text of the ids, without special tokens."""
        return self._backend.decode([int(token) for token in ids], skip_special_tokens=True)

    @cached_property
    def fingerprint(self) -> str:
        """Return a digest of the vocabulary; it outlives changes of the file format."""
        ids = sorted(self._backend.get_vocab(with_added_tokens=True).items())
        return hashlib.blake2b(json.dumps(ids).encode(), digest_size=16).hexdigest()

    @cached_property
    def token_bytes(self) -> np.ndarray:
        """Return the UTF-8 bytes that each token stands for, int32 [vocab]; 0 for specials.

        They sum to `len(text.encode())` over the ids of any text (of the text in NFC, where the
        tokenizer has that normalizer).

        Raises:
            ValueError: the tokenizer is not byte-level, so no such count exists.
        """
        require_exact_bytes(json.loads(self.to_json()))
        lengths = np.zeros(self.vocab_size, np.int32)
        for token, index in self._backend.get_vocab(with_added_tokens=False).items():
            lengths[index] = len(token)
        for index, token in self._backend.get_added_tokens_decoder().items():
            lengths[index] = 0 if token.special else len(token.content.encode())
        return lengths

    @cached_property
    def _backend_of_specials(self) -> tokenizers.Tokenizer:
        """Return a copy that reads special tokens in text: switching one would race with other threads."""
        from tokenizers import Tokenizer as Backend

        return Backend.from_str(self.to_json())

    def _make_special(self, index: int) -> None:
        """Where it is an ordinary token, a document that spells it out would end there."""
        added = self._backend.get_added_tokens_decoder().get(index)
        if added is None or not added.special:  # a special one keeps its own flags
            self._backend.add_special_tokens([self.token(index)])


def _usual_end(ids: Mapping[str, int]) -> int:
    name = next((name for name in END_OF_TEXT_NAMES if name in ids), None)
    if name is None:
        raise ValueError(
            f"the tokenizer ({len(ids)} tokens) has no end-of-text token; add one of {', '.join(END_OF_TEXT_NAMES)}"
        )
    return ids[name]


def _first_added(backend: tokenizers.Tokenizer) -> int | None:
    """Return the id that the post-processor puts in front of a text."""
    ids = backend.encode("", add_special_tokens=True).ids
    marked = backend.encode("a", add_special_tokens=True).ids
    plain = backend.encode("a", add_special_tokens=False).ids
    in_front = ids and plain and marked != plain and marked[0] == ids[0] != plain[0]
    return ids[0] if in_front else None


def _byte_level(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    from tokenizers import decoders, pre_tokenizers

    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def required(tokenizer: Tokenizer | None) -> Tokenizer:
    """Return the tokenizer of a checkpoint.

    Raises:
        ValueError: it has none.
    """
    if tokenizer is None:
        raise ValueError("the checkpoint has no tokenizer; put its tokenizer.json beside the weights")
    return tokenizer
