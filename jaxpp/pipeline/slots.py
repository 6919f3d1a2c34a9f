"""What the operations of a stage leave for each other, microbatch by microbatch, in as few slots as the table needs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from jaxpp.pipeline import split
from jaxpp.pipeline.line import evaluate
from jaxpp.pipeline.split import Piece
from jaxpp.pipeline.ticks import NOTHING, Ticks
from jaxpp.pipeline.traced import Traced
from jaxpp.schedule import Kind

Values = dict[int, jax.Array]
"""Arrays by their numbers in the line."""
Shapes = dict[int, jax.ShapeDtypeStruct]


@dataclass(frozen=True)
class Pieces:
    """The operations of a stage as pieces of one trace.

    Args:
        traced: the stage; one array comes in, one goes out.
        run: for each kind of operation its steps.
        slots: for each number that waits from one operation to another, in how many slots.
    """

    traced: Traced
    run: dict[Kind, Piece]
    slots: dict[int, int]

    def left(self, kind: Kind) -> tuple[int, ...]:
        """Return the numbers that an operation puts into their slots: of what it makes, and of what it is given."""
        return tuple(number for number in _at_hand(self.traced, self.run, kind) if number in self.slots)

    def operate(self, kind: Kind, known: Values) -> tuple[list[jax.Array], Values]:
        """Run an operation: return its outputs, and what it leaves."""
        piece, left = self.run[kind], self.left(kind)
        made = evaluate(piece.steps, known, (*piece.outputs, *left))
        return made[: len(piece.outputs)], dict(zip(left, made[len(piece.outputs) :], strict=True))

    def shapes(self, given: Shapes) -> Shapes:
        """Return the shapes of all that operations take, from those of what a stage is given."""
        known = dict(given)
        for kind, piece in self.run.items():  # in this order each has what it takes
            taken = {number: known[number] for number in piece.inputs}
            known.update(jax.eval_shape(partial(self.operate, kind), taken)[1])
        return known

    def empty(self, given: Shapes) -> Values:
        """Return the slots with nothing in them, ``[slots, ...]`` each."""
        known = self.shapes(given)
        return {n: jnp.zeros((count, *known[n].shape), known[n].dtype) for n, count in self.slots.items()}


def pieces_of(traced: Traced, ticks: Ticks) -> Pieces:
    """Cut a stage into the operations that a table runs."""
    later: dict[Kind, Piece] = {}
    if "D" in ticks.schedule.kinds:
        later["D"] = split.fused(traced)
    if "B" in ticks.schedule.kinds:
        later["B"], later["W"] = split.split(traced)
    run: dict[Kind, Piece] = {"F": split.forward(traced, later.values()), **later}
    slots: dict[int, int] = {}
    for writer in run:
        for number in _at_hand(traced, run, writer):
            readers: list[Kind] = [k for k, piece in later.items() if k != writer and number in piece.inputs]
            if readers:
                slots[number] = ticks.slots(writer, readers)
    return Pieces(traced, run, slots)


def _at_hand(traced: Traced, run: dict[Kind, Piece], kind: Kind) -> tuple[int, ...]:
    given = {"F": traced.x, "B": traced.cotangents}.get(kind, ())
    return (*run[kind].kept, *given)


def get(slots: jax.Array, j: jax.Array) -> jax.Array:
    """Return what waits of microbatch `j`."""
    return slots[j % slots.shape[0]]


def put(slots: jax.Array, j: jax.Array, value: jax.Array) -> jax.Array:
    """Put what is to wait of microbatch `j` into its slot."""
    return slots.at[j % slots.shape[0]].set(value)


def put_some(slots: jax.Array, j: jax.Array, value: jax.Array) -> jax.Array:
    """Do so where there is a microbatch, else leave the slots as they are."""
    at = jnp.maximum(j, 0)
    return put(slots, at, jnp.where(j == NOTHING, get(slots, at), value))
