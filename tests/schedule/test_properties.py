"""What holds of every table, whatever the numbers and the durations; and formulas where they are exact."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpp.schedule import SCHEDULES, build, check, simulate
from jaxpp.schedule.table import LAST
from tests.schedule.tables import fitting, longest_chain, relaxed_ends, uneven, whole_costs

few = settings(max_examples=40, deadline=None)
times = st.integers(1, 9)


@pytest.mark.parametrize("name", SCHEDULES)
@given(data=st.data())
@few
def test_every_table(name: str, data: st.DataObject) -> None:
    schedule = SCHEDULES[name](**data.draw(fitting(name)))
    check(schedule)
    costs = data.draw(uneven(schedule))
    timeline = simulate(schedule, costs)

    ends = {op: event.end_s for event in timeline.events for op in event.cell}
    assert ends == relaxed_ends(schedule, costs)
    assert timeline.makespan_s >= max(max(timeline.busy_s), longest_chain(schedule, costs))
    assert timeline.makespan_s <= sum(timeline.busy_s) + sum(max(costs.transfer_s) for _ in schedule.messages())
    assert all(0 <= idle <= bubble for idle, bubble in zip(timeline.idle_s, timeline.bubble_s, strict=True))

    counted, weighed = _peaks_at_every_moment(timeline)
    assert timeline.peak_activations == counted
    if "R" not in schedule.kinds:
        assert timeline.peak_activation_bytes == weighed


def _peaks_at_every_moment(timeline) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Count what has begun and not ended, just after each start."""
    starts = {op: event.start_s for event in timeline.events for op in event.cell}
    ends = {op: event.end_s for event in timeline.events for op in event.cell}
    counted, weighed = Counter(), Counter()
    lives = [
        (rank, starts[op._replace(kind="F")], ends[op], timeline.costs.stages[op.stage].activation_bytes)
        for rank, op in timeline.schedule.ops()
        if op.kind in LAST
    ]
    for rank in range(timeline.schedule.num_ranks):
        for _, moment, _, _ in (life for life in lives if life[0] == rank):
            held = [size for at, start, end, size in lives if at == rank and start <= moment < end]
            counted[rank] = max(counted[rank], len(held))
            weighed[rank] = max(weighed[rank], sum(held))
    ranks = range(timeline.schedule.num_ranks)
    return tuple(counted[r] for r in ranks), tuple(weighed[r] for r in ranks)


@given(ranks=st.integers(1, 6), microbatches=st.integers(1, 12), f=times, b=times, w=times, transfer=st.integers(0, 9))
@few
def test_gpipe_and_1f1b(ranks, microbatches, f, b, w, transfer) -> None:
    least = (microbatches + ranks - 1) * (f + b + w)
    for name, peaks in (
        ("gpipe", [microbatches] * ranks),
        ("1f1b", [min(microbatches, ranks - s) for s in range(ranks)]),
        ("eager-1f1b", [min(microbatches, 2 * (ranks - s) - 1) for s in range(ranks)]),
    ):
        schedule = build(name, ranks, microbatches)
        timeline = simulate(schedule, whole_costs(schedule, f, b, w))
        assert timeline.makespan_s == least
        assert timeline.peak_activations == tuple(peaks)
    for name in ("gpipe", "eager-1f1b"):
        schedule = build(name, ranks, microbatches)
        hidden = min(transfer, (f + b + w) / 2)
        timeline = simulate(schedule, whole_costs(schedule, f, b, w, transfer_s=hidden))
        assert timeline.makespan_s == least + 2 * (ranks - 1) * hidden


@given(numbers=fitting("interleaved"), f=times, b=times, w=times)
@few
def test_interleaved(numbers, f, b, w) -> None:
    schedule = build("interleaved", **numbers)
    ranks, chunks, group = numbers["ranks"], numbers["chunks"], numbers["group"]
    timeline = simulate(schedule, whole_costs(schedule, f, b, w))
    assert set(timeline.bubble_s) == {(ranks - 1) * (f + b + w)}
    ahead = [2 * (ranks - 1 - rank) + (chunks - 1) * group for rank in range(ranks)]
    assert timeline.peak_activations == tuple(min(a + 1, chunks * numbers["microbatches"]) for a in ahead)


@given(ranks=st.integers(1, 5), more=st.integers(0, 5), f=times, b=times, w=times)
@few
def test_zero_bubble_h(ranks, more, f, b, w) -> None:
    w = min(w, f)
    for k, name in ((1, "zb-h1"), (2, "zb-h2")):
        schedule = build(name, ranks, 2 * ranks + more)
        timeline = simulate(schedule, whole_costs(schedule, f, b, w))
        assert max(timeline.idle_s) == max(0, (ranks - 1) * (f + b - k * w))
        assert timeline.peak_activations == (k * (ranks - 1) + 1,) * ranks
        if k == 1:
            assert max(timeline.bubble_s) == (ranks - 1) * (f + max(0, b - w))


