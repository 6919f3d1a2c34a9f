"""How many layers each stage gets: evenly, as told, or balanced by what the layers cost."""

from __future__ import annotations

from collections.abc import Sequence

Cuts = tuple[int, ...]
"""The number of layers of each stage."""


def check_cuts(cuts: Sequence[int], num_layers: int, num_stages: int, even: Cuts | None = None) -> Cuts:
    """Return cuts that were given; `even` are those that an error advises.

    Raises:
        ValueError: another number of stages, a stage without a layer, or a sum that is not the number of layers.
    """
    fix = "/".join(map(str, even or even_cuts(num_layers, num_stages)))
    if len(cuts) != num_stages:
        raise ValueError(f"cuts {list(cuts)} name {len(cuts)} stages; the schedule has {num_stages}: {fix} would do")
    if min(cuts) < 1 or sum(cuts) != num_layers:
        raise ValueError(
            f"cuts {list(cuts)} add up to {sum(cuts)} layers; {num_layers} are there, at least one to a stage: "
            f"{fix} would do"
        )
    return tuple(cuts)


def even_cuts(num_layers: int, num_stages: int) -> Cuts:
    """Return cuts that differ by one layer at most; the stages in the middle, without embedding or head, get more.

    Raises:
        ValueError: more stages than layers.

    Example:
        >>> even_cuts(10, 4)
        (2, 3, 3, 2)
    """
    if not 1 <= num_stages <= num_layers:
        raise ValueError(f"{num_stages} stages of {num_layers} layers; from 1 to {num_layers} stages are possible")
    least, more = divmod(num_layers, num_stages)
    first = (num_stages - more) // 2
    return tuple(least + (first <= stage < first + more) for stage in range(num_stages))


def balanced_cuts(costs: Sequence[float], num_stages: int, first: float = 0.0, last: float = 0.0) -> Cuts:
    """Return the cuts whose dearest stage is cheapest.

    Args:
        costs: of each layer, in any one unit.
        num_stages: at least one layer each.
        first: cost of what the first stage has besides (the embedding).
        last: cost of what the last stage has besides (the head and the loss).

    Raises:
        ValueError: more stages than layers, or a negative cost.

    Example:
        >>> balanced_cuts([1.0] * 8, 2, last=2.0)
        (5, 3)
    """
    num_layers = len(costs)
    even_cuts(num_layers, num_stages)
    if min((*costs, first, last)) < 0:
        raise ValueError(f"a cost is {min((*costs, first, last))}; 0 or more is needed")
    before = [0.0]
    for cost in costs:
        before.append(before[-1] + cost)
    # best[n]: (dearest stage, cuts) of the first n layers in the stages so far
    best: dict[int, tuple[float, Cuts]] = {n: (first + before[n], (n,)) for n in range(1, num_layers + 1)}
    for stage in range(1, num_stages):
        extra = last if stage == num_stages - 1 else 0.0
        best = {
            n: min(
                (max(best[k][0], before[n] - before[k] + extra), (*best[k][1], n - k)) for k in range(1, n) if k in best
            )
            for n in range(stage + 1, num_layers + 1)
        }
    return best[num_layers][1]
