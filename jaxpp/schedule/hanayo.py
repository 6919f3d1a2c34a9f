"""Hanayo: the model is folded over the ranks in waves, so that turns need no message."""

from __future__ import annotations

import itertools
from typing import Literal

from jaxpp.schedule.counts import check_counts, check_multiple
from jaxpp.schedule.greedy import list_schedule
from jaxpp.schedule.table import Op, Schedule, singles


def hanayo(
    ranks: int, microbatches: int, chunks: int | None = None, waves: int | None = None,
    order: Literal["bounded", "hand"] = "bounded",
) -> Schedule:  # fmt: skip
    """Return Hanayo's table: ``2 W p`` stages in zigzag, so that every rank holds 2W of them.

    Bubble for ``m = k p``: ``(p - 1)(F + D) / (2W)`` where ``F = D``, as interleaved 1F1B with 2W chunks;
    ``(p - 1)(k + 1)F / W`` where ``D = 2F``: it grows with m, so that for ``m >> p`` interleaved 1F1B is better. For
    other m it is larger. Peak at most ``2 W p`` activations of a chunk (p of a share), 1F1B's first. Weights held once.
    Messages: ``2 W (p - 1)`` for each microbatch and direction. The first rank holds both embedding and head.

    Args:
        ranks: ``p``.
        microbatches: ``m``.
        chunks: stages on each rank, even: twice the waves.
        waves: ``W``, times that a microbatch goes down to the last rank and back; 1 if neither is given.
        order: ``bounded``, the memory limit above for any m; ``hand``, written out for ``m = p``, with the same bubble.

    Raises:
        ValueError: chunks that are odd or not twice the waves; the hand order for another m.

    Source: Liu et al., Hanayo: Harnessing Wave-like Pipeline Parallelism for Enhanced Large Model Training Efficiency,
    2023.
    """
    if waves is None:
        chunks = 2 if chunks is None else chunks
        check_counts("hanayo", chunks=chunks)
        check_multiple("hanayo", "chunks", chunks, 2, "stages in a wave")
        waves = chunks // 2
    check_counts("hanayo", ranks=ranks, microbatches=microbatches, waves=waves)
    if chunks not in (None, 2 * waves):
        raise ValueError(f"schedule hanayo: chunks = {chunks} and waves = {waves}; {2 * waves} chunks would do")
    blocks = [tuple(range(ranks)), tuple(reversed(range(ranks)))] * waves
    placement = tuple(rank for block in blocks for rank in block)
    if order == "bounded":
        orders = list_schedule(placement, microbatches, [2 * waves * ranks] * ranks)
    elif order == "hand":
        if microbatches != ranks:
            raise ValueError(f"schedule hanayo: order = hand with microbatches = {microbatches}; {ranks} microbatches, "
                             "as many as ranks, or order = bounded would do")  # fmt: skip
        orders = [_by_hand(rank, ranks, microbatches, waves) for rank in range(ranks)]
    else:
        raise ValueError(f'schedule hanayo: unknown order "{order}"; bounded or hand')
    return Schedule("hanayo", len(placement), microbatches, singles(orders), (placement,))


def _by_hand(rank: int, ranks: int, microbatches: int, waves: int) -> list[Op]:
    """Return one rank's order: phases of its odd stages forward and back; between them its even stages likewise."""
    stages = [block * ranks + (rank if block % 2 == 0 else ranks - 1 - rank) for block in range(2 * waves)]
    every = range(microbatches)
    forward = [Op("F", stage, j) for stage in stages[::2] for j in every]
    backward = [Op("D", stage, j) for stage in stages[::-2] for j in every]
    warm_up = min(ranks - rank, microbatches)
    order, between = forward[:warm_up], iter(forward[warm_up:] + backward)
    odd = [Op("F", stage, j) for stage in stages[1::2] for j in every]
    even = [Op("D", stage, j) for stage in stages[-2::-2] for j in every]
    for op in odd + even:
        order.append(op)
        order.extend(itertools.islice(between, 1))
    return order