@given(ranks=st.integers(1, 5), more=st.integers(0, 5), costs=st.lists(times, min_size=3, max_size=3))
@few
def test_zb_v(ranks, more, costs) -> None:
    w, f, b = sorted(costs)
    schedule = build("zb-v", ranks, 2 * ranks - 1 + more)
    timeline = simulate(schedule, whole_costs(schedule, f, b, w))
    assert max(timeline.idle_s) == timeline.idle_s[0] == 2 * (ranks - 1) * (b - w)
    assert timeline.peak_activations == (2 * ranks,) * ranks
    timeline = simulate(schedule, whole_costs(schedule, f, f, f))
    assert set(timeline.bubble_s) == {(ranks - 1) * f}


@given(numbers=fitting("chimera"), f=times)
@few
def test_chimera(numbers, f) -> None:
    schedule, ranks = build("chimera", **numbers), numbers["ranks"]
    timeline = simulate(schedule, whole_costs(schedule, 2 * f, f, f))
    assert set(timeline.bubble_s) == {(ranks - 2) * 2 * f}
    timeline = simulate(schedule, whole_costs(schedule, f, f, f))
    assert set(timeline.bubble_s) == {(ranks - 2) * (numbers["microbatches"] // ranks + 1) * f}
    half = ranks // 2
    assert timeline.peak_activations == tuple(half + 1 + min(rank, ranks - 1 - rank) for rank in range(ranks))


@pytest.mark.parametrize("name", ["dualpipe", "dualpipe-v"])
@given(data=st.data(), costs=st.lists(times, min_size=3, max_size=3), overlap=st.sampled_from([1.0, 0.75]))
@few
def test_dualpipe(name, data, costs, overlap) -> None:
    schedule = build(name, **data.draw(fitting(name)))
    ranks = schedule.num_ranks
    scale = ranks / 2 - 1 if name == "dualpipe" else ranks - 1  # in times of a stage
    w, f, b = (4 * cost for cost in sorted(costs))
    timeline = simulate(schedule, whole_costs(schedule, f, b, w))
    assert max(timeline.bubble_s) <= scale * (f + 2 * b - w)
    timeline = simulate(schedule, whole_costs(schedule, f, f, f, overlap=overlap))
    assert max(timeline.bubble_s) == scale * (3 * overlap - 1) * f
    assert set(timeline.peak_activations) == {schedule.num_stages + 1}


@given(ranks=st.integers(1, 5), rounds=st.integers(1, 3), waves=st.integers(1, 3), f=times)
@few
def test_hanayo(ranks, rounds, waves, f) -> None:
    schedule = build("hanayo", ranks, rounds * ranks, waves=waves)
    assert set(simulate(schedule, whole_costs(schedule, 2 * f, f, f)).bubble_s) == {(ranks - 1) * 4 * f}
    timeline = simulate(schedule, whole_costs(schedule, f, f, f))
    assert set(timeline.bubble_s) == {2 * (ranks - 1) * (rounds + 1) * f}


@given(ranks=st.integers(1, 5), microbatches=st.integers(1, 12), waves=st.integers(1, 3))
@few
def test_hanayo_stays_within_its_memory_for_any_number_of_microbatches(ranks, microbatches, waves) -> None:
    schedule = build("hanayo", ranks, microbatches, waves=waves)
    timeline = simulate(schedule, whole_costs(schedule, 1, 1, 1))
    assert max(timeline.peak_activations) <= 2 * waves * ranks


@given(ranks=st.integers(2, 6), more=st.integers(0, 6), f=times, d=times, r=times)
@few
def test_merak(ranks, more, f, d, r) -> None:
    microbatches, makespans = max(ranks, 4) + more, {}
    for variant, d_of, r_of in (
        ("plain", d + 1, r),
        ("pre-recompute", d + 1, min(r, f)),
        ("last-no-remat", 2 * f + d, f),
        ("shifted", 2 * f + d, f),
    ):
        schedule = build("merak", ranks, microbatches, variant=variant)
        makespans[variant] = simulate(schedule, whole_costs(schedule, f, d_of - 1, 1, r_of)).makespan_s
    assert makespans["plain"] == (microbatches + ranks - 1) * (f + r + d + 1)
    assert makespans["pre-recompute"] == microbatches * (f + min(r, f) + d + 1) + (ranks - 1) * (f + d + 1)
    base = microbatches * (4 * f + d) + (ranks - 1) * (3 * f + d)
    assert (makespans["last-no-remat"], makespans["shifted"]) == (base - 2 * f, base - 3 * f)
