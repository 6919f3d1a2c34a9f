"""The sampler of all slots: their settings and histories on the devices, and what a step draws."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpp.parallel import Layout
from jaxpp.serve.handle import Request
from jaxpp.serve.request import Sampling, Token
from jaxpp.serve.sampler import Controls, Drawn, History, Needs, admit, sample


@dataclass(frozen=True)
class Pending:
    """What a step will have drawn, once the devices are there.

    Args:
        drawn: of all rows.
        slots: those that draw; each has an ``index`` and a ``request``.
    """

    drawn: Drawn
    slots: Sequence[Any]

    def tokens(self) -> Iterator[tuple[Any, list[Token | None]]]:
        """Wait, and yield each slot with its token; None where its logits were not finite."""
        drawn = jax.tree.map(np.asarray, self.drawn)
        for slot in self.slots:
            yield slot, [_token(drawn, slot.index, slot.request.sampling.logprobs)]


@dataclass(frozen=True)
class PendingMany:
    """What a step that verifies a draft will have drawn.

    Args:
        drawn: of all rows at each position, arrays ``[T, rows, ...]``.
        valid: bool ``[T, rows]``: the draft was right up to there.
        slots: those that draw.
    """

    drawn: Drawn
    valid: jax.Array
    slots: Sequence[Any]

    def tokens(self) -> Iterator[tuple[Any, list[Token | None]]]:
        """Wait, and yield each slot with its tokens: one, and one more for each that the draft had right."""
        drawn, valid = jax.tree.map(np.asarray, self.drawn), np.asarray(self.valid)
        each = [jax.tree.map(lambda x, i=i: x[i], drawn) for i in range(len(valid))]
        for slot in self.slots:
            count = int(valid[:, slot.index].sum())
            yield slot, [_token(one, slot.index, slot.request.sampling.logprobs) for one in each[:count]]


def _token(drawn: Drawn, row: int, wanted: int | None) -> Token | None:
    if not drawn.finite[row]:
        return None
    if wanted is None:
        return Token(int(drawn.tokens[row]))
    top = zip(drawn.top_ids[row, :wanted].tolist(), drawn.top_logprobs[row, :wanted].tolist(), strict=True)
    return Token(int(drawn.tokens[row]), float(drawn.logprobs[row]), tuple(top))


class Draws:
    """Draws a token for slots.

    Args:
        num_slots: rows.
        vocab: rows of the model's table.
        num_tokens: ids from here on are never drawn.
        ends: ids that end an answer.
        layout: where logits lie; None: on one device.
    """

    def __init__(self, num_slots: int, vocab: int, num_tokens: int, ends: Collection[int], layout: Layout | None):
        """Begin with slots that nobody uses."""
        self.last: Any = np.zeros(num_slots, np.int32)
        self._num_slots, self._vocab, self._ends = num_slots, vocab, ends
        self._controls, self._on_device = Controls.idle(num_slots), None
        self._history: History | None = None  # made for the first request that needs one
        place = None if layout is None else layout.replicated()
        placed: dict[str, Any] = {} if place is None else {"out_shardings": place}
        self._admit = jax.jit(admit, donate_argnums=(0,), **placed)
        self._merge = jax.jit(_merge)
        self._draw = jax.jit(
            partial(_draw, num_tokens=num_tokens), static_argnames=("needs",), donate_argnums=(2,), **placed
        )
        self._verify = jax.jit(
            partial(_verify, num_tokens=num_tokens), static_argnames=("needs",), donate_argnums=(3,), **placed
        )
        self._guess = jax.jit(partial(_guess, num_tokens=num_tokens), static_argnames=("needs",), **placed)
        self._empty_history = jax.jit(lambda: jax.tree.map(jnp.asarray, History.idle(num_slots, vocab)), **placed)

    def start(self, row: int, request: Request) -> None:
        """Take up the settings of a request in a row."""
        sampling = request.sampling
        self._controls = self._controls.with_row(row, sampling, request.seed, self._ends)
        self._on_device = None
        if Needs.of([sampling]).history and self._history is None:
            self._history = self._empty_history()
        if self._history is not None:
            arriving = History.of(sampling, self._vocab, request.prompt)
            self._history = self._admit(self._history, np.int32(row), arriving)

    def merge(self, logits: jax.Array | None, chunk_logits: jax.Array, rows: np.ndarray) -> jax.Array:
        """Put the logits of prompts that are in into their rows; rows past the last slot are dropped."""
        if logits is None:
            logits = self._no_logits(chunk_logits)
        return self._merge(logits, chunk_logits, rows)

    def draw(self, logits: jax.Array, rows: Sequence[tuple[Any, int, int]]) -> Pending:
        """Draw for some slots.

        Args:
            logits: ``[slots, vocab]``.
            rows: each slot that draws, the position of its new token and the tokens it drew before.
        """
        where = np.zeros((3, self._num_slots), np.int32)
        for slot, position, num_new in rows:
            where[:, slot.index] = position, num_new, 1
        needs = Needs.of(slot.request.sampling for slot, *_ in rows)
        history = self._history if needs.history else None
        drawn, history, self.last = self._draw(logits, self._settings(), history, self.last, where, needs=needs)
        if needs.history:
            self._history = history
        return Pending(drawn, [slot for slot, *_ in rows])

    def guess(self, logits: jax.Array, positions: np.ndarray, slots: Sequence[Any]) -> jax.Array:
        """Draw from a draft's logits, with the noise that the model's own draw will have; no history.

        Args:
            logits: ``[slots, vocab]``.
            positions: ``[slots]``, of the new tokens.
            slots: those that draw.
        """
        needs = replace(Needs.of(slot.request.sampling for slot in slots), history=False, logprobs=False)
        return self._guess(logits, self._settings(), positions, needs=needs)

    def verify(
        self, logits: jax.Array, guesses: Sequence[jax.Array], where: np.ndarray, slots: Sequence[Any]
    ) -> PendingMany:
        """Draw at every position of a draft, as far as the draft was right.

        Args:
            logits: ``[slots, T, vocab]``, behind each token.
            guesses: ``T - 1`` of ``[slots]``: what the draft drew behind each token but the last.
            where: ``[3, slots]``: position of the first new token, tokens drawn before, most tokens to draw.
            slots: those that draw.
        """
        needs = Needs.of(slot.request.sampling for slot in slots)
        history = self._history if needs.history else None
        given = (logits, tuple(guesses), self._settings(), history, self.last, where)
        drawn, valid, history, self.last = self._verify(*given, needs=needs)
        if needs.history:
            self._history = history
        return PendingMany(drawn, valid, slots)

    def _settings(self) -> Controls:
        if self._on_device is None:
            self._on_device = jax.tree.map(jnp.asarray, self._controls)
        return self._on_device

    def warm_up(self, chunk_logits: jax.Array, guesses: int = 0) -> None:
        """Compile every variant, also for drafts of so many tokens.

        Args:
            chunk_logits: as a program gives them for the ends of prompts, ``[rows, vocab]``.
            guesses: tokens that a draft guesses; 0: there is none.
        """
        self._history = self._history or self._empty_history()
        nothing = History.of(Sampling(), self._vocab, [])
        self._history = self._admit(self._history, np.int32(0), nothing)
        none = np.full(len(chunk_logits), self._num_slots, np.int32)
        logits = self.merge(self.merge(None, chunk_logits, none), chunk_logits, none)
        where = np.zeros((3, self._num_slots), np.int32)
        # Twice: what the first call returns lies where later steps find it.
        for flags in (*product((False, True), repeat=4),) * 2:
            needs = Needs(*flags)
            if needs.cuts and not needs.draws:
                continue
            history = self._history if needs.history else None
            _, history, self.last = self._draw(logits, self._settings(), history, self.last, where, needs=needs)
            if guesses:
                few = replace(needs, history=False, logprobs=False)
                one = self._guess(logits, self._settings(), where[0], needs=few)
                every = jnp.broadcast_to(logits[:, None], (len(logits), guesses + 1, logits.shape[1]))
                given = (every, (one,) * guesses, self._settings(), history, self.last, where)
                _, _, history, self.last = self._verify(*given, needs=needs)
            self._history = history if needs.history else self._history
        self._history = self._admit(self._history, np.int32(0), nothing)

    def _no_logits(self, like: jax.Array) -> jax.Array:
        return jnp.zeros((self._num_slots, self._vocab), like.dtype)


def _merge(logits: jax.Array, chunk_logits: jax.Array, rows: jax.Array) -> jax.Array:
    return logits.at[rows].set(chunk_logits, mode="drop")


def _draw(
    logits: jax.Array,
    controls: Controls,
    history: History | None,
    last: jax.Array,
    where: jax.Array,
    *,
    needs: Needs,
    num_tokens: int,
) -> tuple[Drawn, History | None, jax.Array]:
    positions, num_new, active = where[0], where[1], where[2] > 0
    drawn, history = sample(logits, controls, history, positions, num_new, active, needs=needs, num_tokens=num_tokens)
    return drawn, history, jnp.where(active, drawn.tokens, last)


def _guess(logits: jax.Array, controls: Controls, positions: jax.Array, *, needs: Needs, num_tokens: int) -> jax.Array:
    everyone, none = jnp.ones(len(logits), bool), jnp.zeros(len(logits), jnp.int32)
    drawn, _ = sample(logits, controls, None, positions, none, everyone, needs=needs, num_tokens=num_tokens)
    return drawn.tokens


def _verify(
    logits: jax.Array,
    guesses: Sequence[jax.Array],
    controls: Controls,
    history: History | None,
    last: jax.Array,
    where: jax.Array,
    *,
    needs: Needs,
    num_tokens: int,
) -> tuple[Drawn, jax.Array, History | None, jax.Array]:
    """Draw at each position in turn: a wrong guess ends a row, and its history holds what it drew until then."""
    found, valid, active = [], [], where[2] > 0
    for i in range(logits.shape[1]):
        places = (where[0] + i, where[1] + i, active)
        drawn, history = sample(logits[:, i], controls, history, *places, needs=needs, num_tokens=num_tokens)
        found.append(drawn)
        valid.append(active)
        last = jnp.where(active, drawn.tokens, last)
        if i < len(guesses):
            active = active & (drawn.tokens == guesses[i]) & (i + 1 < where[2])
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *found), jnp.stack(valid), history, last
