"""One configurable decoder: ``embed -> blocks -> head``, the shape that most language models share."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxpp.model import Batch
from jaxpp.models.decoder_config import SIZES, DecoderConfig
from jaxpp.nn import (
    Attention,
    AttentionConfig,
    Context,
    Embedding,
    Layer,
    Linear,
    Mlp,
    Norm,
    Streams,
    cross_entropy,
    layers_from,
    num_blocks,
    rope,
    run_blocks,
    split_blocks,
    stack_blocks,
)
from jaxpp.nn.attention import ALIKE
from jaxpp.nn.forward import forward
from jaxpp.nn.loss import real_only, soft_capped
from jaxpp.nn.moe import Moe
from jaxpp.nn.stack import KEPT
from jaxpp.parallel import constrain, in_use, residual

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from jaxtyping import Array, Float, Int

__all__ = ["SIZES", "Block", "Decoder", "DecoderConfig"]


class Block(nnx.Module):
    """Attention and mlp, each added to the residual stream: ``x + norm(mlp(norm(x)))`` with the norms asked for.

    Source: Xiong et al., On Layer Normalization in the Transformer Architecture, 2020 (norms before); Wang and
        Komatsuzaki, GPT-J-6B, 2021 (parallel).
    """

    def __init__(self, key: jax.Array, config: DecoderConfig):
        """Draw one block; projections back to the residual stream start small by depth (GPT-2's rule)."""
        keys = jax.random.split(key, 2)
        out_scale = (2 * config.num_layers) ** -0.5
        self.parallel = config.parallel
        before, after = config.norm_place in ("pre", "both"), config.norm_place in ("post", "both")
        self.attention_norm, self.mlp_norm = (_norm(config) if before else None for _ in range(2))
        self.attention_post_norm, self.mlp_post_norm = (_norm(config) if after else None for _ in range(2))
        self.attention = Attention(keys[0], _attention(config), out_scale)
        if config.moe.num_experts:
            self.mlp = Moe(
                keys[1], config.moe, config.embed_dim, config.mlp_dim,
                activation=config.activation, out_scale=out_scale,
            )  # fmt: skip
        else:
            self.mlp = Mlp(
                keys[1], config.embed_dim, config.mlp_dim,
                kind=config.mlp, activation=config.activation, bias=config.mlp_bias, out_scale=out_scale,
            )  # fmt: skip

    def __call__(
        self, x: Float[Array, "batch seq embed"], context: Context, layer: Layer = ALIKE
    ) -> Float[Array, "batch seq embed"]:
        """Run the block on the residual stream."""
        attended = self._attend(x, context, layer)
        if self.parallel:
            return x + checkpoint_name(residual(attended + self._feed(x, context)), KEPT)
        x = residual(x + checkpoint_name(residual(attended), KEPT))
        return x + checkpoint_name(residual(self._feed(x, context)), KEPT)

    def through(self, streams: Streams, context: Context, layer: Layer = ALIKE, *, ladder: bool) -> Streams:
        """Run the block where later ones are, or this one is, on the ladder (`jaxpp.nn.ladder`)."""
        for branch in (partial(self._attend, context=context, layer=layer), partial(self._feed, context=context)):
            streams = jax.tree.map(residual, streams.through(partial(_added, branch), ladder=ladder))
        return streams

    def _attend(self, x: jax.Array, context: Context, layer: Layer) -> jax.Array:
        y = self.attention(_entering(self.attention_norm, x), context, layer)
        return y if self.attention_post_norm is None else self.attention_post_norm(residual(y))

    def _feed(self, x: jax.Array, context: Context) -> jax.Array:
        entered = _entering(self.mlp_norm, x)
        if isinstance(self.mlp, Moe):
            real = None if context.segments is None else context.segments > 0
            y = self.mlp(entered, real=real, loss_weight=context.loss_weight)
        else:
            y = self.mlp(entered)
        return y if self.mlp_post_norm is None else self.mlp_post_norm(residual(y))


def _added(branch: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Return what a branch adds to the stream, reduced before it is added."""
    return checkpoint_name(residual(branch(x)), KEPT)


def _entering(norm: Norm | None, x: jax.Array) -> jax.Array:
    return constrain(x if norm is None else norm(x), "batch seq embed")


def _norm(config: DecoderConfig) -> Norm:
    return Norm(config.embed_dim, config.norm, config.norm_epsilon, config.norm_scale)


def _attention(config: DecoderConfig) -> AttentionConfig:
    return AttentionConfig(
        config.embed_dim, config.num_heads, config.num_kv_heads, config.head_dim,
        qkv_bias=config.qkv_bias, out_bias=config.out_bias, qk_norm=config.qk_norm,
        norm_epsilon=config.norm_epsilon, norm_scale=config.norm_scale, window=config.window,
        scale=config.attention_scale, soft_cap=config.attention_soft_cap,
    )  # fmt: skip


class Decoder(nnx.Module):
    """Token embedding, stacked blocks, final norm, head."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        """Draw all weights."""
        self.config = config
        self.loaded: Any = None  # where it came from (jaxpp.conversion.Loaded), if it was loaded
        keys = jax.random.split(rngs.params(), 4)
        sizes = {"vocab": config.table_rows, "embed": config.embed_dim, "positions": config.max_positions}
        self.tokens = Embedding(keys[0], "vocab -> embed", sizes, also="embed -> vocab" if config.tied else "")
        learned = config.positions == "learned"
        self.places = Embedding(keys[1], "positions -> embed", sizes) if learned else None
        self.blocks = stack_blocks(lambda key: Block(key, config), keys[2], config.num_layers)
        self.final_norm = _norm(config)
        self.head = None if config.tied else Linear(keys[3], "embed -> vocab", sizes)

    @property
    def tokenizer(self) -> Any:
        """The tokenizer that it was loaded with; None where there is none."""
        return self.loaded.tokenizer if self.loaded else None

    def embed(self, batch: Batch) -> Float[Array, "batch seq embed"]:
        """Look up tokens (and learned positions)."""
        x = self.tokens(batch["tokens"])
        if self.config.embed_scale:
            x = x * jnp.asarray(self.config.embed_dim**0.5, x.dtype)
        if self.places is not None:
            x = x + self.places(batch["positions"])
        return residual(x)

    def run(
        self, x: Float[Array, "batch seq embed"], batch: Batch, first_layer: Int[Array, ""] | int = 0
    ) -> Float[Array, "batch seq embed"]:
        """Run the stacked blocks; a batch without ``segments`` is one document per row.

        Args:
            x: the residual stream.
            batch: positions, and what else the blocks need of it. With ``caches``, one for each layer, the tokens go on
                from those in them; ``lengths`` ``[batch]`` then says how many a row will have.
            first_layer: number of the first block, where this is a stage that holds some of them.

        Raises:
            ValueError: a stage of a model with ladder layers, which would have to hand two streams on.
        """
        weight = batch["weights"].astype(jnp.float32).sum() if "weights" in batch else None
        rotary, window_rotary = self._rotary(batch["positions"], batch.get("lengths"))
        context = Context(batch["positions"], batch.get("segments"), rotary, window_rotary, weight)
        layers = self.config.layers()
        each = layers and layers_from(layers, first_layer, num_blocks(self.blocks))
        if "caches" in batch:
            each = each or [ALIKE] * num_blocks(self.blocks)
            each = [replace(one, cache=cache) for one, cache in zip(each, batch["caches"], strict=True)]
        if self.config.ladder_layers:
            return self._through(x, context, each)
        return run_blocks(self.blocks, x, context, each=each)

    def _through(self, x: jax.Array, context: Context, each: Sequence[Layer] | None) -> jax.Array:
        """Run the standard blocks, then those on the ladder: two programs, as a choice by layer would wait for both."""
        ladder, held, wanted = self.config.ladder_layers, num_blocks(self.blocks), self.config.num_layers
        if held != wanted:
            raise ValueError(
                f"a stage with {held} of {wanted} layers hands on one residual stream, and ladder_layers = {ladder} "
                "needs two; run the model without pipeline stages, or set ladder_layers = 0"
            )
        streams, at = Streams(x, x), wanted - ladder
        parts = (None, None) if each is None else (each[:at], each[at:])
        for blocks, own, is_ladder in zip(split_blocks(self.blocks, at), parts, (False, True), strict=True):
            if num_blocks(blocks):
                streams = run_blocks(blocks, streams, context, each=own, call=partial(Block.through, ladder=is_ladder))
        return streams.newest

    def _rotary(self, positions: jax.Array, lengths: jax.Array | None) -> tuple[rope.Rotary | None, rope.Rotary | None]:
        config = self.config
        if config.positions != "rope":
            return None, None
        rotary = rope.angles(positions, config.rotary_dim, config.rope_base, config.rope_scaling, lengths)
        own = config.window and config.window_rope_base
        return rotary, rope.angles(positions, config.rotary_dim, config.window_rope_base) if own else None

    def head_weight(self) -> Float[Array, "embed vocab"]:
        """Return the output weights: the head's own, or the table read the other way."""
        return in_use(self.tokens.table).T if self.head is None else in_use(self.head.kernel)

    def logits(self, x: Float[Array, "batch seq embed"]) -> Float[Array, "batch seq vocab"]:
        """Return the logits of the next token, fp32 (fp64 of fp64 weights)."""
        x = constrain(self.final_norm(x), "batch seq embed")
        logits = constrain(x @ self.head_weight().astype(x.dtype), "batch seq vocab")
        logits = logits.astype(jnp.promote_types(x.dtype, jnp.float32))
        return real_only(soft_capped(logits, self.config.logit_soft_cap), self.config.vocab_size)

    def __call__(
        self,
        tokens: Int[Array, "batch seq"],
        *,
        positions: Int[Array, "batch seq"] | None = None,
        segment_ids: Int[Array, "batch seq"] | None = None,
    ) -> Float[Array, "batch seq vocab"]:
        """Return the logits of the next token at every position, fp32; compiled once per shape.

        Args:
            tokens: ids.
            positions: of each token in its document; by default they are counted within each segment.
            segment_ids: document of each token, 0 for padding (on either side); by default each row is one document.

        Raises:
            ValueError: a sequence longer than learned positions reach, or an id outside of the table.
        """
        config, execution = self.config, self.loaded.execution if self.loaded else None
        longest = config.max_positions if config.positions == "learned" else None
        return forward(
            self, tokens, positions, segment_ids,
            vocab_size=config.vocab_size, max_positions=longest, execution=execution,
        )  # fmt: skip

    def loss(self, batch: Batch) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """Return the summed cross-entropy of the targets, in nats, and the sum of their weights."""
        return self.loss_from(self.run(self.embed(batch), batch), batch)

    def loss_from(self, x: Float[Array, "batch seq embed"], batch: Batch) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """Return the loss from the last hidden states, as `loss` does from the tokens."""
        x = self.final_norm(x)
        weights = batch["weights"].astype(jnp.float32)
        total = cross_entropy(
            x, self.head_weight(), batch["targets"], weights,
            soft_cap=self.config.logit_soft_cap, num_real=self.config.vocab_size,
        )  # fmt: skip
        return total, weights.sum()
