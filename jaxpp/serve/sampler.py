"""The compiled side of `Sampling`: one draw for each row of a batch, every row by its own settings and its own key.

A row's token depends on its logits, settings, history, seed and position alone: not on the other rows, and not on which
of the compiled variants (`Needs`) they made necessary. V: the rows of the model's table.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpp.serve.cuts import cut
from jaxpp.serve.noise import gumbel
from jaxpp.serve.request import MAX_LOGPROBS, Sampling

MAX_ENDS = 32
"""Most ids that end one row's answer: the tokenizer's and the request's."""

GREEDY_BELOW = 1e-5
"""Temperatures below this are taken as 0: scores divided by them would leave fp32."""


@dataclass(frozen=True)
class Needs:
    """What a compiled variant holds; what it lacks costs nothing. More than a row needs does not change its tokens.

    Args:
        draws: a temperature above 0.
        cuts: top-k, top-p or min-p.
        history: biases, penalties or `min_tokens`; without it, no history is read or written.
        logprobs: of the drawn token and the most probable ones.
    """

    draws: bool = False
    cuts: bool = False
    history: bool = False
    logprobs: bool = False

    @classmethod
    def of(cls, samplings: Iterable[Sampling]) -> Needs:
        """Return the least that serves all of these requests."""
        return reduce(Needs.__or__, map(cls._of, samplings), cls())

    @classmethod
    def _of(cls, one: Sampling) -> Needs:
        draws = one.temperature >= GREEDY_BELOW
        return cls(
            draws=draws,
            cuts=draws and (one.top_k > 0 or one.top_p < 1 or one.min_p > 0),
            history=bool(one.logit_bias or one.min_tokens or one.presence_penalty or one.frequency_penalty)
            or one.repetition_penalty != 1,
            logprobs=one.logprobs is not None,
        )

    def __or__(self, other: Needs) -> Needs:
        return Needs(*(getattr(self, one.name) or getattr(other, one.name) for one in fields(self)))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Controls:
    """The settings of every row, arrays ``[rows]``; see `Sampling`.

    Args:
        seed: uint32 ``[rows, 2]``, the high and low word of the seed: the key of `jax.random.key`.
        ends: int32 ``[rows, MAX_ENDS]``, the ids that are not drawn before `min_tokens`; -1: none.
    """

    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any
    repetition: Any
    presence: Any
    frequency: Any
    min_tokens: Any
    seed: Any
    ends: Any

    @classmethod
    def idle(cls, rows: int) -> Controls:
        """Return numpy settings of rows that nobody uses: greedy, nothing else."""
        zero, one, none = np.zeros(rows, np.float32), np.ones(rows, np.float32), np.zeros(rows, np.int32)
        ends, seed = np.full((rows, MAX_ENDS), -1, np.int32), np.zeros((rows, 2), np.uint32)
        return cls(zero, none, one, zero, one, zero, zero, none, seed, ends)

    def with_row(self, row: int, sampling: Sampling, seed: int, ends: Collection[int] = ()) -> Controls:
        """Return numpy settings with one row replaced; what a step in flight reads is not written to.

        Args:
            row: which.
            sampling: of the request that takes the row.
            seed: for a request that brings none; its lowest 64 bits count.
            ends: the tokenizer's.

        Raises:
            ValueError: more than `MAX_ENDS` ids would end the answer.
        """
        greedy = sampling.temperature < GREEDY_BELOW
        own = sorted({*sampling.stop_ids, *(() if sampling.ignore_ends else ends)})
        if len(own) > MAX_ENDS:
            raise ValueError(
                f"{len(own)} ids end the answer, the tokenizer's {len(ends)} among them; {MAX_ENDS} or fewer are taken"
            )
        word = (seed if sampling.seed is None else sampling.seed) & (2**64 - 1)
        values = Controls(
            temperature=0 if greedy else sampling.temperature,
            top_k=0 if greedy else min(max(sampling.top_k, 0), 2**31 - 1),
            top_p=1 if greedy else sampling.top_p,
            min_p=0 if greedy else sampling.min_p,
            repetition=sampling.repetition_penalty,
            presence=sampling.presence_penalty,
            frequency=sampling.frequency_penalty,
            min_tokens=min(sampling.min_tokens, 2**31 - 1),
            seed=[word >> 32, word & (2**32 - 1)],
            ends=own + [-1] * (MAX_ENDS - len(own)),
        )
        return jax.tree.map(lambda all, one: _with(all, row, one), self, values)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class History:
    """What biases and penalties look at, arrays ``[rows, V]``; to be donated. 9 bytes for each row and id.

    Args:
        prompt: bool, the ids of the prompt.
        counts: int32, how often each id is in the answer.
        bias: fp32, added to the logits.
    """

    prompt: Any
    counts: Any
    bias: Any

    @classmethod
    def idle(cls, rows: int, vocab: int) -> History:
        """Return numpy histories without a token."""
        shape = (rows, vocab)
        return cls(np.zeros(shape, bool), np.zeros(shape, np.int32), np.zeros(shape, np.float32))

    @classmethod
    def of(cls, sampling: Sampling, vocab: int, prompt: Sequence[int], answer: Sequence[int] = ()) -> History:
        """Return the numpy history of one request, arrays ``[V]``, for `admit`; only real tokens, no padding."""
        row = cls.idle(1, vocab)
        row.prompt[0, np.asarray(prompt, np.int64)] = True
        np.add.at(row.counts[0], np.asarray(answer, np.int64), 1)
        for index, bias in sampling.logit_bias.items():
            row.bias[0, index] = bias
        return cls(row.prompt[0], row.counts[0], row.bias[0])


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Drawn:
    """What was drawn for each row.

    Args:
        tokens: int32 ``[rows]``; 0 where the row is not active.
        finite: bool ``[rows]``; False: the logits held NaN or +inf, or every id was ruled out, and the token is void.
        logprobs: fp32 ``[rows]``, of the tokens under the raw logits; None: not in the variant.
        top_ids: int32 ``[rows, n]``, the most probable ids under the raw logits, n = `MAX_LOGPROBS` or all there are.
        top_logprobs: fp32 ``[rows, n]``, theirs.
    """

    tokens: Any
    finite: Any
    logprobs: Any = None
    top_ids: Any = None
    top_logprobs: Any = None


