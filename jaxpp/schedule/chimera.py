"""Chimera: two pipelines in opposite directions over the same ranks; each rank holds two stages' weights."""

from __future__ import annotations

from collections.abc import Iterator

from jaxpp.schedule.counts import check_counts, check_multiple
from jaxpp.schedule.table import Op, Schedule, singles


def chimera(ranks: int, microbatches: int) -> Schedule:
    """Return Chimera's table by direct concatenation of units of p microbatches, half of them in each direction.

    Downwards stage s is on rank s, upwards on rank ``p - 1 - s``; the gradients of the two replicas of a stage are
    added. A slot is the time of F; with ``D = F`` no two operations of a rank want the same slot.

    Bubble for ``m = k p``: ``(p - 2)F`` where ``D = F``; ``(p - 2)(k + 1)F`` where ``D = 2F``: it grows with every
    unit. Peak ``p / 2 + 1`` activations on the ranks at the ends, one more on each towards the middle, up to p.
    Weights held twice. Messages: ``p - 1`` for each microbatch and direction, and one reduction of all gradients
    between two replicas.

    Args:
        ranks: ``p``, even; one stage for each rank and direction.
        microbatches: ``m``, a multiple of p.

    Raises:
        ValueError: an odd number of ranks, or m is no multiple of it.

    Source: Li and Hoefler, Chimera: Efficiently Training Large-Scale Neural Networks with Bidirectional Pipelines,
    2021.
    """
    check_counts("chimera", ranks=ranks, microbatches=microbatches)
    check_multiple("chimera", "ranks", ranks, 2, "directions")
    check_multiple("chimera", "microbatches", microbatches, ranks, "ranks")
    placement = (tuple(range(ranks)), tuple(reversed(range(ranks))))
    directions = tuple(j % ranks // (ranks // 2) for j in range(microbatches))
    slots: list[dict[int, Op]] = [{} for _ in range(ranks)]
    for slot, op in _slots(ranks, microbatches):
        slots[placement[directions[op.microbatch]][op.stage]][slot] = op
    orders = [[of_rank[slot] for slot in sorted(of_rank)] for of_rank in slots]
    return Schedule("chimera", ranks, microbatches, singles(orders), placement, directions)


def _slots(ranks: int, microbatches: int) -> Iterator[tuple[int, Op]]:
    for microbatch in range(microbatches):
        unit, place = divmod(microbatch, ranks)
        first = 2 * ranks * unit + 2 * (place % (ranks // 2))
        for stage in range(ranks):
            yield first + stage, Op("F", stage, microbatch)
            yield first + 2 * ranks - 1 - stage, Op("D", stage, microbatch)
