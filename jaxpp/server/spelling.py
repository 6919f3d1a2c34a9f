"""Single tokens as text and as bytes, for log-probabilities: a token may be half a character."""

from __future__ import annotations

import json
import re
from functools import lru_cache

from jaxpp.data import Tokenizer
from jaxpp.data.token_bytes import byte_characters, require_exact_bytes

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # how a vocabulary of words spells a byte that no word holds
_WORD_BORDER = "\u2581"  # and a space


class Spelling:
    r"""What single tokens stand for.

    >>> Spelling(Tokenizer.bytes()).text(0xF0)
    'bytes:\\xf0'
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._bytes = {character: byte for byte, character in enumerate(byte_characters())}
        self._is_byte_level = tokenizer is not None and _is_byte_level(tokenizer)
        self.bytes = lru_cache(maxsize=65536)(self._bytes_of)

    def text(self, index: int) -> str:
        """Return a token's text; what is no text by itself is written as its bytes, as OpenAI does."""
        spelled = self.bytes(index)
        try:
            return spelled.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)

    def _bytes_of(self, index: int) -> bytes:
        if self._tokenizer is None or not 0 <= index < self._tokenizer.vocab_size:
            return b""
        try:
            token = self._tokenizer.token(index)
        except ValueError:  # a hole in the vocabulary
            return b""
        if self._is_byte_level:  # special tokens, written as they are, may hold other characters
            known = all(character in self._bytes for character in token)
            return bytes(self._bytes[character] for character in token) if known else token.encode()
        text = self._tokenizer.decode([index])
        if match := _BYTE.fullmatch(token):
            return bytes([int(match[1], 16)])
        if not text:  # a special token, which decoding leaves out
            return token.encode()
        words = token.replace(_WORD_BORDER, " ")  # decoded alone, a word loses the space before it
        return (words if words.strip() == text.strip() else text).encode()


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    try:
        require_exact_bytes(json.loads(tokenizer.to_json()))
    except ValueError:
        return False
    return True
