"""One optimizer per stage, with the update of one optimizer over the whole model.

The gradients' norm is taken over all stages: each one's sum of squares is sent to the first rank, the norm from there
to all. A shared weight is updated where it is owned, and sent to its other uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpp import tree
from jaxpp.pipeline.mean import mean_gradients
from jaxpp.pipeline.pipeline import Pipeline
from jaxpp.pipeline.transfer import absent, add, move, move_weights


def clip_by_norm(max_norm: float) -> optax.GradientTransformationExtraArgs:
    """Return ``optax.clip_by_global_norm``; for a part of a model the norm of the whole comes as ``grad_norm``."""

    def update(updates: Any, state: Any, params: Any = None, **given: Any) -> tuple[Any, Any]:
        grad_norm = given["grad_norm"] if "grad_norm" in given else optax.tree.norm(updates)

        def clip(g: jax.Array) -> jax.Array:
            return jnp.where(grad_norm < max_norm, g, (g / grad_norm.astype(g.dtype)) * max_norm)

        return jax.tree.map(clip, updates), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PipelineState:
    """What training carries from step to step.

    Args:
        step: the number of updates done.
        params: the weights of each stage, on its owner's devices.
        optimizer: the optax state of each stage, over the weights that it owns.
    """

    step: Any
    params: tuple[Any, ...]
    optimizer: tuple[Any, ...]


def _squares(gradients: Any) -> list[jax.Array]:
    squares = [jnp.sum(g.astype(jnp.float32) ** 2) for g in gradients]
    return [sum(squares[1:], squares[0])]


_SQUARES = jax.jit(_squares)
_ROOT = jax.jit(jnp.sqrt)
_BAD = jax.jit(lambda weights: [sum(jnp.sum(~jnp.isfinite(w)).astype(jnp.float32) for w in weights)])


@dataclass(frozen=True, eq=False)
class PipelineTrainer:
    """A pipeline with an optimizer.

    Args:
        pipeline: gives gradients.
        optimizer: an optax transformation of leaves alone (Adam, Muon, SGD). It may take ``grad_norm``, the norm over
            all stages, as `clip_by_norm` does; ``optax.clip_by_global_norm`` would clip each stage by itself.
    """

    pipeline: Pipeline
    optimizer: optax.GradientTransformation

    def owned(self, stage: int, params: Any) -> Any:
        """Return a stage's weights with None for those that another stage owns."""
        leaves, structure = jax.tree.flatten(params)
        borrowed = self.pipeline.borrowed
        return jax.tree.unflatten(structure, [None if (stage, i) in borrowed else x for i, x in enumerate(leaves)])

    @cached_property
    def abstract_optimizer(self) -> tuple[Any, ...]:
        """The optax state of each stage as shapes with shardings."""
        return tuple(self._abstract(index) for index in range(len(self.pipeline.executor.stages)))

    def _abstract(self, index: int) -> Any:
        place, params = (
            self.pipeline.executor.owner(index),
            self.owned(index, self.pipeline.executor.stages[index].params),
        )
        state, whole = (
            jax.eval_shape(self.optimizer.init, params),
            self.pipeline.executor.owner(index).layout.replicated(),
        )
        known = tree.named_nodes(params).values()
        arrows = all(tree.is_variable(node) and "dims" in node.get_metadata() for node in known)
        goals = place.layout.moment_shardings(state, params) if arrows else jax.tree.map(lambda _: whole, state)
        return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, goals)

    def init(self, params: Sequence[Any]) -> PipelineState:
        """Start from weights that lie on their owners' devices (see `Pipeline.lay_out`)."""
        states = []
        for index, (one, goal) in enumerate(zip(params, self.abstract_optimizer, strict=True)):
            leaves, structure = jax.tree.flatten(goal)
            if self.pipeline.executor.owner(index).is_local:
                begin = jax.jit(self.optimizer.init, out_shardings=jax.tree.map(lambda x: x.sharding, goal))
                states.append(begin(self.owned(index, one)))
            else:
                states.append(jax.tree.unflatten(structure, absent(leaves)))
        return PipelineState(0, tuple(params), tuple(states))

    @cached_property
    def _updates(self) -> list[Any]:
        rule = optax.with_extra_args_support(self.optimizer)

        def update(params: Any, state: Any, gradients: list[Any], norm: jax.Array) -> tuple[Any, Any]:
            gradients = jax.tree.unflatten(jax.tree.structure(params), gradients)
            updates, new = rule.update(gradients, state, params, grad_norm=norm)
            new = jax.tree.map(lambda a, b: a.astype(b.dtype), new, state)
            return optax.apply_updates(params, updates), new

        found = []
        for index, stage in enumerate(self.pipeline.executor.stages):
            place = self.pipeline.executor.owner(index)
            weights = self.owned(index, place.weight_shardings(stage.params))
            state = jax.tree.map(lambda x: x.sharding, self.abstract_optimizer[index])
            found.append(jax.jit(update, donate_argnums=(0, 1), out_shardings=(weights, state)))
        return found

    def norms(self, gradients: Sequence[Sequence[Any]]) -> list[jax.Array]:
        """Return, on every rank, the norm of the gradients of all stages."""
        totals = self._total(_SQUARES, gradients)
        return [_ROOT(x) if place.is_local else x for x, place in zip(totals, self.pipeline.places, strict=True)]

    def is_finite(self, state: PipelineState) -> bool:
        """Say whether every weight of every stage is finite; all processes make the same call."""
        leaves = [jax.tree.leaves(self.owned(stage, params)) for stage, params in enumerate(state.params)]
        return not float(self._total(_BAD, leaves)[self.pipeline.here])

    def _total(self, measure: Any, parts: Sequence[Sequence[Any]]) -> list[jax.Array]:
        """Add up, on every rank, what ``measure(leaves) -> [scalar]`` gives for each stage."""
        executor, total = self.pipeline.executor, None
        hub = executor.owner(0)
        for index, leaves in enumerate(parts):
            place, own = executor.owner(index), [leaf for leaf in leaves if leaf is not None]
            if not own:  # all its weights are another's
                continue
            kind = [jax.ShapeDtypeStruct((), jnp.float32, sharding=place.layout.replicated())]
            here = move(measure(own) if place.is_local else absent(kind), hub)
            total = here if total is None else add(hub, total, here)
        assert total is not None
        return [move(total, place)[0] for place in executor.places]

    def step(
        self, state: PipelineState, batch: Any, key: jax.Array | None = None
    ) -> tuple[PipelineState, dict[str, jax.Array]]:
        """Run a batch and update; the state that is passed in is used up.

        Args:
            state: from `init`.
            batch: host arrays ``[batch, ...]``, the same on every process.
            key: PRNG key of the run.

        Returns:
            The next state, and ``loss`` (mean, nats), ``grad_norm`` (before clipping) and ``weight``, on a device of
            this process.
        """
        pipeline = self.pipeline
        sums = pipeline.sums(state.params, batch, key, state.step)
        gradients = mean_gradients(pipeline, sums)
        norms = self.norms(gradients)
        params, optimizer = list(state.params), list(state.optimizer)
        for index in range(len(params)):
            if pipeline.executor.owner(index).is_local:
                self._update(index, params, optimizer, gradients[index], norms)
        for (stage, leaf), (owner, at) in pipeline.borrowed.items():
            leaves, structure = jax.tree.flatten(params[stage])
            source, place = pipeline.executor.owner(owner), pipeline.executor.owner(stage)
            leaves[leaf] = move_weights([jax.tree.leaves(params[owner])[at]], source, place)[0]
            params[stage] = jax.tree.unflatten(structure, leaves)
        here = pipeline.here
        loss = sums.loss[here] / jnp.maximum(sums.weight[here], np.float32(1e-8))
        metrics = {"loss": loss, "grad_norm": norms[here], "weight": sums.weight[here]}
        return PipelineState(state.step + 1, tuple(params), tuple(optimizer)), metrics

    def _update(self, index: int, params: list[Any], optimizer: list[Any], gradients: list[Any], norms: Any) -> None:
        own = [g for g in gradients if g is not None]
        norm = norms[self.pipeline.executor.schedule.placement[0][index]]
        new, optimizer[index] = self._updates[index](self.owned(index, params[index]), optimizer[index], own, norm)
        leaves, structure = jax.tree.flatten(params[index])
        fresh = iter(jax.tree.leaves(new))
        kept = [x if (index, i) in self.pipeline.borrowed else next(fresh) for i, x in enumerate(leaves)]
        params[index] = jax.tree.unflatten(structure, kept)
