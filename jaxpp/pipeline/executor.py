"""A schedule over stages on places: in which order a program hands operations over, and what each of them is."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxpp.parallel import executing
from jaxpp.pipeline.operations import StageOperations
from jaxpp.pipeline.place import Place
from jaxpp.pipeline.stage import Stage
from jaxpp.pipeline.traced import trace
from jaxpp.schedule import Op, Schedule, simulate, unit_costs

Held = tuple[int, int]
"""A stage and the rank that holds it: a schedule of two directions holds each stage twice."""


def global_order(schedule: Schedule) -> list[tuple[int, Op]]:
    """Return all operations with their ranks, in the order in which one program hands them over.

    By the start times of the simulated table; the order of each rank is its own.
    """
    timeline = simulate(schedule, unit_costs(schedule, recompute=1.0))
    events = sorted(timeline.events, key=lambda event: (event.start_s, event.rank))
    return [(event.rank, op) for event in events for op in event.cell]


@dataclass(frozen=True, eq=False)
class Executor:
    """A schedule over stages on places.

    Args:
        stages: functions and the shapes of their weights.
        schedule: the table.
        places: one for each rank.
    """

    stages: tuple[Stage, ...]
    schedule: Schedule
    places: tuple[Place, ...]

    def __post_init__(self) -> None:
        if len(self.stages) != self.schedule.num_stages:
            raise ValueError(
                f"{len(self.stages)} stages are given; schedule {self.schedule.name} on {self.schedule.num_ranks} "
                f"ranks runs {self.schedule.num_stages}"
            )

    @cached_property
    def order(self) -> list[tuple[int, Op]]:
        """All operations in the order in which they are handed over."""
        return global_order(self.schedule)

    @cached_property
    def held(self) -> tuple[Held, ...]:
        """Every stage with each rank that holds it; the first of a stage owns it."""
        pairs = [(stage, ranks[stage]) for ranks in self.schedule.placement for stage in range(len(self.stages))]
        return tuple(sorted(dict.fromkeys(pairs), key=lambda pair: (pair[0], pairs.index(pair))))

    @cached_property
    def forward_only(self) -> Executor:
        """The same without backward passes, for losses alone."""
        orders = tuple(
            tuple((op,) for cell in order for op in cell if op.kind == "F") for order in self.schedule.orders
        )
        return replace(self, schedule=replace(self.schedule, orders=orders))

    def owner(self, stage: int) -> Place:
        """Return the place that owns a stage."""
        return self.places[self.schedule.placement[0][stage]]

    @cached_property
    def recomputed(self) -> frozenset[tuple[int, int]]:
        """Stages and microbatches that are recomputed."""
        return frozenset((op.stage, op.microbatch) for _, op in self.order if op.kind == "R")

    def operations(self, batch: Any, key: Any) -> dict[Held, StageOperations]:
        """Trace every stage.

        Args:
            batch: shapes of a microbatch.
            key: shape of the run's key, or None.
        """
        kinds: dict[Held, set[str]] = {pair: set() for pair in self.held}
        for rank, op in self.order:
            if op.kind in "DB":
                kinds[op.stage, rank].add(op.kind)
        found: dict[Held, StageOperations] = {}
        for ranks in self.schedule.placement:
            x, specs = None, ()
            for index, stage in enumerate(self.stages):
                pair, is_last = (index, ranks[index]), index == len(self.stages) - 1
                run = frozenset(kinds[pair])
                found[pair] = operations_of(stage, self.places[pair[1]], is_last, run, x, specs, batch, key)
                x, specs = found[pair].traced.y_shape, found[pair].y_specs
        return found


def operations_of(
    stage: Stage, place: Place, is_last: bool, kinds: frozenset[str], x: Any, x_specs: tuple[PartitionSpec, ...],
    batch: Any, key: Any,
) -> StageOperations:  # fmt: skip
    """Return the operations of a stage on a place; of the same function and shapes, the same.

    Args:
        stage: its function and the shapes of its weights.
        place: where it runs.
        is_last: whether it returns losses.
        kinds: of backward passes.
        x: shapes of what comes in.
        x_specs: how its leaves are split.
        batch: shapes of a microbatch.
        key: shape of the step's key, or None.
    """
    given = (stage.params, x, batch, key)
    leaves, structure = jax.tree.flatten(given)
    name = (stage.function, stage.entry, is_last, kinds, x_specs, structure, *((a.shape, a.dtype) for a in leaves))
    if name not in place.memo:
        with executing(place.execution):
            traced = trace(stage, is_last, *given)
        goals = jax.tree.leaves(place.weight_shardings(stage.params, "moments"))
        sums = tuple(
            jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=goal)
            for leaf, goal in zip(jax.tree.leaves(stage.params), goals, strict=True)
        )
        title = getattr(stage.function, "__name__", "stage")
        place.memo[name] = StageOperations(title, traced, place, is_last, kinds, x_specs, sums)
    return place.memo[name]
