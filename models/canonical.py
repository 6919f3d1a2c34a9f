"""One form for every config of the same model, so that two of them can be compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxpp.models.decoder_config import DecoderConfig
from jaxpp.nn.moe import MoeConfig
from jaxpp.nn.scaling import RopeScaling

SCALING_FIELDS: dict[str, tuple[str, ...]] = {
    "none": (),
    "linear": ("factor",),
    "dynamic": ("factor", "original_positions"),
    "llama3": ("factor", "original_positions", "low_frequency_factor", "high_frequency_factor"),
    "yarn": ("factor", "original_positions", "beta_fast", "beta_slow", "truncate", "magnitude"),
    "longrope": ("original_positions", "short_factors", "long_factors", "magnitude"),
}
"""What each kind of rotary scaling reads."""

_TRAINING_ONLY: dict[str, Any] = dict(balance_loss=0.0, z_loss=0.0)


def spread(pattern: Sequence[bool], num_layers: int) -> tuple[bool, ...]:
    """Repeat a pattern over the depth; an empty one says True of every layer."""
    return tuple(pattern[i % len(pattern)] if pattern else True for i in range(num_layers))


def shortest(layers: Sequence[bool]) -> tuple[bool, ...]:
    """Return the shortest pattern that repeats to `layers`; all True: the empty one.

    Example:
        >>> shortest([True, False, True, False, True])
        (True, False)
    """
    if all(layers):
        return ()
    size = next(n for n in range(1, len(layers) + 1) if all(x == layers[i % n] for i, x in enumerate(layers)))
    return tuple(layers[:size])


def canonical(config: DecoderConfig) -> DecoderConfig:
    """Return the config of the same model in which what is not used, or is a default, is not set."""
    new: dict[str, Any] = dict(_window(config), rope_layers=shortest(spread(config.rope_layers, config.num_layers)))
    scaling = config.rope_scaling
    kept = {name: getattr(scaling, name) for name in SCALING_FIELDS[scaling.kind]}
    if scaling.kind == "longrope":
        kept["magnitude"] = scaling.own_magnitude()
    new["rope_scaling"] = RopeScaling(kind=scaling.kind, **kept)
    if config.positions == "learned":
        new |= dict(rope_base=10_000.0, rope_scaling=RopeScaling(), rotary_dim=0, rope_layers=(), window_rope_base=0.0)
    if config.vocab_rows == config.vocab_size:
        new["vocab_rows"] = 0
    if config.attention_scale == config.head_dim**-0.5:
        new["attention_scale"] = 0.0
    if config.norm == "layer":
        new["norm_scale"] = "cast"
    if not config.moe.num_experts:
        new["moe"] = MoeConfig()
    return dataclasses.replace(config, **new)


def _window(config: DecoderConfig) -> dict[str, Any]:
    layers = spread(config.window_layers, config.num_layers)
    if not config.window or not any(layers):
        return dict(window=0, window_layers=(), window_rope_base=0.0)
    same = config.window_rope_base == config.rope_base and config.rope_scaling.kind == "none"
    return dict(window_layers=shortest(layers), window_rope_base=0.0 if same else config.window_rope_base)


def difference(config: DecoderConfig, found: DecoderConfig) -> list[str]:
    """Say which fields of `config` a checkpoint that reads back as `found` loses; weights of losses do not count.

    Returns:
        One phrase a field, such as ``"rotary_dim 16 (it would be 32)"``; empty if both are the same model.
    """
    wanted, got = _of_the_forward_pass(config), _of_the_forward_pass(found)
    return [
        f"{field.name} {getattr(wanted, field.name)!r} (it would be {getattr(got, field.name)!r})"
        for field in dataclasses.fields(wanted)
        if getattr(wanted, field.name) != getattr(got, field.name)
    ]


def _of_the_forward_pass(config: DecoderConfig) -> DecoderConfig:
    """Drop what does not change the logits: the weights of losses, and the width of an mlp that experts replace."""
    config = canonical(config)
    if not config.moe.num_experts:
        return config
    width = config.moe.mlp_dim or config.mlp_dim
    moe = dataclasses.replace(config.moe, mlp_dim=width, **_TRAINING_ONLY)
    return dataclasses.replace(config, mlp_dim=width, moe=moe)
