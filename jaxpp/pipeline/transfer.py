"""Arrays between places: moved, added up, and stood for where they lie on devices of other processes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpp.pipeline.place import Place


def move(values: Sequence[jax.Array], place: Place) -> list[jax.Array]:
    """Send arrays to a place, split there as they are now; every process makes the same calls in the same order."""
    goals = [place.sharding(value.sharding.spec) for value in values]  # type: ignore[union-attr]
    return jax.device_put(list(values), goals)


@jax.jit
def copies(values: list[jax.Array]) -> list[jax.Array]:
    """Return copies in buffers of their own."""
    return [jnp.copy(value) for value in values]


def move_weights(values: Sequence[jax.Array], source: Place, place: Place) -> list[jax.Array]:
    """Send arrays that an update will donate.

    Another process may fetch what is sent to it long after: a buffer donated meanwhile would be gone (JAX then fails
    with "deleted or donated buffer"), so that a copy goes.
    """
    if source.processes == place.processes:
        return move(values, place)
    return move(copies(list(values)) if source.is_local else values, place)


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


@partial(jax.jit, static_argnums=1)
def _whole(values: list[jax.Array], goal: Any) -> list[jax.Array]:
    return jax.lax.with_sharding_constraint(values, [goal] * len(values))


def fetch(values: Sequence[jax.Array], source: Place, places: Sequence[Place]) -> list[np.ndarray]:
    """Return arrays that lie on one place on the host of every process; all processes make the same call.

    Args:
        values: on `source`.
        source: their place.
        places: of all ranks; one for each process is sent a copy.
    """
    if not values:
        return []
    goal = source.layout.replicated()
    stand = [jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=goal) for value in values]
    whole = _whole(list(values), goal) if source.is_local else absent(stand)
    found: list[np.ndarray] = []
    for process in sorted(frozenset().union(*(place.processes for place in places))):
        inside = process in source.processes
        goal_place = source if inside else next(place for place in places if process in place.processes)
        here = whole if inside else move(whole, goal_place)
        if process == jax.process_index():
            found = [np.asarray(value.addressable_data(0)) for value in here]
    return found
