"""Normalisation over the last dims, in fp32 (fp64 of fp64) whatever the compute dtype."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpp.parallel import in_use

if TYPE_CHECKING:
    from jaxtyping import Array, Float

NormKind = Literal["rms", "layer"]
NormScale = Literal["cast", "wide", "offset"]


class Norm(nnx.Module):
    """RMSNorm ``x / sqrt(mean(x^2) + eps) * scale`` or LayerNorm with bias.

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019; Ba, Kiros, Hinton, Layer Normalization,
        2016.
    """

    def __init__(
        self,
        shape: int | tuple[int, ...],
        kind: NormKind = "rms",
        epsilon: float = 1e-5,
        scale: NormScale = "cast",
        arrow: str = "-> embed",
    ):
        """Start at the identity.

        Args:
            shape: sizes of the last dims, over all of which the mean is taken.
            kind: ``"rms"``, or ``"layer"`` with mean and bias.
            epsilon: added to the mean square.
            scale: ``"cast"`` back to the dtype of `x` and then scale, scale ``"wide"`` in fp32 and then cast, or
                ``"offset"``: wide, by 1 + the stored scale.
            arrow: of scale and bias.
        """
        shape = (shape,) if isinstance(shape, int) else shape
        self.kind, self.epsilon, self.scaling, self.ndim = kind, epsilon, scale, len(shape)
        start = jnp.zeros(shape) if scale == "offset" else jnp.ones(shape)
        self.scale = nnx.Param(start, dims=arrow)
        self.bias = nnx.Param(jnp.zeros(shape), dims=arrow) if kind == "layer" else None

    def __call__(self, x: Float[Array, "*rest embed"]) -> Float[Array, "*rest embed"]:
        """Normalise the last dims of `x`; the result has its dtype."""
        wide, axes = x.astype(jnp.promote_types(x.dtype, jnp.float32)), tuple(range(-self.ndim, 0))
        if self.kind == "layer":
            wide = wide - wide.mean(axes, keepdims=True)
        # not jnp.square: under a scan its backward pass keeps one more fp32 copy of the stream
        wide = wide * jax.lax.rsqrt((wide * wide).mean(axes, keepdims=True) + self.epsilon)
        scale = in_use(self.scale)
        if self.scaling == "cast":
            y = wide.astype(x.dtype) * scale.astype(x.dtype)
        else:
            scale = scale.astype(wide.dtype)
            y = (wide * (1 + scale if self.scaling == "offset" else scale)).astype(x.dtype)
        return y if self.bias is None else y + in_use(self.bias).astype(x.dtype)
