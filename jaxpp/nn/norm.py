"""Normalisation over the last dim, in fp32 whatever the compute dtype."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpp.parallel import in_use

if TYPE_CHECKING:
    from jaxtyping import Array, Float

NormKind = Literal["rms", "layer"]


class Norm(nnx.Module):
    """RMSNorm ``x / sqrt(mean(x^2) + eps) * scale`` or LayerNorm with bias.

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019; Ba, Kiros, Hinton, Layer Normalization,
        2016.
    """

    def __init__(self, size: int, kind: NormKind = "rms", epsilon: float = 1e-5):
        """Start at the identity scale."""
        self.kind, self.epsilon = kind, epsilon
        self.scale = nnx.Param(jnp.ones((size,)), dims="-> embed")
        self.bias = nnx.Param(jnp.zeros((size,)), dims="-> embed") if kind == "layer" else None

    def __call__(self, x: Float[Array, "*rest embed"]) -> Float[Array, "*rest embed"]:
        """Normalise the last dim of `x`; the result has its dtype."""
        wide = x.astype(jnp.float32)
        if self.kind == "layer":
            wide = wide - wide.mean(-1, keepdims=True)
        # not jnp.square: under a scan its backward pass keeps one more fp32 copy of the stream
        wide = wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + self.epsilon)
        y = wide.astype(x.dtype) * in_use(self.scale).astype(x.dtype)
        return y if self.bias is None else y + in_use(self.bias).astype(x.dtype)
