"""A pipeline: stages, a schedule and the devices they run on; loss and gradients of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxpp import tree
from jaxpp.mesh import Device
from jaxpp.parallel import Plan
from jaxpp.pipeline.batch import lay_out, microbatch_shapes
from jaxpp.pipeline.executor import Executor, Held
from jaxpp.pipeline.mpmd import Walk
from jaxpp.pipeline.place import Place, make_places
from jaxpp.pipeline.stage import Stage, as_stages
from jaxpp.pipeline.transfer import add, fetch, move, move_weights
from jaxpp.schedule import Schedule

Use = tuple[int, str]
"""A stage and the path of one of its weights, as `jaxpp.tree.named_nodes` names it."""


@dataclass(frozen=True)
class Sums:
    """What one pass leaves, before it is divided by the weight.

    Args:
        loss: the sum of losses on each rank, fp32 scalars.
        weight: the sum of weights on each rank, fp32 scalars.
        gradients: for each stage the leaves of its summed gradient, fp32; of a shared weight its owner has them all,
            and the other uses None.
        peak_activations: for each rank, the most activations (one stage, one microbatch) held at once.
    """

    loss: tuple[Any, ...]
    weight: tuple[Any, ...]
    gradients: tuple[list[Any], ...]
    peak_activations: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Pipeline:
    """Stages that run by a schedule.

    Args:
        executor: walks the table.
        tied: groups of uses of one weight, the owner's first.
    """

    executor: Executor
    tied: tuple[tuple[Use, ...], ...] = ()

    @property
    def places(self) -> tuple[Place, ...]:
        """One for each rank."""
        return self.executor.places

    @property
    def here(self) -> int:
        """A rank that has devices of this process."""
        return next(rank for rank, place in enumerate(self.places) if place.is_local)

    @cached_property
    def borrowed(self) -> dict[tuple[int, int], tuple[int, int]]:
        """For each use of a shared weight but the owner's, stage and place among its leaves, the owner's.

        Raises:
            ValueError: a stage or path that is not there, or shapes that differ.
        """
        found: dict[tuple[int, int], tuple[int, int]] = {}
        for owner, *others in self.tied:
            for other in others:
                shapes = [self._leaf(use)[1].shape for use in (owner, other)]
                if shapes[0] != shapes[1]:
                    raise ValueError(f"tied weights {owner} and {other} have shapes {shapes[0]} and {shapes[1]}")
                found[other[0], self._leaf(other)[0]] = (owner[0], self._leaf(owner)[0])
        return found

    def _leaf(self, use: Use) -> tuple[int, Any]:
        stage, path = use
        known = tree.named_nodes(self.executor.stages[stage].params) if stage < len(self.executor.stages) else {}
        if path not in known:
            raise ValueError(
                f"tied weight {path} of stage {stage}: no such weight; it has {', '.join(known) or 'none'}"
            )
        return list(known).index(path), known[path]

    def lay_out(self, params: Sequence[Any], share: bool = False) -> tuple[Any, ...]:
        """Put each stage's weights onto its owner's devices.

        Args:
            params: host arrays (the same on every process), or arrays of this process.
            share: whether what lies there already may be used as it is; training would use it up.
        """
        found = []
        for index, (stage, one) in enumerate(zip(self.executor.stages, params, strict=True)):
            place = self.executor.owner(index)
            goals = jax.tree.leaves(place.weight_shardings(stage.params))
            leaves, structure = jax.tree.flatten(one)
            if jax.process_count() > 1:
                laid = [place.put(leaf, goal) for leaf, goal in zip(leaves, goals, strict=True)]
            else:
                laid = jax.device_put(leaves, goals, may_alias=share)
            found.append(jax.tree.unflatten(structure, laid))
        return tuple(found)

    def held(self, params: Sequence[Any]) -> dict[Held, list[jax.Array]]:
        """Return the leaves of every held stage; those of a second rank are sent there."""
        found: dict[Held, list[jax.Array]] = {}
        for stage, rank in self.executor.held:
            leaves = jax.tree.leaves(params[stage])
            place, owner = self.places[rank], self.executor.owner(stage)
            found[stage, rank] = leaves if place is owner else move_weights(leaves, owner, place)
        return found

    def sums(self, params: Sequence[Any], batch: Any, key: Any = None, step: int = 0) -> Sums:
        """Run the schedule over a batch.

        Args:
            params: of each stage, on its owner's devices.
            batch: host arrays ``[batch, ...]``, the same on every process.
            key: PRNG key of the run, the same for every step; None where nothing is drawn.
            step: number of this step, for keys.
        """
        walk = self._walk(self.executor, params, batch, key, step)
        gradients = tuple(walk.own_sums(stage) for stage in range(len(self.executor.stages)))
        self._gather_tied(gradients)
        totals = walk.totals_everywhere()
        loss, weight = (tuple(one[i] for one in totals) for i in (0, 1))
        return Sums(loss, weight, gradients, tuple(walk.peak))

    def losses(self, params: Sequence[Any], batch: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Return the sum of losses and the sum of weights on each rank, without gradients and without drawing."""
        totals = self._walk(self.executor.forward_only, params, batch, None, 0).totals_everywhere()
        return tuple(one[0] for one in totals), tuple(one[1] for one in totals)

    def _walk(self, executor: Executor, params: Sequence[Any], batch: Any, key: Any, step: int) -> Walk:
        data = None if key is None else np.asarray(jax.random.key_data(key))
        shape = None if data is None else jax.ShapeDtypeStruct(data.shape, data.dtype)
        operations = executor.operations(microbatch_shapes(executor, batch), shape)
        local = [(rank, place) for rank, place in enumerate(self.places) if place.is_local]
        keys = {} if data is None else {rank: place.put(data, place.layout.replicated()) for rank, place in local}
        walk = Walk(executor, self.held(params), lay_out(executor, operations, batch), operations, keys, step)
        walk.run()
        return walk

    def _gather_tied(self, gradients: Sequence[list[Any]]) -> None:
        """Add the gradients of all uses of a weight up at its owner."""
        for (stage, leaf), (owner, at) in self.borrowed.items():
            place = self.executor.owner(owner)
            gradients[owner][at] = add(place, [gradients[owner][at]], move([gradients[stage][leaf]], place))[0]
            gradients[stage][leaf] = None


