"""Merak: 1F1B with recomputation that is taken off the critical path, and the share that each stage recomputes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from jaxpp.names import unknown
from jaxpp.schedule.costs import Costs
from jaxpp.schedule.counts import check_counts, check_least
from jaxpp.schedule.one_f_one_b import alternating_order
from jaxpp.schedule.table import Cell, Op, Schedule

Variant = Literal["plain", "pre-recompute", "last-no-remat", "shifted"]
VARIANTS: tuple[Variant, ...] = ("plain", "pre-recompute", "last-no-remat", "shifted")


def merak(ranks: int, microbatches: int, variant: Variant = "shifted") -> Schedule:
    """Return 1F1B's table with R before each D; each variant does what the one before it does, and more.

    - ``plain``: R and D are one cell, so that R waits for the gradient too. Makespan ``(m + p - 1)(F + R + D)``.
    - ``pre-recompute``: in the cool-down (the last ``p - 1 - s`` backwards of stage s) R does not wait. Saves
      ``(p - 1)R``.
    - ``last-no-remat``: the last stage, which holds one microbatch, recomputes nothing; the stage before it does not
      wait with its first R. Saves 2R more.
    - ``shifted``: the stage before the last runs its third F ahead of its first D and does not wait with its first two
      R, nor the stage before it with its first. Saves R more: ``m(F + R + D) + (p - 1)(F + D) - 3R``.

    The first formula always holds, the second for ``R <= F``, the third and fourth for ``R = F <= D / 2`` and two
    ranks or more. Peak ``min(m, p - s)``
    activations on stage s, 3 on the last but one if shifted; between F and R only the stage's input and what it does
    not recompute are held. Weights held once. Messages: ``p - 1`` for each microbatch and direction.

    Args:
        ranks: ``p``, one stage each.
        microbatches: ``m``; shifted: at least 4 and p.
        variant: one of `VARIANTS`.

    Raises:
        ValueError: an unknown variant, or too few microbatches for it.

    Source: Lai et al., Merak: An Efficient Distributed DNN Training Framework with Automated 3D Parallelism for Giant
    Foundation Models, 2023, the shifted critical path.
    """
    check_counts("merak", ranks=ranks, microbatches=microbatches)
    if variant not in VARIANTS:
        raise ValueError(unknown("schedule merak: unknown variant", variant, VARIANTS))
    if variant == "shifted":
        check_least("merak", "microbatches", microbatches, max(ranks, 4), "max(ranks, 4)")
    orders = tuple(_order(stage, ranks, microbatches, VARIANTS.index(variant)) for stage in range(ranks))
    return Schedule("merak", ranks, microbatches, orders, (tuple(range(ranks)),))


def recompute_ratios(num_stages: int, first: float, variant: Variant = "last-no-remat") -> tuple[float, ...]:
    """Return the share of its layers that each stage recomputes, so that all hold about as much.

    Stage s (from 0) has ``S - 1 - s`` microbatches waiting beside the one at work; that number times the share that
    is *not* recomputed stays what it is on stage 0: ``r(s) = max(0, 1 - (1 - first)(S - 1) / (S - 1 - s))``, and 0 on
    the last. The shifted variant holds as many on the last stage but one as on the one before: they share a ratio.

    Args:
        num_stages: ``S``.
        first: the share of stage 0, from 0 to 1.
        variant: of the schedule; ``shifted`` differs.

    Raises:
        ValueError: a share outside 0 to 1.

    Example:
        >>> [round(ratio, 2) for ratio in recompute_ratios(4, 0.8)]
        [0.8, 0.7, 0.4, 0.0]
    """
    check_counts("merak", num_stages=num_stages)
    if not 0 <= first <= 1:
        raise ValueError(
            f"schedule merak: the first stage recomputes {first} of its layers; a share from 0 to 1 is needed"
        )
    last = num_stages - 1
    ratios = [max(0.0, 1 - (1 - first) * last / (last - stage)) for stage in range(last)] + [0.0]
    if variant == "shifted" and num_stages > 2:
        ratios[-2] = ratios[-3]
    return tuple(ratios)


def with_recomputation(costs: Costs, ratios: Sequence[float]) -> Costs:
    """Return costs of stages that recompute a share of their layers.

    Args:
        costs: of the stages. R costs that share of F; the rest of the activations is kept from F to R.
        ratios: for each stage the share of its layers.

    Raises:
        ValueError: another number of ratios than of stages.
    """
    if len(ratios) != len(costs.stages):
        raise ValueError(f"{len(ratios)} ratios of recomputation; {len(costs.stages)}, one for each stage, are needed")
    stages = []
    for stage, ratio in zip(costs.stages, ratios, strict=True):
        kept = round((1 - ratio) * stage.activation_bytes)
        stages.append(replace(stage, recompute_s=ratio * stage.forward_s, kept_bytes=kept))
    return replace(costs, stages=tuple(stages))


def _order(stage: int, ranks: int, microbatches: int, level: int) -> tuple[Cell, ...]:
    """Return one stage's cells; `level` is the place of the variant among `VARIANTS`."""
    to_last = ranks - 1 - stage
    order = list(alternating_order(stage, microbatches, to_last))
    if level == 3 and to_last == 1:
        third = Op("F", stage, 2)
        order.remove(third)
        order.insert(order.index(Op("D", stage, 0)), third)
    waiting = range(microbatches - to_last if level >= 1 else microbatches)
    ahead = {(2, 1): 1, (3, 1): 2, (3, 2): 1}.get((level, to_last), 0)
    cells: list[Cell] = []
    for op in order:
        again = op._replace(kind="R")
        if op.kind == "F" or (level >= 2 and to_last == 0):
            cells.append((op,))
        elif op.microbatch in waiting[ahead:]:
            cells.append((again, op))
        else:
            cells += [(again,), (op,)]
    return tuple(cells)
