"""Causal self-attention over packed documents: MHA, GQA and MQA by the number of kv heads.

Letters in the maths: B batch, T seq (S for keys), H heads, K kv_heads, G heads per kv head, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpp.names import unknown
from jaxpp.nn import rope
from jaxpp.nn.linear import Linear, apply_all
from jaxpp.nn.norm import Norm, NormScale
from jaxpp.nn.splash import BLOCK, splash
from jaxpp.parallel import constrain, current

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int

QkNorm = Literal["none", "head", "full"]


@dataclass(frozen=True)
class AttentionConfig:
    """Shape and options of an attention layer."""

    embed_dim: int
    num_heads: int
    num_kv_heads: int  # num_heads: MHA; 1: MQA; between: GQA, must divide num_heads
    head_dim: int
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: QkNorm = "none"  # rms norm of queries and keys before they turn: of each head, or over all heads
    norm_epsilon: float = 1e-5
    norm_scale: NormScale = "cast"
    window: int = 0  # keys that a token sees, itself included; 0: all before it
    scale: float = 0.0  # factor on the scores; 0: head_dim^-1/2
    soft_cap: float = 0.0  # scores become cap x tanh(scores / cap); 0: none


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Context:
    """What every layer of one forward pass shares.

    Args:
        positions: ``[batch, seq]`` int32, of each token in its document.
        segments: ``[batch, seq]`` int32, the document of each token, 0 for padding; None when every row is one
            document, which lets fused kernels run without a mask.
        rotary: cosine and sine of `rope.angles`, ``[batch, seq, half]``; None: nothing turns.
        window_rotary: those of the layers with a window, where they differ.
        loss_weight: sum of the loss weights of the batch, for losses that layers add to the gradient; None: no loss.
    """

    positions: Int[Array, "batch seq"]
    segments: Int[Array, "batch seq"] | None = None
    rotary: rope.Rotary | None = None
    window_rotary: rope.Rotary | None = None
    loss_weight: Float[Array, ""] | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Layer:
    """What sets one layer apart from the others of its stack: Python bools, or scalars where layers are scanned.

    Args:
        window: whether it has the config's window.
        rotary: whether its queries and keys turn.
        cache: a `jaxpp.nn.paged.PagedCache` with the tokens before these; None: there are none.
    """

    window: Any = True
    rotary: Any = True
    cache: Any = None


ALIKE = Layer()
"""A layer with the config's window, whose queries and keys turn."""


@dataclass(frozen=True)
class Scores:
    """How scores become weights, beside causality.

    Args:
        mask: ``[batch, 1, seq, seq]``, True where a query (axis 2) sees a key (axis 3); None: all before it.
        segments: as in `Context`; what a mask of documents alone would say.
        scale: factor on the scores.
        soft_cap: 0: none.
    """

    mask: Any
    segments: Any
    scale: float
    soft_cap: float


def _chosen(flag: Any, yes: Any, no: Any) -> Any:
    """Return `yes` or `no` by a flag of `Layer`."""
    if isinstance(flag, bool):
        return yes if flag else no
    return jnp.where(flag, yes, no)


def document_mask(segments: Int[Array, "batch seq"]) -> Bool[Array, "batch 1 seq seq"]:
    """Return True where a query (axis 2) and a key (axis 3) belong to the same document.

    Padding (segment 0) sees padding only, so that no row of the softmax is empty.
    """
    return segments[:, None, :, None] == segments[:, None, None, :]


def window_mask(positions: Int[Array, "batch seq"], window: int, layer: Layer) -> Bool[Array, "batch 1 seq seq"]:
    """Return True where a key (axis 3) is at most ``window - 1`` tokens before the query (axis 2)."""
    near = positions[:, None, :, None] - positions[:, None, None, :] < window
    return near if layer.window is True else near | ~layer.window


def _mask(context: Context, window: int, layer: Layer) -> jax.Array | None:
    same = None if context.segments is None else document_mask(context.segments)
    if not window or layer.window is False:
        return same
    near = window_mask(context.positions, window, layer)
    return near if same is None else near & same


