"""What a rank does and holds at each moment of a timeline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jaxpp.schedule.simulate import Event, Timeline
from jaxpp.schedule.table import LAST


def single_events(timeline: Timeline, rank: int) -> list[Event]:
    """Return a rank's events, those of several operations taken apart where one follows the other.

    A recomputation and the backward pass behind it may be one cell; a forward and a backward pass in one cell overlap,
    and stay together.
    """
    events = []
    for event in timeline.of(rank):
        if len(event.cell) == 1 or any(op.kind == "F" for op in event.cell):
            events.append(event)
            continue
        start = event.start_s
        for op in event.cell:
            end = event.end_s if op is event.cell[-1] else start + timeline.costs.seconds((op,))
            events.append(Event(rank, (op,), start, end))
            start = end
    return events


def held_activations(timeline: Timeline, rank: int) -> list[tuple[float, int]]:
    """Return how many activations (one stage, one microbatch) a rank holds, at each moment at which that changes."""
    ones = [1] * timeline.schedule.num_stages
    return list(_held(timeline, rank, ones, ones))


def held_bytes(timeline: Timeline, rank: int) -> list[tuple[float, int]]:
    """Return the bytes of the activations that a rank holds, at each moment at which they change.

    What is recomputed is held in part only until then.
    """
    costs, stages = timeline.costs, range(timeline.schedule.num_stages)
    whole, kept = [costs.stages[s].activation_bytes for s in stages], [costs.kept_bytes(s) for s in stages]
    return list(_held(timeline, rank, whole, kept))


def weight_bytes(timeline: Timeline) -> tuple[int, ...]:
    """Return the bytes of the weights that each rank holds; a stage that several ranks hold counts on each."""
    schedule, stages = timeline.schedule, timeline.costs.stages
    return tuple(sum(stages[s].weight_bytes for s in schedule.held_by(rank)) for rank in range(schedule.num_ranks))


def _held(timeline: Timeline, rank: int, whole: Sequence[int], kept: Sequence[int]) -> Iterator[tuple[float, int]]:
    ops = [(event, op) for event in single_events(timeline, rank) for op in event.cell]
    again = {(op.stage, op.microbatch) for _, op in ops if op.kind == "R"}
    changes: dict[float, int] = {}
    for event, op in ops:
        stage = op.stage
        if op.kind == "F":
            time, change = event.start_s, (kept if (stage, op.microbatch) in again else whole)[stage]
        elif op.kind == "R":
            time, change = event.start_s, whole[stage] - kept[stage]
        elif op.kind in LAST:
            time, change = event.end_s, -whole[stage]
        else:
            continue
        changes[time] = changes.get(time, 0) + change  # what ends makes room for what starts at the same time
    held = 0
    for time in sorted(changes):
        held += changes[time]
        yield time, held
