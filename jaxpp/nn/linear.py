"""Linear maps, contracted as their arrow says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpp import dims
from jaxpp.parallel import in_use, products

if TYPE_CHECKING:
    from jaxtyping import Array, Float


class Linear(nnx.Module):
    """A weight and, if asked for, a bias, named by one arrow."""

    def __init__(self, key: jax.Array, arrow: str, sizes: Mapping[str, int], *, bias: bool = False, scale: float = 1.0):
        """Draw the weight.

        Args:
            key: PRNG key.
            arrow: e.g. ``"embed -> heads head_dim"``.
            sizes: size of each dim.
            bias: add a zero bias over the written dims.
            scale: factor on the fan-in deviation.
        """
        self.kernel = dims.normal(key, arrow, sizes, scale)
        writes = dims.parse(arrow, tuple(sizes)).writes
        bias_shape = tuple(sizes[dim] for dim in writes)
        self.bias = nnx.Param(jnp.zeros(bias_shape), dims=f"-> {' '.join(writes)}") if bias else None

    def __call__(self, x: Float[Array, "*rest reads"]) -> Float[Array, "*rest writes"]:
        """Apply the map to the last dims of `x`."""
        return apply_all(x, self)[0]


def apply_all(x: Float[Array, "*rest reads"], *layers: Linear) -> list[Float[Array, "*rest writes"]]:
    """Apply several maps to the same input; on a mesh the gradient of `x` is then reduced once for all."""
    results = products(x, [layer.kernel for layer in layers])
    return [
        y if layer.bias is None else y + in_use(layer.bias).astype(y.dtype)
        for y, layer in zip(results, layers, strict=True)
    ]