def _xla(q_BTHD: jax.Array, k_BTKD: jax.Array, v_BTKD: jax.Array, scores: Scores) -> jax.Array:
    if scores.soft_cap or q_BTHD.dtype == jnp.float64:
        return _einsum(q_BTHD, k_BTKD, v_BTKD, scores)
    return jax.nn.dot_product_attention(
        q_BTHD, k_BTKD, v_BTKD, mask=scores.mask, is_causal=True, scale=scores.scale, implementation="xla"
    )


def _einsum(q_BTHD: jax.Array, k_BSKD: jax.Array, v_BSKD: jax.Array, scores: Scores) -> jax.Array:
    """Attend with capped scores, or in fp64: no kernel of JAX offers either."""
    (batch, seq, heads, head_dim), kv_heads = q_BTHD.shape, k_BSKD.shape[2]
    q_BTKGD = q_BTHD.reshape(batch, seq, kv_heads, heads // kv_heads, head_dim)
    wide = jnp.promote_types(q_BTHD.dtype, jnp.float32)
    s_BKGTS = jnp.einsum("btkgd,bskd->bkgts", q_BTKGD, k_BSKD, preferred_element_type=wide) * scores.scale
    s_BKGTS = scores.soft_cap * jnp.tanh(s_BKGTS / scores.soft_cap) if scores.soft_cap else s_BKGTS
    seen = jnp.tril(jnp.ones((seq, seq), bool))[None, None]
    seen = seen if scores.mask is None else seen & scores.mask
    s_BKGTS = jnp.where(seen[:, :, None], s_BKGTS, jnp.finfo(wide).min)
    p_BKGTS = jax.nn.softmax(s_BKGTS, axis=-1).astype(v_BSKD.dtype)
    return jnp.einsum("bkgts,bskd->btkgd", p_BKGTS, v_BSKD).reshape(q_BTHD.shape)


def _cudnn(q_BTHD: jax.Array, k_BTKD: jax.Array, v_BTKD: jax.Array, scores: Scores) -> jax.Array:
    return jax.nn.dot_product_attention(
        q_BTHD, k_BTKD, v_BTKD, mask=scores.mask, is_causal=True, scale=scores.scale, implementation="cudnn"
    )


def _splash(q_BTHD: jax.Array, k_BTKD: jax.Array, v_BTKD: jax.Array, scores: Scores) -> jax.Array:
    own = q_BTHD.shape[-1] ** -0.5
    return splash(q_BTHD * (scores.scale / own), k_BTKD, v_BTKD, scores.segments)


KERNELS: dict[str, Callable[[jax.Array, jax.Array, jax.Array, Scores], jax.Array]] = {
    "xla": _xla,
    "cudnn": _cudnn,
    "splash": _splash,
}
PLATFORM = {"cudnn": "gpu", "splash": "tpu"}
WITH_WINDOW = ("xla", "cudnn")  # kernels that take a mask
WITH_SOFT_CAP = ("xla",)


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


def choose_kernel(name: str, dtype: jnp.dtype, seq: int, head_dim: int, window: int = 0, soft_cap: float = 0.0) -> str:
    """Return the kernel that ``"auto"`` means for these shapes on this platform, or `name` itself.

    Raises:
        ValueError: as `check_kernel`, or the kernel has no window or no soft cap.
    """
    check_kernel(name)
    fits = [one for one in KERNELS if (not window or one in WITH_WINDOW) and (not soft_cap or one in WITH_SOFT_CAP)]
    if name != "auto":
        if name not in fits:
            lacks = "soft cap" if soft_cap else "window"
            raise ValueError(
                f'plan.attention = "{name}" has no {lacks}, which this model needs; {" or ".join(fits)} has'
            )
        return name
    half = dtype in (jnp.bfloat16, jnp.float16)
    if "cudnn" in fits and jax.default_backend() == "gpu" and half and head_dim % 8 == 0 and head_dim <= 128:
        return "cudnn"
    if "splash" in fits and jax.default_backend() == "tpu" and seq % BLOCK == 0 and head_dim % BLOCK == 0:
        return "splash"
    return "xla"


class Attention(nnx.Module):
    """Project to heads, turn, attend causally within each document, project back.

    Source: Vaswani et al., Attention Is All You Need, 2017; Ainslie et al., GQA, 2023; norm of queries and keys:
        Henry, Dachapally, Pawar, Chen, Query-Key Normalization for Transformers, 2020.
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
        self.query = Linear(keys[0], "embed -> heads head_dim", sizes, bias=config.qkv_bias)
        self.key = Linear(keys[1], "embed -> kv_heads head_dim", sizes, bias=config.qkv_bias)
        self.value = Linear(keys[2], "embed -> kv_heads head_dim", sizes, bias=config.qkv_bias)
        self.out = Linear(keys[3], "heads head_dim -> embed", sizes, bias=config.out_bias, scale=out_scale)
        self.query_norm, self.key_norm = self._norm("heads", sizes), self._norm("kv_heads", sizes)

    def _norm(self, heads: str, sizes: dict[str, int]) -> Norm | None:
        if self.config.qk_norm == "none":
            return None
        dims = ("head_dim",) if self.config.qk_norm == "head" else (heads, "head_dim")
        shape = tuple(sizes[dim] for dim in dims)
        return Norm(shape, "rms", self.config.norm_epsilon, self.config.norm_scale, f"-> {' '.join(dims)}")

    def __call__(
        self, x: Float[Array, "batch seq embed"], context: Context, layer: Layer = ALIKE
    ) -> Float[Array, "batch seq embed"]:
        """Attend."""
        config = self.config
        q_BTHD, k_BTKD, v_BTKD = apply_all(x, self.query, self.key, self.value)
        q_BTHD = constrain(q_BTHD, "batch seq heads head_dim")
        k_BTKD = constrain(k_BTKD, "batch seq kv_heads head_dim")
        v_BTKD = constrain(v_BTKD, "batch seq kv_heads head_dim")
        if self.query_norm is not None and self.key_norm is not None:
            q_BTHD, k_BTKD = self.query_norm(q_BTHD), self.key_norm(k_BTKD)
        if (rotary := _rotary(context, layer)) is not None:
            if layer.cache is not None:  # else the compiler turns them where the cache is, and gathers in every layer
                rotary = tuple(constrain(x, "batch seq head_dim") for x in rotary)
            q_BTHD, k_BTKD = rope.rotate(q_BTHD, *rotary), rope.rotate(k_BTKD, *rotary)
        window = 0 if layer.window is False else config.window
        scale = config.scale or config.head_dim**-0.5
        if layer.cache is not None:
            real = True if context.segments is None else context.segments > 0
            at, options = jnp.where(real, context.positions, -1), {"window": window, "scale": scale}
            y_BTHD = layer.cache.attend(q_BTHD, k_BTKD, v_BTKD, at, **options, soft_cap=config.soft_cap)
            return self.out(constrain(y_BTHD, "batch seq heads head_dim"))
        name = choose_kernel(current().attention, x.dtype, x.shape[1], config.head_dim, window, config.soft_cap)
        scores = Scores(_mask(context, window, layer), context.segments, scale, config.soft_cap)
        return self.out(constrain(KERNELS[name](q_BTHD, k_BTKD, v_BTKD, scores), "batch seq heads head_dim"))


def _rotary(context: Context, layer: Layer) -> rope.Rotary | None:
    """Return the cosine and sine of this layer."""
    if context.rotary is None or layer.rotary is False:
        return None
    pair = context.rotary
    if context.window_rotary is not None:
        pair = tuple(_chosen(layer.window, own, other) for own, other in zip(context.window_rotary, pair, strict=True))
    if layer.rotary is True:
        return pair
    return _chosen(layer.rotary, pair[0], 1.0), _chosen(layer.rotary, pair[1], 0.0)
