"""ZB-V: each rank holds two stages, down and back up, so that the first rank ends what it began."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from jaxpp.schedule.counts import check_counts, check_least
from jaxpp.schedule.table import Kind, Op, Schedule, singles


def zb_v(ranks: int, microbatches: int) -> Schedule:
    """Return the ZB-V table: rank r holds the stages ``r`` and ``2p - 1 - r``; the backward pass is split.

    Idle between a rank's first start and last end: at most ``(p - 1)(B - W)`` where ``B >= F >= W``, so 0 where all are
    equal; the bubble of the step then is ``(p - 1)F / 2``, for ranks start one after the other. Peak ``2p`` activations
    of a half share on every rank, 1F1B's first. Weights held once. Messages: ``2p - 2`` for each microbatch and
    direction; the turn is local. The first rank holds both embedding and head.

    Args:
        ranks: ``p``.
        microbatches: ``m``, at least ``2p - 1``.

    Raises:
        ValueError: fewer microbatches.

    Source: Qi et al., Zero Bubble Pipeline Parallelism, 2024, the memory-efficient schedule ZB-V.
    """
    check_counts("zb-v", ranks=ranks, microbatches=microbatches)
    check_least("zb-v", "microbatches", microbatches, 2 * ranks - 1, "2 * ranks - 1")
    orders = [list(_order(rank, ranks, microbatches)) for rank in range(ranks)]
    placement = (*range(ranks), *reversed(range(ranks)))
    return Schedule("zb-v", 2 * ranks, microbatches, singles(orders), (placement,))


def _order(rank: int, ranks: int, microbatches: int) -> Iterator[Op]:
    stages = (rank, 2 * ranks - 1 - rank)
    done: Counter[tuple[str, int]] = Counter()

    def run(*names: tuple[Kind, int], times: int = 1) -> Iterator[Op]:
        for kind, chunk in names * times:
            yield Op(kind, stages[chunk], done[kind, chunk])
            done[kind, chunk] += 1

    yield from run(("F", 0), times=2 * (ranks - rank) - 1)
    yield from run(("F", 1), ("F", 0), times=rank)
    yield from run(("F", 1), ("B", 1), ("W", 1), times=ranks - rank)
    while done["F", 1] < microbatches:
        if done["F", 0] < microbatches:
            yield from run(("F", 0))
        yield from run(("B", 0), ("W", 0), ("F", 1), ("B", 1), ("W", 1))
    yield from run(("B", 0), ("B", 1), times=rank)
    yield from run(("B", 0), ("W", 0), times=ranks - rank)
    for chunk in (1, 0):
        yield from run(("W", chunk), times=microbatches - done["W", chunk])
