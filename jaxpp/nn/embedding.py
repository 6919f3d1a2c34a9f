"""Embedding tables: token ids (or positions) to vectors."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpp import dims
from jaxpp.compress import Quantized
from jaxpp.parallel import batch_shards, constrain, in_use

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _lookup(table: jax.Array, ids: jax.Array, shards: int) -> jax.Array:
    return table[ids]


def _lookup_forward(table: jax.Array, ids: jax.Array, shards: int) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return table[ids], (ids, jnp.zeros((0, table.shape[0]), table.dtype))


def _lookup_backward(shards: int, kept: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array, None]:
    """Add up each batch shard's own rows, then the shards: one reduction, no moving of activations."""
    ids, like = kept
    rows = g.reshape(shards, -1, g.shape[-1])
    zeros = constrain(jnp.zeros((shards, like.shape[1], g.shape[-1]), g.dtype), "batch vocab embed")
    parts = jax.vmap(lambda zero, index, row: zero.at[index].add(row))(zeros, ids.reshape(shards, -1), rows)
    return constrain(parts, "batch vocab embed").sum(0).astype(like.dtype), None


_lookup.defvjp(_lookup_forward, _lookup_backward)


class Embedding(nnx.Module):
    """A table ``"vocab -> embed"`` or ``"positions -> embed"``, read by a one-hot."""

    def __init__(self, key: jax.Array, arrow: str, sizes: dict[str, int], *, deviation: float = 0.02, also: str = ""):
        """Draw the table.

        Args:
            key: PRNG key.
            arrow: ``"vocab -> embed"`` or ``"positions -> embed"``.
            sizes: size of each dim.
            deviation: standard deviation of its entries.
            also: a second arrow by which the table is read (a tied head reads it ``"embed -> vocab"``).
        """
        self.table = dims.normal(key, arrow, sizes, deviation)
        if also:
            self.table.set_metadata(also=also)

    def __call__(self, ids: Int[Array, "batch seq"]) -> Float[Array, "batch seq embed"]:
        """Look the ids up; ids outside the table are the caller's error."""
        table = in_use(self.table)
        if isinstance(table, Quantized):
            return constrain(table[ids].dequantized(), "batch seq embed")
        return constrain(_lookup(table, ids, batch_shards(ids.shape[0])), "batch seq embed")
