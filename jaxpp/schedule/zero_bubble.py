"""ZB-H1 and ZB-H2: the backward pass is split, and weight gradients fill what would be the bubble."""

from __future__ import annotations

from collections.abc import Iterator

from jaxpp.schedule.counts import check_counts
from jaxpp.schedule.table import Op, Schedule, singles


def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """Return the ZB-H1 table: 1F1B's order of F and B; W of stage s is s microbatches behind B.

    Idle between a rank's first start and last end: at most ``(p - 1)(F + B - W)`` where ``W <= F`` and ``m >= 2p``;
    the bubble of the step is ``(p - 1)(F + max(0, B - W))``. Peak ``p`` activations on every
    rank (``min(m, p)``): as 1F1B's first. Weights held once. Messages: ``p - 1`` for each microbatch and direction.

    Args:
        ranks: ``p``, one stage each.
        microbatches: ``m``.

    Source: Qi et al., Zero Bubble Pipeline Parallelism, 2024.
    """
    return _split("zb-h1", ranks, microbatches, 1)


def zb_h2(ranks: int, microbatches: int) -> Schedule:
    """Return the ZB-H2 table: twice the warm-up; W of stage s is 2s microbatches behind B.

    Idle between a rank's first start and last end: at most ``(p - 1)(F + B - 2W)`` (0 if that is less) where
    ``W <= F`` and ``m >= 2p``. Where ``F = B = W`` the bubble of the step is ``(p - 1)F``, as ZB-H1's: ranks start one
    after the other, and only a step that the next one follows without a barrier gets that time back. Peak ``2p - 1``
    activations on every rank (``min(m, 2p - 1)``). Weights held once. Messages: ``p - 1`` for each microbatch and
    direction.

    Args:
        ranks: ``p``, one stage each.
        microbatches: ``m``.

    Source: Qi et al., Zero Bubble Pipeline Parallelism, 2024.
    """
    return _split("zb-h2", ranks, microbatches, 2)


def _split(name: str, ranks: int, microbatches: int, ahead: int) -> Schedule:
    check_counts(name, ranks=ranks, microbatches=microbatches)
    orders = [list(_order(s, microbatches, ahead * (ranks - 1 - s), ahead * s)) for s in range(ranks)]
    return Schedule(name, ranks, microbatches, singles(orders), (tuple(range(ranks)),))


def _order(stage: int, microbatches: int, warm_up: int, behind: int) -> Iterator[Op]:
    warm_up, behind = min(warm_up, microbatches), min(behind, microbatches)
    yield from (Op("F", stage, j) for j in range(warm_up))
    for j in range(microbatches):
        if j + warm_up < microbatches:
            yield Op("F", stage, j + warm_up)
        yield Op("B", stage, j)
        if j >= behind:
            yield Op("W", stage, j - behind)
    yield from (Op("W", stage, j) for j in range(microbatches - behind, microbatches))
