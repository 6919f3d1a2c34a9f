"""1F1B: after a warm-up every rank alternates one forward and one backward; eager 1F1B: twice the warm-up."""

from __future__ import annotations

from collections.abc import Iterator

from jaxpp.schedule.counts import check_counts
from jaxpp.schedule.table import Op, Schedule, singles


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """Return the 1F1B table: ``p - 1 - s`` forwards ahead, then F and D in turn, then the remaining D.

    Bubble ``(p - 1)(F + D)``, as GPipe. Peak ``min(m, p - s)`` activations on stage s. Weights held once. Messages:
    ``p - 1`` for each microbatch and direction.

    Args:
        ranks: ``p``, one stage each.
        microbatches: ``m``.

    Source: Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training (PipeDream-Flush), 2021; Fan et al.,
    DAPPLE, 2021.
    """
    return _alternating("1f1b", ranks, microbatches, 1)


def eager_one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """Return 1F1B with ``2(p - 1 - s)`` forwards ahead, so that transfers hide behind operations.

    Bubble ``(p - 1)(F + D)``, and ``2(p - 1)`` transfers as long as one takes at most ``(F + D) / 2``: only the ramps
    wait for them, as in GPipe; in 1F1B every few microbatches do. Peak ``min(m, 2(p - s) - 1)`` activations on stage
    s. Weights held once. Messages: ``p - 1`` for each microbatch and direction.

    Args:
        ranks: ``p``, one stage each.
        microbatches: ``m``.

    Source: Zhuang et al., On Optimizing the Communication of Model Parallelism, 2023, section on eager-1F1B.
    """
    return _alternating("eager-1f1b", ranks, microbatches, 2)


def alternating_order(stage: int, microbatches: int, warm_up: int) -> Iterator[Op]:
    """Yield one stage's operations: `warm_up` forwards, then F and D in turn while there are forwards, then D."""
    warm_up = min(warm_up, microbatches)
    yield from (Op("F", stage, j) for j in range(warm_up))
    for j in range(microbatches):
        if j + warm_up < microbatches:
            yield Op("F", stage, j + warm_up)
        yield Op("D", stage, j)


def _alternating(name: str, ranks: int, microbatches: int, ahead: int) -> Schedule:
    check_counts(name, ranks=ranks, microbatches=microbatches)
    orders = [list(alternating_order(s, microbatches, ahead * (ranks - 1 - s))) for s in range(ranks)]
    return Schedule(name, ranks, microbatches, singles(orders), (tuple(range(ranks)),))
