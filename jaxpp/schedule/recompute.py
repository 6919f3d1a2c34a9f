"""Recomputation put into any table: stages that keep nothing from their forward pass but what came in."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from jaxpp.schedule.laws import check
from jaxpp.schedule.table import BACKWARD, Cell, Schedule


def recomputing(schedule: Schedule, stages: Collection[int]) -> Schedule:
    """Return a table in which some stages run R before each backward pass, in one cell with it.

    Args:
        schedule: without recomputation of these stages.
        stages: that are recomputed.

    Raises:
        ValueError: a stage that is not there, or that is recomputed already.

    Source: Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016.
    """
    if not stages:
        return schedule

    def cell(old: Cell) -> Cell:
        again = [op for op in old if op.kind in BACKWARD and op.stage in stages]
        return (*(op._replace(kind="R") for op in again), *old)

    orders = tuple(tuple(map(cell, order)) for order in schedule.orders)
    made = replace(schedule, orders=orders)
    check(made)
    return made
