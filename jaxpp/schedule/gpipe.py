"""GPipe: all microbatches forward, then all backward."""

from __future__ import annotations

from jaxpp.schedule.counts import check_counts
from jaxpp.schedule.table import Op, Schedule, singles


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """Return GPipe's table: on every rank all F, then all D, both from the first microbatch on.

    Bubble ``(p - 1)(F + D)``. Peak ``m`` activations on every rank. Weights held once. Messages: ``p - 1`` for each
    microbatch and direction.

    Args:
        ranks: ``p``, one stage each.
        microbatches: ``m``.

    Source: Huang et al., GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism, 2019.
    """
    check_counts("gpipe", ranks=ranks, microbatches=microbatches)
    orders = [[Op(kind, stage, j) for kind in ("F", "D") for j in range(microbatches)] for stage in range(ranks)]
    return Schedule("gpipe", ranks, microbatches, singles(orders), (tuple(range(ranks)),))
