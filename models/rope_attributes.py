"""The spellings of rotary positions in a ``config.json``: that of transformers 4, and that of 5.

Of 4: ``rope_theta`` at the top level and ``rope_scaling: {rope_type or type, factor, ...}``. Of 5: all of it under
``rope_parameters``. Both are written; where both are read, they must agree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxpp.convert.attributes import Attributes
from jaxpp.models.decoder_config import DecoderConfig
from jaxpp.models.scaling_attributes import KINDS, read_scaling, write_scaling
from jaxpp.nn.scaling import RopeKind, RopeScaling

PER_LAYER = ("full_attention", "sliding_attention")
"""Kinds of layers, for each of which ``rope_parameters`` may hold a mapping of its own."""


@dataclass(frozen=True)
class RopeNames:
    """How a family names its rotary settings, and what absent ones stand for.

    Args:
        base: name of the base at the top level.
        default_base: the base where none is said.
        partial: name of the rotated share of a head at the top level; empty: this family rotates all of it.
        default_partial: the share where none is said.
        original: ``original_max_position_embeddings`` where none is said; 0: ``max_position_embeddings``.
        kinds: known values of ``rope_type``.
    """

    base: str = "rope_theta"
    default_base: float = 10_000.0
    partial: str = ""
    default_partial: float = 1.0
    original: int = 0
    kinds: Mapping[str, RopeKind] = field(default_factory=lambda: KINDS)


LLAMA_ROPE = RopeNames()


def read_rope(attributes: Attributes, head_dim: int, max_positions: int, names: RopeNames) -> dict[str, Any]:
    """Read ``rope_base``, ``rope_scaling`` and ``rotary_dim`` in either spelling, of the full layers where they differ.

    Args:
        attributes: of the config.
        head_dim: size of a head.
        max_positions: longest sequence, in tokens.
        names: the family's.

    Raises:
        ValueError: an unknown ``rope_type``, settings without one, or two spellings that disagree.
    """
    source = attributes.source
    new = attributes.take("rope_parameters", kind=dict, default=None)
    if new is not None and new.keys() & set(PER_LAYER):
        new = new.get(PER_LAYER[0])
        if new is not None and not isinstance(new, dict):
            raise ValueError(f"{source}: rope_parameters.{PER_LAYER[0]} = {new!r}; a mapping is needed")
    both = {"rope_parameters": new, "rope_scaling": attributes.take("rope_scaling", kind=dict, default=None)}
    spelled = {name: values for name, values in both.items() if values is not None}
    base = agreed(attributes, spelled, "rope_theta", names.base, names.default_base)
    partial = agreed(attributes, spelled, "partial_rotary_factor", names.partial, names.default_partial)
    if partial != 1 and not names.partial:
        raise ValueError(f"{source}: partial_rotary_factor = {partial} is not supported here; 1.0 is")
    # At the top level it has the last word, also over what the mappings say.
    top = attributes.take("original_max_position_embeddings", kind=int, at_least=2, default=None)
    override = {} if top is None else {"original_max_position_embeddings": top}
    original = names.original or max_positions
    scalings = [
        read_scaling(_stretched(values, override), f"{source}: {name}", original, max_positions, names.kinds)
        for name, values in spelled.items()
    ]
    if len(set(scalings)) > 1:
        said = " and ".join(f"{name} {values}" for name, values in spelled.items())
        raise ValueError(f"{source} says {said}, which differ; keep one")
    scaling = scalings[0] if scalings else RopeScaling()
    return dict(rope_base=base, rope_scaling=scaling, rotary_dim=int(head_dim * partial))


def _stretched(values: Mapping[str, Any], override: Mapping[str, Any]) -> Mapping[str, Any]:
    """Lay `override` over a mapping that says a kind; to others it would add a setting whose kind is missing."""
    return {**values, **override} if {"rope_type", "type"} & values.keys() else values


def agreed(
    attributes: Attributes, mappings: Mapping[str, Mapping[str, Any]], key: str, top: str, default: float
) -> float:
    """Return the one value that all places give.

    Args:
        attributes: of the config.
        mappings: name to ``rope_parameters`` or ``rope_scaling``.
        key: its name there.
        top: its name at the top level, besides `key`.
        default: the value where no place gives one.

    Raises:
        ValueError: two places differ.
    """
    found = {f"{name}.{key}": values[key] for name, values in mappings.items() if values.get(key) is not None}
    for name in filter(None, dict.fromkeys((top, key))):
        value = attributes.take(name, kind=float, default=None)
        found |= {} if value is None else {name: value}
    for name, value in found.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise ValueError(f"{attributes.source}: {name} = {value!r}; a number above 0 is needed")
    if len(set(found.values())) > 1:
        pairs = " and ".join(f"{name} {value}" for name, value in found.items())
        raise ValueError(f"{attributes.source} says {pairs}, which are names of one thing; keep one")
    return float(next(iter(found.values()), default))


def write_rope(config: DecoderConfig, names: RopeNames) -> dict[str, Any]:
    """Write the rotary settings in both spellings."""
    scaling = write_scaling(config)
    new: dict[str, Any] = {"rope_type": "default", **scaling, "rope_theta": config.rope_base}
    top: dict[str, Any] = {names.base: config.rope_base, "rope_scaling": scaling or None}
    if names.partial:
        new["partial_rotary_factor"] = top[names.partial] = _share(config)
    if config.rope_scaling.kind == "longrope":  # transformers 4 looks for it there only
        top["original_max_position_embeddings"] = config.rope_scaling.original_positions
    return {**top, "rope_parameters": new}


def _share(config: DecoderConfig) -> float:
    """Return a share of a head of which ``int(head_dim x share)`` is the rotated part."""
    share = config.rotary_dim / config.head_dim
    return share if int(config.head_dim * share) == config.rotary_dim else math.nextafter(share, 2)
