"""Mixture of experts against a loop over tokens and experts in float64: values, gradients, capacity, balance."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpp import dims, tree
from jaxpp.nn.dispatch import tile_rows, to_shards, to_tiles
from jaxpp.nn.moe import Moe, MoeConfig
from jaxpp.nn.router import balance_loss, route, router_sums, with_gradient_of

BATCH, SEQ, EMBED, MLP, EXPERTS, K = 2, 6, 8, 12, 5, 2
CONFIGS = {
    "normalised": MoeConfig(EXPERTS, K),
    "as they come": MoeConfig(EXPERTS, 3, normalize=False),
    "one": MoeConfig(EXPERTS, 1, normalize=False),
    "shared": MoeConfig(EXPERTS, K, shared_mlp_dim=6),
    "shared, gated": MoeConfig(EXPERTS, K, mlp_dim=10, shared_mlp_dim=6, shared_gate=True),
    "narrow": MoeConfig(EXPERTS, K, capacity_factor=0.6, normalize=False),
    "capacity": MoeConfig(EXPERTS, K, capacity_factor=1.0),
}
RNG = np.random.default_rng(0)
X = RNG.normal(size=(BATCH, SEQ, EMBED)).astype(np.float32)
REAL = RNG.random((BATCH, SEQ)) < 0.7


@functools.cache
def drawn(config: MoeConfig) -> tuple[nnx.GraphDef, nnx.State]:
    graph = nnx.graphdef(nnx.eval_shape(lambda: Moe(jax.random.key(1), config, EMBED, MLP)))
    return graph, jax.jit(lambda key: nnx.state(Moe(key, config, EMBED, MLP)))(jax.random.key(1))


def choices(state, x, k: int, xp):
    """Softmax over all experts and a stable sort: of equal ones the lowest index."""
    logits = x.reshape(-1, EMBED) @ state["router"]["kernel"]
    wide = xp.exp(logits - logits.max(-1, keepdims=True))
    probabilities = wide / wide.sum(-1, keepdims=True)
    return (
        logits,
        probabilities,
        np.argsort(-np.asarray(jax.lax.stop_gradient(probabilities)), axis=-1, kind="stable")[:, :k],
    )


def kept_slots(chosen, real, config: MoeConfig) -> np.ndarray:
    """Say which choices find room: first choices before second, earlier tokens before later."""
    kept, taken = np.ones(chosen.shape, bool), np.zeros(config.num_experts, int)
    if config.capacity_factor:
        capacity = math.ceil(config.capacity_factor * chosen.size / config.num_experts)
        for rank in range(chosen.shape[1]):
            for token, expert in enumerate(chosen[:, rank]):
                kept[token, rank] = real[token] and taken[expert] < capacity
                taken[expert] += kept[token, rank]
    return kept


def gated(x, weights, xp):
    gate, up, down = weights
    wide = x @ gate
    return (wide / (1 + xp.exp(-wide)) * (x @ up)) @ down


def oracle(state, x, real, config: MoeConfig, xp=np):
    """Token by token, choice by choice."""
    _, probabilities, chosen = choices(state, x, config.experts_per_token, xp)
    kept, experts, rows = kept_slots(chosen, real.reshape(-1), config), state["experts"], []
    for token, row in enumerate(x.reshape(-1, EMBED)):
        weights = probabilities[token][chosen[token]]
        weights = weights / weights.sum() if config.normalize else weights
        y = xp.zeros(EMBED)
        for rank, expert in enumerate(chosen[token]):
            if kept[token, rank]:
                one = gated(row, [experts[name][expert] for name in ("gate", "up", "down")], xp)
                y = y + weights[rank] * one
        if config.shared_mlp_dim:
            shared = gated(row, [state["shared"][name]["kernel"] for name in ("gate", "up", "down")], xp)
            y = y + (shared / (1 + xp.exp(-row @ state["shared_gate"]["kernel"])) if config.shared_gate else shared)
        rows.append(y)
    return xp.stack(rows).reshape(x.shape)


def values(state) -> dict:
    return nnx.to_pure_dict(state)


@pytest.mark.parametrize("name", CONFIGS)
def test_values_equal_a_loop_in_float64(name):
    config = CONFIGS[name]
    graph, state = drawn(config)
    wide = jax.tree.map(lambda w: np.asarray(w, np.float64), values(state))
    found = jax.jit(lambda s, x: nnx.merge(graph, s)(x, real=REAL))(state, X)
    np.testing.assert_allclose(found, oracle(wide, X.astype(np.float64), REAL, config), atol=1e-5)


@pytest.mark.parametrize("name", ["as they come", "shared, gated", "narrow"])
def test_gradients_equal_those_of_the_loop(name):
    config = CONFIGS[name]
    graph, state = drawn(config)
    x, real = X[1:, :4], REAL[1:, :4]
    run, loop = (lambda s, x: nnx.merge(graph, s)(x, real=real)), (lambda s, x: oracle(s, x, real, config, jnp))
    found = jax.jit(jax.grad(lambda s, x: jnp.sum(jnp.sin(run(s, x))), argnums=(0, 1)))(state, x)
    wanted = jax.grad(lambda s, x: jnp.sum(jnp.sin(loop(s, x))), argnums=(0, 1))(values(state), x)
    wanted = {**tree.named_leaves(wanted[0]), "x": wanted[1]}
    for path, grad in {**tree.named_leaves(found[0]), "x": found[1]}.items():
        scale = np.abs(wanted[path]).max()
        np.testing.assert_allclose(grad, wanted[path], atol=1e-5 * scale, err_msg=path)
        assert scale > 0


def test_a_capacity_drops_and_padding_takes_none():
    config = MoeConfig(EXPERTS, 1, capacity_factor=0.5)
    graph, state = drawn(config)
    x = np.broadcast_to(X[:1, :1], X.shape)  # every token wants the same expert
    y = np.asarray(jax.jit(lambda x: nnx.merge(graph, state)(x, real=REAL))(x)).reshape(-1, EMBED)
    served = np.flatnonzero(y.any(-1))
    np.testing.assert_array_equal(served, np.flatnonzero(REAL)[: math.ceil(0.5 * BATCH * SEQ / EXPERTS)])


def test_a_row_alone_is_that_row_among_others():
    graph, state = drawn(CONFIGS["normalised"])
    run = jax.jit(lambda x: nnx.merge(graph, state)(x))
    together = run(np.concatenate([X, np.repeat(X[:1], 5, 0)]))
    for i in range(BATCH):
        np.testing.assert_allclose(run(X[i : i + 1])[0], together[i], atol=1e-6)
    np.testing.assert_allclose(together[BATCH:], np.broadcast_to(together[0], (5, SEQ, EMBED)), atol=1e-6)


def test_a_model_in_bf16_routes_in_fp32():
    """Two experts 1e-3 apart at logit 8, where bf16 has steps of 1/16."""
    x = jnp.ones((1, 8), jnp.bfloat16)
    kernel = jnp.full((8, 3), 1.0).at[0, 1].add(1e-3).at[:, 0].set(0.0)
    routing = route(x, kernel, 1, True)
    assert routing.logits.dtype == jnp.float32 and int(routing.chosen[0, 0]) == 1
    assert float(routing.logits[0, 1] - routing.logits[0, 2]) == pytest.approx(1e-3, rel=1e-2)
    narrow = jnp.asarray([[2.0**-8] + [0.0] * 6 + [8.0]], jnp.bfloat16)  # bf16 inputs whose exact sum bf16 cannot hold
    kernel = jnp.zeros((8, 2), jnp.bfloat16).at[7].set(1.0).at[0, 1].set(1.0)
    assert int(route(narrow, kernel, 1, True).chosen[0, 0]) == 1


def test_of_equal_experts_the_lowest_are_chosen():
    routing = route(jnp.ones((2, 4)), jnp.zeros((4, 6)), 3, True)
    np.testing.assert_array_equal(routing.chosen, [[0, 1, 2]] * 2)


def test_auxiliary_losses_join_the_gradient_and_not_the_value():
    config = MoeConfig(EXPERTS, K, capacity_factor=1.0, balance_loss=0.7, z_loss=0.3)
    graph, state = drawn(config)
    weight = jnp.float32(REAL.sum())

    def plain(state, x, loss_weight=None):
        return jnp.sum(jnp.sin(nnx.merge(graph, state)(x, real=REAL, loss_weight=loss_weight)))

    def auxiliary(state, x):
        logits, probabilities, chosen = choices(state, x, K, jnp)
        real = REAL.reshape(-1)
        slots = np.bincount(chosen[real].reshape(-1), minlength=EXPERTS) / real.sum()
        balance = EXPERTS * (slots * probabilities[real].mean(0)).sum()
        square = (jnp.log(jnp.exp(logits[real]).sum(-1)) ** 2).mean()
        return weight * (0.7 * balance + 0.3 * square)

    compute = jax.jit(jax.value_and_grad(plain, argnums=(0, 1)))
    (value, found), (without, base) = compute(state, X, weight), compute(state, X)
    assert float(value) == float(without)
    extra = jax.grad(auxiliary, argnums=(0, 1))(values(state), X)
    scale = np.abs(extra[0]["router"]["kernel"]).max()
    for one, more, other in zip(*map(jax.tree.leaves, (found, extra, base)), strict=True):
        np.testing.assert_allclose(one, more + other, atol=1e-5 * scale)
    assert scale > 0.1


def test_an_even_router_has_balance_k():
    routing = route(jnp.ones((4, EMBED)), jnp.zeros((EMBED, EXPERTS)), EXPERTS, True)
    assert float(balance_loss(router_sums(routing, jnp.ones(4, bool)))) == pytest.approx(EXPERTS)


def test_with_gradient_of_sends_one():
    value, grads = jax.value_and_grad(lambda y, a: 3.0 * with_gradient_of(y, a**2), argnums=(0, 1))(2.0, 5.0)
    assert value == 6.0 and grads == (3.0, 10.0)


def test_weights_and_their_arrows():
    params = drawn(CONFIGS["shared, gated"])[1]
    assert {path: str(arrow) for path, arrow in dims.arrows(params).items()} == {
        "experts/down": "experts | mlp -> embed",
        "experts/gate": "experts | embed -> mlp",
        "experts/up": "experts | embed -> mlp",
        "router/kernel": "embed -> experts",
        "shared/down/kernel": "mlp -> embed",
        "shared/gate/kernel": "embed -> mlp",
        "shared/up/kernel": "embed -> mlp",
        "shared_gate/kernel": "embed ->",
    }
    shapes = {path: leaf.shape for path, leaf in tree.named_leaves(params).items()}
    assert shapes["experts/gate"] == (EXPERTS, EMBED, 10) and shapes["shared_gate/kernel"] == (EMBED,)
    spread = np.asarray(params["experts"]["down"][...]).std()
    assert spread == pytest.approx(10**-0.5, rel=0.2)


def test_every_slot_has_one_row_and_every_tile_one_owner():
    ids = jnp.asarray([3, 0, 4, 3, 3, 0, 4, 3])  # of 4 experts; 4 is no expert
    move, tiles = to_tiles(ids, 4, 2)
    assert int(tiles.count) == 3
    np.testing.assert_array_equal(tiles.owner[:3], [0, 3, 3])
    np.testing.assert_array_equal(move.slot[:6], [1, 5, 0, 3, 4, 7])
    np.testing.assert_array_equal(move.back(move(jnp.arange(1.0, 9.0))), [1, 2, 0, 4, 5, 6, 0, 8])
    sent, counts = to_shards(jnp.asarray([3, 0, 3, 1, 2]), 4, 2, 3)
    np.testing.assert_array_equal(counts, [1, 1, 1, 2])
    np.testing.assert_array_equal(sent.slot, [1, 3, 5, 4, 0, 2])


def test_tiles_follow_the_share_of_an_expert():
    assert [tile_rows(n, 8) for n in (1, 128, 1024, 10**6)] == [8, 8, 64, 512]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_experts": 4, "experts_per_token": 5}, "experts_per_token = 5: 1 to num_experts = 4"),
        ({"num_experts": 4, "capacity_factor": -1.0}, "capacity_factor = -1.0: 0 or more"),
        ({"num_experts": 4, "shared_gate": True}, "shared_gate needs a shared expert"),
    ],
)
def test_wrong_configs_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        MoeConfig(**fields)
