"""Speculative decoding: a small draft guesses tokens, the model runs them all at once and keeps what it agrees with.

Draft and model draw with the same noise at the same position (that of the request's seed), and a guess is kept where
both draw the same token. So the answer is, token for token, what the model alone would have drawn, with any settings; a
draft that computes the same function, as the source of a grown model does, is always right.

Source: Leviathan, Kalman, Matias, Fast Inference from Transformers via Speculative Decoding, 2023; drawing by common
    noise in place of their rejection: Maddison, Tarlow, Minka, A* Sampling, 2014 (Gumbel noise).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxpp.serve.draws import Draws, PendingMany
from jaxpp.serve.program import Program
from jaxpp.serve.rows import Tables

MOST = 15
"""Most tokens that a draft guesses at a time."""


class Speculation:
    """A draft beside the model, on the same devices, with pages of its own.

    Args:
        draft: its program.
        count: tokens that it guesses at a time, `MOST` at most.

    Attributes:
        guessed: tokens that were guessed since the start.
        right: those that the model drew too.
    """

    def __init__(self, draft: Program, count: int):
        """Begin without a guess."""
        self.draft, self.count = draft, count
        self.guessed = self.right = 0

    def step(
        self,
        program: Program,
        draws: Draws,
        slots: Sequence[Any],
        positions: np.ndarray,
        tables: tuple[Tables, Tables],
    ) -> PendingMany:
        """Guess, run the guesses, and draw.

        The draft runs once more than it guesses, so that its cache holds the last guess too.

        Args:
            program: the model.
            draws: the sampler of all slots.
            slots: those that go on.
            positions: ``[rows, count + 1]``: of the last drawn token and the guesses behind it; -1 where a row takes no
                more.
            tables: of the model's groups of layers and of the draft's.
        """
        guesses, token = [], draws.last
        for i in range(self.count + 1):
            at = positions[:, i]
            logits = self.draft.extend(token, at[:, None], at + 1, tables[1])
            if i < self.count:
                token = draws.guess(logits, at + 1, slots)
                guesses.append(token)
        tokens = jnp.stack([jnp.asarray(draws.last), *guesses], axis=1)
        logits = program.extend(tokens, positions, positions.max(axis=1) + 1, tables[0], every=True)
        where = np.zeros((3, len(positions)), np.int32)
        for slot in slots:
            row = positions[slot.index]
            where[:, slot.index] = row[0] + 1, slot.num_asked, (row >= 0).sum()
        return draws.verify(logits, guesses, where, slots)
