"""One configurable decoder: ``embed -> blocks -> head``, pre-norm, the shape that most language models share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxpp.model import Batch
from jaxpp.nn import (
    Attention,
    AttentionConfig,
    Context,
    Embedding,
    Linear,
    Mlp,
    Norm,
    cross_entropy,
    rope,
    run_blocks,
    stack_blocks,
)
from jaxpp.nn.mlp import Activation, MlpKind
from jaxpp.nn.norm import NormKind
from jaxpp.nn.stack import KEPT
from jaxpp.parallel import constrain, in_use, residual

if TYPE_CHECKING:
    from jaxtyping import Array, Float


@dataclass(frozen=True)
class DecoderConfig:
    """Shape and options of a decoder."""

    family: ClassVar[str] = "decoder"
    vocab_size: int = 4096
    num_layers: int = 4
    embed_dim: int = 256
    num_heads: int = 4
    num_kv_heads: int = 0  # 0: as num_heads (MHA); 1: MQA; a divisor of num_heads: GQA
    head_dim: int = 0  # 0: embed_dim / num_heads
    mlp_dim: int = 0  # 0: 8/3 embed_dim if gated, else 4 embed_dim, rounded up to a multiple of 64
    max_positions: int = 2048  # longest sequence, in tokens
    mlp: MlpKind = "gated"
    activation: Activation = "silu"
    norm: NormKind = "rms"
    norm_epsilon: float = 1e-5
    positions: Literal["rope", "learned"] = "rope"
    rope_base: float = 10_000.0
    bias: bool = False  # of attention and mlp
    tied: bool = False  # the head reads the embedding table

    def __post_init__(self) -> None:
        for name in ("vocab_size", "num_layers", "embed_dim", "num_heads", "max_positions"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name} = {getattr(self, name)}: 1 or more are needed")
        for name in ("num_kv_heads", "head_dim", "mlp_dim"):
            if getattr(self, name) < 0:
                raise ValueError(f"model.{name} = {getattr(self, name)}: 1 or more are needed, or 0 for the default")
        if not self.head_dim and self.embed_dim % self.num_heads:
            fits = [h for h in range(1, self.embed_dim + 1) if self.embed_dim % h == 0 and h <= 2 * self.num_heads]
            raise ValueError(
                f"model.embed_dim {self.embed_dim} does not split into num_heads {self.num_heads}; "
                f"{', '.join(map(str, fits[-6:]))} heads do, or set head_dim"
            )
        self._set("head_dim", self.head_dim or self.embed_dim // self.num_heads)
        self._set("num_kv_heads", self.num_kv_heads or self.num_heads)
        self._set("mlp_dim", self.mlp_dim or _default_mlp_dim(self.embed_dim, self.mlp))
        if self.num_heads % self.num_kv_heads:
            fits = [k for k in range(1, self.num_heads + 1) if self.num_heads % k == 0]
            raise ValueError(
                f"model.num_kv_heads {self.num_kv_heads} does not divide num_heads {self.num_heads}; "
                f"{', '.join(map(str, fits))} do"
            )
        if self.positions == "rope" and self.head_dim % 2:
            raise ValueError(f"model.head_dim {self.head_dim} is odd; rotary positions need {self.head_dim + 1}")

    def _set(self, name: str, value: int) -> None:
        object.__setattr__(self, name, value)

    def build(self, rngs: nnx.Rngs) -> Decoder:
        """Draw a decoder."""
        return Decoder(self, rngs)


def _default_mlp_dim(embed_dim: int, kind: str) -> int:
    wanted = -(-8 * embed_dim // 3) if kind == "gated" else 4 * embed_dim
    return -(-wanted // 64) * 64


SIZES: Mapping[str, Mapping[str, Any]] = {
    "1m": dict(num_layers=4, embed_dim=128, num_heads=4, num_kv_heads=2, vocab_size=2048, max_positions=512),
    "4m": dict(num_layers=6, embed_dim=192, num_heads=6, num_kv_heads=2, vocab_size=4096, max_positions=1024),
    "15m": dict(num_layers=8, embed_dim=320, num_heads=5, num_kv_heads=5, vocab_size=8192),
    "60m": dict(num_layers=12, embed_dim=512, num_heads=8, num_kv_heads=4, vocab_size=16384),
    "160m": dict(num_layers=12, embed_dim=768, num_heads=12, num_kv_heads=4, vocab_size=32768),
    "400m": dict(num_layers=24, embed_dim=1024, num_heads=16, num_kv_heads=8, vocab_size=32768),
    "1b": dict(num_layers=16, embed_dim=2048, num_heads=32, num_kv_heads=8, mlp_dim=8192, vocab_size=32768,
               max_positions=8192, rope_base=500_000.0),
    "3b": dict(num_layers=28, embed_dim=3072, num_heads=24, num_kv_heads=8, mlp_dim=8192, vocab_size=65536,
               max_positions=8192, rope_base=500_000.0),
    "8b": dict(num_layers=32, embed_dim=4096, num_heads=32, num_kv_heads=8, mlp_dim=14336, vocab_size=128256,
               max_positions=8192, rope_base=500_000.0),
}  # fmt: skip


class Block(nnx.Module):
    """``x + attention(norm(x))``, then ``x + mlp(norm(x))``."""

    def __init__(self, key: jax.Array, config: DecoderConfig):
        """Draw one block; projections back to the residual stream start small by depth (GPT-2's rule)."""
        keys = jax.random.split(key, 2)
        out_scale = (2 * config.num_layers) ** -0.5
        self.attention_norm = Norm(config.embed_dim, config.norm, config.norm_epsilon)
        self.attention = Attention(
            keys[0],
            AttentionConfig(
                config.embed_dim, config.num_heads, config.num_kv_heads, config.head_dim, config.bias,
                config.rope_base if config.positions == "rope" else None,
            ),
            out_scale,
        )  # fmt: skip
        self.mlp_norm = Norm(config.embed_dim, config.norm, config.norm_epsilon)
        self.mlp = Mlp(
            keys[1], config.embed_dim, config.mlp_dim,
            kind=config.mlp, activation=config.activation, bias=config.bias, out_scale=out_scale,
        )  # fmt: skip

    def __call__(self, x: Float[Array, "batch seq embed"], context: Context) -> Float[Array, "batch seq embed"]:
        """Run the block on the residual stream."""
        entered = constrain(self.attention_norm(x), "batch seq embed")
        x = residual(x + checkpoint_name(residual(self.attention(entered, context)), KEPT))
        entered = constrain(self.mlp_norm(x), "batch seq embed")
        return x + checkpoint_name(residual(self.mlp(entered)), KEPT)


class Decoder(nnx.Module):
    """Token embedding, stacked blocks, final norm, head."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        """Draw all weights."""
        self.config = config
        keys = jax.random.split(rngs.params(), 4)
        sizes = {"vocab": config.vocab_size, "embed": config.embed_dim, "positions": config.max_positions}
        self.tokens = Embedding(keys[0], "vocab -> embed", sizes, also="embed -> vocab" if config.tied else "")
        learned = config.positions == "learned"
        self.places = Embedding(keys[1], "positions -> embed", sizes) if learned else None
        self.blocks = stack_blocks(lambda key: Block(key, config), keys[2], config.num_layers)
        self.final_norm = Norm(config.embed_dim, config.norm, config.norm_epsilon)
        self.head = None if config.tied else Linear(keys[3], "embed -> vocab", sizes)

    def embed(self, batch: Batch) -> Float[Array, "batch seq embed"]:
        """Look up tokens (and learned positions)."""
        x = self.tokens(batch["tokens"])
        if self.places is not None:
            x = x + self.places(batch["positions"])
        return residual(x)

    def run(self, x: Float[Array, "batch seq embed"], batch: Batch) -> Float[Array, "batch seq embed"]:
        """Run the stacked blocks; a batch without ``segments`` is one document per row."""
        positions, config = batch["positions"], self.config
        rotary = rope.angles(positions, config.head_dim, config.rope_base) if config.positions == "rope" else None
        return run_blocks(self.blocks, x, Context(positions, batch.get("segments"), rotary))

    def head_weight(self) -> Float[Array, "embed vocab"]:
        """Return the output weights: the head's own, or the table read the other way."""
        return in_use(self.tokens.table).T if self.head is None else in_use(self.head.kernel)

    def logits(self, x: Float[Array, "batch seq embed"]) -> Float[Array, "batch seq vocab"]:
        """Return the logits of the next token, fp32."""
        x = constrain(self.final_norm(x), "batch seq embed")
        return constrain(x @ self.head_weight().astype(x.dtype), "batch seq vocab").astype(jnp.float32)

    def __call__(self, batch: Batch) -> Float[Array, "batch seq vocab"]:
        """Return logits at every position."""
        return self.logits(self.run(self.embed(batch), batch))

    def loss(self, batch: Batch) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """Return the summed cross-entropy of the targets, in nats, and the sum of their weights."""
        x = self.final_norm(self.run(self.embed(batch), batch))
        weights = batch["weights"].astype(jnp.float32)
        return cross_entropy(x, self.head_weight(), batch["targets"], weights), weights.sum()
