"""What a pipeline schedule is: for each rank, its operations in order. Plain data; no JAX.

Words: a **rank** is one place of the pipeline; a **stage** is a piece of the model; a rank may hold several stages (its
**chunks**); a **microbatch** is a part of the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

Kind = Literal["F", "D", "B", "W", "R"]
"""Forward; fused backward; input gradient; weight gradient; recomputation of the forward pass."""

BACKWARD = ("D", "B")  # kinds that send a gradient to the stage before
LAST = ("D", "W")  # kinds after which a microbatch's activations of a stage are no longer needed


class Op(NamedTuple):
    """One operation: what, on which stage, for which microbatch."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.microbatch}"


Cell = tuple[Op, ...]
"""Operations that a rank runs as one, once all have what they need: nearly always a single one. Two are a forward and a
backward pass that overlap, or a recomputation and its backward pass that both wait for the gradient."""


@dataclass(frozen=True)
class Schedule:
    """A table of operations.

    Args:
        name: of the method.
        num_stages: pieces of the model.
        num_microbatches: parts of the batch.
        orders: for each rank its cells, in the order in which it runs them.
        placement: for each direction, the rank of each stage.
        directions: for each microbatch its direction; empty: all go in the only one.
    """

    name: str
    num_stages: int
    num_microbatches: int
    orders: tuple[tuple[Cell, ...], ...]
    placement: tuple[tuple[int, ...], ...]
    directions: tuple[int, ...] = ()

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self.orders)

    def rank_of(self, stage: int, microbatch: int) -> int:
        """Return the rank that runs a stage for a microbatch."""
        return self.placement[self.directions[microbatch] if self.directions else 0][stage]

    def held_by(self, rank: int) -> tuple[int, ...]:
        """Return the stages whose weights a rank holds, in order."""
        return tuple(s for s in range(self.num_stages) if any(ranks[s] == rank for ranks in self.placement))

    @property
    def chunks(self) -> int:
        """Most stages that a rank holds."""
        return max(len(self.held_by(rank)) for rank in range(self.num_ranks))

    def ops(self) -> Iterator[tuple[int, Op]]:
        """Yield every operation with its rank, rank by rank in order."""
        for rank, cells in enumerate(self.orders):
            for cell in cells:
                for op in cell:
                    yield rank, op

    @cached_property
    def kinds(self) -> frozenset[Kind]:
        """The kinds of operations that occur."""
        return frozenset(op.kind for _, op in self.ops())

    @cached_property
    def backward_of(self) -> dict[tuple[int, int], Kind]:
        """For each stage and microbatch, the kind of its backward pass: ``D``, or ``B`` where it is split."""
        return {(op.stage, op.microbatch): op.kind for _, op in self.ops() if op.kind in BACKWARD}

    def needs(self, op: Op) -> tuple[Op, ...]:
        """Return the operations whose results an operation takes.

        ``F(s) <- F(s-1)``; ``D(s), B(s) <- F(s)`` and ``D or B(s+1)``; ``W(s) <- B(s)``; ``R(s) <- F(s)``, all of one
        microbatch. That a `D` comes after its own `R` follows from the order of their rank.
        """
        kind, stage, microbatch = op
        if kind == "F":
            return (Op("F", stage - 1, microbatch),) if stage else ()
        if kind == "W":
            return (Op("B", stage, microbatch),)
        own = Op("F", stage, microbatch)
        if kind == "R" or stage == self.num_stages - 1:
            return (own,)
        return (own, Op(self.backward_of[stage + 1, microbatch], stage + 1, microbatch))

    def messages(self) -> Iterator[tuple[Op, Op]]:
        """Yield each operation that needs a result of another rank, with the operation that gives it."""
        for rank, op in self.ops():
            for need in self.needs(op):
                if self.rank_of(need.stage, need.microbatch) != rank:
                    yield op, need


def singles(orders: Sequence[Sequence[Op]]) -> tuple[tuple[Cell, ...], ...]:
    """Return orders in which every cell is one operation."""
    return tuple(tuple((op,) for op in order) for order in orders)
