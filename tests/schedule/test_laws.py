"""A table that breaks a law is refused, and the message says where."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jaxpp.schedule import Cell, Deadlock, Op, Schedule, build, check


def with_order(schedule: Schedule, rank: int, cells: list[Cell]) -> Schedule:
    orders = list(schedule.orders)
    orders[rank] = tuple(cells)
    return replace(schedule, orders=tuple(orders))


def without(schedule: Schedule, rank: int, op: Op) -> Schedule:
    return with_order(schedule, rank, [cell for cell in schedule.orders[rank] if op not in cell])


def swapped(schedule: Schedule, rank: int, one: Op, other: Op) -> Schedule:
    turn = {one: other, other: one}
    cells = [tuple(turn.get(op, op) for op in cell) for cell in schedule.orders[rank]]
    return with_order(schedule, rank, cells)


GPIPE = build("gpipe", 2, 2)
GOOD, SPLIT, REMAT = build("1f1b", 2, 3), build("zb-h1", 2, 3), build("merak", 2, 4, variant="pre-recompute")

BROKEN = [
    (without(GOOD, 0, Op("F", 0, 2)), "F0.2 is missing"),
    (without(GOOD, 1, Op("D", 1, 0)), "D1.0 is missing"),
    (without(SPLIT, 1, Op("W", 1, 0)), "W1.0 is missing"),
    (without(SPLIT, 1, Op("B", 1, 0)), "B1.0 is missing"),
    (with_order(GOOD, 1, [*GOOD.orders[1], (Op("F", 1, 2),)]), "F1.2 stands 2 times"),
    (with_order(SPLIT, 1, [*SPLIT.orders[1], (Op("D", 1, 0),)]), "D1.0 is too much"),
    (with_order(GOOD, 1, [*GOOD.orders[1], (Op("F", 1, 3),)]), "F1.3 is too much"),
    (with_order(GOOD, 1, [*GOOD.orders[1], (Op("R", 2, 0),)]), "R2.0 is too much"),
    (with_order(REMAT, 0, [*REMAT.orders[0], (Op("R", 0, 0),)]), "R0.0 stands 2 times"),
    (with_order(without(GOOD, 0, Op("F", 0, 2)), 1, [(Op("F", 0, 2),), *GOOD.orders[1]]), "F0.2 stands on rank 1"),
    (swapped(REMAT, 0, Op("R", 0, 3), Op("D", 0, 3)), "R0.3 stands after the backward pass that uses it"),
    (swapped(REMAT, 0, Op("R", 0, 0), Op("D", 0, 0)), "R0.0 stands after the backward pass that uses it"),
    (with_order(GOOD, 1, [(Op("D", 1, 0), Op("F", 1, 0)), *GOOD.orders[1][2:]]), "in one cell D1.0 stands before F1.0"),
    (swapped(GOOD, 1, Op("F", 1, 0), Op("D", 1, 0)), "deadlocks: no rank can run its next operation"),
    (
        swapped(GPIPE, 1, Op("F", 1, 0), Op("F", 1, 1)),
        "rank 0 sends activations of F0.0 before those of F0.1; rank 1 uses them the other way round",
    ),
    (
        swapped(GPIPE, 1, Op("D", 1, 0), Op("D", 1, 1)),
        "rank 1 sends gradients of D1.1 before those of D1.0; rank 0 uses them the other way round",
    ),
    (replace(GOOD, placement=((0, 2),)), "placement (0, 2); 2 numbers of ranks, 0 to 1, are needed"),
    (replace(GOOD, placement=((0,),)), "placement (0,); 2 numbers of ranks"),
    (replace(GOOD, directions=(0, 0)), "directions of 2 microbatches; there are 3"),
    (replace(GOOD, directions=(0, 1, 0)), "1 placements; the directions need 2"),
]


@pytest.mark.parametrize(("schedule", "message"), BROKEN)
def test_refused(schedule: Schedule, message: str) -> None:
    with pytest.raises(ValueError) as refusal:
        check(schedule)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value) and str(refusal.value).startswith(f"schedule {schedule.name}")


def test_a_deadlock_is_told_from_other_broken_laws() -> None:
    with pytest.raises(Deadlock):
        check(swapped(GOOD, 0, Op("F", 0, 0), Op("D", 0, 0)))


def test_one_queue_for_activations_and_gradients_would_not_do() -> None:
    """ZB-V keeps the order of each kind; the two together are used in another order than sent."""
    schedule = build("zb-v", 3, 6)
    place = {op: i for cells in schedule.orders for i, (op,) in enumerate(cells)}
    queue = sorted(
        (place[need], place[op])
        for op, need in schedule.messages()
        if schedule.rank_of(need.stage, 0) == 0 and schedule.rank_of(op.stage, 0) == 1
    )
    used = [at for _, at in queue]
    assert used != sorted(used)
