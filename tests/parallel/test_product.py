"""Products with weights in use: the numbers of one device, the dtype of the input, shards kept between passes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from jaxpp import dims
from jaxpp.parallel import Plan, executing, in_use, product, products

BATCH, SEQ, EMBED, HEADS, HEAD_DIM = 8, 4, 16, 4, 6
RNG = np.random.default_rng(0)
WEIGHTS = {
    "query": dims.param(jnp.asarray(RNG.normal(size=(EMBED, HEADS, HEAD_DIM)), jnp.float32), "embed -> heads head_dim"),
    "key": dims.param(
        jnp.asarray(RNG.normal(size=(EMBED, HEADS, HEAD_DIM)), jnp.float32), "embed -> kv_heads head_dim"
    ),
    "value": dims.param(jnp.asarray(RNG.normal(size=(EMBED, 2 * HEADS)), jnp.float32), "embed -> mlp"),
}
OUT = dims.param(jnp.asarray(RNG.normal(size=(HEADS, HEAD_DIM, EMBED)), jnp.float32), "heads head_dim -> embed")
X = RNG.normal(size=(BATCH, SEQ, EMBED)).astype(np.float32)
PLANS = {
    "one device": None,
    "tensor": Plan(mesh="tensor:4 data:2"),
    "fsdp": Plan(mesh="fsdp:8"),
    "all": Plan(mesh="data:2 fsdp:2 tensor:2", schemes=("data", "zero1", "fsdp", "tensor")),
    "all, unrolled": Plan(mesh="data:2 fsdp:2 tensor:2", layers="unroll"),
}


def total(state, x):
    """Read one `x` by three weights, come back by a fourth."""
    weights, out = state
    query, key, value = products(x, [weights[name] for name in ("query", "key", "value")])
    return jnp.sum(jnp.sin(product(query * jnp.tanh(key), out))) + jnp.sum(value**2)


def oracle() -> tuple[float, list[np.ndarray]]:
    q, k, v, o = (np.asarray(w[...], np.float64) for w in (*WEIGHTS.values(), OUT))
    x = X.astype(np.float64)
    query, key, value = x.reshape(-1, EMBED) @ q.reshape(EMBED, -1), np.einsum("bte,ehd->bthd", x, k), x @ v
    query = query.reshape(BATCH, SEQ, HEADS, HEAD_DIM)
    mixed = query * np.tanh(key)
    y = np.einsum("bthd,hde->bte", mixed, o)
    dmixed = np.einsum("bte,hde->bthd", np.cos(y), o)
    dquery, dkey, dvalue = dmixed * np.tanh(key), dmixed * query / np.cosh(key) ** 2, 2 * value
    dx = np.einsum("bthd,ehd->bte", dquery, q) + np.einsum("bthd,ehd->bte", dkey, k) + dvalue @ v.T
    grads = [
        np.einsum("bte,bthd->ehd", x, dquery),
        np.einsum("bte,bthd->ehd", x, dkey),
        np.einsum("bte,btm->em", x, dvalue),
    ]
    return np.sin(y).sum() + (value**2).sum(), [*grads, np.einsum("bthd,bte->hde", mixed, np.cos(y)), dx]


@pytest.mark.parametrize("name", PLANS)
def test_values_and_gradients_equal_float64(name):
    plan, state, x = PLANS[name], (WEIGHTS, OUT), jnp.asarray(X)
    compute = jax.jit(jax.value_and_grad(total, argnums=(0, 1)))
    if plan is None:
        value, (grads, dx) = compute(state, x)
    else:
        layout = plan.layout()
        state = jax.device_put(state, layout.param_shardings(state))
        with executing(plan.execution(layout)):
            value, (grads, dx) = compute(state, jax.device_put(x, layout.batch_sharding(3)))
    wanted = oracle()
    assert value == pytest.approx(wanted[0], rel=1e-5)
    found = [*(grads[0][name][...] for name in WEIGHTS), grads[1][...], dx]
    for one, other in zip(found, wanted[1], strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * np.abs(other).max())


def test_the_gradient_leaves_split_as_the_moments_are():
    plan = PLANS["all"]
    layout = plan.layout()
    state = jax.device_put((WEIGHTS, OUT), layout.param_shardings((WEIGHTS, OUT)))
    with executing(plan.execution(layout)):
        grads = jax.jit(jax.grad(total))(state, jax.device_put(X, layout.batch_sharding(3)))
    assert grads[0]["query"][...].sharding.spec == PartitionSpec(("data", "fsdp"), "tensor")
    assert state[0]["query"][...].sharding.spec == PartitionSpec("fsdp", "tensor", None)


def test_what_is_kept_for_the_backward_pass_is_the_shard():
    plan = PLANS["fsdp"]
    layout = plan.layout()
    weight = jax.device_put(OUT, layout.param_shardings(OUT))
    with executing(plan.execution(layout)):
        _, pullback = jax.vjp(lambda w, x: product(x, w), weight, jnp.ones((BATCH, HEADS, HEAD_DIM)))
    kept = [leaf for leaf in jax.tree.leaves(pullback) if leaf.shape == OUT.shape]
    assert kept and all(leaf.sharding.shard_shape(leaf.shape) == (HEADS, HEAD_DIM, EMBED // 8) for leaf in kept)


def test_the_product_is_in_the_dtype_of_the_input():
    assert product(jnp.ones((2, EMBED), jnp.bfloat16), WEIGHTS["value"]).dtype == jnp.bfloat16


def test_a_weight_with_dims_of_ones_own():
    weight = dims.param(jnp.ones((3, 5)), "pixels -> embed")
    np.testing.assert_array_equal(product(jnp.ones((2, 3)), weight), np.full((2, 5), 3.0))
    plan = Plan(mesh="fsdp:5", dims=("pixels",))
    with executing(plan.execution(plan.layout(jax.devices()[:5]))):
        np.testing.assert_array_equal(jax.jit(lambda x: product(x, weight))(jnp.ones((2, 3))), np.full((2, 5), 3.0))


def test_in_use_gathers_and_its_gradient_is_reduced():
    plan = PLANS["fsdp"]
    layout = plan.layout()
    scale = nnx.Param(jnp.arange(16.0), dims="-> embed")
    np.testing.assert_array_equal(in_use(scale), np.arange(16.0))
    with executing(plan.execution(layout)):
        value = jax.jit(in_use)(scale)
        grad = jax.jit(jax.grad(lambda w, x: jnp.vdot(x @ jnp.ones((16, 1)), x @ in_use(w)[:, None])))(
            scale, jax.device_put(X[:, 0], layout.batch_sharding())
        )
    assert value.sharding.is_fully_replicated
    assert grad[...].sharding.spec == PartitionSpec("fsdp")
    np.testing.assert_allclose(grad[...], X[:, 0].T @ X[:, 0].sum(-1), atol=1e-4)
