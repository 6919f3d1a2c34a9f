"""The vocabulary in the metadata of a GGUF file as a tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpp.data import Tokenizer, vocabulary

# Types of tokens.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4

_BEGINS_BY_DEFAULT = {"llama-bpe", "llama3", "llama-v3", "tekken"}  # pre-tokenizers whose models expect a begin of text

_TURN_ENDS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eom_id|>",
    "<EOT>",
)
"""Control tokens that end an answer, whatever the metadata says: a file names one end, and chat models have several."""


def tokenizer_of(metadata: Mapping[str, Any], source: str) -> Tokenizer | None:
    """Return the tokenizer of a GGUF file; None where the file has no vocabulary.

    Args:
        metadata: all keys of the file.
        source: its name, for messages.

    Raises:
        ValueError: the vocabulary is of a kind that is not supported, or incomplete.
    """
    own = {
        key.removeprefix("tokenizer.ggml."): value
        for key, value in metadata.items()
        if key.startswith("tokenizer.ggml.")
    }
    if "tokens" not in own:
        return None
    kind = own.get("model")
    if kind not in ("gpt2", "llama"):
        raise ValueError(f"{source}: tokenizer.ggml.model {kind!r} is not supported; gpt2 and llama are")
    tokens: list[str] = own["tokens"]
    types: list[int] = own.get("token_type") or [_NORMAL] * len(tokens)
    ids = {token: index for index, token in enumerate(tokens)}
    if len(ids) < len(tokens) or len(types) != len(tokens):
        raise ValueError(f"{source}: {len(tokens)} tokens, {len(ids)} of them different, with {len(types)} types")
    added = [
        vocabulary.Added(index, token, types[index] == _CONTROL)
        for token, index in ids.items()
        if types[index] in (_CONTROL, _USER_DEFINED)
    ]
    try:
        build = _byte_level if kind == "gpt2" else _sentencepiece
        backend = build(own, ids, types, added)
        if _begins(own):
            vocabulary.begin_with(backend, own["bos_token_id"])
        template = metadata.get("tokenizer.chat_template")
        return Tokenizer(backend, _ends(own, ids, types), own.get("bos_token_id"), chat_template=template)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error


def _byte_level(own: Mapping[str, Any], ids: Mapping[str, int], types: list[int], added: list[vocabulary.Added]) -> Any:
    if "merges" not in own:
        raise ValueError("a vocabulary of byte-level BPE without tokenizer.ggml.merges")
    if wrong := [merge for merge in own["merges"] if merge.count(" ") != 1]:
        raise ValueError(f"merge {wrong[0]!r} is no pair of tokens")
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in own["merges"])]
    return vocabulary.byte_level(ids, merges, own.get("pre", "default"), added)


def _sentencepiece(
    own: Mapping[str, Any], ids: Mapping[str, int], types: list[int], added: list[vocabulary.Added]
) -> Any:
    values = own.get("scores", [])
    scores = {
        token: score for (token, index), score in zip(ids.items(), values, strict=False) if types[index] == _NORMAL
    }
    named = [token for token, index in ids.items() if types[index] == _UNKNOWN]
    unknown = named[0] if named else next(iter(ids))
    return vocabulary.sentencepiece(ids, scores, unknown, own.get("add_space_prefix", True), added)


def _begins(own: Mapping[str, Any]) -> bool:
    """Return whether a text begins with the begin of text; the format's default depends on the kind of vocabulary."""
    usual = own["model"] == "llama" or own.get("pre") in _BEGINS_BY_DEFAULT
    return own.get("add_bos_token", usual) and own.get("bos_token_id") is not None


def _ends(own: Mapping[str, Any], ids: Mapping[str, int], types: list[int]) -> list[int]:
    named = [own.get(f"{name}_token_id") for name in ("eos", "eot", "eom")]
    usual = [ids[token] for token in _TURN_ENDS if token in ids and types[ids[token]] == _CONTROL]
    return list(dict.fromkeys(index for index in [*named, *usual] if index is not None))
