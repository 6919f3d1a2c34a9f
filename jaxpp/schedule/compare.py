"""All schedules side by side for the same ranks, microbatches and costs, and the best of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from jaxpp.quantities import show_bytes, show_share
from jaxpp.schedule import SCHEDULES, build
from jaxpp.schedule.costs import Costs, unit_costs
from jaxpp.schedule.counts import check_counts
from jaxpp.schedule.held import weight_bytes
from jaxpp.schedule.layer_costs import ModelCosts, costs_of
from jaxpp.schedule.simulate import Timeline, simulate
from jaxpp.schedule.table import Schedule

USUAL_OPTIONS: dict[str, tuple[dict[str, Any], ...]] = {
    "interleaved": ({"chunks": 2}, {"chunks": 3}),
    "hanayo": ({"waves": 1}, {"waves": 2}),
    "merak": tuple({"variant": name} for name in ("plain", "pre-recompute", "last-no-remat", "shifted")),
}
"""What is tried of a schedule that has options; the others are tried as they are."""


@dataclass(frozen=True)
class Measures:
    """What a schedule takes. A share is what a rank has of the model: one of as many equal parts as there are ranks.

    Args:
        makespan_s: of a step.
        bubble_ratio: share of all ranks' time that is idle.
        activation_shares: most activations that a rank holds, in those of one microbatch in its share; what waits for
            its recomputation counts as nothing.
        activation_bytes: likewise, with what is kept until the recomputation.
        weight_shares: weights that a rank holds.
        memory_bytes: most of any rank: activations, and what stays all the time.
        messages: between ranks, for each microbatch and direction.
        sent_bytes: by all ranks in a step, activations and gradients.
        recomputes: whether forward passes run twice.
    """

    makespan_s: float
    bubble_ratio: float
    activation_shares: float
    activation_bytes: int
    weight_shares: float
    memory_bytes: int
    messages: float
    sent_bytes: int
    recomputes: bool


@dataclass(frozen=True)
class Row:
    """A schedule with its options, and what it takes or why it cannot be."""

    schedule: str
    options: Mapping[str, Any]
    measures: Measures | None
    reason: str = ""

    @property
    def label(self) -> str:
        """The schedule and its options, in words."""
        return " ".join([self.schedule, *(f"{key}={value}" for key, value in self.options.items())])


def compare(
    ranks: int, microbatches: int, costs: Costs | ModelCosts | None = None, memory_bytes: int | None = None
) -> list[Row]:
    """Simulate every schedule.

    Args:
        ranks: places of the pipeline.
        microbatches: parts of the batch.
        costs: of a model's layers, which suit any schedule; of stages, which suit those that have as many; or None:
            F = B = W = R = 1 for a rank's share, and transfers for nothing.
        memory_bytes: of a rank; what needs more is impossible.

    Returns:
        Rows, the fastest first, those of schedules that cannot be last.

    Raises:
        ValueError: no positive numbers of ranks and microbatches, or a limit of memory without costs in bytes.
    """
    check_counts("compare", ranks=ranks, microbatches=microbatches)
    if memory_bytes is not None and costs is None:
        raise ValueError(f"a limit of {show_bytes(memory_bytes)} needs costs in bytes: give a costs file")
    rows = [
        _row(name, options, ranks, microbatches, costs)
        for name in SCHEDULES
        for options in USUAL_OPTIONS.get(name, ({},))
    ]
    return sorted((_limited(row, memory_bytes) for row in rows), key=_order)


def best(rows: Sequence[Row]) -> tuple[Row | None, str]:
    """Return the fastest of compared schedules, and say in one line why it is that one."""
    possible = [(row, row.measures) for row in rows if row.measures and not row.reason]
    too_large = sorted(
        ((row, row.measures) for row in rows if row.measures and row.reason), key=lambda pair: pair[1].memory_bytes
    )
    if not possible and too_large:
        row, measures = too_large[0]
        return None, f"none fits; the smallest is {row.label} with {show_bytes(measures.memory_bytes)} a rank"
    if not possible:
        return None, "no schedule is possible"
    row, measures = possible[0]
    larger = sorted(too_large, key=lambda pair: pair[1].makespan_s)
    ahead = [other.label for other, taken in larger if taken.makespan_s < measures.makespan_s * (1 - 1e-9)]
    why = f"{row.label}: the shortest step" + (" of those that fit" if too_large else "")
    if len(possible) > 1:
        why += f", {_lead(measures, *possible[1])}"
    if ahead:
        why += f"; faster, but too large: {', '.join(ahead)}"
    return row, why


def _lead(measures: Measures, second: Row, taken: Measures) -> str:
    longer = taken.makespan_s / measures.makespan_s - 1
    if longer > 1e-9:
        return f"{show_share(longer)} before {second.label}"
    held = taken.activation_shares / measures.activation_shares - 1
    return f"as {second.label}, " + (f"which holds {show_share(held)} more activations" if held > 0 else "all alike")


def _row(
    name: str, options: dict[str, Any], ranks: int, microbatches: int, costs: Costs | ModelCosts | None
) -> Row:  # fmt: skip
    try:
        schedule = build(name, ranks, microbatches, **options)
        timeline = simulate(schedule, _priced(schedule, costs))
    except ValueError as error:
        return Row(name, options, None, str(error).removeprefix(f"schedule {name}: "))
    return Row(name, options, _measures(timeline, costs.state_per_weight if isinstance(costs, ModelCosts) else 1.0))


def _priced(schedule: Schedule, costs: Costs | ModelCosts | None) -> Costs:
    if costs is None:
        return unit_costs(schedule, recompute=1.0)
    return costs_of(schedule, costs) if isinstance(costs, ModelCosts) else costs


def _measures(timeline: Timeline, state_per_weight: float) -> Measures:
    schedule, activations, weights = timeline.schedule, timeline.peak_activation_bytes, weight_bytes(timeline)
    counted = Timeline(schedule, replace(unit_costs(schedule), transfer_bytes=(0,)), ()).peak_activation_bytes
    share = schedule.num_ranks / schedule.num_stages
    sent = [boundary for j in range(schedule.num_microbatches) for boundary in _sent(schedule, j)]
    sizes = timeline.costs.transfer_bytes
    return Measures(
        makespan_s=timeline.makespan_s,
        bubble_ratio=timeline.bubble_ratio,
        activation_shares=max(counted) * share,
        activation_bytes=max(activations),
        weight_shares=max(len(schedule.held_by(rank)) for rank in range(schedule.num_ranks)) * share,
        memory_bytes=max(a + round(state_per_weight * w) for a, w in zip(activations, weights, strict=True)),
        messages=len(sent) / schedule.num_microbatches,
        sent_bytes=2 * sum(sizes[boundary if len(sizes) > 1 else 0] for boundary in sent),
        recomputes="R" in schedule.kinds,
    )


def _sent(schedule: Schedule, microbatch: int) -> Iterator[int]:
    """Yield the boundaries at which a microbatch goes to another rank."""
    ranks = [schedule.rank_of(stage, microbatch) for stage in range(schedule.num_stages)]
    yield from (boundary for boundary, (here, there) in enumerate(pairwise(ranks)) if here != there)


def _limited(row: Row, memory_bytes: int | None) -> Row:
    if row.measures is None or memory_bytes is None or row.measures.memory_bytes <= memory_bytes:
        return row
    needed = show_bytes(row.measures.memory_bytes)
    return Row(row.schedule, row.options, row.measures, f"needs {needed} a rank, over {show_bytes(memory_bytes)}")


def _order(row: Row) -> tuple[Any, ...]:
    measures = row.measures
    if measures is None:
        return (2, row.label)
    # Sums of the same durations in another order differ in the last digits.
    makespan = float(f"{measures.makespan_s:.9g}")
    return (1 if row.reason else 0, makespan, measures.memory_bytes, measures.activation_shares, measures.messages)
