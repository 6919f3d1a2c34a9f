"""Feed-forward layers: gated (SwiGLU and kin) or plain."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import jax
from flax import nnx

from jaxpp.nn.linear import Linear, apply_all
from jaxpp.parallel import constrain

if TYPE_CHECKING:
    from jaxtyping import Array, Float

MlpKind = Literal["gated", "plain"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
}


class Mlp(nnx.Module):
    """``down(act(gate(x)) * up(x))`` if gated, ``down(act(up(x)))`` if plain.

    Source: Shazeer, GLU Variants Improve Transformer, 2020.
    """

    def __init__(
        self,
        key: jax.Array,
        embed_dim: int,
        mlp_dim: int,
        *,
        kind: MlpKind = "gated",
        activation: Activation = "silu",
        bias: bool = False,
        out_scale: float = 1.0,
    ):
        """Draw two (plain) or three (gated) weights; `out_scale` multiplies the deviation of the last."""
        self.activation = activation
        sizes = {"embed": embed_dim, "mlp": mlp_dim}
        keys = jax.random.split(key, 3)
        self.gate = Linear(keys[0], "embed -> mlp", sizes, bias=bias) if kind == "gated" else None
        self.up = Linear(keys[1], "embed -> mlp", sizes, bias=bias)
        self.down = Linear(keys[2], "mlp -> embed", sizes, bias=bias, scale=out_scale)

    def __call__(self, x: Float[Array, "batch seq embed"]) -> Float[Array, "batch seq embed"]:
        """Apply the layer to each token."""
        act = ACTIVATIONS[self.activation]
        if self.gate is None:
            return self.down(act(constrain(self.up(x), "batch seq mlp")))
        gate, up = (constrain(y, "batch seq mlp") for y in apply_all(x, self.gate, self.up))
        return self.down(act(gate) * up)
