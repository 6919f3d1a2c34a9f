"""A run whose stages are programs of their own trains as one device does, and its state is the whole model's."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxpp import tree
from jaxpp.mesh import MeshSpec
from jaxpp.models import DecoderConfig
from jaxpp.nn.moe import MoeConfig
from jaxpp.parallel import PipelineConfig, Plan
from jaxpp.train import OptimizerConfig, make_program, make_train_step
from jaxpp.train.optimizer import make_optimizer
from jaxpp.train.pipelined import PipelineProgram
from jaxpp.train.program import Program
from tests.pipeline.functions import alike
from tests.pipeline.test_cut import batch, config

STEPS = 3
CLIP = 0.5  # below the norm of the gradients, so that it tells
SGD = OptimizerConfig(name="sgd", learning_rate=0.01, clip_norm=CLIP, warmup_steps=0)
ADAMW = OptimizerConfig(warmup_steps=0)


def piped(schedule: str, cuts: tuple[int, ...] = (), microbatches: int = 4, **more: Any) -> PipelineConfig:
    return PipelineConfig(schedule, microbatches=microbatches, cuts=cuts, **more)


def built(model: Any, plan: Plan, optimizer: OptimizerConfig = SGD) -> PipelineProgram:
    spec = MeshSpec.parse(plan.mesh)
    devices = jax.devices()[: int(np.prod([spec.size(axis) for axis in spec.axes]))]
    program = make_program(model, make_optimizer(optimizer), plan, devices=devices)
    assert isinstance(program, PipelineProgram)
    return program


@cache
def oracle(tied: bool) -> tuple[Any, Any, Any, list[Any], list[float]]:
    """One device: first state, loss and gradients, last state, metrics of each step, losses of an evaluation."""
    plan = Plan(mesh="data:1", microbatches=4)  # as many sums, in the same order
    program = make_program(config(tied), make_optimizer(SGD), plan, devices=jax.devices()[:1])
    assert isinstance(program, Program)
    state = program.init()
    first = jax.device_get(state)
    result, metrics = jax.device_get(program.loss_and_gradients(state, program.place(batch()))), []
    for _ in range(STEPS):
        state, told = program.step(state, program.place(batch()))
        metrics.append(jax.device_get(told))
    ends = [float(x) for x in program.evaluate(state, program.place(batch()))]
    return first, result, jax.device_get(state), metrics, ends


def values(state: Any) -> dict[str, np.ndarray]:
    return {path: np.asarray(leaf) for path, leaf in tree.named_leaves(state).items()}


@pytest.mark.parametrize(
    ("tied", "plan"),
    [
        (True, Plan("stage:2", pipeline=piped("1f1b", (3, 1)))),
        (False, Plan("stage:2 data:2 tensor:2", layers="unroll", pipeline=piped("zb-h1"))),
        pytest.param(True, Plan("stage:2 data:2", pipeline=piped("zb-v")), marks=pytest.mark.slow),
        pytest.param(False, Plan("stage:2", pipeline=piped("zb-h1", (1, 3), remat="full")), marks=pytest.mark.slow),
        pytest.param(True, Plan("stage:2", pipeline=piped("interleaved", executor="mpmd")), marks=pytest.mark.slow),
        pytest.param(True, Plan("stage:2 fsdp:2", pipeline=piped("chimera", (3, 1))), marks=pytest.mark.slow),
        pytest.param(False, Plan("stage:2", remat="full", pipeline=piped("hanayo")), marks=pytest.mark.slow),
        pytest.param(True, Plan("stage:4 fsdp:2", pipeline=piped("merak")), marks=pytest.mark.slow),
        pytest.param(True, Plan("stage:2", pipeline=piped("eager-1f1b", remat="all-but-last")), marks=pytest.mark.slow),
    ],
    ids=lambda x: f"{x.mesh} {x.pipeline.schedule}" if isinstance(x, Plan) else "tied" if x else "untied",
)  # fmt: skip
def test_it_trains_as_one_device(tied: bool, plan: Plan) -> None:
    first, (loss, gradients), end, told, ends = oracle(tied)
    program = built(config(tied), plan)
    program.check_batch(8, 8)
    weights = jax.device_put(dataclasses.replace(first, optimizer=None), without_moments(program))
    found, others = program.loss_and_gradients(weights, batch())
    assert float(found) == pytest.approx(float(loss), rel=1e-6)
    alike(values(others), values(gradients))
    state = program.init()
    for wanted in told:
        assert wanted["grad_norm"] > CLIP
        state, metrics = program.step(state, program.place(batch()))
        alike({key: np.asarray(value) for key, value in metrics.items()}, wanted, 3e-6)
    assert [float(x) for x in program.evaluate(state, batch())] == pytest.approx(ends, rel=1e-6)
    assert program.is_finite(state)
    alike(values(program.to_save(state)), values(end))


def without_moments(program: PipelineProgram) -> Any:
    return dataclasses.replace(program.shardings, optimizer=None)


@pytest.mark.parametrize(
    "plan",
    [
        Plan("stage:2 data:2", pipeline=piped("1f1b", (3, 1))),
        Plan("stage:2 fsdp:2 tensor:2", pipeline=piped("zb-v")),
        Plan("stage:4", pipeline=piped("zb-h2", microbatches=8)),
        Plan("stage:2", pipeline=piped("chimera")),
    ],
    ids=lambda plan: f"{plan.mesh} {plan.pipeline.schedule}",
)
def test_a_state_goes_to_stages_and_back_bit_for_bit(plan: Plan) -> None:
    program = built(config(True), plan, ADAMW)
    goal, draw = program.abstract_state, np.random.RandomState(0)
    known = jax.tree.map(lambda x: draw.normal(size=x.shape).astype(x.dtype), goal)
    known = dataclasses.replace(known, step=np.int32(7))
    state = program.from_saved(jax.device_put(known, program.shardings))
    assert state.step == 7
    back = program.to_save(state)
    assert jax.tree.structure(back) == jax.tree.structure(goal)
    assert [leaf.sharding for leaf in jax.tree.leaves(back)] == [leaf.sharding for leaf in jax.tree.leaves(goal)]
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(back), known)


def test_layers_that_do_not_divide_over_the_ranks_are_whole_on_the_whole_mesh() -> None:
    model = dataclasses.replace(config(False), num_layers=5)
    program = built(model, Plan("stage:2 data:2", pipeline=piped("1f1b")))
    assert program.cut.cuts == (3, 2) or program.cut.cuts == (2, 3)
    kernel = program.abstract_state.params["blocks"]["mlp"]["up"]["kernel"].get_value()
    assert kernel.sharding.shard_shape(kernel.shape)[0] == 5
    known = values(program.to_save(program.init(3)))
    one = make_program(model, make_optimizer(SGD), Plan("data:1"), devices=jax.devices()[:1])
    for path, wanted in values(one.init(3)).items():
        np.testing.assert_allclose(known[path], wanted, rtol=1e-6, err_msg=path)


def test_a_tied_table_is_the_same_on_both_ends_and_has_one_optimizer_state() -> None:
    program = built(config(True), Plan("stage:2", pipeline=piped("1f1b", (3, 1))))
    assert program.cut.tied == (((0, "tokens/table"), (1, "tokens/table")),)
    before = np.asarray(tree.named_leaves(oracle(True)[0].params)["tokens/table"])
    state, _ = program.step(program.init(), batch())
    ends = [np.asarray(tree.named_leaves(params)["tokens/table"]) for params in state.params]
    assert np.array_equal(ends[0], ends[1]) and not np.array_equal(ends[0], before)
    assert [any("tokens/table" in path for path in tree.named_leaves(one)) for one in state.optimizer] == [True, False]


def test_a_weight_that_is_not_finite_is_found_on_any_stage() -> None:
    program = built(config(False), Plan("stage:2", pipeline=piped("1f1b", (3, 1))))
    for path in ("tokens/table", "head/kernel"):
        state = jax.tree.map(np.array, program.to_save(program.init()))
        tree.named_leaves(state.params)[path].flat[-1] = np.nan
        assert not program.is_finite(program.from_saved(jax.device_put(state, program.shardings))), path


@pytest.mark.slow
def test_a_loop_of_your_own_takes_any_schedule() -> None:
    plan = Plan("stage:2", pipeline=piped("1f1b", (3, 1)))
    model = config(True).build(nnx.Rngs(0))
    state, step = make_train_step(model, make_optimizer(SGD), plan, devices=jax.devices()[:2])
    state, metrics = step(state, batch())
    assert float(metrics["loss"]) == pytest.approx(float(oracle(True)[3][0]["loss"]), rel=1e-6)
    assert jnp.isfinite(model.tokens.table[...]).all(), "the model's own arrays stay valid"


@pytest.mark.parametrize(
    ("model", "plan", "message"),
    [
        (config(True), Plan("stage:4 data:2", pipeline=piped("zb-v", microbatches=7)), "plan.pipeline: 8 stages "
         r"\(zb-v on 4 ranks\) of 4 layers; at most 4 stages are possible"),
        (config(True), Plan("stage:2 data:4", pipeline=piped("zb-v", microbatches=2)),
         "plan.pipeline: schedule zb-v: microbatches = 2, 2 \\* ranks - 1 = 3 or more are needed"),
        (config(True), Plan("stage:2 data:4", pipeline=piped("hanayo", chunks=3)), "schedule hanayo: chunks"),
        (config(True), Plan("stage:2 data:4", pipeline=piped("1f1b", (3, 5))),
         r"cuts \[3, 5\] add up to 8 layers; 4 are there, at least one to a stage: 2/2 would do"),
        (config(True), Plan("stage:2 data:4", pipeline=piped("zb-v", (2, 2))),
         r"cuts \[2, 2\] name 2 stages; the schedule has 4: 1/1/1/1 would do"),
        (config(True), Plan("stage:2 data:4", microbatches=2, pipeline=piped("1f1b")),
         "plan.microbatches = 2: a pipeline of executor mpmd adds up its own microbatches"),
        (DecoderConfig(vocab_size=32, num_layers=5, embed_dim=16, num_heads=2), Plan("stage:8", pipeline=piped("1f1b")),
         r"8 stages \(1f1b on 8 ranks\) of 5 layers; at most 5 stages are possible"),
    ],
)  # fmt: skip
def test_numbers_that_do_not_fit_are_refused(model: Any, plan: Plan, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        built(model, plan)


def test_a_batch_that_does_not_split_is_refused() -> None:
    program = built(config(True), Plan("stage:2 data:4", pipeline=piped("1f1b")))
    with pytest.raises(ValueError, match="8 does not split into 4 microbatches over 4 batch shards; size 16"):
        program.check_batch(8, 8)


def test_an_optimizer_that_mixes_stages_is_refused() -> None:
    plan = Plan("stage:8", pipeline=piped("1f1b"))
    mixing = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    with pytest.raises(ValueError, match="the optimizer changes .* by the gradient of .* too, which another stage may"):
        make_program(dataclasses.replace(config(True), num_layers=8), mixing, plan)


def test_a_loss_of_your_own_is_refused() -> None:
    with pytest.raises(ValueError, match="takes the loss of each microbatch from the model; drop loss="):
        make_program(config(True), optax.sgd(1.0), Plan("stage:8", pipeline=piped("1f1b")), lambda model, batch: 0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(schedule="1f2b"), 'plan.pipeline.schedule: unknown "1f2b"; did you mean "1f1b"?'),
        (dict(schedule="zb-v", executor="spmd"), "plan.pipeline.executor = spmd does not run zb-v, only gpipe"),
        (dict(schedule="gpipe", executor="spmd", cuts=(3, 1)), "plan.pipeline.cuts is for executor=mpmd"),
        (dict(schedule="gpipe", executor="spmd", remat="full"), "plan.pipeline.remat is for executor=mpmd"),
        (dict(schedule="merak", remat="full"), "plan.pipeline.remat = full: schedule merak has its own"),
        (dict(cuts=(0, 4)), "plan.pipeline: chunks = 0, microbatches = 0, cuts = [0, 4]"),
    ],
)  # fmt: skip
def test_wrong_settings_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        PipelineConfig(**fields)
    assert str(error.value).startswith(message)


@pytest.mark.slow
def test_a_mixture_of_experts_is_cut_too() -> None:
    sizes: dict[str, Any] = dict(vocab_size=32, num_layers=2, embed_dim=16, num_heads=2, mlp_dim=32, max_positions=16)
    model = DecoderConfig(**sizes, moe=MoeConfig(4, 2))
    one = make_program(model, make_optimizer(SGD), Plan("data:1", microbatches=4), devices=jax.devices()[:1])
    assert isinstance(one, Program)
    state, wanted = one.step(one.init(), one.place(batch()))
    program = built(model, Plan("stage:2", pipeline=piped("zb-h1")))
    found, metrics = program.step(program.init(), batch())
    alike({key: np.asarray(value) for key, value in metrics.items()}, jax.device_get(wanted), 3e-6)
    alike(values(program.to_save(found)), values(state))
