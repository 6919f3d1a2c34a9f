"""Random tables and costs, and the dumb way to play them."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from jaxpp.schedule import Costs, Op, Schedule, StageCosts
from jaxpp.schedule.merak import VARIANTS


@st.composite
def fitting(draw: st.DrawFn, name: str, most_ranks: int = 5) -> dict[str, Any]:
    """Draw numbers and options for which the named schedule exists."""
    ranks = draw(st.integers(1, most_ranks))
    few = st.integers(0, 6)
    match name:
        case "interleaved":
            group = ranks + draw(st.integers(0, 2))
            rest = draw(st.sampled_from([0, *range(ranks, group)]))
            microbatches = group * draw(st.integers(1, 3)) + rest
            return {"ranks": ranks, "microbatches": microbatches, "chunks": draw(st.integers(1, 3)), "group": group}
        case "zb-v":
            return {"ranks": ranks, "microbatches": 2 * ranks - 1 + draw(few)}
        case "chimera":
            return {"ranks": 2 * ranks, "microbatches": 2 * ranks * draw(st.integers(1, 3))}
        case "dualpipe":
            return {"ranks": 2 * (half := (ranks + 1) // 2), "microbatches": 4 * half + 2 * draw(few)}
        case "dualpipe-v":
            return {"ranks": ranks, "microbatches": 2 * ranks + draw(few)}
        case "hanayo":
            waves = draw(st.integers(1, 3))
            if draw(st.booleans()):
                return {"ranks": ranks, "microbatches": ranks, "waves": waves, "order": "hand"}
            return {"ranks": ranks, "microbatches": 1 + draw(few), "waves": waves}
        case "merak":
            variant = draw(st.sampled_from(VARIANTS))
            least = max(ranks, 4) if variant == "shifted" else 1
            return {"ranks": ranks, "microbatches": least + draw(few), "variant": variant}
        case _:
            return {"ranks": ranks, "microbatches": 1 + draw(few)}


@st.composite
def uneven(draw: st.DrawFn, schedule: Schedule) -> Costs:
    """Draw whole numbers for every stage and every boundary, so that sums are exact."""
    times, sizes = st.integers(1, 9), st.integers(1, 5)
    stages = tuple(
        StageCosts(draw(times), draw(times), draw(times), draw(times), activation_bytes=draw(sizes))
        for _ in range(schedule.num_stages)
    )
    boundaries = range(max(schedule.num_stages - 1, 1))
    return Costs(stages, tuple(float(draw(st.integers(0, 5))) for _ in boundaries))


def whole_costs(
    schedule: Schedule, f: int, b: int, w: int, r: int = 0, transfer_s: float = 0.0, overlap: float = 1.0
) -> Costs:
    """Return equal costs of all stages, whole numbers, so that sums are exact; a rank's share is v times as much."""
    return Costs((StageCosts(f, b, w, r),) * schedule.num_stages, (transfer_s,), overlap=overlap)


def relaxed_ends(schedule: Schedule, costs: Costs) -> dict[Op, float]:
    """Return when operations end: start times pushed back, cell after cell, until nothing moves."""
    cells = [(rank, i, cell) for rank, order in enumerate(schedule.orders) for i, cell in enumerate(order)]
    ends = {op: 0.0 for _, _, cell in cells for op in cell}
    moved = True
    while moved:
        moved = False
        for rank, i, cell in cells:
            start = ends[schedule.orders[rank][i - 1][0]] if i else 0.0
            for op in cell:
                for need in set(schedule.needs(op)) - set(cell):
                    apart = schedule.rank_of(need.stage, need.microbatch) != rank
                    wait = costs.transfer(min(need.stage, op.stage)) if apart else 0.0
                    start = max(start, ends[need] + wait)
            end = start + costs.seconds(cell)
            for op in cell:
                if ends[op] != end:
                    ends[op], moved = end, True
    return ends


def longest_chain(schedule: Schedule, costs: Costs) -> float:
    """Return the longest time that one microbatch takes through all stages and back if no rank is ever busy."""
    chains = []
    for j in range(schedule.num_microbatches):
        seconds = 0.0
        for s in range(schedule.num_stages):
            seconds += costs.stages[s].seconds("F") + costs.stages[s].seconds(schedule.backward_of[s, j])
            if s and schedule.rank_of(s - 1, j) != schedule.rank_of(s, j):
                seconds += 2 * costs.transfer(s - 1)
        chains.append(seconds)
    return max(chains)
