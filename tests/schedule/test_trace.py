"""Traces: slices, arrows and counters of Chrome's format."""

from __future__ import annotations

import json

import pytest

from jaxpp.schedule import SCHEDULES, Costs, StageCosts, Timeline, build, simulate, unit_costs
from jaxpp.schedule.held import held_activations, held_bytes, single_events
from jaxpp.schedule.trace import trace, trace_json


def timeline_of(name: str, **options) -> Timeline:
    schedule = build(name, 4, 8, **options)
    return simulate(schedule, unit_costs(schedule, recompute=1.0, transfer_s=0.25))


def sized(name: str, **options) -> Timeline:
    schedule = build(name, 4, 8, **options)
    stages = tuple(StageCosts(1.0, 1.0, 1.0, 1.0, activation_bytes=1000 + 7 * s) for s in range(schedule.num_stages))
    return simulate(schedule, Costs(stages, (0.5,), (10,)))


def of(events: list[dict], *phases: str) -> list[dict]:
    return [event for event in events if event["ph"] in phases]


@pytest.mark.parametrize("name", SCHEDULES)
def test_slices_are_the_operations(name: str) -> None:
    timeline = timeline_of(name)
    slices = of(json.loads(trace_json(timeline))["traceEvents"], "X")
    assert sorted((s["pid"], s["name"]) for s in slices) == sorted((r, str(op)) for r, op in timeline.schedule.ops())
    assert max(s["ts"] + s["dur"] for s in slices) == pytest.approx(timeline.makespan_s * 1e6)
    lanes: dict[tuple[int, int], list[dict]] = {}
    for one in slices:
        lanes.setdefault((one["pid"], one["tid"]), []).append(one)
    for lane in lanes.values():
        lane.sort(key=lambda one: one["ts"])
        for before, after in zip(lane, lane[1:], strict=False):
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-3


@pytest.mark.parametrize("name", SCHEDULES)
def test_arrows_are_the_transfers(name: str) -> None:
    timeline = timeline_of(name)
    events = trace(timeline)["traceEvents"]
    starts, ends = ({e["id"]: e for e in of(events, phase)} for phase in "sf")
    schedule = timeline.schedule
    wanted = sum(
        schedule.rank_of(need.stage, need.microbatch) != rank
        for rank, op in schedule.ops()
        for need in schedule.needs(op)
    )
    assert starts.keys() == ends.keys() and len(starts) == wanted > 0
    for key, start in starts.items():
        end = ends[key]
        source, target = _around(events, start), _around(events, end)
        assert start["pid"] != end["pid"] and start["ts"] < end["ts"]
        assert source["args"]["microbatch"] == target["args"]["microbatch"]
        step = 1 if start["cat"] == "activation" else -1
        assert target["args"]["stage"] - source["args"]["stage"] == step


def _around(events: list[dict], at: dict) -> dict:
    inside = [
        e for e in of(events, "X")
        if (e["pid"], e["tid"]) == (at["pid"], at["tid"]) and e["ts"] < at["ts"] < e["ts"] + e["dur"]
    ]  # fmt: skip
    assert len(inside) == 1
    return inside[0]


@pytest.mark.parametrize("name", SCHEDULES)
def test_counters_peak_where_the_simulator_says(name: str) -> None:
    timeline = sized(name)
    counters = of(trace(timeline)["traceEvents"], "C")
    for rank in range(4):
        for label, peaks in (
            ("live activations", timeline.peak_activations),
            ("activation bytes", timeline.peak_activation_bytes),
        ):
            values = [c["args"]["held"] for c in counters if c["pid"] == rank and c["name"] == label]
            assert max(values) == peaks[rank] and values[-1] == 0 and min(values) == 0


def test_counters_of_one_microbatch() -> None:
    schedule = build("gpipe", 2, 1)
    timeline = simulate(schedule, unit_costs(schedule))
    assert [held_activations(timeline, rank) for rank in (0, 1)] == [[(0, 1), (6, 0)], [(1, 1), (4, 0)]]


def test_bytes_that_wait_for_recomputation() -> None:
    schedule = build("merak", 2, 1, variant="plain")
    costs = Costs((StageCosts(1.0, 1.0, 1.0, 1.0, activation_bytes=100),) * 2, (0.0,), (7,))
    timeline = simulate(schedule, costs)
    assert held_bytes(timeline, 1) == [(1, 7), (2, 100), (5, 0)]
    assert held_bytes(timeline, 0) == [(0, 0), (5, 100), (8, 0)]
    assert [str(event.cell[0]) for event in single_events(timeline, 0)] == ["F0.0", "R0.0", "D0.0"]


def test_processes_are_named_and_bytes_are_left_out_where_there_are_none() -> None:
    events = trace(timeline_of("zb-v"))["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {rank: f"rank {rank} (stages {rank}, {7 - rank})" for rank in range(4)}
    assert {e["name"] for e in of(events, "C")} == {"live activations"}
