"""Pipeline schedules: who does what when. Tables, their laws, a simulator and pictures; imports no JAX."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from jaxpp.names import unknown
from jaxpp.schedule.chimera import chimera
from jaxpp.schedule.costs import Costs, StageCosts, unit_costs
from jaxpp.schedule.dualpipe import dualpipe, dualpipe_v
from jaxpp.schedule.gpipe import gpipe
from jaxpp.schedule.hanayo import hanayo
from jaxpp.schedule.interleaved import interleaved
from jaxpp.schedule.laws import check
from jaxpp.schedule.merak import merak, recompute_ratios, with_recomputation
from jaxpp.schedule.one_f_one_b import eager_one_f_one_b, one_f_one_b
from jaxpp.schedule.simulate import Deadlock, Event, Timeline, simulate
from jaxpp.schedule.table import Cell, Kind, Op, Schedule
from jaxpp.schedule.zb_v import zb_v
from jaxpp.schedule.zero_bubble import zb_h1, zb_h2

SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "eager-1f1b": eager_one_f_one_b,
    "interleaved": interleaved,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "zb-v": zb_v,
    "chimera": chimera,
    "dualpipe": dualpipe,
    "dualpipe-v": dualpipe_v,
    "hanayo": hanayo,
    "merak": merak,
}
"""For each name the function that makes the table: ``(ranks, microbatches, own options) -> Schedule``."""


def build(name: str, ranks: int, microbatches: int, chunks: int | None = None, **options: Any) -> Schedule:
    """Return the table of a named schedule, its laws checked.

    Args:
        name: a key of `SCHEDULES`.
        ranks: places of the pipeline.
        microbatches: parts of the batch.
        chunks: stages that each rank runs for one microbatch; None: as many as the schedule needs.
        options: of that schedule alone, e.g. ``waves`` of `hanayo`.

    Raises:
        ValueError: an unknown name or option, or numbers for which the schedule does not exist; what would do is named.

    Example:
        >>> schedule = build("interleaved", ranks=4, microbatches=8, chunks=2)
        >>> simulate(schedule, unit_costs(schedule)).makespan_s
        28.5
    """
    if name not in SCHEDULES:
        raise ValueError(unknown("unknown schedule", name, SCHEDULES))
    takes = list(inspect.signature(SCHEDULES[name]).parameters)
    for key in options:
        if key not in takes:
            raise ValueError(unknown(f"schedule {name}: unknown option", key, takes))
    if chunks is not None and "chunks" in takes:
        options["chunks"] = chunks
    schedule = SCHEDULES[name](ranks, microbatches, **options)
    if chunks not in (None, (own := schedule.num_stages // ranks)):
        raise ValueError(f"schedule {name}: chunks = {chunks}; {own} would do, as where nothing is said")
    check(schedule)
    return schedule


__all__ = [
    "SCHEDULES", "Cell", "Costs", "Deadlock", "Event", "Kind", "Op", "Schedule", "StageCosts", "Timeline", "build",
    "check", "recompute_ratios", "simulate", "unit_costs", "with_recomputation",
]  # fmt: skip
