"""A training program of many: each stage of a pipeline runs on its rank's own devices, by any schedule.

It offers what `jaxpp.train.program.Program` offers, so that the loop does not know which one it has. What is saved, and
what a run starts from, is the state of the whole model on the whole mesh; between steps the state lies in stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxpp.mesh import Device
from jaxpp.parallel import Layout, PipelineConfig, Plan
from jaxpp.pipeline import CutModel, Pipeline, PipelineState, PipelineTrainer, assemble, check_cuts, cut_model, deal
from jaxpp.pipeline.mean import mean_gradients
from jaxpp.pipeline.pipeline import make_pipeline
from jaxpp.pipeline.place import make_places
from jaxpp.pipeline.separable import check_separable
from jaxpp.schedule import Schedule
from jaxpp.schedule.layer_costs import even_cuts
from jaxpp.train.program import Program, TrainState, num_layers


@dataclass(frozen=True, eq=False)
class PipelineProgram:
    """A training program that walks a schedule's table.

    Args:
        whole: the same model as one program: shapes, first weights, and the form of checkpoints.
        plan: how it runs.
        cut: the model's cut into stages.
        trainer: the stages on their devices, with the optimizer.
    """

    whole: Program
    plan: Plan
    cut: CutModel
    trainer: PipelineTrainer

    @property
    def layout(self) -> Layout:
        """The whole mesh, as checkpoints are laid out on it."""
        return self.whole.layout

    @property
    def params(self) -> Any:
        """The abstract weights of the whole model."""
        return self.whole.params

    @property
    def pipeline(self) -> Pipeline:
        """The stages on their devices."""
        return self.trainer.pipeline

    @property
    def schedule(self) -> Schedule:
        """The table."""
        return self.pipeline.executor.schedule

    @property
    def abstract_state(self) -> TrainState:
        """The whole model's state as ``jax.ShapeDtypeStruct`` with shardings on the whole mesh: what is saved.

        Raises:
            ValueError: an arrow is missing or wrong, or the layout cannot hold a weight.
        """
        return self.whole.abstract_state

    @property
    def shardings(self) -> TrainState:
        """The sharding of each leaf of `abstract_state`."""
        return self.whole.shardings

    def init(self, seed: int = 0) -> PipelineState:
        """Draw the weights, the same as any other plan draws, and start from them."""
        return self._begin(self.whole.draw_params(seed))

    def begin(self, params: Any, seed: int = 0) -> PipelineState:
        """Start from given weights, on the shardings and in the dtypes of `abstract_state`; they are used up."""
        return self._begin(params)

    def adopt(self, model: nnx.Module) -> PipelineState:
        """Start from the weights of an existing model; its own arrays stay valid."""
        return self._begin(self.whole.copies_of(model)[0])

    def _begin(self, params: Any) -> PipelineState:
        return self.trainer.init(self._dealt(params))

    def _dealt(self, params: Any) -> tuple[Any, ...]:
        return deal(self.pipeline, self.cut, params, [stage.params for stage in self.cut.stages])

    def from_saved(self, state: TrainState) -> PipelineState:
        """Cut a whole state, as `abstract_state` describes it, into stages; it is used up."""
        optimizer = deal(self.pipeline, self.cut, state.optimizer, self.trainer.abstract_optimizer)
        return PipelineState(int(np.asarray(state.step.addressable_data(0))), self._dealt(state.params), optimizer)

    def to_save(self, state: PipelineState) -> TrainState:
        """Return the whole state as `abstract_state` describes it; the next step uses up what it shares with `state`.

        Cost: none where the ranks hold equal runs of layers in order (GPipe, 1F1B, zero bubble, without uneven cuts),
            but for embedding, head and norms, which each rank is sent; else each rank is sent its share of the layers,
            or all of them where they do not divide over the ranks.
        """
        goal = self.abstract_state
        return TrainState(
            jax.device_put(np.int32(state.step), goal.step.sharding),
            assemble(self.pipeline, self.cut, goal.params, self._owned(state.params)),
            goal.other,
            assemble(self.pipeline, self.cut, goal.optimizer, state.optimizer),
        )

    def _owned(self, params: Sequence[Any]) -> list[Any]:
        return [self.trainer.owned(stage, one) for stage, one in enumerate(params)]

    def step(self, state: PipelineState, batch: Any) -> tuple[PipelineState, dict[str, jax.Array]]:
        """Run a batch by the schedule and update; the state is used up.

        Args:
            state: in stages.
            batch: host arrays ``[batch, ...]``, the whole batch on every process.

        Returns:
            The next state, and ``loss``, ``grad_norm`` and ``weight`` as `Program.step` has them.
        """
        return self.trainer.step(state, batch)

    def loss_and_gradients(self, state: TrainState, batch: Any) -> tuple[jax.Array, Any]:
        """Return mean loss and gradients of a whole state (see `from_saved`), without an update."""
        sums = self.pipeline.sums(self._dealt(state.params), batch)
        means = mean_gradients(self.pipeline, sums)
        gradients = [
            jax.tree.unflatten(jax.tree.structure(one), [g for g in own if g is not None])
            for one, own in zip(self._owned([stage.params for stage in self.cut.stages]), means, strict=True)
        ]
        goal = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            self.params,
            self.layout.param_shardings(self.params, "moments"),
        )
        here = self.pipeline.here
        return sums.loss[here] / sums.weight[here], assemble(self.pipeline, self.cut, goal, gradients)

    def evaluate(self, state: PipelineState, batch: Any) -> tuple[jax.Array, jax.Array]:
        """Return the loss sum and the weight sum of a batch."""
        total, weight = self.pipeline.losses(state.params, batch)
        return total[self.pipeline.here], weight[self.pipeline.here]

    def is_finite(self, state: PipelineState) -> bool:
        """Say whether every weight of every stage is finite; the same on all processes."""
        return self.trainer.is_finite(state)

    def check_batch(self, batch_size: int, seq_len: int = 0) -> None:
        """Refuse sizes of a batch that do not split over microbatches and a rank's shards of the batch.

        Raises:
            ValueError: with the nearest sizes that do.
        """
        for place in self.pipeline.places:
            place.layout.check_batch(batch_size, seq_len, self.schedule.num_microbatches)

    def rows(self, batch_size: int) -> list[int]:
        """List the rows of a batch that this process needs: all."""
        return list(range(batch_size))

    def place(self, batch: Any, rows: Sequence[int] | None = None, batch_size: int | None = None) -> Any:
        """Return a host batch as host arrays; the schedule lays each microbatch out where it is read."""
        return jax.tree.map(np.asarray, batch)


def make_pipeline_program(whole: Program, devices: Sequence[Device] | None = None) -> PipelineProgram:
    """Build a `PipelineProgram`.

    Args:
        whole: the model and optimizer under the plan; its layout has axis ``stage``.
        devices: that the plan's mesh is made of; all of them if None.

    Raises:
        ValueError: cuts, layers, microbatches, a model or an optimizer that do not fit; what would do is named.
    """
    plan, ranks = whole.plan, whole.layout.mesh.shape["stage"]
    if plan.microbatches > 1:
        raise ValueError(
            f"plan.microbatches = {plan.microbatches}: a pipeline of executor mpmd adds up its own microbatches; "
            f"set plan.microbatches=1 and plan.pipeline.microbatches={plan.microbatches * ranks}"
        )
    check_separable(whole.optimizer, whole.params)
    # What it refuses of a whole model it can refuse here alone: each stage holds a part of the weights.
    moments = jax.eval_shape(whole.optimizer.init, whole.params)
    jax.eval_shape(whole.optimizer.update, whole.params, moments, whole.params)
    table, count = plan.pipeline.table(ranks), num_layers(whole.params, whole.layout.dims)
    cuts = _cuts(plan.pipeline, count, table)
    shared = _on_whole_mesh(whole, count)
    model = nnx.eval_shape(lambda: whole.build(nnx.Rngs(0)))
    cut = cut_model(model, cuts, prepare=shared.in_compute_dtype)
    made = make_pipeline(cut.stages, table, make_places(plan, ranks, devices), cut.tied)
    return PipelineProgram(shared, plan, cut, PipelineTrainer(made, whole.optimizer))


def _cuts(config: PipelineConfig, count: int, table: Schedule) -> tuple[int, ...]:
    if count < table.num_stages:
        raise ValueError(
            f"plan.pipeline: {table.num_stages} stages ({table.name} on {table.num_ranks} ranks) of {count} layers; "
            f"at most {count} stages are possible: fewer ranks on mesh axis stage, or fewer chunks"
        )
    even = even_cuts(count, table)
    return check_cuts(config.cuts, count, table.num_stages, even) if config.cuts else even


def _on_whole_mesh(whole: Program, count: int) -> Program:
    """Return the program that draws and describes the whole state: it never runs.

    Layers that do not divide over the ranks are not split on the whole mesh.
    """
    even = count % whole.layout.mesh.shape["stage"] == 0
    layout = whole.layout if even else whole.layout.unsplit("layers")
    return replace(whole, plan=replace(whole.plan, pipeline=PipelineConfig()), layout=layout)
