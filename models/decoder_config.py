"""Shape and options of a decoder: what one family of language models has that another has not."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from flax import nnx

from jaxpp.nn import Layer
from jaxpp.nn.attention import QkNorm
from jaxpp.nn.mlp import Activation, MlpKind
from jaxpp.nn.moe import MoeConfig
from jaxpp.nn.norm import NormKind, NormScale
from jaxpp.nn.scaling import RopeScaling, scaled_frequencies

if TYPE_CHECKING:
    from jaxpp.models.decoder import Decoder


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
    vocab_rows: int = 0  # rows of embedding table and head; more than vocab_size, for a mesh that this would not split
    tied: bool = False  # the head reads the embedding table
    embed_scale: bool = False  # multiply the token embedding by sqrt(embed_dim), in its dtype
    mlp: MlpKind = "gated"
    activation: Activation = "silu"
    moe: MoeConfig = MoeConfig()  # experts in place of the mlp
    norm: NormKind = "rms"
    norm_epsilon: float = 1e-5
    norm_scale: NormScale = (
        "cast"  # rms: cast to the compute dtype, then scale; "wide": scale in fp32; "offset": 1 + scale
    )
    norm_place: Literal["pre", "post", "both"] = "pre"  # on what a branch reads, on what it adds, or both
    parallel: bool = False  # attention and mlp read the same residual stream, each through its own norm
    ladder_layers: int = 0  # the last so many layers read the stream as it was one branch earlier (jaxpp.nn.ladder)
    positions: Literal["rope", "learned"] = "rope"
    rope_base: float = 10_000.0
    rope_scaling: RopeScaling = RopeScaling()
    rotary_dim: int = 0  # leading dims of a head that are rotated; 0: all
    rope_layers: tuple[bool, ...] = ()  # which layers rotate, repeated over the depth; empty: all
    window: int = 0  # keys that a token sees, itself included; 0: all before it
    window_layers: tuple[bool, ...] = ()  # which layers have the window, repeated over the depth; empty: all
    window_rope_base: float = (
        0.0  # rotary base of the layers with the window, which then are not scaled; 0: as the rest
    )
    qk_norm: QkNorm = "none"  # rms norm of queries and keys: each head, or over all heads
    qkv_bias: bool = False
    out_bias: bool = False  # of the attention's output
    mlp_bias: bool = False
    attention_scale: float = 0.0  # factor on the scores; 0: head_dim^-1/2
    attention_soft_cap: float = 0.0  # scores become cap x tanh(scores / cap); 0: none
    logit_soft_cap: float = 0.0  # the same of the logits

    def __post_init__(self) -> None:
        for name in ("vocab_size", "num_layers", "embed_dim", "num_heads", "max_positions"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name} = {getattr(self, name)}: 1 or more are needed")
        for name in ("num_kv_heads", "head_dim", "mlp_dim", "rotary_dim", "window"):
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
        if self.vocab_rows and self.vocab_rows < self.vocab_size:
            raise ValueError(
                f"model.vocab_rows {self.vocab_rows}: vocab_size {self.vocab_size} or more are needed, or 0"
            )
        self._check_ladder()
        self._set("mlp_dim", self.mlp_dim or _default_mlp_dim(self.embed_dim, self.mlp))
        if self.num_heads % self.num_kv_heads:
            fits = [k for k in range(1, self.num_heads + 1) if self.num_heads % k == 0]
            raise ValueError(
                f"model.num_kv_heads {self.num_kv_heads} does not divide num_heads {self.num_heads}; "
                f"{', '.join(map(str, fits))} do"
            )
        if self.positions == "rope":
            self._check_rotary()

    def _check_ladder(self) -> None:
        if not 0 <= self.ladder_layers <= self.num_layers:
            raise ValueError(
                f"model.ladder_layers {self.ladder_layers}: 0 to num_layers {self.num_layers} are needed, the last so "
                "many of them"
            )
        if self.ladder_layers and self.parallel:
            raise ValueError(
                f"model.ladder_layers {self.ladder_layers} with model.parallel: the mlp of a parallel block waits for "
                "no all-reduce as it is; set one of the two"
            )

    def _check_rotary(self) -> None:
        if not self.rotary_dim and self.head_dim % 2:
            raise ValueError(f"model.head_dim {self.head_dim} is odd; rotary positions need {self.head_dim + 1}")
        self._set("rotary_dim", self.rotary_dim or self.head_dim)
        if self.rotary_dim % 2 or self.rotary_dim > self.head_dim:
            raise ValueError(
                f"model.rotary_dim {self.rotary_dim}: an even number up to head_dim {self.head_dim} is needed"
            )
        scaled_frequencies(self.rotary_dim, self.rope_base, self.rope_scaling)  # refuses a rule that does not fit

    def _set(self, name: str, value: int) -> None:
        object.__setattr__(self, name, value)

    def build(self, rngs: nnx.Rngs) -> Decoder:
        """Draw a decoder."""
        from jaxpp.models.decoder import Decoder

        config: Any = self  # a type checker that meets this file by both of its names sees two classes
        return Decoder(config, rngs)

    @property
    def table_rows(self) -> int:
        """Rows of the embedding table: tokens, and what fills it up."""
        return self.vocab_rows or self.vocab_size

    def layers(self) -> tuple[Layer, ...] | None:
        """Return what sets each layer apart; None where all are alike, with the window and turning."""
        if not (self.window_layers or self.rope_layers):
            return None
        window, rotary = (itertools.cycle(pattern or (True,)) for pattern in (self.window_layers, self.rope_layers))
        return tuple(Layer(next(window), next(rotary)) for _ in range(self.num_layers))


def _default_mlp_dim(embed_dim: int, kind: str) -> int:
    wanted = -(-8 * embed_dim // 3) if kind == "gated" else 4 * embed_dim
    return -(-wanted // 64) * 64


SIZES: Mapping[str, Mapping[str, Any]] = {
    "1m": dict(num_layers=4, embed_dim=128, num_heads=4, num_kv_heads=2, vocab_size=2048, max_positions=512),
    "4m": dict(num_layers=6, embed_dim=192, num_heads=6, num_kv_heads=2, vocab_size=4096, max_positions=1024),
    "moe-4m": dict(num_layers=4, embed_dim=128, num_heads=4, num_kv_heads=2, mlp_dim=256, vocab_size=2048,
                   max_positions=512, moe=MoeConfig(8, 2, balance_loss=0.01, z_loss=1e-3)),
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