def require_ids(sampling: Sampling, num_tokens: int) -> None:
    """Refuse settings that name a token which the vocabulary lacks.

    Raises:
        ValueError: such an id is in `logit_bias` or `stop_ids`.
    """
    for name, ids in (("logit_bias", sampling.logit_bias), ("stop_ids", sampling.stop_ids)):
        for index in ids:
            if not 0 <= index < num_tokens:
                raise ValueError(f"{name} names token {index}; the vocabulary's ids are 0 to {num_tokens - 1}")


def admit(history: History, row: Any, arriving: History) -> History:
    """Put the history of one request (`History.of`) in its row; to be compiled with `history` donated."""
    return jax.tree.map(lambda all, one: all.at[row].set(one), history, arriving)


def sample(
    logits: jax.Array,
    controls: Controls,
    history: History | None,
    positions: jax.Array,
    num_new: jax.Array,
    active: jax.Array,
    *,
    needs: Needs,
    num_tokens: int | None = None,
) -> tuple[Drawn, History | None]:
    """Draw a token for each row: bias and penalties, temperature, top-k, top-p, min-p, then the largest score.

    To its score (logit over temperature) each id adds Gumbel noise of its own, a function of seed, position and id: the
    largest sum is a draw from the softmax. At temperature 0 there is no noise; among equals the lowest id wins.

    Args:
        logits: fp32 ``[rows, V]``.
        controls: of the rows.
        history: of the rows; it may be None where `needs` lacks it.
        positions: int32 ``[rows]``, those that the drawn tokens will have.
        num_new: int32 ``[rows]``, tokens of the answer so far.
        active: bool ``[rows]``; the tokens of other rows are not counted.
        needs: static; at least what the active rows' requests need (`Needs.of`).
        num_tokens: static; ids from here on, rows that only fill the table up, are never drawn; None: all may be.

    Returns:
        What was drawn, and the history that counts it.
    """
    raw, vocab = logits.astype(jnp.float32), logits.shape[1]
    marks = log_weights(raw, controls, history, num_new, active, needs=needs, num_tokens=num_tokens)
    if needs.draws:
        marks += jnp.where(controls.temperature > 0, 1, 0)[:, None] * gumbel(controls.seed, positions, vocab)
    best, tokens = lax.top_k(_one_zero(marks), 1)  # unlike argmax it is vectorised, whatever it is fused with
    tokens = jnp.where(active, tokens[:, 0], 0)
    if needs.history:
        assert history is not None
        counts = history.counts.at[jnp.arange(len(raw)), tokens].add(active.astype(jnp.int32))
        history = History(history.prompt, counts, history.bias)
    drawn = Drawn(tokens, jnp.isfinite(best[:, 0]) | ~active)
    return _with_logprobs(drawn, raw, num_tokens) if needs.logprobs else drawn, history


