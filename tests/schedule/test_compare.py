"""Schedules side by side: their numbers, their order, and the best of them."""

from __future__ import annotations

import pytest

from jaxpp.schedule import SCHEDULES, Costs, StageCosts, build, simulate, unit_costs
from jaxpp.schedule.compare import USUAL_OPTIONS, Row, best, compare
from jaxpp.schedule.compare_text import compared
from jaxpp.schedule.layer_costs import LayerCosts, ModelCosts, Transfer

MODEL = ModelCosts(
    layers=(LayerCosts(1e-3, 1e-3, 1e-3, activation_bytes=1000, weight_bytes=100, repeat=32),),
    transfer=Transfer(bytes=10, bytes_per_s=1e6),
)


def by_label(rows: list[Row]) -> dict[str, Row]:
    return {row.label: row for row in rows}


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return compare(8, 16)


def test_every_schedule_is_there_with_its_options(rows: list[Row]) -> None:
    assert {row.schedule for row in rows} == SCHEDULES.keys() >= USUAL_OPTIONS.keys()
    assert len(rows) == len(by_label(rows)) == len(SCHEDULES) + sum(len(o) - 1 for o in USUAL_OPTIONS.values())
    assert not [row.label for row in rows if row.reason]


def test_golden_numbers(rows: list[Row]) -> None:
    got = {
        label: (m.makespan_s, m.activation_shares, m.weight_shares, m.messages)
        for label, row in by_label(rows).items()
        if (m := row.measures)
    }
    wanted = {
        "gpipe": (69, 16, 1, 7), "1f1b": (69, 8, 1, 7), "eager-1f1b": (69, 15, 1, 7),
        "interleaved chunks=2": (58.5, 11.5, 1, 15), "interleaved chunks=3": (55, 31 / 3, 1, 23),
        "zb-h1": (55, 8, 1, 7), "zb-h2": (55, 15, 1, 7), "zb-v": (51.5, 8, 1, 14),
        "chimera": (66, 8, 2, 7), "dualpipe": (54, 9, 2, 7), "dualpipe-v": (55, 8.5, 1, 14),
        "hanayo waves=1": (69, 8, 1, 14), "hanayo waves=2": (58.5, 8, 1, 28),
        "merak variant=plain": (92, 1, 1, 7), "merak variant=pre-recompute": (85, 1, 1, 7),
        "merak variant=last-no-remat": (83, 1, 1, 7), "merak variant=shifted": (82, 1, 1, 7),
    }  # fmt: skip
    assert got.keys() == wanted.keys()
    for label, numbers in wanted.items():
        assert got[label] == pytest.approx(numbers), label


def test_the_fastest_is_first(rows: list[Row]) -> None:
    spans = [row.measures.makespan_s for row in rows if row.measures]
    assert spans == pytest.approx(sorted(spans)) and rows[0].label == "zb-v"
    same = [row.label for row in rows if row.measures and row.measures.makespan_s == pytest.approx(69)]
    assert same[-1] == "hanayo waves=1" or same.index("1f1b") < same.index("gpipe")
    assert best(rows) == (rows[0], "zb-v: the shortest step, 4.9 % before dualpipe")


def test_bytes_are_those_of_the_simulator() -> None:
    schedule = build("1f1b", 4, 8)
    stages = tuple(StageCosts(1.0, 1.0, 1.0, activation_bytes=10 + s, weight_bytes=1000 * s) for s in range(4))
    costs = Costs(stages, (0.5,), (3, 5, 7))
    rows = by_label(compare(4, 8, costs))
    taken = rows["1f1b"].measures
    assert taken is not None
    timeline = simulate(schedule, costs)
    assert taken.makespan_s == timeline.makespan_s
    assert taken.activation_bytes == max(timeline.peak_activation_bytes) == 40
    assert taken.memory_bytes == 3013  # the last stage: one activation, the most weights
    assert taken.sent_bytes == 2 * 8 * (3 + 5 + 7)
    assert rows["zb-v"].measures is None
    assert rows["zb-v"].reason == "costs of 4 stages; the schedule has 8"


def test_layers_suit_any_number_of_stages() -> None:
    rows = by_label(compare(4, 8, MODEL))
    assert not [row.label for row in rows.values() if row.reason]
    one, v, both = (rows[name].measures for name in ("1f1b", "zb-v", "chimera"))
    assert one and v and both
    assert one.memory_bytes == 4 * 8 * 1000 + 4.0 * 8 * 100
    assert both.memory_bytes == 4 * 8 * 1000 + 2 * 4.0 * 8 * 100
    assert (one.sent_bytes, v.sent_bytes) == (2 * 8 * 3 * 10, 2 * 8 * 6 * 10)


