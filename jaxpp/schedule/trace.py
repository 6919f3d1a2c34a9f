"""A timeline as a trace that Perfetto (ui.perfetto.dev) and Chrome (chrome://tracing) show.

Each rank is a process; its operations are slices, transfers between ranks are arrows, and what the rank holds is a
counter below. Seconds become microseconds, so a unit of time without name shows as one second.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from jaxpp.schedule.held import held_activations, held_bytes, single_events
from jaxpp.schedule.picture import NAMES, title_of
from jaxpp.schedule.simulate import Event, Timeline
from jaxpp.schedule.table import Op

_EDGE = 0.01  # arrows join slices this share of their length inside: on the very edge viewers find no slice


def trace(timeline: Timeline, unit: str = "") -> dict[str, Any]:
    """Return a timeline in the JSON form of Chrome's trace events."""
    events = [*_named(timeline), *_slices(timeline), *_arrows(timeline), *_counters(timeline)]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"title": title_of(timeline, unit)}}


def trace_json(timeline: Timeline, unit: str = "") -> str:
    """Return the text of a trace file."""
    return json.dumps(trace(timeline, unit), indent=None, separators=(",", ":")) + "\n"


def _events(timeline: Timeline) -> list[Event]:
    return [event for rank in range(timeline.schedule.num_ranks) for event in single_events(timeline, rank)]


def _named(timeline: Timeline) -> Iterator[dict[str, Any]]:
    lanes = max((len(event.cell) for event in _events(timeline)), default=1)
    for rank in range(timeline.schedule.num_ranks):
        stages = ", ".join(map(str, timeline.schedule.held_by(rank)))
        yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank} (stages {stages})"}}
        yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
        for lane in range(lanes):
            name = "overlapped" if lane else "operations"
            yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": lane, "args": {"name": name}}


def _slices(timeline: Timeline) -> Iterator[dict[str, Any]]:
    for event in _events(timeline):
        for lane, op in enumerate(event.cell):
            yield {
                "ph": "X", "name": str(op), "cat": NAMES[op.kind], "pid": event.rank, "tid": lane,
                "ts": _microseconds(event.start_s), "dur": _microseconds(event.end_s - event.start_s),
                "args": {"kind": NAMES[op.kind], "stage": op.stage, "microbatch": op.microbatch, "rank": event.rank},
            }  # fmt: skip


def _arrows(timeline: Timeline) -> Iterator[dict[str, Any]]:
    ran = {op: (event, lane) for event in _events(timeline) for lane, op in enumerate(event.cell)}
    number = 0
    for op, (event, lane) in ran.items():
        for need in timeline.schedule.needs(op):
            source, source_lane = ran[need]
            if source.rank == event.rank:
                continue
            shared = {"name": "transfer", "cat": _direction(need), "id": number}
            yield {**shared, "ph": "s", "pid": source.rank, "tid": source_lane, "ts": _inside(source, 1 - _EDGE)}
            yield {**shared, "ph": "f", "bp": "e", "pid": event.rank, "tid": lane, "ts": _inside(event, _EDGE)}
            number += 1


def _counters(timeline: Timeline) -> Iterator[dict[str, Any]]:
    sized = any(stage.activation_bytes > 1 for stage in timeline.costs.stages)
    for rank in range(timeline.schedule.num_ranks):
        yield from _counter("live activations", rank, held_activations(timeline, rank))
        if sized:
            yield from _counter("activation bytes", rank, held_bytes(timeline, rank))


def _counter(name: str, rank: int, held: list[tuple[float, int]]) -> Iterator[dict[str, Any]]:
    for time, value in held:
        yield {"ph": "C", "name": name, "pid": rank, "ts": _microseconds(time), "args": {"held": value}}


def _direction(op: Op) -> str:
    return "activation" if op.kind == "F" else "gradient"


def _inside(event: Event, share: float) -> float:
    return _microseconds(event.start_s + share * (event.end_s - event.start_s))


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 4)
