"""Cross-entropy over the vocabulary, in chunks, never holding the full fp32 logits.

Letters in the maths: S batch shards, B batch (of a shard, after S), T seq, D embed, V vocab.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jaxpp.parallel import batch_shards, constrain

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

CHUNK_TOKENS = 1024  # tokens of one chunk on one device


def soft_capped(x: jax.Array, cap: float) -> jax.Array:
    """Return ``cap tanh(x / cap)``, or `x` where the cap is 0."""
    return cap * jnp.tanh(x / cap) if cap else x


def real_only(logits: jax.Array, num_real: int) -> jax.Array:
    """Make the logits of rows from `num_real` on, which only fill a table up, too small for any token."""
    if num_real >= logits.shape[-1]:
        return logits
    return jnp.where(jnp.arange(logits.shape[-1]) < num_real, logits, jnp.finfo(logits.dtype).min)


@dataclass(frozen=True)
class _Form:
    """What is static in a loss: chunks of the sequence, batch shards, cap of the logits, rows that are tokens."""

    num_chunks: int
    shards: int
    soft_cap: float
    num_real: int


def _chunk_loss(
    x_SBTD: jax.Array, head_DV: jax.Array, targets_SBT: jax.Array, form: _Form
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the chunk's logits, their log-sum-exp and the loss of each token."""
    logits = constrain(x_SBTD @ head_DV, "batch rows seq vocab").astype(jnp.float32)
    logits = real_only(soft_capped(logits, form.soft_cap), form.num_real)
    log_z = jax.nn.logsumexp(logits, axis=-1)
    is_target = jnp.arange(logits.shape[-1]) == targets_SBT[..., None]  # compared, not gathered: vocab may be split
    return logits, log_z, log_z - jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)


def _cut(array: jax.Array, num_chunks: int, shards: int) -> jax.Array:
    """Cut ``[batch, seq, ...]`` along seq into ``[chunks, shards, batch / shards, seq / chunks, ...]``."""
    batch, seq, *rest = array.shape
    return jnp.moveaxis(array.reshape(shards, batch // shards, num_chunks, seq // num_chunks, *rest), 2, 0)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _total(
    x_BTD: jax.Array,
    head_DV: jax.Array,
    targets_BT: jax.Array,
    weights_BT: jax.Array,
    form: _Form,
) -> jax.Array:
    def step(_: None, chunk: tuple[jax.Array, jax.Array]) -> tuple[None, jax.Array]:
        return None, _chunk_loss(chunk[0], head_DV, chunk[1], form)[2]

    cut = partial(_cut, num_chunks=form.num_chunks, shards=form.shards)
    losses = jax.lax.scan(step, None, (cut(x_BTD), cut(targets_BT)))[1]
    return jnp.sum(losses * cut(weights_BT))


def _total_forward(
    x_BTD: jax.Array,
    head_DV: jax.Array,
    targets_BT: jax.Array,
    weights_BT: jax.Array,
    form: _Form,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    """Compute each chunk's gradients while its logits are at hand: 3 products in all, as without chunks.

    The head's gradient is summed per batch shard (leading dim S) and over shards once, after the loop: a sum over the
    whole batch inside the loop would be an all-reduce of the head in every chunk.
    """

    def step(dhead_SDV: jax.Array, chunk: tuple[jax.Array, jax.Array, jax.Array]):
        x, targets, weights = chunk
        logits, log_z, loss = _chunk_loss(x, head_DV, targets, form)
        is_target = jnp.arange(logits.shape[-1]) == targets[..., None]
        dlogits = (jnp.exp(logits - log_z[..., None]) - is_target) * weights[..., None]
        if form.soft_cap:
            dlogits = dlogits * (
                1 - jnp.clip(logits / form.soft_cap, -1, 1) ** 2
            )  # clipped for rows that are no tokens
        dlogits = dlogits.astype(x.dtype)
        dhead = jnp.einsum("sbtd,sbtv->sdv", x, dlogits, preferred_element_type=jnp.float32)
        return constrain(dhead_SDV + dhead, "batch embed vocab"), (loss, dlogits @ head_DV.T)

    cut = partial(_cut, num_chunks=form.num_chunks, shards=form.shards)
    start = constrain(jnp.zeros((form.shards, *head_DV.shape), jnp.float32), "batch embed vocab")
    dhead, (losses, dx) = jax.lax.scan(step, start, (cut(x_BTD), cut(targets_BT), cut(weights_BT)))
    kept = (jnp.moveaxis(dx, 0, 2).reshape(x_BTD.shape), dhead.sum(0).astype(head_DV.dtype), weights_BT)
    return jnp.sum(losses * cut(weights_BT)), kept


def _total_backward(form: _Form, kept: tuple[jax.Array, jax.Array, jax.Array], g: jax.Array):
    dx, dhead, weights = kept
    return (dx * g.astype(dx.dtype), dhead * g.astype(dhead.dtype), None, jnp.zeros_like(weights))


_total.defvjp(_total_forward, _total_backward)


def num_chunks_for(tokens: int, seq: int) -> int:
    """Return the smallest divisor of `seq` that leaves at most `CHUNK_TOKENS` of `tokens` in a chunk."""
    wanted = max(1, -(-tokens // CHUNK_TOKENS))
    return next(n for n in range(1, seq + 1) if seq % n == 0 and (n >= wanted or n == seq))


def cross_entropy(
    x: Float[Array, "batch seq embed"],
    head: Float[Array, "embed vocab"],
    targets: Int[Array, "batch seq"],
    weights: Float[Array, "batch seq"],
    num_chunks: int | None = None,
    soft_cap: float = 0.0,
    num_real: int | None = None,
) -> Float[Array, ""]:
    """Return the weighted sum of ``-log softmax(x head)[target]`` over all tokens, in nats.

    The logits of one chunk of the sequence exist at a time, in fp32, and the gradients of `x` and `head` are computed
    beside them, so that nothing is recomputed: memory ``tokens / chunks x vocab`` instead of ``tokens x vocab``.

    Args:
        x: last hidden states, normalised.
        head: output weights.
        targets: next token of each position.
        weights: of each position's loss; 0 leaves it out.
        num_chunks: divisor of seq; by default chunks of about `CHUNK_TOKENS` tokens on a device.
        soft_cap: logits become ``soft_cap tanh(logits / soft_cap)``; 0: as they are.
        num_real: columns of `head` that stand for tokens, the others only filling it up; None: all.

    Returns:
        A scalar, fp32. Divide by ``weights.sum()`` for the mean. It is not differentiable in `weights`.

    Cost: with ``vocab`` split over axis ``tensor``, three small all-reduces of ``batch x seq`` per chunk; the gradient
        of `x` leaves as partial sums over that axis.
    """
    shards = batch_shards(targets.shape[0])
    chunks = num_chunks or num_chunks_for(targets.size // shards, targets.shape[1])
    if targets.shape[1] % chunks:
        raise ValueError(f"{chunks} chunks do not divide a sequence of {targets.shape[1]} tokens; a divisor does")
    x = constrain(x, "batch seq embed")
    form = _Form(chunks, shards, soft_cap, head.shape[1] if num_real is None else num_real)
    return _total(x, head.astype(x.dtype), targets, weights.astype(jnp.float32), form)
