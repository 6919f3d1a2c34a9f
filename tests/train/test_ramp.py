"""New units come in while the model trains: from the old function to weights of their own, in one compiled step."""

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

from jaxpp import config as configs
from jaxpp.data.config import DataConfig
from jaxpp.models import DecoderConfig
from jaxpp.nn.moe import MoeConfig
from jaxpp.parallel import Plan
from jaxpp.train import Run, TrainConfig, make_program
from jaxpp.train.ramp import RampConfig, make_ramp, ramped
from jaxpp.train.session import check

MODEL = DecoderConfig(32, 2, 16, num_heads=4, num_kv_heads=2, head_dim=4, mlp_dim=24, max_positions=16, mlp_bias=True)
RAMP = RampConfig({"mlp": 16, "layers": 1}, num_steps=4, start=1)
STILL = optax.sgd(0.0)  # only the mask changes
ONE = jax.devices()[:1]


def batch() -> dict[str, np.ndarray]:
    tokens = np.random.RandomState(0).randint(0, 32, (8, 9)).astype(np.int32)
    positions, weights = np.tile(np.arange(8, dtype=np.int32), (8, 1)), np.ones((8, 8), np.float32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "positions": positions, "weights": weights}


def abstract(config: DecoderConfig) -> Any:
    return nnx.eval_shape(lambda: config.build(nnx.Rngs(0)))


def program_of(config: DecoderConfig, ramp: RampConfig | None, plan: Plan | str = "data:1", devices: Any = ONE) -> Any:
    return make_program(config, STILL, plan, devices=devices, ramp=ramp)


@cache
def plain_loss() -> float:
    program = program_of(MODEL, None)
    total, weight = program.evaluate(program.init(), program.place(batch()))
    return float(total / weight)


@cache
def old_loss() -> float:
    """Cut the new units and the new layer off."""
    program = program_of(dataclasses.replace(MODEL, num_layers=1, mlp_dim=16), None)
    params = program_of(MODEL, None).init().params
    old = jax.tree.map(lambda x, new: new[tuple(slice(size) for size in x.shape)], program.params, params)
    state = program.begin(jax.device_put(old, program.shardings.params))
    total, weight = program.evaluate(state, program.place(batch()))
    return float(total / weight)


@pytest.mark.parametrize("plan", [Plan("data:1"), Plan("data:2 fsdp:2 tensor:2", microbatches=2)], ids=lambda p: p.mesh)
@pytest.mark.timeout(120)
def test_one_compiled_step_goes_from_the_old_function_to_the_new(plan: Plan) -> None:
    devices = ONE if plan.mesh == "data:1" else jax.devices()
    program = program_of(MODEL, RAMP, plan, devices)
    state, losses, evaluated = program.init(), [], []
    for _ in range(7):
        held = program.place(batch())
        total, weight = program.evaluate(state, held)
        evaluated.append(float(total / weight))
        state, metrics = program.step(state, held)
        losses.append(float(metrics["loss"]))
    assert program.step._cache_size() == 1
    assert losses == pytest.approx(evaluated, rel=1e-6)
    assert losses[:2] == pytest.approx([old_loss()] * 2, rel=1e-6)  # until updates done exceed start
    assert losses[5:] == pytest.approx([plain_loss()] * 2, rel=1e-6)
    assert all(abs(before - after) > 1e-5 for before, after in zip(losses[1:5], losses[2:6], strict=True))


def test_new_weights_get_gradients_as_far_as_they_are_in() -> None:
    program = program_of(MODEL, RAMP)
    state, norms = program.init(), []
    for step in (1, 3, 5):
        at = dataclasses.replace(state, step=jnp.int32(step))
        kernel = program.loss_and_gradients(at, program.place(batch()))[1]["blocks"]["mlp"]["down"]["kernel"][...]
        norms.append(float(jnp.linalg.norm(kernel[0, 16:])))
    assert norms[0] == 0 and 0.3 < norms[1] / norms[2] < 0.7


