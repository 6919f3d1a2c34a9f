"""Optimizers by name, their matrices and decays read off the arrows, and the learning rate at its key steps."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpp import tree
from jaxpp.models import DecoderConfig
from jaxpp.parallel import Plan
from jaxpp.train import OptimizerConfig, make_program
from jaxpp.train.optimizer import OPTIMIZERS, SCHEDULES, decays, global_norm, make_optimizer, make_schedule, matrices

CONFIG = DecoderConfig(32, 1, 16, num_heads=2, num_kv_heads=2, mlp_dim=32)
PEAK = 0.02
MESH = Plan(mesh="data:2 fsdp:2 tensor:2", schemes=("data", "zero1", "fsdp", "tensor"))


def settings(name: str, **fields) -> OptimizerConfig:
    return OptimizerConfig(name, PEAK, schedule="constant", warmup_steps=0, schedule_steps=100, epsilon=1e-4, **fields)


def make_batch() -> dict[str, np.ndarray]:
    tokens = np.random.default_rng(0).integers(0, 32, (8, 9)).astype(np.int32)
    positions = np.tile(np.arange(8, dtype=np.int32), (8, 1))
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "positions": positions,
        "weights": np.ones((8, 8), np.float32),
    }


@functools.cache
def trained(name: str) -> tuple[list[float], dict[str, np.ndarray]]:
    """Train on one device; return the losses and the weights after two updates."""
    program = make_program(CONFIG, make_optimizer(settings(name)), "data:1", devices=jax.devices()[:1])
    state, losses, second = program.init(0), [], {}
    for i in range(12):
        state, metrics = program.step(state, program.place(make_batch()))
        losses.append(float(metrics["loss"]))
        if i == 1:
            second = {path: np.array(leaf) for path, leaf in tree.named_leaves(state.params).items()}
    return losses, second


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_trains(name):
    losses, _ = trained(name)
    assert np.isfinite(losses).all() and losses[-1] < losses[0] - 0.05


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_updates_the_same_on_a_mesh(name):
    program = make_program(CONFIG, make_optimizer(settings(name)), MESH)
    state = program.init(0)
    for _ in range(2):
        state, metrics = program.step(state, program.place(make_batch()))
    losses, wanted = trained(name)
    assert metrics["loss"] == pytest.approx(losses[1], rel=1e-5)
    for path, leaf in tree.named_leaves(state.params).items():
        np.testing.assert_allclose(leaf, wanted[path], rtol=0, atol=1e-5, err_msg=path)


@functools.cache
def params() -> nnx.State:
    biases = dict(qkv_bias=True, out_bias=True, mlp_bias=True)
    config = dataclasses.replace(CONFIG, num_layers=3, norm="layer", positions="learned", **biases)
    return nnx.split(nnx.eval_shape(lambda: config.build(nnx.Rngs(0))), nnx.Param, ...)[1]


def test_what_decays_is_what_reads():
    found = {path: node.get_value() for path, node in tree.named_nodes(decays(params())).items()}
    assert {path for path, decay in found.items() if decay} == {
        *(f"blocks/attention/{name}/kernel" for name in ("query", "key", "value", "out")),
        *(f"blocks/mlp/{name}/kernel" for name in ("gate", "up", "down")),
        "tokens/table",
        "places/table",
        "head/kernel",
    }
    assert len(found) == 10 + 7 + 6  # kernels and tables, biases, scales and biases of three norms


def test_muons_matrices_are_reads_by_writes():
    flat = jax.tree_util.tree_flatten_with_path(matrices(params()), is_leaf=tree.is_variable)[0]
    axes = {
        tree.path_name(path): (node.get_value().reduction_axis, node.get_value().output_axis)
        for path, node in flat
        if node.get_value() is not None
    }
    heads, square = ((1,), (2, 3)), ((1,), (2,))
    assert axes == {
        **{f"blocks/attention/{name}/kernel": heads for name in ("query", "key", "value")},
        "blocks/attention/out/kernel": ((1, 2), (3,)),
        **{f"blocks/mlp/{name}/kernel": square for name in ("gate", "up", "down")},
    }


def test_muon_makes_the_update_orthogonal():
    """The update of a stacked 16 x (2 x 8) matrix has singular values near 1 times the rate, layer by layer."""
    weight = nnx.Param(jnp.zeros((2, 16, 2, 8)), dims="layers | embed -> heads head_dim")
    state = nnx.State({"w": weight, "t": nnx.Param(jnp.zeros((4, 16)), dims="vocab -> embed")})
    grads = jax.tree.map(lambda w: jax.random.normal(jax.random.key(0), w.shape), state)
    optimizer = make_optimizer(settings("muon", weight_decay=0.0, clip_norm=0.0))
    updates, moments = jax.jit(lambda g, s: optimizer.update(g, optimizer.init(s), s))(grads, state)
    for layer in np.asarray(updates["w"][...]):
        singular = np.linalg.svd(layer.reshape(16, 16), compute_uv=False)
        assert singular.max() / singular.min() < 2.5
        assert np.sqrt(np.square(layer).mean()) == pytest.approx(0.2 * PEAK, rel=0.3)  # as large as an Adam update
    table = np.abs(updates["t"][...])  # a table: Adam with Nesterov momentum, all entries by about the rate
    assert PEAK * 0.99 < table.min() and table.max() < 1.5 * PEAK
    names = [path for path in tree.named_leaves(moments) if path.endswith("/w")]
    assert len(names) == 1 and sum(path.endswith("/t") for path in tree.named_leaves(moments)) == 2


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_decay_shrinks_matrices_alone(name):
    """With no gradient, a weight that reads a dim becomes (1 - rate x decay) of itself."""
    state = nnx.State({
        "w": nnx.Param(jnp.full((16, 32), 2.0), dims="embed -> mlp"),
        "t": nnx.Param(jnp.full((4, 16), 2.0), dims="vocab -> embed"),
        "b": nnx.Param(jnp.full((32,), 2.0), dims="-> mlp"),
    })  # fmt: skip
    optimizer = make_optimizer(settings(name, weight_decay=0.5))
    zero = jax.tree.map(jnp.zeros_like, state)
    updates, _ = jax.jit(lambda g, s: optimizer.update(g, optimizer.init(s), s))(zero, state)
    for path, wanted in (("w", -2.0 * PEAK * 0.5), ("t", -2.0 * PEAK * 0.5), ("b", 0.0)):
        np.testing.assert_allclose(updates[path][...], wanted, rtol=1e-4, atol=1e-7, err_msg=path)


@pytest.mark.parametrize(("clip", "norm"), [(1.0, 1.0), (10.0, 5.0), (0.0, 5.0)])
def test_clipping_is_by_the_global_norm(clip, norm):
    state = nnx.State({name: nnx.Param(jnp.zeros(1), dims="-> embed") for name in "ab"})
    grads = nnx.State({name: nnx.Param(jnp.full(1, n), dims="-> embed") for name, n in (("a", 3.0), ("b", 4.0))})
    optimizer = make_optimizer(settings("sgd", b1=0.0, clip_norm=clip))
    updates, _ = optimizer.update(grads, optimizer.init(state), state)
    assert float(global_norm(updates)) == pytest.approx(PEAK * norm, rel=1e-5)
    assert updates["b"][0] / updates["a"][0] == pytest.approx(4 / 3)


def test_the_norm_is_summed_wide():
    grads = {"a": jnp.full(4096, 1.0, jnp.bfloat16), "b": jnp.full(4096, 1.0, jnp.bfloat16)}
    found = global_norm(grads)
    assert found.dtype == jnp.float32 and found == pytest.approx(np.sqrt(8192), rel=1e-6)


def rates(steps: tuple[int, ...], **fields) -> list[float]:
    config = OptimizerConfig(learning_rate=1.0, final_fraction=0.1, **fields)
    return [float(make_schedule(config)(jnp.int32(step))) for step in steps]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_rate_warms_up_from_above_zero(schedule):
    found = rates((0, 4, 9), schedule=schedule, warmup_steps=10, schedule_steps=100)
    assert found == pytest.approx([0.1, 0.5, 1.0], rel=1e-5)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_without_warmup_the_rate_starts_at_its_peak(schedule):
    found = rates((0,), schedule=schedule, warmup_steps=0, schedule_steps=1000)
    assert found == pytest.approx([1.0], rel=1e-3)


def test_cosine_at_its_key_steps():
    found = rates((9, 54, 99, 100, 1000), schedule="cosine", warmup_steps=10, schedule_steps=100)
    assert found == pytest.approx([1.0, 0.55, 0.1, 0.1, 0.1], rel=1e-5)


def test_wsd_holds_its_plateau_then_falls_in_a_line():
    steps = (9, 10, 40, 79, 89, 99, 1000)
    found = rates(steps, schedule="wsd", warmup_steps=10, schedule_steps=100, decay_steps=20)
    assert found == pytest.approx([1.0, 1.0, 1.0, 1.0, 0.55, 0.1, 0.1], rel=1e-5)
    assert found == rates(steps, schedule="wsd", warmup_steps=10, schedule_steps=100)  # a fifth of it by default


def test_constant_stays():
    assert rates((9, 99, 10_000), schedule="constant", warmup_steps=10, schedule_steps=100) == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("warmup_steps", [0, 50, 90])
@pytest.mark.parametrize("decay_steps", [0, 10])
def test_wsd_ends_with_its_schedule(warmup_steps, decay_steps):
    fields = dict(schedule="wsd", warmup_steps=warmup_steps, schedule_steps=100, decay_steps=decay_steps)
    assert rates((99,), **fields) == pytest.approx([0.1], rel=1e-5)


def test_wsd_that_cannot_end_with_its_schedule_is_refused():
    with pytest.raises(ValueError, match="optimizer.decay_steps"):
        OptimizerConfig(schedule="wsd", warmup_steps=50, schedule_steps=100, decay_steps=60)


def test_the_schedule_has_a_length_of_its_own():
    """Training for another number of steps changes no rate: nothing of train.num_steps is asked for."""
    steps = (10, 20, 30)
    short, long = (rates(steps, schedule="cosine", warmup_steps=5, schedule_steps=n) for n in (100, 200))
    assert all(one < other for one, other in zip(short, long, strict=True))
    assert "num_steps" not in {field.name for field in dataclasses.fields(OptimizerConfig)}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(name="adam"), 'optimizer.name: unknown "adam"; did you mean "adamw"? known: adamw muon adafactor sgd'),
        (dict(name="zzz"), 'optimizer.name: unknown "zzz"; known: adamw muon'),
        (
            dict(schedule="cosin"),
            'optimizer.schedule: unknown "cosin"; did you mean "cosine"? known: cosine wsd constant',
        ),
        (
            dict(warmup_steps=11, schedule_steps=10),
            "optimizer.warmup_steps 11 must lie between 0 and schedule_steps 10",
        ),
        (dict(warmup_steps=-1), "optimizer.warmup_steps -1 must lie between 0 and schedule_steps 1000"),
        (dict(warmup_steps=0, schedule_steps=0), "optimizer."),
        (dict(clip_norm=-1.0), "optimizer.clip_norm"),
        (dict(learning_rate=-1e-3), "optimizer.learning_rate"),
        (dict(weight_decay=-0.1), "optimizer.weight_decay"),
        (dict(decay_steps=-5), "optimizer.decay_steps"),
        (dict(b2=1.0), "optimizer.b2"),
    ],
)
def test_wrong_settings_are_refused_with_the_fix(fields, message):
    with pytest.raises(ValueError) as error:
        OptimizerConfig(**fields)
    assert message in str(error.value) and "\n" not in str(error.value)
