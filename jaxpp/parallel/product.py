"""Weights in use: gathered for a product, their gradients reduced and split.

The one place where a block meets a weight; what a leaf is (and later: quantised, low-rank) is decided here, not in models.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

import jax
from flax import nnx
from jax.sharding import NamedSharding

from jaxpp import dims as arrows
from jaxpp.parallel.execution import active_layout
from jaxpp.parallel.layout import Layout

if TYPE_CHECKING:
    from jaxtyping import Array, Float


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _reshard(x: jax.Array, forward: NamedSharding, backward: NamedSharding) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, forward)


def _reshard_forward(x: jax.Array, forward: NamedSharding, backward: NamedSharding) -> tuple[jax.Array, None]:
    return jax.lax.with_sharding_constraint(x, forward), None


def _reshard_backward(forward: NamedSharding, backward: NamedSharding, _: None, g: jax.Array) -> tuple[jax.Array]:
    return (jax.lax.with_sharding_constraint(g, backward),)


_reshard.defvjp(_reshard_forward, _reshard_backward)


def _shardings(arrow: arrows.Arrow, layout: Layout) -> tuple[NamedSharding, NamedSharding]:
    """Return the shardings of an unstacked weight in use and of its gradient."""
    places = (layout.spec(arrow.dims, "compute"), layout.spec(arrow.dims, "moments"))
    return NamedSharding(layout.mesh, places[0]), NamedSharding(layout.mesh, places[1])


def in_use(weight: nnx.Param) -> jax.Array:
    """Return a small or unstacked weight (norm scale, bias, table) laid out for use.

    Cost: an all-gather over the axes in its rules for ``weights`` but not ``compute``; in the backward pass the matching
        reduce-scatter. The gathered array may be kept for the backward pass: large stacked weights go through `product`.
    """
    layout = active_layout()
    if layout is None:
        return weight.get_value()
    return _reshard(weight.get_value(), *_shardings(arrows.of(weight, "weight", layout.dims), layout))


def _contract(x: jax.Array, kernel: jax.Array, num_reads: int) -> jax.Array:
    reads, writes = kernel.shape[:num_reads], kernel.shape[num_reads:]
    flat = x.reshape(*x.shape[: x.ndim - num_reads], math.prod(reads)) if num_reads > 1 else x
    y = flat @ kernel.reshape(math.prod(reads), math.prod(writes))
    return y.reshape(*y.shape[:-1], *writes) if len(writes) > 1 else y


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _sharded(x: jax.Array, kernel: jax.Array, num_reads: int, use: NamedSharding, grad: NamedSharding) -> jax.Array:
    return _contract(x, jax.lax.with_sharding_constraint(kernel, use), num_reads)


def _sharded_forward(
    x: jax.Array, kernel: jax.Array, num_reads: int, use: NamedSharding, grad: NamedSharding
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _sharded(x, kernel, num_reads, use, grad), (x, kernel)


def _sharded_backward(
    num_reads: int, use: NamedSharding, grad: NamedSharding, kept: tuple[jax.Array, jax.Array], g: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, kernel = kept
    gathered = jax.lax.with_sharding_constraint(kernel, use)
    _, transpose = jax.vjp(partial(_contract, num_reads=num_reads), x, gathered)
    dx, dkernel = transpose(g)
    return dx, jax.lax.with_sharding_constraint(dkernel, grad)


_sharded.defvjp(_sharded_forward, _sharded_backward)


def product(x: Float[Array, "*rest reads"], weight: nnx.Param) -> Float[Array, "*rest writes"]:
    """Contract the read dims of `weight` with the last dims of `x`.

    On a mesh the weight is gathered for the product and gathered again for the backward pass: what is kept is the
    stored shard, never the gathered weight. The gradient leaves reduced and split as the moments are.

    Args:
        x: ``[..., *reads]``.
        weight: an unstacked Param whose value is ``[*reads, *writes]``.

    Returns:
        ``[..., *writes]`` in the dtype of `x`.

    Cost: over the axes in the weight's rules for ``weights`` but not ``compute``: an all-gather in the forward pass and
        one in the backward pass; a reduce-scatter (or all-reduce) of the gradient over the axes that split the batch.
    """
    text = weight.get_metadata()["dims"]
    arrow = arrows.parse(text, tuple(arrows.parse_words(text)))
    kernel, layout = weight.get_value().astype(x.dtype), active_layout()
    if layout is None:
        return _contract(x, kernel, len(arrow.reads))
    return _sharded(x, kernel, len(arrow.reads), *_shardings(arrow, layout))
