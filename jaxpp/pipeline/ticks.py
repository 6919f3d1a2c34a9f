"""A table as ticks: what every rank does while all of them take one step together, and what waits meanwhile. No JAX.

In a tick a rank runs one operation or none; what it makes can be used from the next tick on, on any rank. A tick lasts
as long as the longest operation in it: tables whose operations cost the same (B and W apart) lose nothing by that;
where a fused backward pass and a forward pass share a tick, the one waits for the other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from jaxpp.schedule import Costs, Kind, Op, Schedule, StageCosts, simulate
from jaxpp.schedule.table import BACKWARD

NOTHING = -1
Rows = list[list[int]]
"""For each tick and rank a number."""


@dataclass(frozen=True)
class Ticks:
    """A table played in lock step.

    Args:
        schedule: stage s on rank s, one operation in each cell.
    """

    schedule: Schedule

    @cached_property
    def start(self) -> dict[Op, int]:
        """The tick of each operation: each rank runs its order, as early as it can."""
        tick = StageCosts(1, 1, 1, fused_s=1)
        timeline = simulate(self.schedule, Costs((tick,) * self.schedule.num_stages))
        return {op: round(event.start_s) for event in timeline.events for op in event.cell}

    @property
    def num_ticks(self) -> int:
        """Ticks of a step."""
        return max(self.start.values()) + 1

    def seconds(self, costs: StageCosts) -> float:
        """Return how long a step lasts."""
        longest = [0.0] * self.num_ticks
        for op, tick in self.start.items():
            longest[tick] = max(longest[tick], costs.seconds(op.kind))
        return sum(longest)

    def kinds(self, order: Sequence[Kind]) -> Rows:
        """Return the place, in `order` and from 1, of the kind of each operation; 0: none."""
        return self._rows(((op.stage, op, 1 + order.index(op.kind)) for op in self.start), 0)

    def microbatches(self) -> Rows:
        """Return the microbatch of each operation."""
        return self._rows(((op.stage, op, op.microbatch) for op in self.start), 0)

    def activations(self) -> Rows:
        """Return the microbatch whose activations reach the rank at the end of the tick, or `NOTHING`."""
        return self._rows(((rank, op, op.microbatch) for rank, op in self._activations), NOTHING)

    def gradients(self) -> Rows:
        """Return the same of gradients; the last rank has them from the loss, in the tick of its forward pass."""
        return self._rows(((rank, op, op.microbatch) for rank, op in self._gradients), NOTHING)

    def losses(self) -> list[int]:
        """Return the microbatch that leaves the last stage in each tick, or `NOTHING`."""
        return [row[-1] for row in self.gradients()]

    def ends(self) -> list[int]:
        """Return the microbatch whose gradient leaves the first stage in each tick, or `NOTHING`."""
        first = ((0, op, op.microbatch) for op in self.start if op.kind in BACKWARD and not op.stage)
        return [row[0] for row in self._rows(first, NOTHING)]

    def slots(self, writer: Kind, readers: Collection[Kind]) -> int:
        """Return how many slots hold what one kind of operation leaves for others on the same rank.

        Microbatch j takes slot ``j % slots``; no slot is written before it is read for the last time.
        """
        return self._slots([(op.stage, op) for op in self.start if op.kind == writer], readers)

    @property
    def activation_slots(self) -> int:
        """Slots for activations that have reached a rank and wait, used likewise."""
        return self._slots(self._activations, ("F",))

    @property
    def gradient_slots(self) -> int:
        """Slots for gradients that wait."""
        return self._slots(self._gradients, BACKWARD)

    @property
    def _activations(self) -> list[tuple[int, Op]]:
        last = self.schedule.num_stages - 1
        return [(op.stage + 1, op) for op in self.start if op.kind == "F" and op.stage < last]

    @property
    def _gradients(self) -> list[tuple[int, Op]]:
        last = self.schedule.num_stages - 1
        losses = [(last, op) for op in self.start if op.kind == "F" and op.stage == last]
        return losses + [(op.stage - 1, op) for op in self.start if op.kind in BACKWARD and op.stage]

    def _rows(self, entries: Iterable[tuple[int, Op, int]], default: int) -> Rows:
        rows = [[default] * self.schedule.num_ranks for _ in range(self.num_ticks)]
        for rank, op, value in entries:
            rows[self.start[op]][rank] = value
        return rows

    def _slots(self, written: Iterable[tuple[int, Op]], readers: Collection[Kind]) -> int:
        in_time = sorted(self.start.items(), key=lambda item: item[1])
        read = {(op.stage, op.microbatch): tick for op, tick in in_time if op.kind in readers}  # the last one stays
        held = sorted((self.start[op], rank, op.microbatch) for rank, op in written)
        spans = [(rank, j, tick, read[rank, j]) for tick, rank, j in held if (rank, j) in read]
        return next(n for n in range(1, self.schedule.num_microbatches + 1) if _fit(spans, n))


def _fit(spans: Iterable[tuple[int, int, int, int]], num_slots: int) -> bool:
    """Say whether so many slots do for spans ``(rank, microbatch, tick written, tick read)``, in order of writing."""
    free: dict[tuple[int, int], int] = {}
    for rank, j, written, read in spans:
        if free.get((rank, j % num_slots), 0) > written:
            return False
        free[rank, j % num_slots] = read
    return True
