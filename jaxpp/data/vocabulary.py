"""Backends of the `tokenizers` library from the parts of a vocabulary, where there is no `tokenizer.json`.

Two kinds: byte-level BPE, whose pre-tokenizer has a name, and SentencePiece's BPE, whose merges follow from scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxpp.data.config import BYTE_TOKENS

if TYPE_CHECKING:
    import tokenizers

# Each entry: the expressions that cut a text one after the other. The names are those of GGUF's tokenizer.ggml.pre.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _SHORT + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _TAIL
_QWEN2 = _SHORT + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _TAIL
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*",
)
_SLASHED = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = "|".join(_WORDS) + r"|\p{N}" + _SLASHED
_GPT4O = "|".join(f"{word}{_SHORT}?" for word in _WORDS) + r"|\p{N}{1,3}" + _SLASHED

PRE_TOKENIZERS: Mapping[str, tuple[str, ...]] = {
    "gpt-2": (_GPT2,),
    "olmo": (_GPT2,),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "smollm": (r"\p{N}", _GPT2),
    "starcoder": (r"\p{N}", _GPT2),
    "refact": (r"\p{N}", _GPT2),
    "llama-bpe": (_LLAMA3,),
    "llama3": (_LLAMA3,),
    "llama-v3": (_LLAMA3,),
    "dbrx": (_LLAMA3,),
    "smaug-bpe": (_LLAMA3,),
    "qwen2": (_QWEN2,),
    "deepseek-r1-qwen": (_QWEN2,),
    "tekken": (_TEKKEN,),
    "gpt-4o": (_GPT4O,),
    "llama4": (_GPT4O,),
}
"""How a byte-level BPE cuts a text into words before merging, by the name of its family."""

_NFC = {"qwen2", "deepseek-r1-qwen"}
_WHOLE_WORDS_FIRST = {"llama-bpe", "llama3", "llama-v3", "tekken"}  # a word that is a token is not merged anew


@dataclass(frozen=True)
class Added:
    """A token that is found in a text before anything else.

    Args:
        index: its id.
        content: its text.
        special: it marks structure and is left out of decoded text.
    """

    index: int
    content: str
    special: bool


def parse(text: str) -> tokenizers.Tokenizer:
    """Return the backend that the text of a `tokenizer.json` describes.

    Raises:
        ValueError: the text is not one.
    """
    from tokenizers import Tokenizer as Backend

    try:
        return Backend.from_str(text)
    except Exception as error:  # the library raises bare Exception on malformed input
        raise ValueError(f"this is not a tokenizer.json: {' '.join(str(error).split())}") from error


def begin_with(backend: tokenizers.Tokenizer, index: int) -> None:
    """Let the backend put a token in front of a text where special tokens are asked for."""
    from tokenizers import processors

    token = backend.id_to_token(index)
    if token is None:
        raise ValueError(f"the begin-of-text token {index} is not in the vocabulary")
    backend.post_processor = processors.TemplateProcessing(
        single=[token, "$A"], pair=[token, "$A", "$B"], special_tokens=[(token, index)]
    )


def byte_level(
    vocabulary: Mapping[str, int], merges: Iterable[tuple[str, str]], pre: str, added: Sequence[Added] = ()
) -> tokenizers.Tokenizer:
    """Return a byte-level BPE.

    Args:
        vocabulary: token, written in the characters that stand for bytes, to id.
        merges: pairs in the order in which they are applied.
        pre: an entry of `PRE_TOKENIZERS`.
        added: special and other whole tokens.

    Raises:
        ValueError: the pre-tokenizer is unknown, or a merge uses what is no token.
    """
    from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

    if pre not in PRE_TOKENIZERS:
        raise ValueError(f"pre-tokenizer {pre!r} is not known; these are: {', '.join(PRE_TOKENIZERS)}")
    backend = _backend(
        lambda: models.BPE(vocab=dict(vocabulary), merges=list(merges), ignore_merges=pre in _WHOLE_WORDS_FIRST)
    )
    cuts: list[Any] = [pre_tokenizers.Split(Regex(cut), "isolated") for cut in PRE_TOKENIZERS[pre]]
    cuts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    backend.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    backend.decoder = decoders.ByteLevel()
    if pre in _NFC:
        backend.normalizer = normalizers.NFC()
    return _with_added(backend, added)


def sentencepiece(
    vocabulary: Mapping[str, int],
    scores: Mapping[str, float],
    unknown: str,
    space_prefix: bool,
    added: Sequence[Added] = (),
) -> tokenizers.Tokenizer:
    """Return a SentencePiece BPE: of two neighbours, those are joined whose union scores highest.

    Args:
        vocabulary: token to id; a space is written as U+2581.
        scores: of the tokens that neighbours may join to.
        unknown: the token of characters that have none, where there are no byte tokens either.
        space_prefix: a text begins as if a space stood before it.
        added: special and other whole tokens.

    Raises:
        ValueError: the scores do not order the merges.
    """
    from tokenizers import decoders, models, normalizers

    if len(set(scores.values())) < 2:
        raise ValueError(f"the {len(scores)} tokens have no scores of their own, so the order of merges is unknown")
    bytes_of = {f"<0x{byte:02X}>" for byte in range(BYTE_TOKENS)}
    fallback = bytes_of <= vocabulary.keys()
    merges = _merges_of_scores(vocabulary, scores)
    backend = _backend(
        lambda: models.BPE(
            vocab=dict(vocabulary), merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=fallback
        )
    )
    prefix = [normalizers.Prepend("\u2581")] if space_prefix else []
    strip = [decoders.Strip(" ", 1, 0)] if space_prefix else []
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "\u2581")])
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    backend.decoder = decoders.Sequence(parts)
    return _with_added(backend, added)


def _merges_of_scores(vocabulary: Mapping[str, int], scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return every way to join two tokens to a scored one, best score first, then lowest id."""
    ranked = sorted(scores, key=lambda token: (-scores[token], vocabulary[token]))
    cuts = ((token[:cut], token[cut:]) for token in ranked for cut in range(1, len(token)))
    return [(left, right) for left, right in cuts if left in scores and right in scores]


def _backend(model: Callable[[], Any]) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer as Backend

    try:
        return Backend(model())
    except Exception as error:  # the library raises bare Exception on a merge of what is no token
        raise ValueError(f"vocabulary and merges do not fit: {' '.join(str(error).split())}") from error


def _with_added(backend: tokenizers.Tokenizer, added: Sequence[Added]) -> tokenizers.Tokenizer:
    from tokenizers import AddedToken

    for one in sorted(added, key=lambda one: one.index):
        backend.add_tokens([AddedToken(one.content, normalized=False, special=one.special)])
        found = backend.token_to_id(one.content)
        if found != one.index:
            raise ValueError(f"added token {one.content!r} has id {one.index}, but the vocabulary leaves it {found}")
    return backend
