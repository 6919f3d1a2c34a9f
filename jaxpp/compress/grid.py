"""Numbers on a grid: a block of a weight becomes small integers, one scale and, if asked for, one offset.

A block is described by `counts`: into how many parts each axis is cut. ``w = scale x integer + offset``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

SHRINK = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)  # parts of a block's range that a search for clipping tries


@dataclass(frozen=True)
class Grid:
    """Which numbers a block may hold.

    Args:
        bits: of an integer, 8 or 4.
        offset: the grid spans a block's smallest to its largest number; else it is symmetric about zero.
        clip: give up the ends of a block's range where that makes the squared error smaller.
        stored: dtype of scales and offsets; the integers are chosen for what it rounds them to.
    """

    bits: int
    offset: bool = False
    clip: bool = False
    stored: str = "float32"

    @property
    def ends(self) -> tuple[int, int]:
        """The smallest and the largest integer."""
        top = 2 ** (self.bits - 1) - 1
        return (-top - 1 if self.offset else -top), top


def _blocked(x: jax.Array, counts: Sequence[int]) -> jax.Array:
    """Cut each axis in two: blocks, and what is in a block."""
    pairs = ((count, size // count) for size, count in zip(x.shape, counts, strict=True))
    return x.reshape(tuple(itertools.chain.from_iterable(pairs)))


def _within(x: jax.Array) -> tuple[int, ...]:
    return tuple(range(1, 2 * x.ndim, 2))


def round_to_grid(
    weight: jax.Array, counts: Sequence[int], grid: Grid
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Round to the nearest numbers of a grid, which is chosen for each block.

    Args:
        weight: any shape.
        counts: blocks along each axis; each divides its size.
        grid: the grid.

    Returns:
        int8 of the weight's shape, scales and offsets of shape `counts` (None where the grid has none).

    Source: Jacob et al., Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference,
        2018, section 2.1.
    """
    x, within = _blocked(weight.astype(jnp.float32), counts), _within(weight)
    low, high = x.min(within, keepdims=True), x.max(within, keepdims=True)
    best = _rounded(x, low, high, grid)
    for shrink in SHRINK[1:] if grid.clip else ():
        one = _rounded(x, low * shrink, high * shrink, grid)
        errors = [((scale * q + offset - x) ** 2).sum(within, keepdims=True) for q, scale, offset in (best, one)]
        better = errors[1] < errors[0]
        best = tuple(jnp.where(better, new, old) for old, new in zip(best, one, strict=True))
    q, scale, offset = best
    kept = [part.reshape(tuple(counts)).astype(grid.stored) for part in (scale, offset)]
    return q.reshape(weight.shape).astype(jnp.int8), kept[0], kept[1] if grid.offset else None


def _rounded(x: jax.Array, low: jax.Array, high: jax.Array, grid: Grid) -> tuple[jax.Array, jax.Array, jax.Array]:
    least, most = grid.ends
    if grid.offset:
        scale = _as_stored((high - low) / (most - least), grid)
        offset = _as_stored(low - least * scale, grid)
    else:
        scale = _as_stored(jnp.maximum(-low, high) / most, grid)
        offset = jnp.zeros_like(scale)
    step = jnp.where(scale == 0, 1, scale)  # a block of one number alone: its offset says it all
    return jnp.clip(jnp.round((x - offset) / step), least, most), scale, offset


def _as_stored(x: jax.Array, grid: Grid) -> jax.Array:
    return x.astype(grid.stored).astype(jnp.float32)


def from_grid(integers: jax.Array, scales: jax.Array, offsets: jax.Array | None, dtype: jnp.dtype) -> jax.Array:
    """Return the numbers that integers stand for; blocks are as many as `scales` has elements along each axis."""
    shape = tuple(itertools.chain.from_iterable((count, 1) for count in scales.shape))
    x = _blocked(integers.astype(dtype), scales.shape) * scales.astype(dtype).reshape(shape)
    if offsets is not None:
        x = x + offsets.astype(dtype).reshape(shape)
    return x.reshape(integers.shape)


def pack(integers: jax.Array, axis: int) -> jax.Array:
    """Put two 4-bit integers into one int8: neighbours along an axis of even size, the first in the low half.

    JAX has int4 of its own, which some backends and versions keep in one byte each.
    """
    pairs = integers.reshape(*integers.shape[:axis], -1, 2, *integers.shape[axis:][1:])
    first, second = (jax.lax.index_in_dim(pairs, i, axis + 1, keepdims=False) for i in (0, 1))
    return (first & 15) | (second << 4)


def unpack(packed: jax.Array, axis: int) -> jax.Array:
    """Undo `pack`."""
    halves = jnp.stack([(packed << 4) >> 4, packed >> 4], axis=axis + 1)
    return halves.reshape(*packed.shape[:axis], -1, *packed.shape[axis:][1:])


def blocks_along(sizes: Sequence[int], group: int) -> tuple[int, ...] | None:
    """Return how many blocks of `group` neighbours lie along each of several axes taken as one.

    Args:
        sizes: of the axes.
        group: elements of a block; 0: all of them.

    Returns:
        One count for each axis; None where groups do not come out even.

    Example:
        >>> blocks_along((9, 64), 32), blocks_along((9, 64), 192), blocks_along((9, 64), 128)
        ((9, 2), (3, 1), None)
    """
    if not group:
        return (1,) * len(sizes)
    if group > math.prod(sizes):
        return None
    counts, left = [], group
    for size in reversed(sizes):
        part = min(size, left)
        if size % part or left % part:
            return None
        counts.append(size // part)
        left //= part
    return tuple(reversed(counts))
