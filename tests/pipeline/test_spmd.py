"""The pipeline in one program: the numbers of one device, GPipe and circular, with every other axis beside it."""

from __future__ import annotations

import functools
import math
import re

import jax
import numpy as np
import optax
import pytest

from jaxpp import tree
from jaxpp.models import DecoderConfig
from jaxpp.nn.moe import MoeConfig
from jaxpp.parallel import PipelineConfig, Plan, executing
from jaxpp.train.program import Program
from jaxpp.train.programs import make_program

BATCH, SEQ, VOCAB = 16, 8, 64
SHAPE = dict(vocab_size=VOCAB, num_layers=4, embed_dim=32, num_heads=4, num_kv_heads=2, mlp_dim=64, max_positions=32)
CONFIG = DecoderConfig(**SHAPE)
MIXED = DecoderConfig(**SHAPE, tied=True, window=3, window_layers=(True, False), rope_layers=(True, True, False))
CIRCULAR = PipelineConfig("interleaved", 2, 4)


def make_batch() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCAB, (BATCH, SEQ + 1), dtype=np.int32)
    cut, at = rng.integers(1, SEQ, (BATCH, 1)), np.arange(SEQ, dtype=np.int32)[None]
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "segments": (1 + (at >= cut)).astype(np.int32),
        "positions": np.where(at >= cut, at - cut, at).astype(np.int32),
        "weights": (rng.random((BATCH, SEQ)) < 0.8).astype(np.float32),
    }


def values(program: Program, state) -> tuple[float, dict[str, np.ndarray]]:
    loss, gradients = program.loss_and_gradients(jax.device_put(state, program.shardings), program.place(make_batch()))
    return float(loss), {path: np.asarray(g) for path, g in tree.named_leaves(gradients).items()}


@functools.cache
def oracle(config: DecoderConfig):
    program = make_program(config, optax.sgd(0.1), "data:1", devices=jax.devices()[:1])
    state = program.init(0)
    return state, values(program, state)


@pytest.mark.parametrize(
    ("config", "plan"),
    [
        (CONFIG, Plan("stage:2 data:2 tensor:2")),
        pytest.param(
            CONFIG,
            Plan("stage:4 data:2", remat="full", pipeline=PipelineConfig(microbatches=8)),
            marks=pytest.mark.slow,
        ),
        (CONFIG, Plan("stage:2 fsdp:4", remat="dots", pipeline=CIRCULAR)),
        pytest.param(
            CONFIG,
            Plan("stage:2 data:4", microbatches=2, pipeline=PipelineConfig(microbatches=2)),
            marks=pytest.mark.slow,
        ),
        (
            CONFIG,
            Plan(
                "stage:2 fsdp:2 tensor:2",
                schemes=("stage", "fsdp", "tensor", "sequence"),
                remat="full",
                pipeline=PipelineConfig("interleaved", 2, 2),
            ),
        ),
        (MIXED, Plan("stage:2 data:4", pipeline=CIRCULAR)),
        (MIXED, Plan("stage:2 data:2 tensor:2", microbatches=2, pipeline=PipelineConfig("zb-h1", 1, 4, "spmd"))),
        pytest.param(MIXED, Plan("stage:4 tensor:2", pipeline=PipelineConfig(microbatches=8)), marks=pytest.mark.slow),
    ],
    ids=lambda x: f"{x.mesh} {x.pipeline.schedule}" if isinstance(x, Plan) else "mixed" if x is MIXED else "plain",
)
def test_loss_and_gradients_are_those_of_one_device(config, plan):
    state, (loss, gradients) = oracle(config)
    found, others = values(make_program(config, optax.sgd(0.1), plan), state)
    assert found == pytest.approx(loss, rel=1e-6)
    for path, wanted in gradients.items():
        np.testing.assert_allclose(others[path], wanted, rtol=0, atol=1e-5 * np.abs(wanted).max(), err_msg=path)


def test_each_rank_holds_its_own_layers():
    program = make_program(CONFIG, optax.adam(1e-3), "stage:4 data:2")
    kernel = program.init(0).params["blocks"]["attention"]["query"]["kernel"][...]
    assert kernel.sharding.shard_shape(kernel.shape)[0] == 1
    moments = tree.named_leaves(program.abstract_state.optimizer)
    split = [leaf for path, leaf in moments.items() if path.endswith("mu/blocks/mlp/up/kernel")]
    assert split and split[0].sharding.shard_shape(split[0].shape)[0] == 1


def test_a_step_trains_and_the_pipeline_permutes():
    program = make_program(CONFIG, optax.sgd(0.1), "stage:2 data:4")
    state, batch = program.init(0), program.place(make_batch())
    losses = []
    for _ in range(3):
        state, metrics = program.step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[2] < losses[1] < losses[0]

    def forward(params, other, batch):
        with executing(program.plan.execution(program.layout)):
            return program.summed_loss(params, other, batch)[0]

    like = program.abstract_state
    text = jax.jit(forward).lower(like.params, like.other, batch).compile().as_text()
    found = re.findall(r"= \(?f32\[([0-9,]*)\][^\n]* collective-permute(?:-start)?\(", text)
    sent = [math.prod(int(size) for size in shape.split(",")) for shape in found]
    assert max(sent) == BATCH // 2 // 4 * SEQ * SHAPE["embed_dim"]  # a microbatch's share on a device


@pytest.mark.parametrize(
    ("config", "plan", "message"),
    [
        (CONFIG, Plan("stage:8"), "4 layers do not split into 8 stages x 1 chunks; 1, 2, 4 in all do"),
        (
            CONFIG,
            Plan("stage:4 data:2", pipeline=PipelineConfig("interleaved", 2)),
            "4 layers do not split into 4 stages x 2 chunks; 1, 2, 4 in all do",
        ),
        (
            CONFIG,
            Plan("stage:2 data:4", pipeline=PipelineConfig("interleaved", 2, 3)),
            "plan.pipeline.microbatches = 3: with 2 chunks a multiple of the 2 stages is needed, 2 say",
        ),
    ],
)
def test_what_the_ring_cannot_share_out_is_refused(config, plan, message):
    with pytest.raises(ValueError, match=message):
        _ = make_program(config, optax.sgd(0.1), plan).abstract_state


def test_a_batch_that_does_not_split_is_refused():
    program = make_program(CONFIG, optax.sgd(0.1), Plan("stage:2 data:4", pipeline=PipelineConfig(microbatches=3)))
    with pytest.raises(
        ValueError,
        match="a batch of 16 does not split into 3 pipeline microbatches over 4 batch shards; 12 or 24 would",
    ):
        program.check_batch(16)


def test_experts_in_a_pipeline_are_refused():
    config = DecoderConfig(**SHAPE, moe=MoeConfig(4, 2))
    program = make_program(config, optax.sgd(0.1), "stage:2 data:4")
    with pytest.raises(ValueError, match="a mixture of experts does not run inside of a pipeline over axis stage"):
        program.evaluate(program.init(0), program.place(make_batch()))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(schedule="gpip"), 'plan.pipeline.schedule: unknown "gpip"; did you mean "gpipe"?'),
        (dict(chunks=2, executor="spmd"), "plan.pipeline.chunks = 2: gpipe has 1; schedule interleaved takes more"),
        (dict(microbatches=-1), "plan.pipeline: chunks = 0, microbatches = -1"),
    ],
)
def test_wrong_settings_are_refused(fields, message):
    with pytest.raises(ValueError) as error:
        PipelineConfig(**fields)
    assert str(error.value).startswith(message)
