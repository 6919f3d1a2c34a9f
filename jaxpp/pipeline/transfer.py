"""Arrays between places: moved, added up, and stood for where they lie on devices of other processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxpp.pipeline.place import Place


def move(values: Sequence[jax.Array], place: Place) -> list[jax.Array]:
    """Send arrays to a place, split there as they are now; every process makes the same calls in the same order."""
    goals = [place.sharding(value.sharding.spec) for value in values]  # type: ignore[union-attr]
    return jax.device_put(list(values), goals)


@jax.jit
def _copies(values: list[jax.Array]) -> list[jax.Array]:
    return [jnp.copy(value) for value in values]


def move_weights(values: Sequence[jax.Array], source: Place, place: Place) -> list[jax.Array]:
    """Send arrays that an update will donate.

    Another process may fetch what is sent to it long after: a buffer donated meanwhile would be gone (JAX then fails
    with "deleted or donated buffer"), so that a copy goes.
    """
    if source.processes == place.processes:
        return move(values, place)
    return move(_copies(list(values)) if source.is_local else values, place)


def absent(leaves: Sequence[jax.ShapeDtypeStruct]) -> list[jax.Array]:
    """Return arrays of which this process holds nothing, to be named in a transfer."""
    make: Any = jax.make_array_from_single_device_arrays
    return [make(tuple(leaf.shape), leaf.sharding, [], dtype=jnp.dtype(leaf.dtype)) for leaf in leaves]


def like(values: Sequence[jax.Array]) -> list[jax.ShapeDtypeStruct]:
    """Return the shapes and shardings of arrays."""
    return [jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=value.sharding) for value in values]


@jax.jit
def _sum(one: list[jax.Array], other: list[jax.Array]) -> list[jax.Array]:
    return [a + b for a, b in zip(one, other, strict=True)]


def add(place: Place, one: Sequence[jax.Array], other: Sequence[jax.Array]) -> list[jax.Array]:
    """Add arrays that lie on one place."""
    return _sum(list(one), list(other)) if place.is_local else absent(like(one))
