"""Dispatch: sort what tokens send to experts into rows, and back. Gathers both ways, forward and backward.

A **slot** is one choice of one token: slot ``r x tokens + n`` is the r-th choice of token n. A **row** is a place in a
buffer. Letters: S slots, R rows, M embed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from jaxpp.parallel.grouped import Tiles


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Move:
    """A partial permutation of slots into rows.

    Args:
        row: ``[slots]`` int32, the row of each slot; the number of rows for a slot that is dropped.
        slot: ``[rows]`` int32, the slot in each row; the number of slots for an empty row.
    """

    row: jax.Array
    slot: jax.Array

    def __call__(self, x_SM: jax.Array) -> jax.Array:
        """Return ``[rows, ...]``, zero where empty; an `x_SM` of tokens, not slots, goes to each slot of its token."""
        return _gather(x_SM, self.slot, self.row, self.row.size // x_SM.shape[0])

    def back(self, y_RM: jax.Array) -> jax.Array:
        """Return ``[slots, ...]``, zero where dropped."""
        return _gather(y_RM, self.row, self.slot, 1)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _gather(x: jax.Array, source: jax.Array, inverse: jax.Array, copies: int) -> jax.Array:
    held = inverse.size // copies
    index = jnp.where(source < inverse.size, source % held, held) if copies > 1 else source
    return _rows(jnp.asarray(x), index)


def _rows(x: jax.Array, index: jax.Array) -> jax.Array:
    """Return rows of `x`, zero where the index is past its end."""
    return x.at[index].get(mode="fill", fill_value=0, wrap_negative_indices=False)


def _gather_forward(
    x: jax.Array, source: jax.Array, inverse: jax.Array, copies: int
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _gather(x, source, inverse, copies), (source, inverse)


def _gather_backward(copies: int, kept: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array, None, None]:
    """Gather by the inverse: what autodiff would do by a scatter."""
    _, inverse = kept
    back = _rows(g, inverse)
    if copies > 1:
        back = back.reshape(copies, -1, *back.shape[1:]).astype(jnp.float32).sum(0).astype(g.dtype)
    return back, None, None


_gather.defvjp(_gather_forward, _gather_backward)


def _move(row_S: jax.Array, num_rows: int) -> Move:
    slots = jnp.arange(row_S.size, dtype=jnp.int32)
    slot = jnp.full(num_rows, row_S.size, jnp.int32).at[row_S].set(slots, mode="drop")
    return Move(row_S.astype(jnp.int32), slot)


def _ranks(ids_S: jax.Array, num_groups: int) -> tuple[jax.Array, jax.Array]:
    """Return each slot's rank among those of its group, in order, and the sizes; an id of `num_groups` is no group."""
    order = jnp.argsort(ids_S, stable=True)
    sizes = jnp.zeros(num_groups + 1, jnp.int32).at[ids_S].add(1)
    sorted_ranks = jnp.arange(ids_S.size, dtype=jnp.int32) - (jnp.cumsum(sizes) - sizes)[ids_S[order]]
    return jnp.zeros(ids_S.size, jnp.int32).at[order].set(sorted_ranks), sizes[:num_groups]


def to_capacity(ids_S: jax.Array, real_S: jax.Array, num_experts: int, capacity: int) -> Move:
    """Give each expert `capacity` rows: first choices before second, earlier tokens first; the rest is dropped.

    Args:
        ids_S: expert of each slot.
        real_S: False for the slots of padding, which take no row.
        num_experts: experts.
        capacity: rows of each.

    Returns:
        A move into ``num_experts x capacity`` rows.
    """
    ids = jnp.where(real_S, ids_S, num_experts)
    ranks, _ = _ranks(ids, num_experts)
    fits = real_S & (ranks < capacity)
    return _move(jnp.where(fits, ids * capacity + ranks, num_experts * capacity), num_experts * capacity)


def to_shards(ids_S: jax.Array, num_experts: int, num_shards: int, rows: int) -> tuple[Move, jax.Array]:
    """Sort slots by expert into `rows` rows for each of the shards that hold ``num_experts / num_shards`` each.

    Returns:
        A move into ``num_shards x rows`` rows, and the slots of each expert.
    """
    ranks, sizes = _ranks(ids_S, num_experts)
    before = jnp.cumsum(sizes.reshape(num_shards, -1), axis=1).reshape(-1) - sizes
    shard = ids_S // (num_experts // num_shards)
    return _move(shard * rows + before[ids_S] + ranks, num_shards * rows), sizes


def arrived(counts: jax.Array, rows: int) -> jax.Array:
    """Return the expert of each row that came by `to_shards`; the number of experts for an empty row.

    Args:
        counts: ``[shards, experts]``, rows that came from each shard for each expert.
        rows: rows from each shard.
    """
    ends = jnp.cumsum(counts, axis=1)
    return (jnp.arange(rows)[None, :, None] >= ends[:, None, :]).sum(-1).reshape(-1)


def to_tiles(ids_S: jax.Array, num_experts: int, tile: int) -> tuple[Move, Tiles]:
    """Sort slots by expert into tiles of one expert each; an id of `num_experts` is dropped.

    Returns:
        A move into ``tiles x tile`` rows, and whose each tile is.
    """
    num_tiles = min(ids_S.size, ids_S.size // tile + num_experts)
    ranks, sizes = _ranks(ids_S, num_experts)
    ends = jnp.cumsum(-(-sizes // tile))
    starts = jnp.concatenate([jnp.zeros_like(ends[:1]), ends])
    row = jnp.where(ids_S < num_experts, starts[ids_S] * tile + ranks, num_tiles * tile)
    owner = (jnp.arange(num_tiles)[:, None] >= ends[None]).sum(-1)
    return _move(row, num_tiles * tile), Tiles(jnp.minimum(owner, num_experts - 1), ends[-1])


def tile_rows(num_slots: int, num_experts: int) -> int:
    """Choose the rows of a tile: about half an even share, so that padding adds no more than half; 8 to 512."""
    share = max(1, num_slots // (2 * num_experts))
    return min(512, max(8, 2 ** int(math.log2(share))))
