"""The mapping ``{rope_type, factor, ...}`` of a ``config.json``: how rotary positions are stretched."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

from jaxpp.models.canonical import SCALING_FIELDS
from jaxpp.models.decoder_config import DecoderConfig
from jaxpp.names import unknown
from jaxpp.nn.scaling import RopeKind, RopeScaling

KINDS: Mapping[str, RopeKind] = {
    "default": "none", "linear": "linear", "dynamic": "dynamic", "llama3": "llama3", "yarn": "yarn",
    "longrope": "longrope", "su": "longrope",
}  # fmt: skip
"""``rope_type`` to our kind; ``su`` is the name of longrope in early Phi-3 files."""

_KEYS = {
    "factor": "factor",
    "original_positions": "original_max_position_embeddings",
    "low_frequency_factor": "low_freq_factor",
    "high_frequency_factor": "high_freq_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "truncate": "truncate",
    "magnitude": "attention_factor",
    "short_factors": "short_factor",
    "long_factors": "long_factor",
}
_OPTIONAL = ("beta_fast", "beta_slow", "truncate")
_LISTS = ("short_factor", "long_factor")
_APART = ("rope_theta", "partial_rotary_factor")  # of every kind, and read elsewhere
_KNOWN = {"rope_type", "type", "mscale", "mscale_all_dim", *_APART, *_KEYS.values()}


def read_scaling(
    given: Mapping[str, Any], source: str, original: int, max_positions: int, kinds: Mapping[str, RopeKind] = KINDS
) -> RopeScaling:
    """Read one mapping.

    Args:
        given: ``rope_parameters`` or ``rope_scaling``.
        source: its file and name, for messages.
        original: ``original_max_position_embeddings`` where the mapping has none.
        max_positions: longest sequence of the model, in tokens.
        kinds: known values of ``rope_type``.

    Raises:
        ValueError: an unknown ``rope_type``, settings without one, unknown or missing settings.
    """
    values = {key: value for key, value in given.items() if value is not None}
    strange = sorted(values.keys() - _KNOWN)
    if strange:
        raise ValueError(f"{source} has keys that this reader does not know: {', '.join(strange)}")
    kind = _kind(values, source, kinds)
    if kind == "none":
        return RopeScaling()
    values = {key: _number(key, value, source) for key, value in values.items()}
    original = max_positions if kind == "dynamic" else int(values.get("original_max_position_embeddings", original))
    values["original_max_position_embeddings"] = original
    if original < 2:
        raise ValueError(f"{source}: original_max_position_embeddings = {original}; 2 or more are needed")
    if kind in ("yarn", "longrope"):
        values.setdefault("factor", max_positions / original)
        values["attention_factor"] = _magnitude(kind, values, original)
    fields = [name for name in SCALING_FIELDS[kind] if name not in _OPTIONAL or _KEYS[name] in values]
    missing = [_KEYS[name] for name in fields if _KEYS[name] not in values]
    if missing:
        raise ValueError(f"{source} of type {kind} has no {', '.join(missing)}")
    if kind == "llama3" and values["high_freq_factor"] <= values["low_freq_factor"]:
        low, high = values["low_freq_factor"], values["high_freq_factor"]
        raise ValueError(f"{source}: high_freq_factor {high} is not above low_freq_factor {low}")
    return RopeScaling(kind=kind, **{name: values[_KEYS[name]] for name in fields})


def write_scaling(config: DecoderConfig) -> dict[str, Any]:
    """Write the mapping of a config; empty if nothing is stretched."""
    scaling = config.rope_scaling
    if scaling.kind == "none":
        return {}
    values = {_KEYS[name]: getattr(scaling, name) for name in SCALING_FIELDS[scaling.kind]}
    if scaling.kind == "dynamic":
        del values["original_max_position_embeddings"]  # it is always max_position_embeddings
    if scaling.kind == "longrope":
        values |= {key: list(values[key]) for key in _LISTS}
        own = _longrope_magnitude(config.max_positions / scaling.original_positions, scaling.original_positions)
        values["attention_factor"] = 0.0 if scaling.own_magnitude() == own else scaling.own_magnitude()
    if not values.get("attention_factor", True):
        del values["attention_factor"]
    return {"rope_type": scaling.kind, **values}


def _kind(values: Mapping[str, Any], source: str, kinds: Mapping[str, RopeKind]) -> RopeKind:
    said = [values[key] for key in ("rope_type", "type") if key in values]
    for one in said:
        if not isinstance(one, str) or one not in kinds:
            raise ValueError(unknown(f"{source}: unknown rope_type", str(one), kinds))
    if len({kinds[one] for one in said}) > 1:
        raise ValueError(f'{source} says rope_type "{said[0]}" and type "{said[1]}"; keep one')
    if said:
        return kinds[said[0]]
    settings = sorted(values.keys() - set(_APART))
    if settings and settings != ["factor"]:
        raise ValueError(f"{source} has {', '.join(settings)} but no rope_type; known: {' '.join(kinds)}")
    return "linear" if settings else "none"  # a bare factor is linear, by old convention


def _number(key: str, value: Any, source: str) -> Any:
    if key in ("rope_type", "type", "truncate"):
        return value
    try:
        return tuple(float(one) for one in value) if key in _LISTS else float(value)
    except (TypeError, ValueError):
        raise ValueError(
            f"{source}: {key} = {value!r}; {'numbers are' if key in _LISTS else 'a number is'} needed"
        ) from None


def _magnitude(kind: str, values: Mapping[str, Any], original: int) -> float:
    """Return the factor on cosine and sine; 0 where it is yarn's own."""
    factor, given = cast(float, values["factor"]), values.get("attention_factor")
    if kind == "longrope":
        return _longrope_magnitude(factor, original) if given is None else given
    over, under = values.get("mscale"), values.get("mscale_all_dim")
    if given is None and over and under:
        given = (0.1 * over * math.log(factor) + 1) / (0.1 * under * math.log(factor) + 1)
    if given is None or math.isclose(given, 0.1 * math.log(factor) + 1, rel_tol=1e-12):
        return 0.0
    return given


def _longrope_magnitude(factor: float, original: int) -> float:
    """Return the rule's own.

    Source: Ding et al., LongRoPE, 2024; Abdin et al., Phi-3 Technical Report, 2024.
    """
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
