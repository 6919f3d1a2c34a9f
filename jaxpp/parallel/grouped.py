"""Grouped products: each row times the weight of its own expert, the weights gathered for use as in `product`.

Rows come sorted by expert and padded into tiles of one expert each. Letters: G tiles, B rows of a tile, K what is
read, N what is written, E experts. Runs inside `jax.shard_map` (or on one device).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp

from jaxpp.compress import Quantized
from jaxpp.compress.quantized import FORWARD_ONLY

Kernel = TypeVar("Kernel", jax.Array, Quantized)

_RAGGED_OUTER = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tiles:
    """Which expert each tile of rows belongs to.

    Args:
        owner: ``[tiles]`` int32, ascending.
        count: int32, leading tiles in use; the others hold no row.
    """

    owner: jax.Array
    count: jax.Array


@dataclass(frozen=True)
class GroupedUse:
    """How stacked expert weights are used; hashable, so that it can be a static argument.

    Args:
        gathers: array axis and the mesh axes over which it is gathered for use.
        reduces: mesh axes over which the gradient is summed besides.
        varies: mesh axes on which devices have rows of their own, or part of the weights.
        barrier: keep the forward and the backward gather apart (unrolled layers).
        native: use ``jax.lax.ragged_dot``; else a loop over the tiles in use.
    """

    gathers: tuple[tuple[int, tuple[str, ...]], ...] = ()
    reduces: tuple[str, ...] = ()
    varies: tuple[str, ...] = ()
    barrier: bool = False
    native: bool = False

    def gathered(self, kernel: Kernel) -> Kernel:
        """Return the weights with the gathered dims whole."""
        for axis, names in self.gathers:
            gather = partial(jax.lax.all_gather, axis_name=names, axis=axis, tiled=True)
            kernel = kernel.gathered(gather, axis) if isinstance(kernel, Quantized) else gather(kernel)  # type: ignore
        return kernel

    def reduced(self, gradient: jax.Array) -> jax.Array:
        """Sum a gradient over the devices that share the weights, back to the stored shard."""
        for axis, names in self.gathers:
            gradient = jax.lax.psum_scatter(gradient, names, scatter_dimension=axis, tiled=True)
        return jax.lax.psum(gradient, self.reduces) if self.reduces else gradient

    def zeros(self, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
        """Return zeros to start a loop with; what a loop carries varies from the start."""
        zeros = jnp.zeros(shape, dtype)
        return jax.lax.pcast(zeros, self.varies, to="varying") if self.varies else zeros


def has_native_ragged_dot() -> bool:
    """Say whether this platform multiplies ragged groups without a dense product per expert."""
    return jax.default_backend() == "tpu"


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def grouped_product(x_GBK: jax.Array, kernel_EKN: Kernel, tiles: Tiles | None, use: GroupedUse) -> jax.Array:
    """Multiply each tile of rows by the weight of its expert.

    What is kept for the backward pass is the stored shard of the weights; they are gathered again there.

    Args:
        x_GBK: rows.
        kernel_EKN: this device's shard of the weights, in the dtype of `x_GBK`; quantised ones run forward only.
        tiles: whose each tile is; None: one tile per expert, in order.
        use: what to gather and reduce.

    Returns:
        ``[tiles, rows, written]``; what tiles not in use hold is undefined.

    Cost: per pass, an all-gather of the weights over the axes of ``use.gathers``; in the backward pass their gradient's
        reduce-scatter over these and all-reduce over ``use.reduces``. FLOPs follow the tiles in use.
    """
    return _contract(x_GBK, use.gathered(kernel_EKN), tiles, use)


def _forward(
    x_GBK: jax.Array, kernel_EKN: jax.Array, tiles: Tiles | None, use: GroupedUse
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, Tiles | None]]:
    if isinstance(kernel_EKN, Quantized):
        raise ValueError(FORWARD_ONLY)
    return grouped_product(x_GBK, kernel_EKN, tiles, use), (x_GBK, kernel_EKN, tiles)


def _backward(
    use: GroupedUse, kept: tuple[jax.Array, jax.Array, Tiles | None], g_GBN: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    x_GBK, kernel, tiles = kept
    if use.barrier:  # unrolled, XLA would merge this gather with the forward one and keep every gathered weight alive
        kernel, g_GBN = jax.lax.optimization_barrier((kernel, g_GBN))
    kernel_EKN = use.gathered(kernel)
    dx_GBK = _contract(g_GBN, kernel_EKN.swapaxes(1, 2), tiles, use)
    return dx_GBK, use.reduced(_outer(x_GBK, g_GBN, tiles, kernel_EKN.shape[0], use)), None


grouped_product.defvjp(_forward, _backward)


def _contract(x_GBK: jax.Array, kernel_EKN: jax.Array | Quantized, tiles: Tiles | None, use: GroupedUse) -> jax.Array:
    if tiles is None:
        return jax.vmap(lambda x_BK, kernel_KN: x_BK @ kernel_KN)(x_GBK, kernel_EKN)
    shape = (*x_GBK.shape[:2], kernel_EKN.shape[2])
    if use.native:
        rows = x_GBK.reshape(-1, x_GBK.shape[2])
        kernel_EKN = kernel_EKN.dequantized() if isinstance(kernel_EKN, Quantized) else kernel_EKN
        return jax.lax.ragged_dot(rows, kernel_EKN, _sizes(tiles, kernel_EKN.shape[0], shape[1])).reshape(shape)

    def one(i: jax.Array, y_GBN: jax.Array) -> jax.Array:
        return y_GBN.at[i].set(x_GBK[i] @ kernel_EKN[tiles.owner[i]])

    return jax.lax.fori_loop(0, tiles.count, one, use.zeros(shape, x_GBK.dtype))


def _outer(x_GBK: jax.Array, g_GBN: jax.Array, tiles: Tiles | None, num_experts: int, use: GroupedUse) -> jax.Array:
    """Return the gradient of the weights ``[experts, read, written]``: rows times gradients, summed by expert."""
    if tiles is None:
        return jnp.einsum("gbk,gbn->gkn", x_GBK, g_GBN)
    if use.native:
        rows, gradients = x_GBK.reshape(-1, x_GBK.shape[2]), g_GBN.reshape(-1, g_GBN.shape[2])
        sizes = _sizes(tiles, num_experts, x_GBK.shape[1])
        return jax.lax.ragged_dot_general(rows, gradients, sizes, _RAGGED_OUTER)

    def one(i: jax.Array, sums: jax.Array) -> jax.Array:
        product = jnp.einsum("bk,bn->kn", x_GBK[i], g_GBN[i], preferred_element_type=jnp.float32)
        return sums.at[tiles.owner[i]].add(product)

    shape = (num_experts, x_GBK.shape[2], g_GBN.shape[2])
    return jax.lax.fori_loop(0, tiles.count, one, use.zeros(shape, jnp.float32)).astype(x_GBK.dtype)


def _sizes(tiles: Tiles, num_experts: int, rows: int) -> jax.Array:
    """Return the rows of each expert, whole tiles."""
    in_use = jnp.arange(tiles.owner.size) < tiles.count
    return jnp.zeros(num_experts, jnp.int32).at[tiles.owner].add(jnp.where(in_use, rows, 0))
