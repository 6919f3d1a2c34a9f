"""A factor on the learning rate of one weight scales what follows from its gradient, and nothing else."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxpp import config as configs
from jaxpp import tree
from jaxpp.data.config import DataConfig
from jaxpp.parallel import PipelineConfig, Plan
from jaxpp.pipeline import cut_model
from jaxpp.runs import build_run
from jaxpp.train import OptimizerConfig, Run, make_program
from jaxpp.train.optimizer import OPTIMIZERS, make_optimizer
from jaxpp.train.rates import rate_of
from jaxpp.train.session import check
from tests.pipeline.functions import alike
from tests.pipeline.test_cut import batch, config

PEAK, DECAY = 0.02, 0.5
RATES = {"up/kernel": 0.25, "up/*": 3.0}
FACTORS = {"up/kernel": 0.25, "up/bias": 3.0, "table": 1.0}


def settings(name: str, **fields: Any) -> OptimizerConfig:
    known: dict[str, Any] = dict(
        schedule="constant", warmup_steps=0, schedule_steps=100, epsilon=1e-4, weight_decay=DECAY
    )
    return OptimizerConfig(name, PEAK, **known | fields)


def weights() -> nnx.State:
    draw = np.random.RandomState(0)
    shapes = {("up", "kernel"): ((16, 32), "embed -> mlp"), ("up", "bias"): ((32,), "-> mlp"),
              ("table",): ((4, 16), "vocab -> embed")}  # fmt: skip
    return nnx.from_flat_state([
        (path, nnx.Param(jnp.asarray(draw.normal(size=shape), jnp.float32), dims=arrow))
        for path, (shape, arrow) in shapes.items()
    ])  # fmt: skip


def gradients(seed: int) -> Any:
    draw = np.random.RandomState(seed)
    return jax.tree.map(lambda w: jnp.asarray(draw.normal(size=w.shape), jnp.float32), weights())


def updates(name: str, params: Any, **fields: Any) -> dict[str, np.ndarray]:
    """Return the second update, both taken at the same weights."""
    rule = make_optimizer(settings(name, **fields))

    @jax.jit
    def second(first: Any, second: Any, params: Any) -> Any:
        _, state = rule.update(first, rule.init(params), params)
        return rule.update(second, state, params)[0]

    return tree.named_leaves(second(gradients(1), gradients(2), params))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_factor_scales_the_direction_and_not_the_decay(name: str) -> None:
    direction = updates(name, weights(), weight_decay=0.0)
    plain, found = updates(name, weights()), updates(name, weights(), rates=RATES)
    for path, factor in FACTORS.items():
        decay = plain[path] - direction[path]
        np.testing.assert_allclose(found[path], factor * direction[path] + decay, rtol=1e-4, atol=1e-6, err_msg=path)
        assert np.abs(decay).max() > 0.5 * PEAK * DECAY or path == "up/bias"


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_optimizers_state_keeps_its_names(name: str) -> None:
    plain, found = (jax.eval_shape(make_optimizer(settings(name, rates=r)).init, weights()) for r in ({}, RATES))
    assert tree.named_leaves(found) == tree.named_leaves(plain)


def test_a_path_wins_over_patterns_and_the_longer_pattern_over_the_shorter() -> None:
    rates = {"*": 5.0, "blocks/*/kernel": 2.0, "blocks/mlp/*": 3.0, "blocks/mlp/up/kernel": 4.0}
    assert rate_of("blocks/mlp/up/kernel", rates) == 4.0
    assert rate_of("blocks/mlp/down/kernel", rates) == 2.0
    assert rate_of("blocks/mlp/down/bias", rates) == 3.0
    assert rate_of("head/kernel", rates) == 5.0
    assert rate_of("head/kernel", {"blocks/*": 2.0}) == 1.0


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan"), float("inf")])
def test_a_factor_is_above_zero(factor: float) -> None:
    with pytest.raises(ValueError, match=r"optimizer.rates: head/kernel: .*above 0"):
        OptimizerConfig(rates={"head/kernel": factor})


@pytest.mark.parametrize("mesh", ["data:8", "stage:2 data:4"])
def test_a_weight_that_is_not_there_is_refused_before_a_compile(mesh: str) -> None:
    wrong = OptimizerConfig(rates={"blocks/mlp/dwn/kernel": 0.5})
    plan = Plan(mesh, pipeline=PipelineConfig("1f1b", microbatches=2))
    words = r'optimizer.rates: no weight "blocks/mlp/dwn/kernel"; did you mean "blocks/mlp/down/kernel"'
    with pytest.raises(ValueError, match=words):
        check(Run(config(True), optimizer=wrong, plan=plan, data=DataConfig(seq_len=8, tokenizer="bytes")))
    with pytest.raises(ValueError, match=words):
        program: Any = make_program(config(True), make_optimizer(wrong), plan)
        program.step.lower(program.abstract_state, batch())


def test_factors_go_through_files_and_overrides(tmp_path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text('optimizer: {rates: {blocks/mlp/down/kernel: 0.5, "blocks/*": 2}}\n')
    read = configs.read(path, ["optimizer.rates.head/kernel=0.1"])
    rates = {"blocks/mlp/down/kernel": 0.5, "blocks/*": 2.0, "head/kernel": 0.1}
    run = build_run(read)
    assert run.optimizer.rates == rates
    path.write_text(configs.dump(run.optimizer))
    assert configs.build(OptimizerConfig, configs.read(path)) == run.optimizer
    path.write_text("optimizer: {rates: {head/kernel: fast}}\n")
    with pytest.raises(ValueError, match=r'optimizer.rates.head/kernel = "fast": a number is needed'):
        build_run(configs.read(path))


STAGED = {"blocks/*/kernel": 0.5, "tokens/table": 4.0, "final_norm/*": 0.25}


def test_a_part_of_the_model_has_the_factors_of_the_whole() -> None:
    """A part may lack what a key names, and says so by the norm of the whole that it is given."""
    rule = optax.with_extra_args_support(make_optimizer(settings("sgd", rates=STAGED)))
    cut = cut_model(nnx.eval_shape(lambda: config(True).build(nnx.Rngs(0))), (3, 1))
    draw = np.random.RandomState(0)
    whole = jax.tree.map(lambda x: draw.normal(size=x.shape).astype(np.float32), cut.skeleton.params)

    @jax.jit
    def update(params: Any) -> dict[str, Any]:
        gradients = jax.tree.map(jnp.sin, params)
        return tree.named_leaves(rule.update(gradients, rule.init(params), params, grad_norm=np.float32(3))[0])

    wanted = update(whole)
    for start, part in zip(cut.starts, cut.split(whole), strict=True):
        for path, found in update(part).items():
            own = wanted[path][start:][: len(found)] if path.startswith("blocks/") else wanted[path]
            np.testing.assert_allclose(found, own, rtol=1e-6, err_msg=path)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_pipeline_trains_at_these_rates_as_one_device_does() -> None:
    ends, staged = [], Plan("stage:2", pipeline=PipelineConfig("1f1b", microbatches=4, cuts=(3, 1)))
    for plan, count in ((Plan("data:1", microbatches=4), 1), (staged, 2)):
        optimizer = make_optimizer(settings("sgd", rates=STAGED))
        program: Any = make_program(config(True), optimizer, plan, devices=jax.devices()[:count])
        state = program.init()
        for _ in range(2):
            state, _ = program.step(state, program.place(batch()))
        ends.append({path: np.asarray(x) for path, x in tree.named_leaves(program.to_save(state)).items()})
    alike(ends[1], ends[0])
