"""How many bytes of text each token stands for, where a tokenizer has an exact answer.

Byte-level BPE writes a byte as one printable character, so a token's length in characters is its length in bytes,
whatever the text. Any step that rewrites the text breaks this and is refused.
"""

from __future__ import annotations

from typing import Any

from jaxpp.data.config import BYTE_TOKENS

# Pre-tokenizers that only cut the text; "Removed" pieces are refused apart.
_CUTTING = {"ByteLevel", "Digits", "Split", "Punctuation", "UnicodeScripts"}


def byte_characters() -> list[str]:
    """Return the printable character that byte-level BPE writes for each byte."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = iter(range(BYTE_TOKENS, 2 * BYTE_TOKENS))
    return [chr(byte if byte in printable else next(hidden)) for byte in range(BYTE_TOKENS)]


def require_exact_bytes(description: dict[str, Any]) -> None:
    """Refuse a tokenizer whose tokens do not partition the bytes of a text.

    Args:
        description: its parsed `tokenizer.json`.

    Raises:
        ValueError: names the parts that add, remove or rewrite text.
    """
    model = description["model"]
    cutters = _flat(description["pre_tokenizer"], "pretokenizers")
    normalizers = _flat(description["normalizer"], "normalizers")
    affixes = [model.get("continuing_subword_prefix"), model.get("end_of_word_suffix")]
    exact = (
        model["type"] == "BPE"
        and set(byte_characters()) <= model["vocab"].keys()
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
