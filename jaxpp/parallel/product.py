"""Weights in use: gathered for a product, their gradients reduced and split.

The one place where a block meets a weight; what a leaf is (an array, or quantised) is decided here, not in models.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding

from jaxpp import dims as arrows
from jaxpp.compress import Quantized, QuantizedWeight
from jaxpp.parallel.execution import active_layout, current
from jaxpp.parallel.layout import Layout

if TYPE_CHECKING:
    from jaxtyping import Array, Float

PRODUCT = "product"  # `checkpoint_name` of every result: a remat policy does not see the products inside a custom_vjp


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


Weight = nnx.Param | QuantizedWeight


def in_use(weight: Weight) -> Any:
    """Return a small or unstacked weight (norm scale, bias, table) laid out for use: an array, or `Quantized`.

    Cost: an all-gather over the axes in its rules for ``weights`` but not ``compute``; in the backward pass the
        matching reduce-scatter. The gathered array may be kept for the backward pass: large stacked weights go through
        `product`.
    """
    layout = active_layout()
    if layout is None:
        return stored(weight)
    if isinstance(weight, QuantizedWeight):

        def place(x: jax.Array, dims: Sequence[str]) -> jax.Array:
            return jax.lax.with_sharding_constraint(x, NamedSharding(layout.mesh, layout.spec(dims, "compute")))

        return weight.in_use(place)
    return _reshard(weight.get_value(), *_shardings(arrows.of(weight, "weight", layout.dims), layout))


def stored(weight: Weight) -> Any:
    """Return a weight as it lies: an array, or `Quantized`."""
    return weight.in_use() if isinstance(weight, QuantizedWeight) else weight.get_value()


def arrow_of(weight: Weight) -> arrows.Arrow:
    """Return the arrow of a weight."""
    if isinstance(weight, QuantizedWeight):
        return weight.arrow
    text = weight.get_metadata()["dims"]
    return arrows.parse(text, tuple(arrows.parse_words(text)))


def _contract(x: jax.Array, kernel: jax.Array | Quantized, num_reads: int) -> jax.Array:
    reads, writes = kernel.shape[:num_reads], kernel.shape[num_reads:]
    flat = x.reshape(*x.shape[: x.ndim - num_reads], math.prod(reads)) if num_reads > 1 else x
    if isinstance(kernel, Quantized):
        y = flat @ kernel.flat(num_reads)
    else:
        y = flat @ kernel.reshape(math.prod(reads), math.prod(writes))
    return y.reshape(*y.shape[:-1], *writes) if len(writes) > 1 else y


@dataclass(frozen=True)
class _Use:
    """How one weight is used on a mesh; hashable, so that it can be a static argument.

    Args:
        num_reads: leading axes of the kernel that are contracted.
        forward: sharding in use.
        gradient: sharding of its gradient.
        shards: parts into which its first written dim is split.
    """

    num_reads: int
    forward: NamedSharding
    gradient: NamedSharding
    shards: int

    def gathered(self, kernel: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(kernel, self.forward)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _sharded(x: jax.Array, kernels: list[jax.Array], uses: tuple[_Use, ...], barrier: bool) -> list[jax.Array]:
    return [_contract(x, use.gathered(kernel), use.num_reads) for kernel, use in zip(kernels, uses, strict=True)]


def _sharded_forward(
    x: jax.Array, kernels: list[jax.Array], uses: tuple[_Use, ...], barrier: bool
) -> tuple[list[jax.Array], tuple[jax.Array, list[jax.Array]]]:
    return _sharded(x, kernels, uses, barrier), (x, kernels)


def _sharded_backward(
    uses: tuple[_Use, ...], barrier: bool, kept: tuple[jax.Array, list[jax.Array]], grads: list[jax.Array]
) -> tuple[jax.Array, list[jax.Array]]:
    x, kernels = kept
    if barrier:  # unrolled, XLA would merge this gather with the forward one and keep every gathered weight alive
        kernels, grads = jax.lax.optimization_barrier((kernels, grads))
    gathered = [use.gathered(kernel) for kernel, use in zip(kernels, uses, strict=True)]
    dkernels = [
        jax.lax.with_sharding_constraint(_outer(x, g, use.num_reads, kernel.shape), use.gradient)
        for g, kernel, use in zip(grads, kernels, uses, strict=True)
    ]
    return _into_input(x, gathered, grads, uses), dkernels


_sharded.defvjp(_sharded_forward, _sharded_backward)


def _outer(x: jax.Array, g: jax.Array, num_reads: int, shape: tuple[int, ...]) -> jax.Array:
    """Return the gradient of a kernel: ``x`` times ``g``, summed over all tokens."""
    rest = x.ndim - num_reads
    return jnp.tensordot(x, g, axes=(tuple(range(rest)), tuple(range(rest)))).reshape(shape)


def _into_input(x: jax.Array, kernels: list[jax.Array], grads: list[jax.Array], uses: tuple[_Use, ...]) -> jax.Array:
    """Return the gradient of `x`, summed over the weights that read it, as ONE product.

    Where the written dims are split, each weight's own product would be reduced over the axis by itself (three times
    for query, key and value); laid side by side within each shard they are reduced once.
    """
    shards, num_reads, rest = uses[0].shards, uses[0].num_reads, x.ndim - uses[0].num_reads
    if len(uses) > 1 and shards > 1 and all(use.shards == shards for use in uses):
        g = jnp.concatenate([g.reshape(*g.shape[:rest], shards, -1) for g in grads], axis=-1)
        kernel = jnp.concatenate([k.reshape(*k.shape[:num_reads], shards, -1) for k in kernels], axis=-1)
        return jnp.tensordot(g, kernel, axes=((-2, -1), (-2, -1)))
    parts = [
        jnp.tensordot(g, k, axes=(tuple(range(rest, g.ndim)), tuple(range(num_reads, k.ndim))))
        for g, k in zip(grads, kernels, strict=True)
    ]
    return sum(parts[1:], parts[0])


def products(x: Float[Array, "*rest reads"], weights: Sequence[Weight]) -> list[Float[Array, "*rest writes"]]:
    """Contract the read dims of each weight with the last dims of `x`.

    On a mesh a weight is gathered for the product and gathered again for the backward pass: what is kept is the stored
    shard, never the gathered weight. Its gradient leaves reduced and split as the moments are. Weights that read the
    same `x` belong in one call: the gradient of `x` is then reduced once for all of them.

    Args:
        x: ``[..., *reads]``.
        weights: unstacked, each ``[*reads, *writes]``; quantised ones run forward only, and are gathered as stored.

    Returns:
        One ``[..., *writes]`` per weight, in the dtype of `x`.

    Cost: over the axes in a weight's rules for ``weights`` but not ``compute``: an all-gather in the forward pass and
        one in the backward pass; a reduce-scatter (or all-reduce) of the gradient over the axes that split the batch.
        A split read dim leaves partial sums in the forward pass, a split written dim in the gradient of `x`.
    """
    layout = active_layout()
    known = [arrow_of(weight) for weight in weights]
    if any(isinstance(weight, QuantizedWeight) for weight in weights):
        kernels = [in_use(weight).astype(x.dtype) for weight in weights]
        return [_contract(x, kernel, len(arrow.reads)) for kernel, arrow in zip(kernels, known, strict=True)]
    kernels = [stored(weight).astype(x.dtype) for weight in weights]
    if layout is None:
        return [_contract(x, kernel, len(arrow.reads)) for kernel, arrow in zip(kernels, known, strict=True)]
    uses = tuple(_use(arrow, layout) for arrow in known)
    results: list[jax.Array] = _sharded(x, kernels, uses, current().layers == "unroll")
    return [checkpoint_name(y, PRODUCT) for y in results]


def product(x: Float[Array, "*rest reads"], weight: Weight) -> Float[Array, "*rest writes"]:
    """Contract one weight; see `products`."""
    return products(x, [weight])[0]


def _use(arrow: arrows.Arrow, layout: Layout) -> _Use:
    shards = layout.num_shards(arrow.writes[0], "compute") if arrow.writes else 1
    return _Use(len(arrow.reads), *_shardings(arrow, layout), shards)
