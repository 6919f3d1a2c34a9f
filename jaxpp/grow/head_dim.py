"""Wider heads: each dim of a head stands there several times, inside its half where rotary positions turn it.

Rotary positions pair dim k with dim k + half, so ``[a b | c d]`` becomes ``[a b a b | c d c d]``, and the frequencies
of the pairs are tiled alike. Scores sum over the r copies, so they become ``scale' r f^2`` times what the old dims
score, where f is a factor on queries and on keys: ``r^(-1/4)`` if the scale is ``head_dim^(-1/2)``, which shrinks by
itself, ``r^(-1/2)`` if the config sets it. Where a norm stands behind queries and keys, its scale takes f.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxpp.grow import noise
from jaxpp.grow.leaf import ByDims
from jaxpp.grow.split import Kind, Split
from jaxpp.grow.spread import Spread
from jaxpp.grow.step import Step, by_dims, scale_offset
from jaxpp.models import DecoderConfig
from jaxpp.models.canonical import canonical
from jaxpp.nn.scaling import RopeScaling, scaled_frequencies


def head_dim(
    config: DecoderConfig,
    *,
    head_dim: int,
    variant: Kind = "symmetric",
    noise_db: float | None = 15.0,
    seed: int = 0,
) -> Step:
    """Widen every head a whole number of times.

    Noise is on the output projection, as in `heads`, and on the queries (or the scale of their norm): pairs of copies
    add and subtract it, and equal keys cancel it. More heads reach the same size with plain rotary frequencies, which
    more formats can write.

    Args:
        config: of the model.
        head_dim: the new width of a head, a multiple of the old one.
        variant: how the output projection is divided; see `Split`.
        noise_db: signal over noise; None: none, and then copies stay copies for ever.
        seed: of the noise.

    Raises:
        ValueError: no whole multiple, with the nearest; rotary positions that no fixed frequencies describe.

    Source: Samragh et al., Scaling Smart: Accelerating Large Language Model Pre-training with Small Model
        Initialization, 2024 (heads of another size).
    """
    times = _times(config.head_dim, head_dim)
    target = replace(config, head_dim=head_dim, **_positions(config, times))
    step = by_dims(
        "head_dim", config, target, {("head_dim", config.head_dim): _spread(config, times)},
        split=Split(variant, noise_db, seed), changes=_changes(config, times),
    )  # fmt: skip
    if noise_db is None:
        return step
    path = f"blocks/attention/{'query/kernel' if config.qk_norm == 'none' else 'query_norm/scale'}"
    return replace(step, leaves={**step.leaves, path: _Apart(cast(ByDims, step.leaves[path]))})


def _times(old: int, new: int) -> int:
    if new % old or new < 2 * old:
        fits = sorted({max(2, new // old) * old, max(2, -(-new // old)) * old})
        raise ValueError(
            f"head_dim {new}: a multiple of {old}, from {2 * old} on, is needed: {' or '.join(map(str, fits))}; "
            "any number of heads of the old size does too (heads)"
        )
    return new // old


def _spread(config: DecoderConfig, times: int) -> Spread:
    """Tile each half of what turns, and what does not turn."""
    turned = config.rotary_dim if config.positions == "rope" else 0
    parts = np.split(np.arange(config.head_dim), [turned // 2, turned])
    return Spread(config.head_dim, np.concatenate([np.tile(part, times) for part in parts]))


def _positions(config: DecoderConfig, times: int) -> dict[str, Any]:
    """Return the fields with which the frequencies of the wider head are the old ones, tiled.

    Raises:
        ValueError: no field says so.
    """
    if config.positions != "rope":
        return {}
    scaling, own = config.rope_scaling, canonical(config).window_rope_base
    if scaling.kind == "dynamic":
        raise ValueError(
            "head_dim: frequencies of rope_scaling.kind dynamic change with the length of a sequence, which no list of "
            "factors says; more heads of the old size (heads) need none"
        )
    if own:
        raise ValueError(
            f"head_dim: the layers with a window turn by window_rope_base {own:g}, which cannot be scaled, so its "
            "frequencies cannot be tiled; more heads of the old size (heads) need not be"
        )
    rotary_dim = times * config.rotary_dim
    plain = scaled_frequencies(rotary_dim, config.rope_base, RopeScaling())

    def factors(beyond: bool) -> tuple[float, ...]:
        old = scaled_frequencies(config.rotary_dim, config.rope_base, scaling, beyond)
        return tuple((plain / np.tile(old, times)).tolist())

    longest = scaling.original_positions if scaling.kind == "longrope" else config.max_positions
    tiled = RopeScaling(
        "longrope", original_positions=longest, magnitude=scaling.own_magnitude(),
        short_factors=factors(False), long_factors=factors(True),
    )  # fmt: skip
    return dict(rotary_dim=rotary_dim, rope_scaling=tiled, window_rope_base=0.0)


def _changes(config: DecoderConfig, times: int) -> dict[str, dict[str, Any]]:
    factor = times ** (-1 / 2 if config.attention_scale else -1 / 4)
    if config.qk_norm == "none":
        parts = [f"{name}/{part}" for name in ("query", "key") for part in ("kernel", "bias")]
        return {f"blocks/attention/{part}": dict(factor=factor) for part in parts}
    norms = dict(factor=factor, offset=scale_offset(config))
    return {f"blocks/attention/{name}_norm/scale": norms for name in ("query", "key")}


@dataclass(frozen=True, eq=False)
class _Apart:
    """Queries of which pairs of copies add and subtract noise; keys, equal in both, cancel it in the scores."""

    leaf: ByDims

    @property
    def source(self) -> str:
        return self.leaf.source

    def weight(self, x: jax.Array, dtype: jnp.dtype) -> jax.Array:
        leaf, wide = self.leaf, jnp.promote_types(x.dtype, jnp.float32)
        tiled = replace(leaf, factor=1.0).weight(x, wide)
        spread, split = leaf.spreads[-1], leaf.split
        size = noise.root_mean_square(x.astype(wide) + leaf.offset, len(leaf.arrow.stacked))
        drawn = noise.integers(noise.key_of(leaf.path, split.seed), tiled.shape, {tiled.ndim - 1: spread.first})
        change = noise.scaled(drawn, size * 10 ** (-(split.noise_db or 0.0) / 20)) * spread.sign
        # The factor comes last: with a sum behind it, a fused multiply-add here or there would change bits.
        y = (tiled + leaf.offset + change) * leaf.factor
        return (y - leaf.offset if leaf.offset else y).astype(dtype)

    def moment(self, x: jax.Array, power: int) -> jax.Array:
        return self.leaf.moment(x, power)

    def rate(self) -> float:
        return self.leaf.rate()
