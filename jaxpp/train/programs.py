"""The program that trains a model under a plan: one for all devices, or one for each stage and operation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import optax
from flax import nnx

from jaxpp.mesh import Device
from jaxpp.model import Trainable
from jaxpp.parallel import Plan
from jaxpp.pipeline.lockstep import check as check_table
from jaxpp.pipeline.spmd import check as check_layers
from jaxpp.train.pipelined import PipelineProgram, make_pipeline_program
from jaxpp.train.program import Loss, Program, model_loss, num_layers
from jaxpp.train.ramp import RampConfig, make_ramp

AnyProgram = Program | PipelineProgram


def _as_is(model: nnx.Module, rngs: nnx.Rngs) -> nnx.Module:
    return model


def make_program(
    model: Any,
    optimizer: optax.GradientTransformation,
    plan: Plan | str,
    loss: Loss | None = None,
    devices: Sequence[Device] | None = None,
    ramp: RampConfig | None = None,
) -> AnyProgram:
    """Build a `Program`, or a `PipelineProgram` where the plan asks for it; see `make_train_step` for the arguments."""
    plan = Plan(mesh=plan) if isinstance(plan, str) else plan
    build = partial(_as_is, model) if isinstance(model, nnx.Module) else getattr(model, "build", model)
    layout = plan.layout(devices)
    sample = model if isinstance(model, nnx.Module) else nnx.eval_shape(lambda: build(nnx.Rngs(0)))
    masks = make_ramp(ramp or RampConfig(), sample, layout.dims)
    program = Program(build, optimizer, plan, layout, loss or model_loss, masks)
    if loss is None and not isinstance(sample, Trainable):
        raise ValueError(
            f"{type(sample).__name__} has no method loss(batch) -> (sum of losses, sum of weights); "
            "add one or pass loss=your_function(model, batch)"
        )
    if (ranks := layout.mesh.shape.get("stage", 1)) == 1:
        return program
    if masks is not None:
        raise ValueError(
            f"train.ramp masks the weights of a whole model, and plan.mesh {plan.mesh} cuts it into {ranks} stages; "
            "take axis stage out of plan.mesh until the ramp is over, then set train.ramp.num_steps=0"
        )
    if loss is not None and not plan.pipeline.is_differentiated:
        raise ValueError(
            f"plan.pipeline.schedule {plan.pipeline.schedule} takes the loss of each microbatch from the model; drop "
            "loss=, or set schedule gpipe or interleaved with executor spmd"
        )
    if plan.pipeline.is_mpmd:
        return make_pipeline_program(program, devices)
    check_layers(plan.pipeline, program.layout, count := num_layers(program.params, program.layout.dims))
    if program.table is not None:
        check_table(program.table, program.layout, count)
    return program


def make_train_step(
    model: Any,
    optimizer: optax.GradientTransformation,
    plan: Plan | str,
    *,
    loss: Loss | None = None,
    devices: Sequence[Device] | None = None,
    seed: int = 0,
    ramp: RampConfig | None = None,
) -> tuple[Any, Callable[[Any, Any], tuple[Any, dict[str, jax.Array]]]]:
    """Make a sharded state and a jitted training step, for people with a loop of their own.

    Args:
        model: an ``nnx.Module`` (its weights are used), a model config, or a function of ``nnx.Rngs`` (weights are born
            sharded). Every Param carries an arrow.
        optimizer: any optax transformation. Where each stage of a pipeline is run by itself, one that changes each
            weight by its own gradient: clip with `jaxpp.pipeline.clip_by_norm`, which takes the norm over all stages.
        plan: a `Plan`, or just its mesh, ``"data:2 fsdp:2 tensor:2"``.
        loss: ``loss(model, batch)`` to (sum of losses, sum of weights); by default ``model.loss(batch)``.
        devices: the devices to use; all of them if None.
        seed: of the weights, where they are drawn here.
        ramp: how what a growth added to the model comes in; None: as it is.

    Returns:
        ``state, step``: a `TrainState`, or a `PipelineState` where each stage is run by itself;
        ``step(state, batch)`` gives the next state and metrics ``loss``, ``grad_norm``, ``weight``.
        The state passed in is donated: do not use it again. The batch is a tree of arrays ``[batch, ...]``, host or
        device; on several processes each passes the whole batch.

    Raises:
        ValueError: a weight without an arrow, a dim that does not divide over its axes, a mesh that does not fit.

    Example:
        >>> import optax
        >>> from jaxpp.models import DecoderConfig
        >>> config = DecoderConfig(vocab_size=64, num_layers=1, embed_dim=16, num_heads=2)
        >>> state, step = make_train_step(config, optax.adam(1e-3), "data:-1")
    """
    program: Any = make_program(model, optimizer, plan, loss, devices, ramp)
    state = program.adopt(model) if isinstance(model, nnx.Module) else program.init(seed)

    def step(state: Any, batch: Any) -> tuple[Any, dict[str, jax.Array]]:
        program.check_batch(jax.tree.leaves(batch)[0].shape[0])
        return program.step(state, program.place(batch))

    return state, step
