"""The sampler of all slots: their settings and histories on the devices, and what a step draws."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpp.parallel import Layout
from jaxpp.serve.handle import Request
from jaxpp.serve.request import Token
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

    def tokens(self) -> Iterator[tuple[Any, Token | None]]:
        """Wait, and yield each slot with its token; None where its logits were not finite."""
        drawn = jax.tree.map(np.asarray, self.drawn)
        for slot in self.slots:
            row, wanted = slot.index, slot.request.sampling.logprobs
            if not drawn.finite[row]:
                yield slot, None
            elif wanted is None:
                yield slot, Token(int(drawn.tokens[row]))
            else:
                top = zip(drawn.top_ids[row, :wanted].tolist(), drawn.top_logprobs[row, :wanted].tolist(), strict=True)
                yield slot, Token(int(drawn.tokens[row]), float(drawn.logprobs[row]), tuple(top))


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
        if self._on_device is None:
            self._on_device = jax.tree.map(jnp.asarray, self._controls)
        needs = Needs.of(slot.request.sampling for slot, *_ in rows)
        history = self._history if needs.history else None
        drawn, history, self.last = self._draw(logits, self._on_device, history, self.last, where, needs=needs)
        if needs.history:
            self._history = history
        return Pending(drawn, [slot for slot, *_ in rows])

    def warm_up(self) -> None:
        """Compile every variant."""
        self._history = self._history or self._empty_history()
        logits = jnp.zeros((self._num_slots, self._vocab))
        for flags in product((False, True), repeat=4):
            needs = Needs(*flags)
            if needs.cuts and not needs.draws:
                continue
            history = self._history if needs.history else None
            where = np.zeros((3, self._num_slots), np.int32)
            _, history, _ = self._draw(
                logits, self._on_device or self._controls, history, self.last, where, needs=needs
            )
            self._history = history if needs.history else self._history

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