def test_too_many_stages_for_the_layers() -> None:
    few = ModelCosts((LayerCosts(1.0, 1.0, 1.0, repeat=7),))
    rows = by_label(compare(4, 8, few))
    assert rows["zb-v"].reason == "7 layers do not fill 8 stages; at most 7 stages do"
    assert rows["1f1b"].measures


def test_what_cannot_be_is_last_and_says_why() -> None:
    rows = compare(4, 6)
    refused = [row for row in rows if row.reason]
    assert rows[-len(refused) :] == refused and all(row.measures is None for row in refused)
    reasons = {row.label: row.reason for row in refused}
    assert reasons["zb-v"] == "microbatches = 6, 2 * ranks - 1 = 7 or more are needed"
    assert "4 or 8 would do" in reasons["interleaved chunks=2"]
    assert {"chimera", "dualpipe", "dualpipe-v", "zb-v"} < reasons.keys() and "1f1b" not in reasons


def test_a_limit_of_memory() -> None:
    free = compare(4, 8, MODEL)
    needs = {row.label: row.measures.memory_bytes for row in free if row.measures}
    limit = needs["merak variant=shifted"]
    rows = compare(4, 8, MODEL, limit)
    for row in rows:
        assert bool(row.reason) == (needs[row.label] > limit), row.label
    winner, why = best(rows)
    spans = {row.label: row.measures.makespan_s for row in free if row.measures and needs[row.label] <= limit}
    assert winner is not None and spans[winner.label] == min(spans.values())
    assert "the shortest step of those that fit" in why
    faster = [label for label, need in needs.items() if need > limit and _span(free, label) < spans[winner.label]]
    assert faster and all(label in why for label in faster)


def _span(rows: list[Row], label: str) -> float:
    measures = by_label(rows)[label].measures
    assert measures
    return measures.makespan_s


def test_nothing_fits() -> None:
    rows = compare(4, 8, MODEL, 100)
    winner, why = best(rows)
    assert winner is None and why.startswith("none fits; the smallest is merak")
    assert "best: none fits" in compared(rows, "s")


def test_an_equal_makespan_is_not_called_a_lead() -> None:
    rows = [row for row in compare(8, 16) if row.schedule in ("zb-h1", "zb-h2")]
    assert best(rows)[1] == "zb-h1: the shortest step, as zb-h2, which holds 87.5 % more activations"


def test_refusals() -> None:
    with pytest.raises(ValueError, match="a limit of 4.00 GiB needs costs in bytes: give a costs file"):
        compare(4, 8, memory_bytes=2**32)
    with pytest.raises(ValueError, match="ranks = 0; a whole number of 1 or more is needed"):
        compare(0, 8)


def test_one_rank_has_no_bubble() -> None:
    one = by_label(compare(1, 4))["1f1b"].measures
    assert one and (one.makespan_s, one.bubble_ratio, one.messages, one.sent_bytes) == (12, 0, 0, 0)


def test_the_printed_table(rows: list[Row]) -> None:
    lines = compared(rows).splitlines()
    assert lines[0].split() == ["schedule", "makespan", "bubble", "peak", "act.", "weights", "messages"]
    assert lines[1].split() == ["zb-v", "51.5", "6.8", "%", "8", "1", "14"]
    assert len({len(line) for line in lines[: len(rows) + 1]}) == 1
    assert "best: zb-v: the shortest step, 4.9 % before dualpipe" in lines
    assert any(line.startswith("weights 2: two ranks hold each stage") for line in lines)
    assert max(map(len, lines)) <= 120


def test_the_printed_table_in_bytes_and_seconds() -> None:
    text = compared(compare(4, 6, MODEL), "s")
    assert text.splitlines()[0].split()[-2:] == ["memory", "sent"]
    assert "\nnot possible:\n" in text and "  zb-v                  microbatches = 6, 2 * ranks - 1 = 7" in text
    assert " ms " in text and " KiB" in text and "weights 2" not in text


def test_unit_costs_are_the_default(rows: list[Row]) -> None:
    for row in rows:
        schedule = build(row.schedule, 8, 16, **row.options)
        assert row.measures
        assert row.measures.makespan_s == simulate(schedule, unit_costs(schedule, recompute=1.0)).makespan_s