def make_pipeline(
    stages: Sequence[Any], schedule: Schedule, mesh: str | Plan | Mesh | Sequence[Place] | None = None,
    tied: Sequence[Sequence[Use]] = (), devices: Sequence[Device] | None = None,
) -> Pipeline:  # fmt: skip
    """Put stages, a schedule and devices together.

    Args:
        stages: `Stage`s or pairs ``(function, params)``, in order.
        schedule: of as many stages.
        mesh: with an axis `stage` of as many devices as the schedule has ranks; None: one device for each rank. Places
            that were made before bring what was compiled for them.
        tied: groups of uses ``(stage, path)`` of one weight, the owner's first.
        devices: to use; all of them if None.

    Raises:
        ValueError: numbers that do not fit, or tied weights that do not.
    """
    known = tuple(Stage(one.function, shapes(one.params), one.entry) for one in as_stages(stages))
    ranks = schedule.num_ranks
    if mesh is None:
        places = make_places(f"stage:{ranks}", ranks, list(jax.devices() if devices is None else devices)[:ranks])
    elif isinstance(mesh, str | Plan | Mesh):
        places = make_places(mesh, ranks, devices)
    else:
        places = tuple(mesh)
    pipeline = Pipeline(Executor(known, schedule, places), tuple(tuple(group) for group in tied))
    _ = pipeline.borrowed  # refuses what does not fit
    return pipeline


def fetch_states(pipeline: Pipeline, parts: Sequence[Any]) -> tuple[Any, ...]:
    """Return the states of all stages as host arrays, on every process; all processes make the same call.

    Cost: each process but the owner of a stage is sent all of that stage.
    """
    found = []
    for stage, part in enumerate(parts):
        leaves, structure = jax.tree.flatten(part)
        held = fetch(leaves, pipeline.executor.owner(stage), pipeline.places)
        found.append(jax.tree.unflatten(structure, held))
    return tuple(found)


def shapes(values: Any) -> Any:
    """Return a tree of the shapes of arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype)), values)
