"""Where a decoder may be cut, and what its stages keep."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from jaxpp import pipeline, schedule
from jaxpp.models import DecoderConfig
from jaxpp.parallel import Plan
from jaxpp.train.programs import make_program


def config(tied: bool, **more: Any) -> DecoderConfig:
    sizes: dict[str, Any] = dict(vocab_size=32, num_layers=4, embed_dim=16, num_heads=2, mlp_dim=32, max_positions=16)
    return DecoderConfig(**sizes, tied=tied, **more)


def batch() -> dict[str, np.ndarray]:
    draw, size = np.random.RandomState(0), (8, 8)
    found = {name: draw.randint(0, 32, size).astype(np.int32) for name in ("tokens", "targets")}
    positions = np.tile(np.arange(size[1], dtype=np.int32), (size[0], 1))
    weights = draw.uniform(0.1, 1, size).astype(np.float32)
    return {**found, "segments": np.ones(size, np.int32), "positions": positions, "weights": weights}


def test_refused() -> None:
    model = nnx.eval_shape(lambda: config(True).build(nnx.Rngs(0)))
    with pytest.raises(ValueError, match=r"cuts \[3, 2\] add up to 5 layers; 4 are there"):
        pipeline.cut_model(model, [3, 2])
    with pytest.raises(ValueError, match="Linear has not embed, blocks, run, logits, loss and loss_from"):
        pipeline.cut_model(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), [1])


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
