"""Interleaved 1F1B: each rank holds several stages, a whole round of ranks apart."""

from __future__ import annotations

from jaxpp.schedule.counts import check_counts, check_least, check_multiple
from jaxpp.schedule.table import Op, Schedule, singles


def interleaved(ranks: int, microbatches: int, chunks: int = 2, group: int | None = None) -> Schedule:
    """Return the interleaved 1F1B table: rank d holds the stages ``c p + d``.

    Forwards go through the chunks in groups of `group` microbatches: the whole group through chunk 0, then through
    chunk 1, and so on; backwards likewise from the last chunk on. ``2(p - 1 - d) + (v - 1) group`` forwards go ahead.

    Bubble ``(p - 1)(F + D) / v``. Peak ``2(p - 1 - d) + (v - 1) group + 1`` activations of a chunk on rank d where m
    is large enough. Weights held once. Messages: ``v p - 1`` for each microbatch and direction.

    Args:
        ranks: ``p``.
        microbatches: ``m``, a multiple of `group`, or with `ranks` or more left over.
        chunks: ``v``, stages on each rank.
        group: microbatches that go through a chunk together; `ranks` if None. Larger groups hide transfers, and hold
            more.

    Raises:
        ValueError: m and the group do not fit.

    Source: Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM, 2021.
    """
    name, size = "interleaved", ranks if group is None else group
    check_counts(name, ranks=ranks, microbatches=microbatches, chunks=chunks, group=size)
    check_least(name, "group", size, ranks, "ranks")
    if size == ranks or microbatches % size < ranks:
        check_multiple(name, "microbatches", microbatches, size, "ranks" if size == ranks else "group")
    groups = [range(first, min(first + size, microbatches)) for first in range(0, microbatches, size)]
    sequence = [(chunk, j) for members in groups for chunk in range(chunks) for j in members]
    orders = []
    for rank in range(ranks):
        forward = [Op("F", chunk * ranks + rank, j) for chunk, j in sequence]
        backward = [Op("D", (chunks - 1 - chunk) * ranks + rank, j) for chunk, j in sequence]
        ahead = min(2 * (ranks - 1 - rank) + (chunks - 1) * size, len(forward))
        steady = [op for pair in zip(forward[ahead:], backward, strict=False) for op in pair]
        orders.append(forward[:ahead] + steady + backward[len(forward) - ahead :])
    placement = tuple(stage % ranks for stage in range(chunks * ranks))
    return Schedule(name, chunks * ranks, microbatches, singles(orders), (placement,))