def log_weights(
    logits: jax.Array,
    controls: Controls,
    history: History | None,
    num_new: jax.Array,
    active: jax.Array,
    *,
    needs: Needs,
    num_tokens: int | None = None,
) -> jax.Array:
    """Return fp32 ``[rows, V]`` whose softmax `sample` draws from, -inf for what is never drawn; see there.

    A row of temperature 0 takes the largest, though the softmax gives the others a share.
    """
    scores = _known(logits.astype(jnp.float32), num_tokens)
    if needs.history:
        assert history is not None
        scores = _penalised(scores, controls, history, num_new)
    if needs.draws:
        scores = _scaled(scores, controls)
        if needs.cuts:  # rows that nobody uses ask for none: they could make it slow
            top_k, top_p = jnp.where(active, controls.top_k, 0), jnp.where(active, controls.top_p, 1)
            scores = cut(scores, top_k, top_p, controls.min_p)
    return scores


def _penalised(logits: jax.Array, controls: Controls, history: History, num_new: jax.Array) -> jax.Array:
    logits = logits + history.bias
    answered = history.counts > 0
    repetition = controls.repetition[:, None]
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(history.prompt | answered, repeated, logits)
    less = controls.presence[:, None] + controls.frequency[:, None] * history.counts
    logits = logits - jnp.where(answered, less, 0)
    withheld = (num_new < controls.min_tokens)[:, None] & (controls.ends >= 0)
    at = jnp.where(withheld, controls.ends, logits.shape[1])  # past the end: dropped
    return logits.at[jnp.arange(len(logits))[:, None], at].set(-jnp.inf, mode="drop")


def _scaled(logits: jax.Array, controls: Controls) -> jax.Array:
    """Return scores of which the largest is 0."""
    temperature = jnp.where(controls.temperature > 0, controls.temperature, 1)
    return (logits - logits.max(axis=1, keepdims=True)) / temperature[:, None]


def _one_zero(scores: jax.Array) -> jax.Array:
    """Make -0 and 0 equal: `top_k` puts one in front of the other."""
    return jnp.where(scores == 0, 0, scores)


def _known(logits: jax.Array, num_tokens: int | None) -> jax.Array:
    return jnp.where(jnp.arange(logits.shape[1]) < (num_tokens or logits.shape[1]), logits, -jnp.inf)


def _with_logprobs(drawn: Drawn, logits: jax.Array, num_tokens: int | None) -> Drawn:
    total = jax.nn.logsumexp(logits, axis=1, keepdims=True)
    num_top = min(MAX_LOGPROBS, num_tokens or logits.shape[1])
    top, ids = lax.top_k(_known(logits, num_tokens), num_top)
    own = jnp.take_along_axis(logits, drawn.tokens[:, None], axis=1)
    return Drawn(drawn.tokens, drawn.finite, (own - total)[:, 0], ids, top - total)


def _with(values: Any, row: int, value: Any) -> np.ndarray:
    changed = np.array(values)
    changed[row] = value
    return changed
