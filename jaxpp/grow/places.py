"""Where a grown weight lies, and how it is made there: one weight at a time, never gathered."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxpp.dims import Arrow
from jaxpp.grow.leaf import ByDims, Leaf

Sharding = jax.sharding.Sharding


def carried_over(place: Sharding, dims: Sequence[str], arrow: Arrow, shape: Sequence[int]) -> Sharding:
    """Return a sharding by the same dims for an array of another arrow or shape.

    Args:
        place: sharding of an array with axes `dims`.
        dims: names of its axes.
        arrow: of the other array.
        shape: of the other array; an axis that does not divide is not split.
    """
    if not isinstance(place, NamedSharding):
        return place
    entries = dict(zip(dims, [*place.spec, *[None] * len(dims)], strict=False))
    spec = [_fitting(place.mesh, entries.get(dim), size) for dim, size in zip(arrow.dims, shape, strict=True)]
    return NamedSharding(place.mesh, PartitionSpec(*spec))


def _fitting(mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh, entry: Any, size: int) -> Any:
    axes = (entry,) if isinstance(entry, str) else tuple(entry or ())
    return entry if size % math.prod(mesh.shape[axis] for axis in axes) == 0 else None


def make_weight(leaf: Leaf, x: jax.Array, dtype: Any, place: Sharding) -> jax.Array:
    """Make a grown weight on its shards; the same bits whatever the shardings."""
    if isinstance(leaf, ByDims):
        return _by_dims(replace(leaf, path="", source=""), jnp.dtype(dtype), place)(x, np.uint32(leaf.key))
    return jax.jit(lambda x: leaf.weight(x, jnp.dtype(dtype)), out_shardings=place)(x)


@lru_cache(maxsize=32)
def _by_dims(leaf: ByDims, dtype: jnp.dtype, place: Sharding) -> Callable[[jax.Array, np.uint32], jax.Array]:
    """Compile what weights share that grow alike, such as gate and up."""
    return jax.jit(lambda x, key: leaf.weight(x, dtype, key), out_shardings=place)


def make_moment(leaf: Leaf, x: jax.Array, power: int, place: Sharding) -> jax.Array:
    """Make the moment of a grown weight on its shards."""
    return jax.jit(lambda x: leaf.moment(x, power).astype(x.dtype), out_shardings=place)(x)
