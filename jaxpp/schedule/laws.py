"""What holds of every table that an executor accepts."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict

from jaxpp.schedule.costs import unit_costs
from jaxpp.schedule.simulate import simulate
from jaxpp.schedule.table import BACKWARD, Op, Schedule


def check(schedule: Schedule) -> None:
    """Refuse a table that breaks a law.

    1. The placement names a rank for each stage, the directions one placement for each microbatch.
    2. Each stage runs each microbatch: F once, and either D once or B and W once each, R at most once.
    3. Every operation stands on the rank that the placement names.
    4. R stands before the backward pass that uses it; in a cell, what another operation needs stands before it.
    5. No deadlock.
    6. For each ordered pair of ranks and each kind of message (activations, gradients) the receiver uses messages in
       the order in which they are sent: a first-in first-out queue for each kind needs no tags. One queue for both
       would not do: in ZB-V and DualPipe a rank sends activations and gradients to the same neighbour, and that uses
       them in another order.

    Raises:
        ValueError: the law that is broken, and where; `Deadlock` for the fifth.
    """
    _check_shape(schedule)
    _check_each_once(schedule)
    _check_ranks(schedule)
    _check_order_on_rank(schedule)
    simulate(schedule, unit_costs(schedule))
    _check_messages(schedule)


def _refuse(schedule: Schedule, why: str) -> ValueError:
    return ValueError(f"schedule {schedule.name}: {why}")


def _check_shape(schedule: Schedule) -> None:
    if schedule.directions and len(schedule.directions) != schedule.num_microbatches:
        given = len(schedule.directions)
        raise _refuse(schedule, f"directions of {given} microbatches; there are {schedule.num_microbatches}")
    if len(schedule.placement) != (ways := max(schedule.directions, default=0) + 1):
        raise _refuse(schedule, f"{len(schedule.placement)} placements; the directions need {ways}")
    for ranks in schedule.placement:
        if len(ranks) != schedule.num_stages or not set(ranks) <= set(range(schedule.num_ranks)):
            wanted = f"{schedule.num_stages} numbers of ranks, 0 to {schedule.num_ranks - 1}, are needed"
            raise _refuse(schedule, f"placement {ranks}; {wanted}")


def _check_each_once(schedule: Schedule) -> None:
    found = Counter(op for _, op in schedule.ops())
    wanted: set[Op] = set()
    for stage in range(schedule.num_stages):
        for j in range(schedule.num_microbatches):
            split = found[Op("B", stage, j)] or found[Op("W", stage, j)]
            wanted |= {Op(kind, stage, j) for kind in (("F", "B", "W") if split else ("F", "D"))}
    for op in sorted(wanted):
        if not found[op]:
            raise _refuse(schedule, f"{op} is missing")
    for op, times in found.items():
        if times > 1:
            raise _refuse(schedule, f"{op} stands {times} times; once is right")
        if op not in wanted and op.kind != "R":
            raise _refuse(schedule, f"{op} is too much: the stage's backward pass is split, or there is no such stage")
        if op.kind == "R" and Op("F", op.stage, op.microbatch) not in wanted:
            raise _refuse(schedule, f"{op} is too much: there is no such stage or microbatch")


def _check_ranks(schedule: Schedule) -> None:
    for rank, op in schedule.ops():
        if rank != (right := schedule.rank_of(op.stage, op.microbatch)):
            raise _refuse(schedule, f"{op} stands on rank {rank}; the placement puts it on rank {right}")


def _check_order_on_rank(schedule: Schedule) -> None:
    done: set[Op] = set()
    for cells in schedule.orders:
        for cell in cells:
            for op in cell:
                if missing := [need for need in schedule.needs(op) if need in cell and need not in done]:
                    raise _refuse(schedule, f"in one cell {op} stands before {missing[0]}, which it needs")
                done.add(op)
                if op.kind == "R" and op._replace(kind=schedule.backward_of[op.stage, op.microbatch]) in done:
                    raise _refuse(schedule, f"{op} stands after the backward pass that uses it")


def _check_messages(schedule: Schedule) -> None:
    places = {
        op: (rank, i) for rank, cells in enumerate(schedule.orders) for i, cell in enumerate(cells) for op in cell
    }
    queues: dict[tuple[str, int, int], list[tuple[int, int, Op]]] = defaultdict(list)
    for op, need in schedule.messages():
        (sender, sent), (receiver, used) = places[need], places[op]
        queues["gradients" if op.kind in BACKWARD else "activations", sender, receiver].append((sent, used, need))
    for (what, sender, receiver), messages in queues.items():
        for (_, before, first), (_, after, second) in itertools.pairwise(sorted(messages)):
            if after < before:
                raise _refuse(schedule, f"rank {sender} sends {what} of {first} before those of {second}; rank "
                                        f"{receiver} uses them the other way round")  # fmt: skip
