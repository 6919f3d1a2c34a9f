"""Rotary positions of a GGUF file: base and scaling, from its metadata and from small tensors of factors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxpp.convert.attributes import Attributes


@dataclass(frozen=True)
class GgufHeader:
    """What is known of a GGUF file before its weights are read.

    Args:
        architecture: ``general.architecture``.
        metadata: all keys.
        shapes: of the tensors, by their names in the file, in the order [out, in].
        side: small tensors that are settings: the factors of rotary frequencies.
    """

    architecture: str
    metadata: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    side: Mapping[str, np.ndarray]


def short_float(value: Any) -> Any:
    """Return a float as it was written: 0.00001 where the file holds the float32 nearest to it."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def read_rotary(read: Attributes, header: GgufHeader, max_positions: int) -> dict[str, Any]:
    """Read ``rope_theta`` and ``rope_scaling``.

    Args:
        read: the file's metadata.
        header: of the file.
        max_positions: longest sequence of the model, in tokens.

    Raises:
        ValueError: a scaling that no config says.
    """
    base = read.take("rope.freq_base", kind=float, default=10_000.0)
    kind = read.take("rope.scaling.type", kind=str, default=None)
    factor = read.take("rope.scaling.factor", kind=float, default=None)
    original = read.take("rope.scaling.original_context_length", kind=int, default=None)
    attention = read.take("rope.scaling.attn_factor", kind=float, default=1.0)
    scaling: dict[str, Any] | None = None
    if (factors := header.side.get("rope_freqs.weight")) is not None:
        scaling = _llama3(factors, base, read.source)
    elif (short := header.side.get("rope_factors_short.weight")) is not None:
        long = header.side["rope_factors_long.weight"]
        tables = {
            "short_factor": [short_float(float(x)) for x in short],
            "long_factor": [short_float(float(x)) for x in long],
        }
        scaling = {"rope_type": "longrope", **tables, "attention_factor": attention}
    elif kind in (None, "linear") and factor not in (None, 0.0, 1.0):
        scaling = {"rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        scaling = {"rope_type": "yarn", "factor": factor, **_ramp(read, attention)}
    elif kind not in (None, "none", "linear"):
        raise ValueError(f"{read.source}: rope.scaling.type {kind!r} is not supported; none, linear, yarn are")
    if scaling is not None and scaling["rope_type"] in ("yarn", "longrope"):
        scaling["original_max_position_embeddings"] = original or max_positions
    return {"rope_theta": base, "rope_scaling": scaling}


def _ramp(read: Attributes, attention: float) -> dict[str, float]:
    """Read where yarn's ramp lies."""
    if attention != 1:  # whose meaning changed between versions of llama.cpp
        raise ValueError(f"{read.source}: rope.scaling.attn_factor = {attention} of yarn is not supported; 1.0 is")
    read.must_be("rope.scaling.yarn_ext_factor", 1.0, -1.0)
    read.must_be("rope.scaling.yarn_attn_factor", 1.0)
    named = {
        name: read.take(f"rope.scaling.yarn_{name}", kind=float, default=None) for name in ("beta_fast", "beta_slow")
    }
    return {name: value for name, value in named.items() if value is not None}


def _llama3(factors: np.ndarray, base: float, source: str) -> dict[str, Any] | None:
    """Return Llama 3's rule, if it gives these factors: they are all that the file keeps of it.

    Args:
        factors: what each frequency was divided by, [head_dim / 2].
        base: wavelength base.
        source: of the file, for messages.
    """
    low, high, original, factor = 1.0, 4.0, 8192, float(np.max(factors))
    turns = original / (2 * np.pi) * base ** -(np.arange(len(factors)) / len(factors))
    kept = np.clip((turns - low) / (high - low), 0, 1)
    if not np.allclose(factors, 1 / (kept + (1 - kept) / factor), rtol=1e-3):
        raise ValueError(
            f"{source}: rope_freqs.weight is not Llama 3's rule of factor {factor:g}, {low:g} to {high:g} turns in "
            f"{original} tokens; no other rule is known for it"
        )
    if factor == 1:
        return None
    values = {"factor": short_float(factor), "low_freq_factor": low, "high_freq_factor": high}
    return {"rope_type": "llama3", **values, "original_max_position_embeddings": original}
