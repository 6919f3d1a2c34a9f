"""Recomputation put into any table keeps its laws, and costs and saves what it should."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jaxpp.schedule import SCHEDULES, Op, build, simulate, unit_costs
from jaxpp.schedule.recompute import recomputing

SIZES = [(name, 2, 4) for name in SCHEDULES if name != "merak"] + [("1f1b", 4, 8), ("zb-h1", 4, 8), ("gpipe", 4, 8)]


@pytest.mark.parametrize(("name", "ranks", "microbatches"), SIZES)
def test_every_stage_runs_again_before_its_backward_pass(name: str, ranks: int, microbatches: int) -> None:
    table = build(name, ranks, microbatches)
    made = recomputing(table, range(table.num_stages))
    again = [op for _, op in made.ops() if op.kind == "R"]
    assert sorted(again) == [Op("R", s, j) for s in range(table.num_stages) for j in range(microbatches)]
    assert [[op for cell in order for op in cell if op.kind != "R"] for order in made.orders] == [
        [op for cell in order for op in cell] for order in table.orders
    ]


def test_some_stages_alone() -> None:
    made = recomputing(build("1f1b", 4, 8), (0, 2))
    assert {op.stage for _, op in made.ops() if op.kind == "R"} == {0, 2}
    assert recomputing(made, ()) is made


def test_it_costs_a_forward_pass_and_leaves_one_microbatch_whole() -> None:
    """The plain form of Merak's table: ``(m + p - 1)(F + R + D)``."""
    table = build("1f1b", 4, 8)
    made, merak = recomputing(table, range(4)), build("merak", 4, 8, variant="plain")
    costs = unit_costs(made, recompute=1.0)
    assert simulate(made, costs).makespan_s == simulate(merak, costs).makespan_s == 11 * 4
    sized = replace(costs, stages=tuple(replace(one, activation_bytes=10) for one in costs.stages), transfer_bytes=(1,))
    assert simulate(table, sized).peak_activation_bytes == (40, 30, 20, 10)
    assert simulate(made, sized).peak_activation_bytes == (
        10,
        12,
        11,
        10,
    )  # tokens, the input of stage 0, count as 0


def test_a_stage_that_recomputes_already_is_refused() -> None:
    with pytest.raises(ValueError, match="R0.0 stands 2 times"):
        recomputing(recomputing(build("1f1b", 2, 2), (0,)), (0,))
