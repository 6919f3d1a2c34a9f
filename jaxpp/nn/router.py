"""Routing: which experts each token visits and how much each counts, and the losses that keep routers balanced.

Letters: N tokens, K experts per token, E experts, M embed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jaxtyping import Array, Float


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Routing:
    """Where tokens go.

    Args:
        logits: ``[tokens, experts]`` fp32.
        probabilities: their softmax.
        weights: ``[tokens, k]`` fp32, how much each chosen expert counts.
        chosen: ``[tokens, k]`` int32, most probable first; of equal ones the lowest index.
    """

    logits: jax.Array
    probabilities: jax.Array
    weights: jax.Array
    chosen: jax.Array


def route(x_NM: jax.Array, kernel_ME: jax.Array, experts_per_token: int, normalize: bool) -> Routing:
    """Choose experts: softmax over all, the top k, renormalised or not; all in fp32, or fp64 of fp64.

    Args:
        x_NM: tokens, any float dtype.
        kernel_ME: the router's weights.
        experts_per_token: k.
        normalize: make the k weights sum to 1.

    Source: Shazeer et al., Outrageously Large Neural Networks, 2017, section 2.1.
    """
    dtype = jnp.promote_types(x_NM.dtype, jnp.float32)
    wide = x_NM.astype(dtype), kernel_ME.astype(dtype)
    logits = jnp.matmul(*wide, precision=jax.lax.Precision.HIGHEST)  # by default accelerators round fp32 factors
    probabilities = jax.nn.softmax(logits)
    weights, chosen = jax.lax.top_k(probabilities, experts_per_token)
    weights = weights / weights.sum(-1, keepdims=True) if normalize else weights
    return Routing(logits, probabilities, weights, chosen)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RouterSums:
    """Sums over real tokens from which the auxiliary losses follow; sums over shards are sums.

    Args:
        slots: ``[experts]``, how many times each was chosen.
        probabilities: ``[experts]``.
        squares: scalar, of the log of the sum of exponentials of each token's logits.
        tokens: scalar.
    """

    slots: jax.Array
    probabilities: jax.Array
    squares: jax.Array
    tokens: jax.Array


def router_sums(routing: Routing, real_N: jax.Array) -> RouterSums:
    """Add up what the auxiliary losses need; `real_N` is False for padding."""
    real, num_experts = real_N.astype(jnp.float32), routing.logits.shape[1]
    slots = (jax.nn.one_hot(routing.chosen, num_experts).sum(1) * real[:, None]).sum(0)
    squares = jax.nn.logsumexp(routing.logits, axis=-1) ** 2
    return RouterSums(slots, real @ routing.probabilities, real @ squares, real.sum())


def balance_loss(sums: RouterSums) -> Float[Array, ""]:
    """Return ``E sum_e f_e P_e``: f_e slots of expert e per token (they sum to k), P_e its mean probability.

    The convention of transformers for k > 1: an even router has k, not 1. Each layer counts by itself, not all layers
    as one.

    Source: Fedus, Zoph, Shazeer, Switch Transformers, 2021, section 2.2.
    """
    tokens = jnp.maximum(sums.tokens, 1.0)
    return sums.slots.size * jnp.vdot(sums.slots / tokens, sums.probabilities / tokens)


def z_loss(sums: RouterSums) -> Float[Array, ""]:
    """Return the mean over tokens of the square of the log of the sum of exponentials of the logits.

    Source: Zoph et al., ST-MoE, 2022, section 3.2.
    """
    return sums.squares / jnp.maximum(sums.tokens, 1.0)


@jax.custom_vjp
def with_gradient_of(y: jax.Array, auxiliary: jax.Array) -> jax.Array:
    """Return `y`; its backward pass also sends a cotangent of 1 into the scalar `auxiliary`.

    The gradient is that of ``loss(y) + auxiliary``, while the loss is reported without it and no function on the way
    needs a second result. It holds if `y` is differentiated once, into one loss.

    Source: the auxiliary-loss scaler of Megatron-LM.
    """
    return y


def _forward(y: jax.Array, auxiliary: jax.Array) -> tuple[jax.Array, jax.Array]:
    return y, jnp.ones_like(auxiliary)


def _backward(ones: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    return g, ones


with_gradient_of.defvjp(_forward, _backward)
