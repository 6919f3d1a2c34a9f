"""Causal self-attention over packed documents: MHA, GQA and MQA by the number of kv heads.

Letters in the maths: B batch, T seq, H heads, K kv_heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpp.names import unknown
from jaxpp.nn import rope
from jaxpp.nn.linear import Linear, apply_all
from jaxpp.nn.splash import BLOCK, splash
from jaxpp.parallel import constrain, current

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int


@dataclass(frozen=True)
class AttentionConfig:
    """Shape of an attention layer."""

    embed_dim: int
    num_heads: int
    num_kv_heads: int  # num_heads: MHA; 1: MQA; between: GQA, must divide num_heads
    head_dim: int
    bias: bool = False
    rope_base: float | None = 10_000.0  # None: no rotary positions


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Context:
    """What every layer of one forward pass shares.

    Args:
        positions: ``[batch, seq]`` int32, of each token in its document.
        segments: ``[batch, seq]`` int32, the document of each token, 0 for padding; None when every row is one
            document, which lets fused kernels run without a mask.
        rotary: cosine and sine of `rope.angles` for all layers, computed once; None: each layer computes its own.
    """

    positions: Int[Array, "batch seq"]
    segments: Int[Array, "batch seq"] | None = None
    rotary: tuple[Float[Array, "batch seq half"], Float[Array, "batch seq half"]] | None = None


def document_mask(segments: Int[Array, "batch seq"]) -> Bool[Array, "batch 1 seq seq"]:
    """Return True where a query (axis 2) and a key (axis 3) belong to the same document.

    Padding (segment 0) sees padding only, so that no row of the softmax is empty.
    """
    return segments[:, None, :, None] == segments[:, None, None, :]


def _xla(q_BTHD: jax.Array, k_BTKD: jax.Array, v_BTKD: jax.Array, context: Context) -> jax.Array:
    mask = None if context.segments is None else document_mask(context.segments)
    return jax.nn.dot_product_attention(q_BTHD, k_BTKD, v_BTKD, mask=mask, is_causal=True, implementation="xla")


def _cudnn(q_BTHD: jax.Array, k_BTKD: jax.Array, v_BTKD: jax.Array, context: Context) -> jax.Array:
    mask = None if context.segments is None else document_mask(context.segments)
    return jax.nn.dot_product_attention(q_BTHD, k_BTKD, v_BTKD, mask=mask, is_causal=True, implementation="cudnn")


def _splash(q_BTHD: jax.Array, k_BTKD: jax.Array, v_BTKD: jax.Array, context: Context) -> jax.Array:
    return splash(q_BTHD, k_BTKD, v_BTKD, context.segments)


KERNELS: dict[str, Callable[[jax.Array, jax.Array, jax.Array, Context], jax.Array]] = {
    "xla": _xla,
    "cudnn": _cudnn,
    "splash": _splash,
}
PLATFORM = {"cudnn": "gpu", "splash": "tpu"}


def check_kernel(name: str) -> None:
    """Refuse an unknown attention kernel, or one that this platform lacks.

    Raises:
        ValueError: as said, with the nearest name.
    """
    if name != "auto" and name not in KERNELS:
        raise ValueError(unknown("plan.attention: unknown kernel", name, ("auto", *KERNELS)))
    if PLATFORM.get(name, jax.default_backend()) != jax.default_backend():
        raise ValueError(
            f'plan.attention = "{name}" needs a {PLATFORM[name]}, and this is a {jax.default_backend()}; '
            '"auto" picks what there is'
        )


def choose_kernel(name: str, dtype: jnp.dtype, seq: int, head_dim: int) -> str:
    """Return the kernel that ``"auto"`` means for these shapes on this platform, or `name` itself.

    Raises:
        ValueError: as `check_kernel`.
    """
    check_kernel(name)
    half = dtype in (jnp.bfloat16, jnp.float16)
    if name != "auto":
        return name
    if jax.default_backend() == "gpu" and half and head_dim % 8 == 0 and head_dim <= 128:
        return "cudnn"
    if jax.default_backend() == "tpu" and seq % BLOCK == 0 and head_dim % BLOCK == 0:
        return "splash"
    return "xla"


class Attention(nnx.Module):
    """Project to heads, rotate, attend causally within each document, project back.

    Source: Vaswani et al., Attention Is All You Need, 2017; Ainslie et al., GQA, 2023.
    """

    def __init__(self, key: jax.Array, config: AttentionConfig, out_scale: float = 1.0):
        """Draw the four projections; `out_scale` multiplies the deviation of the last."""
        self.config = config
        sizes = {
            "embed": config.embed_dim,
            "heads": config.num_heads,
            "kv_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
        }
        keys = jax.random.split(key, 4)
        self.query = Linear(keys[0], "embed -> heads head_dim", sizes, bias=config.bias)
        self.key = Linear(keys[1], "embed -> kv_heads head_dim", sizes, bias=config.bias)
        self.value = Linear(keys[2], "embed -> kv_heads head_dim", sizes, bias=config.bias)
        self.out = Linear(keys[3], "heads head_dim -> embed", sizes, bias=config.bias, scale=out_scale)

    def __call__(self, x: Float[Array, "batch seq embed"], context: Context) -> Float[Array, "batch seq embed"]:
        """Attend."""
        q_BTHD, k_BTKD, v_BTKD = apply_all(x, self.query, self.key, self.value)
        q_BTHD = constrain(q_BTHD, "batch seq heads head_dim")
        k_BTKD = constrain(k_BTKD, "batch seq kv_heads head_dim")
        v_BTKD = constrain(v_BTKD, "batch seq kv_heads head_dim")
        if self.config.rope_base is not None:
            own = (context.positions, self.config.head_dim, self.config.rope_base)
            cosine, sine = context.rotary or rope.angles(*own)
            q_BTHD, k_BTKD = rope.rotate(q_BTHD, cosine, sine), rope.rotate(k_BTKD, cosine, sine)
        kernel = KERNELS[choose_kernel(current().attention, x.dtype, x.shape[1], self.config.head_dim)]
        return self.out(constrain(kernel(q_BTHD, k_BTKD, v_BTKD, context), "batch seq heads head_dim"))
