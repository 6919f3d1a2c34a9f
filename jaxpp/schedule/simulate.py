"""When each operation runs, and what is held meanwhile: the table played forward in time. No hardware, no JAX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from jaxpp.schedule.costs import Costs
from jaxpp.schedule.table import LAST, Cell, Op, Schedule


class Deadlock(ValueError):
    """No rank can run its next operation."""


@dataclass(frozen=True)
class Event:
    """A cell as it ran."""

    rank: int
    cell: Cell
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """A schedule played with costs.

    Args:
        schedule: the table.
        costs: what its operations cost.
        events: all cells, each rank's in order.
    """

    schedule: Schedule
    costs: Costs
    events: tuple[Event, ...]

    @property
    def makespan_s(self) -> float:
        """From the first start to the last end."""
        return max((event.end_s for event in self.events), default=0.0)

    @cached_property
    def busy_s(self) -> tuple[float, ...]:
        """Seconds that each rank works."""
        return self._per_rank(lambda events: sum(event.end_s - event.start_s for event in events))

    @property
    def bubble_s(self) -> tuple[float, ...]:
        """Seconds of the makespan that each rank does not work."""
        return tuple(self.makespan_s - busy for busy in self.busy_s)

    @cached_property
    def idle_s(self) -> tuple[float, ...]:
        """Seconds that each rank does not work between its first start and its last end."""
        spans = self._per_rank(lambda events: events[-1].end_s - events[0].start_s if events else 0.0)
        return tuple(span - busy for span, busy in zip(spans, self.busy_s, strict=True))

    @property
    def bubble_ratio(self) -> float:
        """Share of all ranks' time that is not work."""
        return sum(self.bubble_s) / max(self.makespan_s * self.schedule.num_ranks, 1e-300)

    @cached_property
    def peak_activations(self) -> tuple[int, ...]:
        """Most activations (one stage, one microbatch) that each rank holds at once, from F to the end of D or W."""
        return self._peaks([1] * self.schedule.num_stages, [1] * self.schedule.num_stages)

    @cached_property
    def peak_activation_bytes(self) -> tuple[int, ...]:
        """The same, in bytes; where the table recomputes, from F to R only what is kept."""
        stages = range(self.schedule.num_stages)
        return self._peaks([s.activation_bytes for s in self.costs.stages], [self.costs.kept_bytes(s) for s in stages])

    def of(self, rank: int) -> list[Event]:
        """Return the events of a rank, in order."""
        return [event for event in self.events if event.rank == rank]

    def _per_rank(self, measure: Callable[[list[Event]], float]) -> tuple[float, ...]:
        return tuple(measure(self.of(rank)) for rank in range(self.schedule.num_ranks))

    def _peaks(self, whole: Sequence[int], kept: Sequence[int]) -> tuple[int, ...]:
        """Walk through each rank's order, for it decides what is held; when the operations run does not."""
        again = {(op.stage, op.microbatch) for _, op in self.schedule.ops() if op.kind == "R"}
        peaks = []
        for cells in self.schedule.orders:
            held = peak = 0
            for cell in cells:
                for kind, stage, microbatch in cell:
                    if kind == "F":
                        held += (kept if (stage, microbatch) in again else whole)[stage]
                    elif kind == "R":
                        held += whole[stage] - kept[stage]
                peak = max(peak, held)
                held -= sum(whole[op.stage] for op in cell if op.kind in LAST)
            peaks.append(peak)
        return tuple(peaks)


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """Run every rank through its order: a cell starts when the rank is free and its inputs have arrived.

    Args:
        schedule: any table; laws are not asked for.
        costs: of its stages.

    Returns:
        The timeline, from 0.

    Raises:
        Deadlock: the heads of all orders wait for each other; they are listed.
        ValueError: costs of another number of stages.
    """
    if len(costs.stages) != schedule.num_stages:
        raise ValueError(f"costs of {len(costs.stages)} stages; the schedule has {schedule.num_stages}")
    ends: dict[Op, float] = {}
    free, head = [0.0] * schedule.num_ranks, [0] * schedule.num_ranks
    events: list[Event] = []
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(schedule.orders):
            while head[rank] < len(order) and (ready := _ready(schedule, costs, rank, order[head[rank]], ends)) >= 0:
                cell, start = order[head[rank]], max(free[rank], ready)
                free[rank] = start + costs.seconds(cell)
                ends.update(dict.fromkeys(cell, free[rank]))
                events.append(Event(rank, cell, start, free[rank]))
                head[rank] += 1
                moved = True
    if stuck := [order[head[rank]] for rank, order in enumerate(schedule.orders) if head[rank] < len(order)]:
        heads = ", ".join("&".join(map(str, cell)) for cell in stuck)
        raise Deadlock(f"schedule {schedule.name} deadlocks: no rank can run its next operation ({heads})")
    return Timeline(schedule, costs, tuple(sorted(events, key=lambda event: event.rank)))


def _ready(schedule: Schedule, costs: Costs, rank: int, cell: Cell, ends: dict[Op, float]) -> float:
    """Return when the inputs of a cell are there; -1 if one is not computed yet."""
    ready = 0.0
    for op in cell:
        for need in schedule.needs(op):
            if need in cell:
                continue
            if need not in ends:
                return -1.0
            there = schedule.rank_of(need.stage, need.microbatch)
            wait = costs.transfer(min(need.stage, op.stage)) if there != rank else 0.0
            ready = max(ready, ends[need] + wait)
    return ready