@pytest.mark.parametrize(("step", "mask"), [(0, 0), (10, 0), (12, 0.25), (18, 1), (1000, 1)])
def test_the_mask_rises_in_a_line(step: int, mask: float) -> None:
    ramp = make_ramp(RampConfig({"mlp": 16}, num_steps=8, start=10), abstract(MODEL))
    assert ramp is not None and float(ramp.at(jnp.int32(step))) == mask


def test_narrow_weights_stay_narrow() -> None:
    ramp = make_ramp(RampConfig({"embed": 8}, num_steps=8), abstract(MODEL))
    assert ramp is not None
    params = nnx.split(abstract(MODEL), nnx.Param, ...)[1]
    narrow = jax.tree.map(lambda x: jnp.ones(x.shape, jnp.bfloat16), params)
    found = jax.jit(lambda p: ramped(p, ramp, 0.25))(narrow)
    assert {x.dtype for x in jax.tree.leaves(found)} == {jnp.dtype("bfloat16")}
    assert found["head"]["kernel"][...].min() == 1  # read: what it reads is masked
    table, scale = found["tokens"]["table"][...], found["final_norm"]["scale"][...]
    assert (table[:, :8] == 1).all() and (table[:, 8:] == 0.25).all()
    np.testing.assert_allclose(scale.astype(np.float32), np.sqrt((8 + 0.25 * 8) / 16), rtol=4e-3)


def test_without_steps_there_is_no_ramp() -> None:
    assert make_ramp(RampConfig({"mlp": 16}), abstract(MODEL)) is None
    assert program_of(MODEL, RampConfig()).ramp is None


def test_a_run_has_its_ramp_in_its_file() -> None:
    train = TrainConfig(ramp=RAMP)
    assert configs.build(TrainConfig, configs.parse(configs.dump(train), "run.yaml")) == train
    run = Run(MODEL, data=DataConfig(seq_len=8, tokenizer="bytes"), train=train, plan=Plan("data:8"))
    program: Any = check(run)
    assert program.ramp.config == RAMP
    words = r"train.ramp masks the weights of a whole model, and plan.mesh stage:2 data:4 cuts it into 2 stages"
    with pytest.raises(ValueError, match=words):
        check(dataclasses.replace(run, plan=Plan("stage:2 data:4")))


@pytest.mark.parametrize(
    ("dims", "words"),
    [
        ({"mpl": 16}, r'train.ramp.dims: unknown dim "mpl"; did you mean "mlp"'),
        ({"mlp": 0}, "mlp: 0: the size before is needed"),
        ({}, "train.ramp.num_steps without train.ramp.dims"),
    ],
)
def test_settings_that_say_nothing_are_refused(dims: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        RampConfig(dims, num_steps=4)


@pytest.mark.parametrize(
    ("config", "dims", "words"),
    [
        (MODEL, {"mlp": 32}, "mlp: 32 before, but the model has 24"),
        (MODEL, {"heads": 2}, "2 heads on 2 kv heads became 4 on 2: .*1 heads for each key are needed, 2 on 2"),
        (dataclasses.replace(MODEL, norm="layer"), {"embed": 8}, "layer norms"),
        (dataclasses.replace(MODEL, qk_norm="full"), {"heads": 2, "kv_heads": 1}, "a norm over all heads"),
        (
            dataclasses.replace(MODEL, mlp_bias=False, moe=MoeConfig(4, 2, 16, 32)),
            {"mlp": 8},
            r"mlp has the sizes 16 \(.*\) and 32 \(.*\)",
        ),
    ],
)
def test_what_no_mask_keeps_is_refused(config: DecoderConfig, dims: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_ramp(RampConfig(dims, num_steps=4), abstract(config))


def test_a_dim_that_the_model_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match='no weight has dim "mlp".* dims of this model: '):
        make_ramp(RampConfig({"mlp": 8}, num_steps=4), nnx.Dict(w=nnx.Param(jnp.ones(3), dims="-> embed")))
