"""Noise that depends on a weight's path and an element's place alone, so that every layout draws the same bits.

Exact where it matters: products of noise and scale are exact in fp32, and sums of squares are sums of integers, so that
no order of summing and no fused multiply-add can change a bit.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

_PRIMES = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F, 0x165667B1)
OTHER = 0x5BD1E995  # a key xor this is another key
_DEVIATION = (4 * (256**2 - 1) / 12) ** 0.5  # of the sum of four bytes
_SCALE_BITS = 12  # of a scale; noise has 11, so that their product fits into 24


def key_of(path: str, seed: int) -> int:
    """Return a key for a weight: 32 bits of its path and the seed."""
    return zlib.crc32(f"{seed}/{path}".encode())


def integers(key: jax.Array | int, shape: Sequence[int], places: Mapping[int, np.ndarray] | None = None) -> jax.Array:
    """Return integers from -510 to 510, about normally distributed with deviation 147.8: a hash of place and key.

    Args:
        key: of the weight.
        shape: of the array.
        places: for an axis, the coordinate to take instead of each index: equal coordinates get equal noise.
    """
    mixed = jnp.full(shape, key, jnp.uint32)
    for axis in range(len(shape)):
        at = jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
        if places and axis in places:
            column = jnp.asarray(places[axis].astype(np.uint32))
            at = jnp.broadcast_to(column.reshape([-1 if i == axis else 1 for i in range(len(shape))]), shape)
        mixed = (mixed ^ at) * np.uint32(_PRIMES[axis % len(_PRIMES)])
    mixed = (mixed ^ (mixed >> 16)) * np.uint32(0x7FEB352D)  # the finalizer lowbias32
    mixed = (mixed ^ (mixed >> 15)) * np.uint32(0x846CA68B)
    mixed = mixed ^ (mixed >> 16)
    total = (mixed & 255) + ((mixed >> 8) & 255) + ((mixed >> 16) & 255) + (mixed >> 24)
    return total.astype(jnp.int32) - 510


def scaled(noise: jax.Array, deviation: jax.Array) -> jax.Array:
    """Return `integers` as numbers of a standard deviation, broadcast over leading axes, in its dtype."""
    step = jax.lax.reduce_precision(deviation / _DEVIATION, 8, _SCALE_BITS - 1)
    step = step.reshape(*step.shape, *[1] * (noise.ndim - step.ndim))
    return noise.astype(deviation.dtype) * step


def root_mean_square(x: jax.Array, axes: int) -> jax.Array:
    """Return the root of the mean square over all but the first `axes` axes, the same bits on every sharding.

    Elements are rounded to 11 bits of the largest, and the integers are summed in two halves of 11 bits.
    """
    shape = x.shape[:axes]
    rest = tuple(range(axes, x.ndim))
    top = jnp.abs(x).max(rest, keepdims=True)
    level = jnp.round(jnp.abs(x) / jnp.where(top > 0, top, 1) * 2**11).astype(jnp.int32)
    square = level * level
    total = jnp.zeros(shape, x.dtype)
    for part, weight in ((square & 0x7FF, 1.0), (square >> 11, 2.0**11)):
        for half, power in _sum_exactly(part, rest):
            total = total + half.astype(x.dtype) * (weight * power)
    count = np.prod([x.shape[axis] for axis in rest])
    return top.reshape(shape) * 2.0**-11 * jnp.sqrt(total / count)


def mean(x: jax.Array, axis: int) -> jax.Array:
    """Return the mean over an axis, kept with size 1, summed in one order on every sharding."""
    size = x.shape[axis]
    total = x
    while (length := total.shape[axis]) > 1:
        half = -(-length // 2)
        low, high = (
            jax.lax.slice_in_dim(total, 0, half, axis=axis),
            jax.lax.slice_in_dim(total, half, length, axis=axis),
        )
        missing = [(0, 2 * half - length if i == axis else 0) for i in range(x.ndim)]
        total = low + jnp.pad(high, missing)
    return total / size


def _sum_exactly(part: jax.Array, axes: Sequence[int]) -> list[tuple[jax.Array, float]]:
    """Sum integers below 2^12 over axes, as sums of 16-bit halves (so that 2^16 rows of 2^19 columns fit)."""
    rows = part.astype(jnp.uint32).sum(axes[-1])
    halves = ((rows & 0xFFFF, 1.0), (rows >> 16, 2.0**16))
    return [(half.sum(tuple(axes[:-1])), power) for half, power in halves]
