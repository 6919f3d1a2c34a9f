"""Training goes on after growth as if nothing had happened; without noise copies stay copies, with it they do not."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxpp import tree
from jaxpp.grow import Growth, Request, enlarge
from jaxpp.grow.settings import settings_of
from jaxpp.models import DecoderConfig
from jaxpp.train import OptimizerConfig
from jaxpp.train.optimizer import make_optimizer

VOCAB, SEQ, ROWS = 48, 24, 16
CONFIG = DecoderConfig(
    vocab_size=VOCAB, num_layers=2, embed_dim=32, num_heads=4, num_kv_heads=2, mlp_dim=48, max_positions=SEQ, tied=True
)
OPTIMIZER = OptimizerConfig(
    learning_rate=4e-3, schedule="constant", warmup_steps=0, clip_norm=0.0, weight_decay=0.1, epsilon=1e-12
)
BEFORE, AFTER = 300, 32


def batches(first: int, count: int) -> jax.Array:
    """Draw texts of a chain in which each token says much of the next one."""
    rng = np.random.default_rng(7)
    cumulative = rng.dirichlet(np.full(VOCAB, 0.1), size=VOCAB).cumsum(-1)
    out, draws = np.empty((count, ROWS, SEQ + 1), np.int32), np.random.default_rng(100 + first)
    out[:, :, 0] = draws.integers(VOCAB, size=(count, ROWS))
    for at in range(1, SEQ + 1):
        uniform = draws.random((count, ROWS, 1))
        out[:, :, at] = (uniform > cumulative[out[:, :, at - 1]]).sum(-1).clip(0, VOCAB - 1)
    return jnp.asarray(out)


def as_batch(rows: jax.Array) -> dict[str, jax.Array]:
    shape = (rows.shape[0], SEQ)
    return dict(
        tokens=rows[:, :-1], targets=rows[:, 1:], positions=jnp.broadcast_to(jnp.arange(SEQ), shape),
        weights=jnp.ones(shape),
    )  # fmt: skip


def trained(model: Any, optimizer: Any, moments: Any, rows: jax.Array) -> tuple[Any, Any, np.ndarray]:
    """Train on the rows; return the model, its moments, and the loss on held-out rows after every step."""
    graph, params = nnx.split(model)
    held_out = as_batch(batches(10_000, 8).reshape(-1, SEQ + 1))

    def loss(params: Any, batch: Any) -> jax.Array:
        total, weight = nnx.merge(graph, params).loss(batch)
        return total / weight

    def step(carry: Any, rows: jax.Array) -> Any:
        params, moments = carry
        updates, moments = optimizer.update(jax.grad(loss)(params, as_batch(rows)), moments, params)
        params = optax.apply_updates(params, updates)
        return (params, moments), loss(params, held_out)

    (params, moments), losses = jax.jit(lambda c, r: jax.lax.scan(step, c, r))((params, moments), rows)
    return nnx.merge(graph, params), moments, np.asarray(losses)


@functools.cache
def small() -> tuple[Any, Any]:
    """Return a model that was trained for a while, and its moments."""
    optimizer, model = make_optimizer(OPTIMIZER), CONFIG.build(nnx.Rngs(0))
    model, moments, losses = trained(model, optimizer, optimizer.init(nnx.state(model)), batches(0, BEFORE))
    assert losses[-1] < losses[0] - 1
    return model, moments


@functools.cache
def continued() -> np.ndarray:
    """Return the losses of the small model's own next steps."""
    model, moments = small()
    return trained(model, make_optimizer(OPTIMIZER), moments, batches(BEFORE, AFTER))[2]


def grown_and_trained(request: Request, *, carry: bool = True, num_steps: int = AFTER) -> tuple[Any, np.ndarray]:
    model, moments = small()
    growth: Growth = request.growth(CONFIG)
    bigger, grown = enlarge(model, growth, opt_state=moments)
    rates = settings_of(growth).rates if carry else {}
    optimizer = make_optimizer(OptimizerConfig(**{**OPTIMIZER.__dict__, "rates": rates}))
    state = grown if carry else optimizer.init(nnx.state(bigger))
    after, _, losses = trained(bigger, optimizer, state, batches(BEFORE, num_steps))
    return after, losses


@pytest.mark.parametrize("variant", ["symmetric", "diagonal"])
def test_a_carried_state_with_scaled_rates_follows_the_small_model(variant: Any) -> None:
    _, losses = grown_and_trained(Request(width=2, variant=variant, noise_db=None))
    np.testing.assert_allclose(losses, continued(), atol=1e-3)


def test_with_noise_it_follows_to_first_order() -> None:
    _, losses = grown_and_trained(Request(width=2, noise_db=15.0))
    np.testing.assert_allclose(losses, continued(), atol=0.05)


def test_a_new_state_at_the_old_rates_shows_a_bump() -> None:
    _, losses = grown_and_trained(Request(width=2, noise_db=15.0), carry=False)
    assert losses.max() > continued()[0] + 0.05
    assert losses.max() > losses[0]


@pytest.mark.parametrize("request_, follows", [
    (Request(heads=8, noise_db=None), True),
    (Request(mlp=96, noise_db=None), True),
    (Request(head_dim=16, noise_db=None), True),
])  # fmt: skip
def test_other_dims_follow_too(request_: Request, follows: bool) -> None:
    _, losses = grown_and_trained(request_)
    np.testing.assert_allclose(losses, continued(), atol=1e-3)


def halves(model: Any) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return the two copies of what each weight writes to the mlp, of it and of its readers."""
    leaves = tree.named_leaves(nnx.state(model))
    up = np.asarray(leaves["blocks/mlp/up/kernel"])
    return {"up": tuple(np.split(up, 2, axis=-1))}  # type: ignore[dict-item]


def test_copies_stay_equal_to_the_bit_without_noise() -> None:
    model, _ = grown_and_trained(Request(width=2, noise_db=None), num_steps=50)
    first, second = halves(model)["up"]
    assert np.array_equal(first, second)


def test_noise_tells_copies_apart() -> None:
    model, _ = grown_and_trained(Request(width=2, noise_db=15.0), num_steps=50)
    first, second = halves(model)["up"]
    before, _ = small()
    grown = enlarge(before, Request(width=2, noise_db=15.0).growth(CONFIG))
    old_first, old_second = halves(grown)["up"]
    moved = np.abs((first - old_first) - (second - old_second)).mean()
    assert moved > 0.1 * np.abs(first - old_first).mean()


@pytest.mark.parametrize("name", ["adamw", "muon", "sgd"])
def test_moments_have_the_shapes_of_a_new_state(name: str) -> None:
    config = OptimizerConfig(name=name)
    model, optimizer = CONFIG.build(nnx.Rngs(0)), make_optimizer(config)
    moments = optimizer.init(nnx.state(model))
    bigger, grown = enlarge(model, opt_state=moments, width=2, depth=3)
    wanted = tree.named_leaves(jax.eval_shape(optimizer.init, nnx.state(bigger)))
    found = tree.named_leaves(grown)
    assert {k: (v.shape, v.dtype) for k, v in found.items()} == {k: (v.shape, v.dtype) for k, v in wanted.items()}


def test_an_optimizer_whose_state_does_not_grow_is_refused() -> None:
    model = CONFIG.build(nnx.Rngs(0))
    moments = make_optimizer(OptimizerConfig(name="adafactor")).init(nnx.state(model))
    with pytest.raises(ValueError, match="v_row.*does not; start the optimizer anew"):
        enlarge(model, opt_state=moments, width=2)
