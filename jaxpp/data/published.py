"""The tokenizer of a published checkpoint, from the small text files beside its weights.

Everything is read from a mapping of file names to texts, so that a checkpoint which carries these texts along gives
the same tokenizer as the directory that they came from. ``tokenizer.model``, which is binary, is not among them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxpp.data import vocabulary
from jaxpp.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    import tokenizers

TEXTS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
)
"""Files that are carried along, word for word, when a checkpoint is converted and exported again."""

KEPT_CONFIG = "hf_config.json"
"""Name of a published ``config.json`` among the documents of one of our checkpoints."""

# Class of a tokenizer that comes as vocab.json and merges.txt -> how it cuts a text.
_PRE_TOKENIZERS = {
    "GPT2Tokenizer": "gpt-2",
    "GPT2TokenizerFast": "gpt-2",
    "Qwen2Tokenizer": "qwen2",
    "Qwen2TokenizerFast": "qwen2",
}

_SAVE = "save it once with transformers' AutoTokenizer.from_pretrained(directory).save_pretrained(directory)"


def texts(directory: str | Path) -> dict[str, str]:
    """Return the small documents of a Hugging Face directory, by file name, as they are.

    Raises:
        ValueError: one of them is no UTF-8 text.
    """
    found = {}
    for name in TEXTS:
        path = Path(directory) / name
        if path.is_file():
            found[name] = _text(path)
    return found


def read_tokenizer(directory: str | Path) -> Tokenizer | None:
    """Return the tokenizer of a Hugging Face directory; None where there is none.

    Raises:
        ValueError: its files are malformed or contradict each other, or there is only a ``tokenizer.model``.
    """
    found = texts(directory)
    config = Path(directory) / "config.json"
    if config.is_file():
        found["config.json"] = _text(config)
    try:
        tokenizer = tokenizer_of(found)
    except ValueError as error:
        raise ValueError(f"{directory}: {error}") from error
    if tokenizer is None and (Path(directory) / "tokenizer.model").is_file():
        raise ValueError(
            f"{directory}: there is a tokenizer.model, which we do not read, and no tokenizer.json; {_SAVE}"
        )
    return tokenizer


def tokenizer_of(documents: Mapping[str, str]) -> Tokenizer | None:
    """Return the tokenizer that a mapping of `texts` describes; None where it has none.

    The ids that end a text are the tokenizer's own end of sequence and those of ``generation_config.json``; without
    the latter, of ``config.json`` (or `KEPT_CONFIG`), if that is among the documents.

    Raises:
        ValueError: a document is malformed, or names a token that the vocabulary lacks.
    """
    settings = _json(documents, "special_tokens_map.json") | _json(documents, "tokenizer_config.json")
    if "tokenizer.json" in documents:
        backend = vocabulary.parse(documents["tokenizer.json"])
    elif "vocab.json" in documents and "merges.txt" in documents:
        backend = _from_merges(documents, settings)
    else:
        return None
    begin = settings.get("bos_token")
    return Tokenizer(
        backend,
        ends=_ends(documents, settings, backend),
        begin_of_text=None if begin is None else backend.token_to_id(_content(begin)),
        add_bos=settings.get("add_bos_token"),
        chat_template=documents.get("chat_template.jinja") or _template(settings.get("chat_template")),
    )


def texts_of(tokenizer: Tokenizer) -> dict[str, str]:
    """Return documents that `tokenizer_of` and transformers read, for a tokenizer that came without them.

    A checkpoint that has its own `texts` keeps those.
    """
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": tokenizer.token(tokenizer.end_of_text),
        "add_bos_token": tokenizer.add_bos,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],  # transformers 4 adds token types, which decoders refuse
    }
    others = sorted(tokenizer.ends - {tokenizer.end_of_text})
    generation: dict[str, Any] = {"eos_token_id": [tokenizer.end_of_text, *others]}
    if tokenizer.begin_of_text is not None:
        config["bos_token"] = tokenizer.token(tokenizer.begin_of_text)
        generation["bos_token_id"] = tokenizer.begin_of_text
    if tokenizer.chat_template is not None:
        config["chat_template"] = tokenizer.chat_template
    return {
        "tokenizer.json": tokenizer.to_json(),
        "tokenizer_config.json": json.dumps(config, indent=2, ensure_ascii=False) + "\n",
        "generation_config.json": json.dumps(generation, indent=2) + "\n",
    }


def _ends(documents: Mapping[str, str], settings: Mapping[str, Any], backend: tokenizers.Tokenizer) -> list[int]:
    """Return the ids that end a text, the tokenizer's own first, each once."""
    ends = []
    if (end := settings.get("eos_token")) is not None:
        index = backend.token_to_id(_content(end))
        if index is None:
            raise ValueError(f"tokenizer_config.json: eos_token {_content(end)!r} is not in the vocabulary")
        ends.append(index)
    named = _json(documents, "generation_config.json").get("eos_token_id")
    for name in ("config.json", KEPT_CONFIG):
        named = _json(documents, name).get("eos_token_id") if named is None else named
    listed = [] if named is None else named if isinstance(named, list) else [named]
    return list(dict.fromkeys([*ends, *listed]))


def _from_merges(documents: Mapping[str, str], settings: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Return the byte-level BPE of a ``vocab.json`` and a ``merges.txt``."""
    kind = settings.get("tokenizer_class", "GPT2Tokenizer")
    if kind not in _PRE_TOKENIZERS:
        known = ", ".join(_PRE_TOKENIZERS)
        raise ValueError(f"vocab.json and merges.txt of a {kind} are not read, those of {known} are; {_SAVE}")
    lines = documents["merges.txt"].splitlines()
    lines = [line for line in lines if line and not line.startswith("#version")]
    if wrong := [line for line in lines if line.count(" ") != 1]:
        raise ValueError(f"merges.txt: {wrong[0]!r} is no pair of tokens")
    pairs = [(left, right) for left, _, right in (line.partition(" ") for line in lines)]
    return vocabulary.byte_level(
        _json(documents, "vocab.json"), pairs, _PRE_TOKENIZERS[kind], _added(documents, settings)
    )


def _added(documents: Mapping[str, str], settings: Mapping[str, Any]) -> list[vocabulary.Added]:
    """Return the tokens that lie beside the vocabulary; those that the settings name are special."""
    named = [value for name, value in settings.items() if name.endswith("_token") and isinstance(value, str | dict)]
    special = {_content(value) for value in named + (settings.get("additional_special_tokens") or [])}
    found = {
        int(index): vocabulary.Added(int(index), one["content"], bool(one.get("special")))
        for index, one in settings.get("added_tokens_decoder", {}).items()
    }
    for content, index in _json(documents, "added_tokens.json").items():
        found.setdefault(index, vocabulary.Added(index, content, content in special))
    return list(found.values())


def _content(token: str | Mapping[str, Any]) -> str:
    """Return the text of a token, which may be given with its flags."""
    return token if isinstance(token, str) else token["content"]


def _template(given: str | list[dict[str, str]] | None) -> str | None:
    """Return the chat template; of several, the one that is called default, or else the first."""
    if isinstance(given, list):
        by_name = {one["name"]: one["template"] for one in given}
        return by_name.get("default", next(iter(by_name.values()), None))
    return given


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def _json(documents: Mapping[str, str], name: str) -> dict[str, Any]:
    try:
        value = json.loads(documents.get(name, "{}"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{name} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{name} is no JSON object")
    return value
