"""One rank of our pipeline in a process of its own, connected to the others or not (`tests/bench/pipelines.py`)."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpp import runtime
from jaxpp.pipeline import Pipeline, Place, Stage, make_pipeline, make_places
from jaxpp.pipeline.batch import lay_out, microbatch_shapes
from jaxpp.pipeline.executor import Executor, Held
from jaxpp.pipeline.mpmd import Walk
from jaxpp.pipeline.timing import measure
from jaxpp.schedule import Op, build, simulate
from tests.bench.pipeline_case import CHUNKS, EPSILON, RANKS, Case, serve


def _layers(params: Any, h: jax.Array) -> jax.Array:
    for layer in params["layers"]:
        normed = h * jax.lax.rsqrt(jnp.mean(h * h, axis=-1, keepdims=True) + EPSILON)
        h = h + jax.nn.gelu(normed @ layer["up"]) @ layer["down"]
    return h


def _entry(params: Any, batch: Any) -> jax.Array:
    return batch["x"] * params["scale"]


def _middle(params: Any, x: Any, batch: Any, key: Any) -> Any:
    return _layers(params, x)


def _last(params: Any, x: Any, batch: Any, key: Any) -> Any:
    y = _layers(params, x)
    return jnp.sum((y - batch["target"]) ** 2), jnp.float32(y.size)


def stages(case: Case, num_stages: int) -> list[Stage]:
    """Return the stages with their weights."""
    found = []
    for stage in range(num_stages):
        params: dict[str, Any] = {"layers": [case.weights(layer) for layer in case.layers(stage, num_stages)]}
        if stage == 0:
            params["scale"] = case.scale()
        function = _last if stage == num_stages - 1 else _middle
        found.append(Stage(function, params, None if stage else _entry))
    return found


@dataclass(frozen=True, eq=False)
class OneRank(Executor):
    """The part of a table that one rank runs.

    Args:
        rank: which.
    """

    rank: int = 0

    @cached_property
    def held(self) -> tuple[Held, ...]:
        """The stages of this rank."""
        return tuple(pair for pair in super().held if pair[1] == self.rank)

    @cached_property
    def order(self) -> list[tuple[int, Op]]:
        """The operations of this rank."""
        return [(rank, op) for rank, op in super().order if rank == self.rank]


class Alone(Walk):
    """One rank's operations, one after the other: what others would send is there from the start."""

    boundary: jax.Array

    def run(self) -> None:
        """Hand every operation over."""
        last = len(self.executor.stages) - 1
        for _, (kind, stage, microbatch) in self.executor.order:
            if kind == "F" and stage:
                self.arrived[stage, microbatch] = [self.boundary]
            if kind in "DB" and stage < last:
                self.returned[stage, microbatch] = [self.boundary]
        super().run()

    def _send(self, values: Any, rank: int, stage: int, microbatch: int) -> Any:
        return [self.boundary]


class Rank:
    """This process's rank, with every schedule compiled.

    Args:
        case: the work.
        rank: which.
        connected: whether it runs with the others or by itself.
    """

    def __init__(self, case: Case, rank: int, connected: bool):
        """Make the places; nothing is compiled yet."""
        self.case, self.rank, self.batch = case, rank, case.batch()
        self.places: tuple[Place, ...] = (
            make_places(f"stage:{RANKS}", RANKS) if connected else make_places("data:1", 1) * RANKS
        )

    @cache  # noqa: B019
    def pipeline(self, schedule: str) -> tuple[Pipeline, Any]:
        """Return a pipeline and its weights."""
        table = build(schedule, RANKS, self.case.num_microbatches, CHUNKS[schedule])
        known = stages(self.case, table.num_stages)
        made = make_pipeline(known, table, self.places)
        return made, made.lay_out([stage.params for stage in known])

    def step(self, schedule: str, count: int) -> dict[str, Any]:
        """Run whole steps; tell when each started and ended, the loss, and the square of the gradient's norm."""
        (pipeline, params), spans, sums = self.pipeline(schedule), [], None
        for _ in range(count):
            runtime.barrier("step")
            start = time.perf_counter()
            sums = pipeline.sums(params, self.batch)
            own = [leaf for leaf in jax.tree.leaves(sums.gradients) if leaf.is_fully_addressable]
            jax.block_until_ready((own, sums.loss[self.rank]))
            spans.append((start, time.perf_counter()))
        assert sums is not None
        squares = sum(float(np.square(np.asarray(leaf, np.float64)).sum()) for leaf in own)
        return {"spans": spans, "loss": float(sums.loss[self.rank]), "squares": squares}

    def simulated(self, schedule: str) -> dict[str, float]:
        """Measure what operations and transfers cost while all ranks work; simulate a step of that."""
        pipeline, params = self.pipeline(schedule)
        costs = measure(pipeline, params, self.batch, repeats=6)
        timeline = simulate(pipeline.executor.schedule, costs)
        return {"simulated": timeline.makespan_s, "bound": max(timeline.busy_s) / timeline.makespan_s}

    def alone(self, schedule: str, seconds: float) -> dict[str, Any]:
        """Run this rank's operations back to back for some time; tell how long each pass took."""
        end, spans = time.perf_counter() + seconds, []
        for walk in self._walks(schedule):
            start = time.perf_counter()
            walk.run()
            jax.block_until_ready((walk.sums, walk.totals))
            spans.append((start, time.perf_counter()))
            if time.perf_counter() >= end:
                return {"spans": spans}
        raise AssertionError

    def _walks(self, schedule: str) -> Iterator[Alone]:
        pipeline, params = self.pipeline(schedule)
        whole = pipeline.executor
        executor = OneRank(whole.stages, whole.schedule, whole.places, self.rank)
        operations = whole.operations(microbatch_shapes(whole, self.batch), None)
        own = {pair: one for pair, one in operations.items() if pair[1] == self.rank}
        parts = lay_out(executor, own, self.batch)
        weights = {pair: jax.tree.leaves(params[pair[0]]) for pair in executor.held}
        place = self.places[self.rank]
        boundary = place.put(self.case.boundary(), place.sharding(place.batch_spec((self.case.rows,))))
        while True:
            walk = Alone(executor, weights, parts, own, {})
            walk.boundary = boundary
            yield jax.block_until_ready(walk)


def main() -> None:
    """Serve."""
    request = json.loads(sys.argv[1])
    if request["connected"]:
        runtime.initialize()
    rank = Rank(Case(**request["case"]), request["rank"], request["connected"])
    serve({"step": rank.step, "alone": rank.alone, "simulated": rank.simulated})


if __name__ == "__main__":
    main()
