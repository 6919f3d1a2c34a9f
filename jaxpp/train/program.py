"""From a model, an optimizer and a plan to a sharded state and one jitted step.

Works for any ``nnx.Module`` whose Params carry arrows. Knows nothing of data, files or configs of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxpp import dims, tree
from jaxpp.parallel import Layout, Plan, executing
from jaxpp.pipeline.lockstep import summed_gradients
from jaxpp.pipeline.skeleton import Skeleton, skeleton_of
from jaxpp.pipeline.spmd import check_rows
from jaxpp.schedule import Schedule
from jaxpp.train.optimizer import global_norm
from jaxpp.train.ramp import Ramp, ramped

Loss = Callable[[Any, Any], tuple[jax.Array, jax.Array]]
"""``loss(model, batch)`` to (sum of losses, sum of weights), both fp32 scalars."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """All that training carries from step to step.

    Args:
        step: int32 scalar, the number of updates done.
        params: the weights, ``nnx.State`` of Params.
        other: the model's other variables (counters, batch statistics, random streams).
        optimizer: optax state.
    """

    step: Any
    params: Any
    other: Any
    optimizer: Any


def cast_weights(params: Any, dtype: Any) -> Any:
    """Cast floating weights, but for those that say ``wide``."""

    def one(path: str, node: Any) -> Any:
        value = node.get_value()
        stays = node.get_metadata().get("wide", False) or not jnp.issubdtype(value.dtype, jnp.floating)
        return value if stays else value.astype(dtype)

    return tree.map_named(one, params)


def model_loss(model: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    """Return ``model.loss(batch)``, the default loss."""
    return model.loss(batch)


def _abstract(tree: Any, shardings: Any) -> Any:
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings)


@dataclass(frozen=True)
class Program:
    """A compiled-once training program.

    Args:
        build: draws the model from ``nnx.Rngs``.
        optimizer: an optax transformation.
        plan: how it runs.
        layout: the plan's layout on the devices.
        loss: summed loss of a batch.
        ramp: masks on the weights that the loss is computed with; None: none.
    """

    build: Callable[[nnx.Rngs], nnx.Module]
    optimizer: optax.GradientTransformation
    plan: Plan
    layout: Layout
    loss: Loss = model_loss
    ramp: Ramp | None = None

    @cached_property
    def _model(self) -> tuple[Any, Any, Any]:
        """Graph, abstract params and abstract other variables."""
        graph, params, other = nnx.split(nnx.eval_shape(lambda: self.build(nnx.Rngs(0))), nnx.Param, ...)
        return graph, params, other

    @property
    def params(self) -> Any:
        """The abstract weights."""
        return self._model[1]

    @cached_property
    def abstract_state(self) -> TrainState:
        """The state as ``jax.ShapeDtypeStruct`` with the sharding of each leaf.

        Raises:
            ValueError: an arrow is missing or wrong, or the layout cannot hold a weight.
        """
        _, params, other = self._model
        self.layout.check(params)
        optimizer = jax.eval_shape(self.optimizer.init, params)
        one = self.layout.replicated()
        return TrainState(
            jax.ShapeDtypeStruct((), jnp.int32, sharding=one),
            _abstract(params, self.layout.param_shardings(params)),
            _abstract(other, jax.tree.map(lambda _: one, other)),
            _abstract(optimizer, self.layout.moment_shardings(optimizer, params)),
        )

    @property
    def shardings(self) -> TrainState:
        """The sharding of each leaf of the state."""
        return jax.tree.map(lambda x: x.sharding, self.abstract_state)

    def draw_params(self, seed: int = 0) -> Any:
        """Draw the weights alone, each born on its shards."""

        def draw() -> Any:
            return nnx.split(self.build(nnx.Rngs(seed)), nnx.Param, ...)[1]

        return jax.jit(draw, out_shardings=self.shardings.params)()

    def init(self, seed: int = 0) -> TrainState:
        """Draw the state, each weight born on its shards.

        The values are those of one device: the draws do not depend on the mesh, what is computed from them may differ
        by one fp32 rounding where the compiler fuses differently.
        """

        def draw() -> TrainState:
            _, params, other = nnx.split(self.build(nnx.Rngs(seed)), nnx.Param, ...)
            return TrainState(jnp.zeros((), jnp.int32), params, other, self.optimizer.init(params))

        return jax.jit(draw, out_shardings=self.shardings)()

    def adopt(self, model: nnx.Module) -> TrainState:
        """Lay the weights of an existing model out; its own arrays stay valid."""
        return self._start(*self.copies_of(model))

    def copies_of(self, model: nnx.Module) -> tuple[Any, Any]:
        """Lay copies of an existing model's weights, and of its other variables, out."""
        _, params, other = nnx.split(model, nnx.Param, ...)
        goal = self.shardings
        place = jax.jit(lambda s: jax.tree.map(jnp.copy, s), out_shardings=(goal.params, goal.other))
        return place((params, other))

    def begin(self, params: Any, seed: int = 0) -> TrainState:
        """Start from given weights, on the shardings and in the dtypes of `abstract_state`."""

        def draw() -> Any:
            return nnx.split(self.build(nnx.Rngs(seed)), nnx.Param, ...)[2]

        return self._start(params, jax.jit(draw, out_shardings=self.shardings.other)())

    def _start(self, params: Any, other: Any) -> TrainState:
        goal = self.shardings
        moments = jax.jit(self.optimizer.init, out_shardings=goal.optimizer)(params)
        return TrainState(jax.device_put(jnp.zeros((), jnp.int32), goal.step), params, other, moments)

    def to_save(self, state: TrainState) -> TrainState:
        """Return the state as `abstract_state` describes it, which is what is saved: the same."""
        return state

    def from_saved(self, state: TrainState) -> TrainState:
        """Return the state to train from what `to_save` returned: the same."""
        return state

    def in_compute_dtype(self, params: Any) -> Any:
        """Cast floating weights to the dtype to compute in, but for those that say ``wide`` (a router's)."""
        return cast_weights(params, self.plan.dtype())

    def summed_loss(
        self, params: Any, other: Any, batch: Any, step: Any = None
    ) -> tuple[jax.Array, tuple[jax.Array, Any]]:
        """Return the loss sum, and beside it the weight sum and the model's other variables after the pass.

        Where weights come in by a ramp, `step` (updates done before) says how far.
        """
        params = params if self.ramp is None else ramped(params, self.ramp, self.ramp.at(step))
        other = jax.tree.map(lambda x: x, other)  # Variables of this trace level, which the pass may change
        model = nnx.merge(self._model[0], self.in_compute_dtype(params), other)
        total, weight = self.loss(model, batch)
        return total.astype(jnp.float32), (weight.astype(jnp.float32), nnx.split(model, nnx.Param, ...)[2])

    @cached_property
    def table(self) -> Schedule | None:
        """The table that the ranks of axis ``stage`` walk in lock step; None where the loss is differentiated whole."""
        ranks = self.layout.mesh.shape.get("stage", 1)
        return None if ranks == 1 or self.plan.pipeline.is_differentiated else self.plan.pipeline.table(ranks)

    @cached_property
    def _skeleton(self) -> Skeleton:
        return skeleton_of(nnx.eval_shape(lambda: self.build(nnx.Rngs(0))), self.in_compute_dtype)

    def _value_and_grad(self, params: Any, other: Any, batch: Any, step: Any) -> tuple[tuple[jax.Array, Any], Any]:
        """Return what ``jax.value_and_grad`` of `summed_loss` returns."""
        if self.table is None:
            return jax.value_and_grad(self.summed_loss, has_aux=True)(params, other, batch, step)
        total, weight, grads = summed_gradients(self._skeleton, params, batch, self.layout, self.table)
        return (total, (weight, other)), grads

    def gradients(self, state: TrainState, batch: Any) -> tuple[Any, jax.Array, jax.Array, Any]:
        """Return gradients of the mean loss, the loss sum, the weight sum, and the other variables after the pass.

        The batch is run in ``plan.microbatches`` parts; sums, not means, are added up, so that the result is that of
        one batch however the weights of the loss are spread.
        """
        places = self.layout.param_shardings(self.params, "moments")
        if self.plan.microbatches == 1:
            (total, (weight, other)), grads = self._value_and_grad(state.params, state.other, batch, state.step)
        else:
            grads, total, weight, other = self._accumulate(state, batch, places)
        scale = 1.0 / jnp.maximum(weight, 1e-8)
        grads = jax.tree.map(lambda g, p: (g * scale).astype(p.dtype), grads, state.params)
        return jax.lax.with_sharding_constraint(grads, places), total, weight, other

    def _accumulate(self, state: TrainState, batch: Any, places: Any) -> Any:
        parts = jax.tree.map(lambda x: self._microbatches(x), batch)

        def add(carry: Any, part: Any) -> tuple[Any, None]:
            sums, total, weight, other = carry
            (t, (w, other)), grads = self._value_and_grad(state.params, other, part, state.step)
            sums = jax.tree.map(lambda s, g: s + g.astype(jnp.float32), sums, grads)
            return (jax.lax.with_sharding_constraint(sums, places), total + t, weight + w, other), None

        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), state.params)
        zeros = jax.lax.with_sharding_constraint(zeros, places)
        start = (zeros, jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32), state.other)
        return jax.lax.scan(add, start, parts)[0]

    def _microbatches(self, x: jax.Array) -> jax.Array:
        """Deal ``[batch, ...]`` out as ``[microbatches, batch / microbatches, ...]``; no row changes its device."""
        count = self.plan.microbatches
        dealt = jnp.moveaxis(x.reshape(x.shape[0] // count, count, *x.shape[1:]), 1, 0)
        dims = ("", "batch", *["" for _ in range(x.ndim - 1)])
        return jax.lax.with_sharding_constraint(
            dealt, jax.sharding.NamedSharding(self.layout.mesh, self.layout.spec(dims, "residual"))
        )

    def _step(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        with executing(self.plan.execution(self.layout)):
            grads, total, weight, other = self.gradients(state, batch)
        updates, optimizer = self.optimizer.update(grads, state.optimizer, state.params)
        # Hyper-parameters held in fp32 would widen narrow moments, and their memory with them.
        optimizer = jax.tree.map(lambda new, old: new.astype(old.dtype), optimizer, state.optimizer)
        params = optax.apply_updates(state.params, updates)
        metrics = {"loss": total / jnp.maximum(weight, 1e-8), "grad_norm": global_norm(grads), "weight": weight}
        return TrainState(state.step + 1, params, other, optimizer), metrics

    @cached_property
    def step(self) -> Any:
        """The jitted step ``(state, batch) -> (state, metrics)``; the state is donated.

        Metrics: ``loss`` (mean, nats), ``grad_norm`` (before clipping), ``weight`` (sum of the loss weights).
        """
        return jax.jit(self._step, donate_argnums=0, out_shardings=(self.shardings, self.layout.replicated()))

    @cached_property
    def loss_and_gradients(self) -> Any:
        """The jitted ``(state, batch) -> (mean loss, gradients)``, without an update."""

        def compute(state: TrainState, batch: Any) -> tuple[jax.Array, Any]:
            with executing(self.plan.execution(self.layout)):
                grads, total, weight, _ = self.gradients(state, batch)
            return total / weight, grads

        return jax.jit(compute)

    @cached_property
    def evaluate(self) -> Any:
        """The jitted ``(state, batch) -> (loss sum, weight sum)``."""

        def compute(params: Any, other: Any, batch: Any, step: Any) -> tuple[jax.Array, jax.Array]:
            with executing(self.plan.execution(self.layout)):
                total, (weight, _) = self.summed_loss(params, other, batch, step)
            return total, weight

        jitted = jax.jit(compute, out_shardings=self.layout.replicated())
        return lambda state, batch: jitted(state.params, state.other, batch, state.step)

    @cached_property
    def is_finite(self) -> Any:
        """``state -> bool``, jitted: every weight is finite. Cost: reads the weights once, reduces one bool."""

        def compute(params: Any) -> jax.Array:
            return jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(params)]).all()

        jitted = jax.jit(compute, out_shardings=self.layout.replicated())
        return lambda state: bool(jitted(state.params))

    def check_batch(self, batch_size: int, seq_len: int = 0) -> None:
        """Refuse sizes of a global batch for `step` that do not split over microbatches and shards.

        Raises:
            ValueError: with the nearest sizes that do.
        """
        self.layout.check_batch(batch_size, seq_len, self.plan.microbatches)
        check_rows(self.plan.pipeline, self.layout, batch_size // self.plan.microbatches)

    def rows(self, batch_size: int) -> list[int]:
        """List the rows of a global batch that this process's devices need."""
        sharding = self.layout.batch_sharding(1)
        slices = [index[0] for index in sharding.addressable_devices_indices_map((batch_size,)).values() if index]
        return sorted({row for one in slices for row in range(*one.indices(batch_size))})

    def place(self, batch: Any, rows: Sequence[int] | None = None, batch_size: int | None = None) -> Any:
        """Put a host batch on the devices.

        Args:
            batch: tree of NumPy arrays ``[rows, ...]``; the whole global batch where `rows` is None.
            rows: which rows of the global batch these are.
            batch_size: rows of the global batch.
        """

        def one(x: Any) -> jax.Array:
            if isinstance(x, jax.Array) and rows is None:
                return jax.device_put(x, self.layout.batch_sharding(x.ndim))
            held = list(rows) if rows is not None else list(range(x.shape[0]))
            index = {row: i for i, row in enumerate(held)}
            shape = (batch_size or len(held), *x.shape[1:])

            def cut(where: Any) -> np.ndarray:
                wanted = [index[row] for row in range(*where[0].indices(shape[0]))]
                return np.asarray(x)[wanted][(slice(None), *where[1:])]

            return jax.make_array_from_callback(shape, self.layout.batch_sharding(x.ndim), cut)

        return jax.tree.map(one, batch)


def num_layers(params: Any, own: Sequence[str]) -> int:
    """Return the size of dim ``layers``; 1 where nothing is stacked."""
    nodes = tree.named_nodes(params)
    sizes = [nodes[p].shape[0] for p, arrow in dims.arrows(params, own).items() if arrow.stacked[:1] == ("layers",)]
    return max(sizes, default=1)
