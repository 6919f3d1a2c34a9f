"""The simulator on tables small enough to play by hand."""

from __future__ import annotations

import pytest

from jaxpp.schedule import Costs, Deadlock, Op, Schedule, StageCosts, build, simulate, unit_costs
from jaxpp.schedule.table import singles


def two_ranks(first: list[Op], second: list[Op], microbatches: int = 1) -> Schedule:
    return Schedule("by hand", 2, microbatches, singles([first, second]), ((0, 1),))


def test_by_hand() -> None:
    schedule = two_ranks(
        [Op("F", 0, 0), Op("F", 0, 1), Op("D", 0, 0), Op("D", 0, 1)],
        [Op("F", 1, 0), Op("B", 1, 0), Op("F", 1, 1), Op("W", 1, 0), Op("D", 1, 1)],
        2,
    )
    costs = Costs((StageCosts(1.0, 1.0, 1.0), StageCosts(2.0, 3.0, 1.0, fused_s=3.5)), (0.5,))
    timeline = simulate(schedule, costs)
    assert [(event.start_s, event.end_s) for event in timeline.of(0)] == [(0, 1), (1, 2), (7, 9), (13.5, 15.5)]
    assert [(event.start_s, event.end_s) for event in timeline.of(1)] == [
        (1.5, 3.5), (3.5, 6.5), (6.5, 8.5), (8.5, 9.5), (9.5, 13.0),
    ]  # fmt: skip
    assert timeline.makespan_s == 15.5
    assert timeline.busy_s == (6.0, 11.5) and timeline.bubble_s == (9.5, 4.0)
    assert timeline.idle_s == (9.5, 0.0)
    assert timeline.peak_activations == (2, 2)
    assert timeline.bubble_ratio == pytest.approx(13.5 / 31)


def test_transfer_times_of_each_boundary() -> None:
    schedule = build("gpipe", 3, 1)
    costs = Costs(unit_costs(schedule).stages, (0.25, 4.0))
    assert simulate(schedule, costs).makespan_s == 9 + 2 * (0.25 + 4.0)


def test_stages_on_the_same_rank_hand_over_without_a_transfer() -> None:
    schedule = build("zb-v", 1, 1)
    assert simulate(schedule, unit_costs(schedule, transfer_s=100.0)).makespan_s == 3


def test_a_pair_overlaps_and_a_recomputation_that_waits_does_not() -> None:
    pair = (Op("F", 0, 1), Op("D", 0, 0))
    cells = (((Op("F", 0, 0),), pair, (Op("R", 0, 1), Op("D", 0, 1))),)
    schedule = Schedule("by hand", 1, 2, cells, ((0,),))
    costs = Costs((StageCosts(1.0, 1.0, 1.0, 1.0),), overlap=0.75)
    assert [event.end_s for event in simulate(schedule, costs).events] == [1.0, 1.0 + 0.75 * 3, 1.0 + 0.75 * 3 + 3]
    assert simulate(schedule, costs).peak_activations == (2,)


def test_until_recomputation_only_the_input_and_what_is_kept_are_held() -> None:
    second = [Op("F", 1, 0), Op("F", 1, 1), Op("R", 1, 0), Op("D", 1, 0), Op("R", 1, 1), Op("D", 1, 1)]
    schedule = two_ranks([Op("F", 0, 0), Op("F", 0, 1), Op("R", 0, 0), Op("D", 0, 0), Op("D", 0, 1)], second, 2)
    stages = tuple(StageCosts(1.0, 1.0, 1.0, 1.0, activation_bytes=100, kept_bytes=kept) for kept in (20, 30))
    timeline = simulate(schedule, Costs(stages, transfer_bytes=(7,)))
    assert timeline.peak_activation_bytes == (200, 137)  # the first stage's input counts as nothing
    assert timeline.peak_activations == (2, 2)


def test_deadlock_names_the_operations_that_wait() -> None:
    schedule = two_ranks([Op("D", 0, 0), Op("F", 0, 0)], [Op("F", 1, 0), Op("D", 1, 0)])
    with pytest.raises(Deadlock) as refusal:
        simulate(schedule, unit_costs(schedule))
    assert str(refusal.value) == "schedule by hand deadlocks: no rank can run its next operation (D0.0, F1.0)"


def test_costs_of_another_number_of_stages() -> None:
    with pytest.raises(ValueError, match="costs of 4 stages; the schedule has 3"):
        simulate(build("gpipe", 3, 1), unit_costs(build("gpipe", 4, 1)))


def test_unit_costs_are_shares_of_a_rank() -> None:
    for name, share in (("interleaved", 0.5), ("1f1b", 1.0), ("chimera", 1.0), ("zb-v", 0.5), ("dualpipe", 1.0)):
        schedule = build(name, 4, 8)
        assert [stage.seconds("D") for stage in unit_costs(schedule).stages] == [2 * share] * schedule.num_stages
        assert simulate(schedule, unit_costs(schedule)).busy_s == (24.0,) * 4
