"""DualPipe and DualPipe-V: forwards of one microbatch overlap backwards of another, as pairs in one cell."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from jaxpp.schedule.counts import check_counts, check_least, check_multiple
from jaxpp.schedule.table import Cell, Op, Schedule


def dualpipe(ranks: int, microbatches: int) -> Schedule:
    """Return DualPipe's table: half of the microbatches enter at each end; rank r holds the stages r and ``p - 1 - r``.

    Bubble ``(p / 2 - 1)(FD + D - 3W)``, FD being the time of a pair, where ``F = B = W``; at most that where
    ``B >= F >= W``, and more for other costs. Peak ``p + 1`` activations on every rank. Weights held twice. Messages:
    ``p - 1`` for each microbatch and direction, and one reduction of all gradients between two replicas.

    Args:
        ranks: ``p``, even.
        microbatches: ``m``, even and at least ``2p``.

    Raises:
        ValueError: odd numbers, or fewer microbatches.

    Source: DeepSeek-AI, DeepSeek-V3 Technical Report, 2024, section 3.2.1.
    """
    check_counts("dualpipe", ranks=ranks, microbatches=microbatches)
    check_multiple("dualpipe", "ranks", ranks, 2, "directions")
    check_least("dualpipe", "microbatches", microbatches, 2 * ranks, "2 * ranks")
    check_multiple("dualpipe", "microbatches", microbatches, 2, "directions")
    half, share = ranks // 2, microbatches // 2
    down, up = range(share), range(share, microbatches)
    orders = [tuple(_order(rank, half, down, up)) for rank in range(half)]
    orders += [tuple(_order(rank, half, up, down)) for rank in reversed(range(half))]
    placement = (tuple(range(ranks)), tuple(reversed(range(ranks))))
    return Schedule("dualpipe", ranks, microbatches, tuple(orders), placement, (0,) * share + (1,) * share)


def dualpipe_v(ranks: int, microbatches: int) -> Schedule:
    """Return DualPipe-V's table: half of DualPipe; rank r holds the stages r and ``2p - 1 - r``, as in ZB-V.

    Bubble ``(p - 1)(FD + D - 3W) / 2``, FD being the time of a pair, where ``F = B = W``; at most that where
    ``B >= F >= W``, and more for other costs. Peak ``2p + 1`` activations of a half share on every rank. Weights held
    once. Messages: ``2p - 2`` for each microbatch and direction; the turn is local.

    Args:
        ranks: ``p``.
        microbatches: ``m``, at least ``2p``.

    Raises:
        ValueError: fewer microbatches.

    Source: DeepSeek-AI, DualPipe (software, with DualPipeV), 2025.
    """
    check_counts("dualpipe-v", ranks=ranks, microbatches=microbatches)
    check_least("dualpipe-v", "microbatches", microbatches, 2 * ranks, "2 * ranks")
    every = range(microbatches)
    orders = tuple(tuple(_order(rank, ranks, every, every)) for rank in range(ranks))
    placement = (*range(ranks), *reversed(range(ranks)))
    return Schedule("dualpipe-v", 2 * ranks, microbatches, orders, (placement,))


def _order(place: int, half: int, own: Sequence[int], other: Sequence[int]) -> Iterator[Cell]:
    """Yield the cells of the rank at `place` from an end; `half` places on is the middle of the way.

    Phase 0 is the near stage with the microbatches `own`, phase 1 the far stage with `other`.
    """
    stages = (place, 2 * half - 1 - place)
    forwards = [iter([Op("F", stage, j) for j in js]) for stage, js in zip(stages, (own, other), strict=True)]
    backwards = [iter([Op("D", stage, j) for j in js]) for stage, js in zip(stages, (own, other), strict=True)]
    later: deque[Op] = deque()  # weight gradients that are put off

    def forward(phase: int) -> Op:
        return next(forwards[phase])

    def backward(phase: int, split: bool = False) -> Op:
        fused = next(backwards[phase])
        if not split:
            return fused
        later.append(fused._replace(kind="W"))
        return fused._replace(kind="B")

    inner, outer = half - 1 - place, place + 1  # ranks between here and the middle; from the end to here
    for _ in range(2 * inner):
        yield (forward(0),)
    for _ in range(outer):
        yield (forward(0),)
        yield (forward(1),)
    for _ in range(inner):
        yield (backward(1, split=True),)
        yield (later.popleft(),)
        yield (forward(1),)
    for i in range(len(own) - 2 * half + outer):
        if i == inner == 0:  # in the middle nothing has come back yet that the first forward could overlap
            yield (forward(0),)
            yield (backward(1),)
        else:
            yield (forward(0), backward(1))
        yield (forward(1), backward(0))
    for _ in range(inner):
        yield (backward(1),)
        yield (forward(1), backward(0))
    for i in range(2 * outer):
        yield (backward(1 - i % 2, split=i >= outer),)
    for _ in range(inner):
        yield (later.popleft(),)
        yield (backward(0, split=True),)
    while later:
        yield (later.popleft(),)
