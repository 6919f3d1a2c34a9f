"""A training run grows as a whole: weights, moments, counters and data position, so that it goes on where it was."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax

from jaxpp import config as configs
from jaxpp import dims, tree
from jaxpp.checkpoint import Checkpoints
from jaxpp.grow.leaf import Leaf
from jaxpp.grow.moments import origin_of, power_of
from jaxpp.grow.places import carried_over, make_moment, make_weight
from jaxpp.grow.settings import settings_of
from jaxpp.grow.step import Growth
from jaxpp.parallel import Plan
from jaxpp.pretrained import Checkpoint, Progress, Saved
from jaxpp.train.config import Run, resolved
from jaxpp.train.optimizer import make_optimizer
from jaxpp.train.programs import make_program

_PARAMS, _OPTIMIZER = "params/", "optimizer/"


def has_moments(checkpoint: Checkpoint) -> bool:
    """Say whether a checkpoint is of a training run, with the state of its optimizer."""
    if not isinstance(checkpoint, Saved):
        return False
    return any(name.startswith(_OPTIMIZER) for name in checkpoint.checkpoints.contents(checkpoint.source.step))


@dataclass(frozen=True, eq=False)
class GrownRun:
    """A run, grown.

    Args:
        origin: the run's checkpoint.
        growth: how its model grows.
        directory: where the grown run will live.
        mesh: on which it is grown; its own plan stays.
    """

    origin: Saved
    growth: Growth
    directory: Path
    mesh: str = "data:1"

    @cached_property
    def run(self) -> Run:
        """Its config: the model grown, learning rates of its weights scaled, new units faded in."""
        before = self.origin.source.run()
        found = settings_of(self.growth, before.optimizer.rates, self.origin.source.step)
        optimizer = replace(before.optimizer, rates=found.rates)
        train = before.train if found.ramp is None else replace(before.train, ramp=found.ramp)
        return replace(
            before, model=self.growth.target, directory=str(self.directory), init="", optimizer=optimizer, train=train
        )

    @cached_property
    def _leaves(self) -> dict[str, Leaf]:
        return self.growth.leaves()

    @cached_property
    def _contents(self) -> Mapping[str, jax.ShapeDtypeStruct]:
        return self.origin.checkpoints.contents(self.origin.source.step)

    @cached_property
    def like(self) -> Any:
        """The state of the grown run, abstract.

        Raises:
            ValueError: the optimizer keeps what does not grow, or the mesh does not hold the model.
        """
        run = self.run
        if run.optimizer.name == "sgd":
            raise ValueError(
                "optimizer sgd moves by the size of gradients, for which the learning rates of growth are not made; "
                "start the optimizer anew (--optimizer reset), or train on with adamw"
            )
        state = make_program(run.model, make_optimizer(run.optimizer), Plan(mesh=self.mesh)).abstract_state
        for name in tree.named_leaves(state.optimizer):
            if (found := origin_of(name, self._leaves)) is not None:
                power_of(name, found[1])
        return state

    def num_bytes(self) -> int:
        """Count the bytes of the grown state."""
        return tree.total_bytes(self.like)

    def write(self, directory: Path, progress: Progress | None = None) -> None:
        """Grow the state leaf by leaf, and save it as the step that it is of.

        Args:
            directory: of the run, to be written.
            progress: called with the bytes made since the last call.

        Cost: memory: the process's shards of the state, and of one leaf its source.
        """
        arrows = dims.arrows(self.like.params)
        made = {}
        for name, goal in tree.named_leaves(self.like).items():
            made[name] = jax.block_until_ready(self._make(name, goal, arrows))
            if progress:
                progress(tree.num_bytes(made[name]))
        step, texts = self.origin.source.step, dict(self.origin.texts)
        texts |= {"config.yaml": configs.dump(resolved(self.run)), "growth.yaml": self.growth_text()}
        with Checkpoints(directory / "checkpoints", asynchronous=False) as checkpoints:
            checkpoints.save(step, made, texts)
        if jax.process_index() == 0:
            (directory / "config.yaml").write_text(texts["config.yaml"])

    def growth_text(self) -> str:
        """Say where it came from."""
        return settings_of(self.growth).text(self.origin.name, self.growth)

    def _make(self, name: str, goal: Any, arrows: Mapping[str, dims.Arrow]) -> jax.Array:
        if name.startswith(_PARAMS):
            path = name.removeprefix(_PARAMS)
            leaf = self._leaves[path]
            x = self._read(_PARAMS + leaf.source, goal, arrows[path])
            return make_weight(leaf, x, x.dtype, goal.sharding)
        found = origin_of(name, self._leaves) if name.startswith(_OPTIMIZER) else None
        if found is None or goal.shape == ():
            return self._restore(name, self._contents[name], goal.sharding)
        prefix, path = found
        leaf = self._leaves[path]
        x = self._read(prefix + leaf.source, goal, arrows[path])
        return make_moment(leaf, x, power_of(name, path), goal.sharding)

    def _read(self, name: str, goal: Any, arrow: dims.Arrow) -> jax.Array:
        """Read an array of the origin, split over the mesh as the one that it becomes."""
        stored = self._contents[name]
        same = arrow if len(arrow.dims) == len(stored.shape) else _without_new(arrow)
        return self._restore(name, stored, carried_over(goal.sharding, arrow.dims, same, stored.shape))

    def _restore(self, name: str, stored: Any, place: Any) -> jax.Array:
        wanted = {name: jax.ShapeDtypeStruct(stored.shape, stored.dtype, sharding=place)}
        return self.origin.checkpoints.restore(self.origin.source.step, wanted, partial=True)[name]


def _without_new(arrow: dims.Arrow) -> dims.Arrow:
    """Return the arrow before experts were stacked."""
    return dims.Arrow(tuple(dim for dim in arrow.stacked if dim != "experts"), arrow.reads, arrow.writes)
