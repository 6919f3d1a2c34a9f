"""A decoder cut into stages trains as the whole one does, and its states go back to the whole's bit for bit."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from jaxpp import pipeline, schedule, tree
from jaxpp.models import DecoderConfig
from jaxpp.parallel import Plan
from jaxpp.pipeline.mean import mean_gradients
from jaxpp.train import OptimizerConfig
from jaxpp.train.optimizer import make_optimizer
from jaxpp.train.program import Program, make_program
from tests.pipeline import functions

STEPS = 3
CLIP = 0.5  # below the norm of the gradients, so that it tells


def config(tied: bool, **more: Any) -> DecoderConfig:
    sizes: dict[str, Any] = dict(vocab_size=32, num_layers=4, embed_dim=16, num_heads=2, mlp_dim=32, max_positions=16)
    return DecoderConfig(**sizes, tied=tied, **more)


def batch() -> dict[str, np.ndarray]:
    draw, size = np.random.RandomState(0), (8, 8)
    found = {name: draw.randint(0, 32, size).astype(np.int32) for name in ("tokens", "targets")}
    positions = np.tile(np.arange(size[1], dtype=np.int32), (size[0], 1))
    weights = draw.uniform(0.1, 1, size).astype(np.float32)
    return {**found, "segments": np.ones(size, np.int32), "positions": positions, "weights": weights}


def optimizer(clip: float) -> OptimizerConfig:
    return OptimizerConfig(name="sgd", learning_rate=0.01, clip_norm=clip, warmup_steps=0)


@cache
def whole(tied: bool) -> tuple[Program, Any, Any, Any, list[dict[str, Any]]]:
    """One device, as many microbatches: program, first state, loss and gradients, last state, metrics of each step."""
    plan = Plan(mesh="data:1", microbatches=4)
    program = make_program(config(tied), make_optimizer(optimizer(CLIP)), plan, devices=jax.devices()[:1])
    state = program.init()
    first = jax.device_get(state)
    result, metrics = jax.device_get(program.loss_and_gradients(state, program.place(batch()))), []
    for _ in range(STEPS):
        state, told = program.step(state, program.place(batch()))
        metrics.append(jax.device_get(told))
    return program, first, result, jax.device_get(state), metrics


@cache
def cut_up(
    tied: bool, name: str, mesh: str, cuts: tuple[int, ...], layers: Any = "scan"
) -> tuple[pipeline.CutModel, pipeline.Trainer]:
    cut = pipeline.cut_model(nnx.eval_shape(lambda: config(tied).build(nnx.Rngs(0))), cuts)
    plan = Plan(mesh=mesh, layers=layers)
    count = int(np.prod([int(word.partition(":")[2]) for word in mesh.split()]))
    devices = jax.devices()[:count]
    made = pipeline.make_pipeline(cut.stages, schedule.build(name, 2, 4), plan, cut.tied, devices)
    rule = optax.chain(pipeline.clip_by_given_norm(CLIP), make_optimizer(optimizer(0)))
    return cut, pipeline.Trainer(made, rule)


@pytest.mark.parametrize(
    ("tied", "name", "mesh", "cuts", "layers"),
    [
        (True, "1f1b", "stage:2", (3, 1), "scan"),
        (False, "zb-h1", "stage:2 data:2 tensor:2", (2, 2), "unroll"),
        pytest.param(False, "zb-h1", "stage:2", (1, 3), "scan", marks=pytest.mark.slow),
        pytest.param(True, "interleaved", "stage:2", (1, 1, 1, 1), "scan", marks=pytest.mark.slow),
        pytest.param(True, "chimera", "stage:2 fsdp:2", (3, 1), "scan", marks=pytest.mark.slow),
        pytest.param(False, "hanayo", "stage:2 data:2", (1, 1, 1, 1), "unroll", marks=pytest.mark.slow),
    ],
)
def test_a_cut_decoder_trains_as_the_whole(
    tied: bool, name: str, mesh: str, cuts: tuple[int, ...], layers: str
) -> None:
    program, first, (loss, gradients), end, told = whole(tied)
    cut, trainer = cut_up(tied, name, mesh, cuts, layers)
    params = trainer.pipeline.lay_out(cut.split(first.params))
    sums = trainer.pipeline.sums(params, batch())
    np.testing.assert_allclose(sums.loss[0] / sums.weight[0], loss, rtol=1e-6)
    means = [
        jax.tree.unflatten(jax.tree.structure(trainer.owned(index, stage.params)), [g for g in own if g is not None])
        for index, (stage, own) in enumerate(zip(cut.stages, mean_gradients(trainer.pipeline, sums), strict=True))
    ]
    functions.alike(pipeline.join_states(gradients, means), gradients)
    state = trainer.init(params)
    for wanted in told:
        assert wanted["grad_norm"] > CLIP
        state, metrics = trainer.step(state, batch())
        functions.alike({key: np.asarray(value) for key, value in metrics.items()}, wanted, 3e-6)
    total, weight = trainer.pipeline.losses(state.params, batch())
    found = [float(one[0]) for one in (total, weight)]
    assert found == pytest.approx([float(x) for x in program.evaluate(end, batch())], rel=1e-6)
    functions.alike(pipeline.join_states(end.params, state.params), end.params)
    functions.alike(pipeline.join_states(end.optimizer, state.optimizer), end.optimizer)


def test_a_tied_table_is_the_same_on_both_ends() -> None:
    first = whole(True)[1]
    cut, trainer = cut_up(True, "1f1b", "stage:2", (3, 1))
    assert cut.tied == (((0, "tokens/table"), (1, "tokens/table")),)
    state, _ = trainer.step(trainer.init(trainer.pipeline.lay_out(cut.split(first.params))), batch())
    ends = [np.asarray(tree.named_leaves(params)["tokens/table"]) for params in state.params]
    assert np.array_equal(ends[0], ends[1]) and not np.array_equal(
        ends[0], tree.named_leaves(first.params)["tokens/table"]
    )
    assert [any("tokens/table" in path for path in tree.named_leaves(one)) for one in state.optimizer] == [True, False]


@pytest.mark.parametrize("cuts", [(2, 2), (3, 1), (1, 1, 1, 1), (4,)])
def test_states_go_to_stages_and_back_bit_for_bit(cuts: tuple[int, ...]) -> None:
    program = whole(True)[0]
    wide = optax.adamw(1e-3)
    state = jax.device_get(program.init(3))
    moments = jax.tree.map(np.asarray, wide.init(state.params))
    draw = np.random.RandomState(0)
    moments = jax.tree.map(lambda x: draw.normal(size=x.shape).astype(x.dtype), moments)
    cut = pipeline.cut_model(nnx.eval_shape(lambda: config(True).build(nnx.Rngs(0))), cuts)
    parts = [stage.params for stage in cut.stages]
    trainer = pipeline.Trainer(
        pipeline.make_pipeline(cut.stages, schedule.build("gpipe", len(cuts), 1), tied=cut.tied), wide
    )
    for known, like in ((state.params, parts), (moments, trainer.abstract_optimizer)):
        back = pipeline.join_states(known, pipeline.split_state(cut, known, like))
        jax.tree.map(np.testing.assert_array_equal, back, known)
        assert jax.tree.structure(back) == jax.tree.structure(known)


def test_refused() -> None:
    model = nnx.eval_shape(lambda: config(True).build(nnx.Rngs(0)))
    with pytest.raises(ValueError, match=r"cuts \[3, 2\] add up to 5 layers; 4 are there"):
        pipeline.cut_model(model, [3, 2])
    with pytest.raises(ValueError, match="Linear has not embed, blocks, run, logits, loss and loss_from"):
        pipeline.cut_model(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), [1])
    cut = pipeline.cut_model(model, [3, 1])
    with pytest.raises(ValueError, match="blocks/.* do not make|which does not make"):
        pipeline.join_states(cut.skeleton.params, [cut.stages[0].params])


def test_layers_that_differ_keep_their_numbers() -> None:
    """Windows and layers without rotation go by the number of the layer in the whole model."""
    mixed = config(False, window=2, window_layers=(True, False), rope_layers=(True, True, True, False))
    program = make_program(mixed, optax.sgd(0.1), Plan(mesh="data:1"), devices=jax.devices()[:1])
    state = program.init()
    wanted = jax.device_get(program.evaluate(state, program.place(batch())))
    cut = pipeline.cut_model(nnx.eval_shape(lambda: mixed.build(nnx.Rngs(0))), (3, 1))
    made = pipeline.make_pipeline(cut.stages, schedule.build("1f1b", 2, 4), Plan(mesh="stage:2"), (), jax.devices()[:2])
    total, weight = made.losses(made.lay_out(cut.split(jax.device_get(state.params))), batch())
    assert [float(total[0]), float(weight[0])] == pytest.approx([float(x) for x in wanted], rel=1e-6)
