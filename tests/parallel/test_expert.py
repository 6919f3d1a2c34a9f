"""Expert parallelism, alone and composed: the numbers of one device, the collectives it states, what it refuses."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxpp import tree
from jaxpp.nn import Norm, run_blocks, stack_blocks
from jaxpp.nn.moe import Moe, MoeConfig
from jaxpp.nn.stack import KEPT
from jaxpp.parallel import Plan, executing
from jaxpp.parallel.expert import expert_spread
from jaxpp.parallel.grouped import GroupedUse, Tiles, grouped_product

_spec = importlib.util.spec_from_file_location(
    "collectives", Path(__file__).parents[1].joinpath("contract", "collectives.py")
)
assert _spec is not None and _spec.loader is not None
collectives = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(collectives)

LAYERS, BATCH, SEQ, EMBED, MLP, EXPERTS, K = 2, 8, 6, 16, 24, 8, 2
CONFIGS = {
    "dropless": MoeConfig(EXPERTS, K, shared_mlp_dim=8, shared_gate=True, balance_loss=0.3, z_loss=0.1),
    "capacity": MoeConfig(EXPERTS, K, capacity_factor=8.0, normalize=False, balance_loss=0.3),
}  # the capacity drops nothing: whom it would drop depends on the shards


class Block(nnx.Module):
    def __init__(self, key: jax.Array, config: MoeConfig):
        self.norm, self.moe = Norm(EMBED), Moe(key, config, EMBED, MLP)

    def __call__(self, x: jax.Array, real: jax.Array, loss_weight: jax.Array) -> jax.Array:
        return x + checkpoint_name(self.moe(self.norm(x), real=real, loss_weight=loss_weight), KEPT)


def inputs() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(BATCH, SEQ, EMBED)).astype(np.float32), rng.random((BATCH, SEQ)) < 0.8


def split(make: Callable[[jax.Array], nnx.Module]) -> tuple[nnx.GraphDef, nnx.State]:
    """Draw a module under ``jit``: one compile, not one per operation."""
    graph = nnx.graphdef(nnx.eval_shape(lambda: make(jax.random.key(0))))
    return graph, jax.jit(lambda key: nnx.state(make(key)))(jax.random.key(0))


@functools.cache
def drawn(config: MoeConfig) -> tuple[nnx.GraphDef, nnx.State]:
    return split(lambda key: stack_blocks(lambda one: Block(one, config), key, LAYERS))


def loss(graph, state, x, real):
    y = run_blocks(nnx.merge(graph, state), x, real, real.sum().astype(jnp.float32))
    return jnp.sum(jnp.sin(y) * real[..., None]), y


def value_and_gradients(name: str, plan: Plan | None) -> dict[str, np.ndarray]:
    (graph, state), (x, real) = drawn(CONFIGS[name]), inputs()
    compute = jax.jit(jax.value_and_grad(functools.partial(loss, graph), argnums=(0, 1), has_aux=True))
    if plan is None:
        (_, y), grads = compute(state, x, real)
    else:
        layout = plan.layout()
        layout.check(state)
        state = jax.device_put(state, layout.param_shardings(state))
        x, real = (jax.device_put(one, layout.batch_sharding(one.ndim)) for one in (x, real))
        with executing(plan.execution(layout)):
            (_, y), grads = compute(state, x, real)
    return {"y": y, "x": grads[1], **tree.named_leaves(grads[0])}


@functools.cache
def oracle(name: str) -> dict[str, np.ndarray]:
    return value_and_gradients(name, None)


def assert_same(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert set(found) == set(wanted)
    for path, other in wanted.items():
        scale = np.abs(other).max()
        np.testing.assert_allclose(found[path], other, rtol=0, atol=1e-5 * scale, err_msg=path)
        assert scale > 0, path


PLANS = {
    "expert:4 data:2": "dropless",
    "expert:2 tensor:2 data:2": "dropless",
    "expert:2 fsdp:2 data:2": "dropless",
    "fsdp:8": "dropless",
    "tensor:8": "dropless",
    "expert:8": "dropless",
    "expert:2 fsdp:2 tensor:2": "capacity",
}
WAYS = {
    "expert:2 tensor:2 data:2": {"schemes": ("expert", "tensor", "data", "zero1"), "layers": "unroll"},
    "expert:2 fsdp:2 data:2": {"remat": "full"},
    "fsdp:8": {"layers": "unroll", "remat": "block"},
    "expert:2 fsdp:2 tensor:2": {"schemes": ("expert", "fsdp", "tensor", "sequence"), "remat": "dots"},
}


@pytest.mark.parametrize("mesh", PLANS)
def test_every_layout_computes_what_one_device_does(mesh):
    assert_same(value_and_gradients(PLANS[mesh], Plan(mesh, **WAYS.get(mesh, {}))), oracle(PLANS[mesh]))


def hlo_elements(plan: Plan, config: MoeConfig, backward: bool, stacked: bool = False) -> dict[tuple[str, int], int]:
    """Count what one layer sends, alone or in a scan over stacked blocks."""
    layout = plan.layout()
    graph, state = drawn(config) if stacked else split(lambda key: Moe(key, config, EMBED, MLP))

    def total(state, x):
        module = nnx.merge(graph, state)
        weight, real = jnp.float32(1.0), jnp.ones((BATCH, SEQ), bool)
        y = run_blocks(module, x, real, weight) if stacked else module(x, real=real, loss_weight=weight)
        return jnp.sum(jnp.sin(y))

    def abstract(leaf, sharding):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    x = jax.ShapeDtypeStruct((BATCH, SEQ, EMBED), jnp.float32, sharding=layout.batch_sharding(3))
    with executing(plan.execution(layout)):
        function = jax.grad(total, argnums=(0, 1)) if backward else total
        lowered = jax.jit(function).lower(jax.tree.map(abstract, state, layout.param_shardings(state)), x)
    return collectives.elements(lowered.compile().as_text())


def test_an_expert_layer_exchanges_twice_and_in_the_backward_pass_twice_more():
    plan, config = Plan("expert:4 data:2"), MoeConfig(EXPERTS, K)
    here, tokens = EXPERTS // 4, BATCH * SEQ // 8
    buffer = 4 * tokens * min(K, here) * EMBED
    forward, both = (hlo_elements(plan, config, backward) for backward in (False, True))
    assert forward["all-to-all", 4] == 2 * buffer
    assert both["all-to-all", 4] == 4 * buffer
    router = EMBED * EXPERTS
    gathered = {key: n for key, n in forward.items() if key[0] == "all-gather"}
    assert gathered == {("all-gather", 4): router + 4 * EXPERTS}
    assert sum(n for (kind, _), n in forward.items() if kind == "all-reduce") == 1  # the loss
    experts = 3 * here * EMBED * MLP  # each device's own, summed over data
    assert experts <= both["all-reduce", 2] <= experts + router
    assert sum(n for (kind, _), n in both.items() if kind == "all-reduce") <= experts + 2 * router + 1


def test_with_a_capacity_the_exchange_holds_the_capacity():
    plan, config = Plan("expert:4 data:2"), MoeConfig(EXPERTS, K, capacity_factor=1.0)
    capacity = -(-BATCH * SEQ // 8 * K // EXPERTS)
    forward = hlo_elements(plan, config, backward=False)
    assert forward["all-to-all", 4] == 2 * EXPERTS * capacity * EMBED
    assert forward["all-gather", 4] == EMBED * EXPERTS


def test_each_batch_shard_has_a_capacity_of_its_own():
    (x, real), plan = inputs(), Plan("expert:4 data:2")
    graph, state = split(lambda key: Moe(key, MoeConfig(EXPERTS, K, capacity_factor=0.7), EMBED, MLP))
    layout, run = plan.layout(), lambda state, x, real: nnx.merge(graph, state)(x, real=real)
    alone = jax.jit(run)
    rows = [alone(state, x[i : i + 1], real[i : i + 1]) for i in range(BATCH)]  # one row on each device
    assert any(not row[0, i].any() for row in rows for i in range(SEQ))
    placed = jax.device_put(state, layout.param_shardings(state))
    with executing(plan.execution(layout)):
        found = jax.jit(run)(placed, *(jax.device_put(one, layout.batch_sharding(one.ndim)) for one in (x, real)))
    np.testing.assert_allclose(found, np.concatenate(rows), atol=1e-5)


def test_fsdp_gathers_expert_weights_in_each_pass():
    found = hlo_elements(Plan("fsdp:8"), MoeConfig(EXPERTS, K), backward=True, stacked=True)
    weights, kept = 3 * EXPERTS * EMBED * MLP, EMBED * EXPERTS + EMBED  # router and norm: gathered once and kept
    assert found["all-gather", 8] == 2 * weights + kept
    assert weights <= found["all-reduce", 8] + 8 * found["reduce-scatter", 8] <= weights + kept + 1


def test_split_experts_reduce_once_per_pass():
    found = hlo_elements(Plan("tensor:8"), MoeConfig(EXPERTS, K, balance_loss=0.1), backward=True)
    assert found == {("all-reduce", 8): 2 * BATCH * SEQ * EMBED + BATCH * SEQ * K}


def test_what_is_kept_for_the_backward_pass_is_the_shard():
    graph, state = drawn(CONFIGS["dropless"])
    x, plan = inputs()[0], Plan("expert:2 fsdp:4")
    layout = plan.layout()
    state = jax.device_put(state, layout.param_shardings(state))
    with executing(plan.execution(layout)):
        _, pullback = jax.vjp(jax.jit(lambda s, x: loss(graph, s, x, jnp.ones((BATCH, SEQ), bool))[0]), state, x)
    kept = [leaf for leaf in jax.tree.leaves(pullback) if leaf.shape[-2:] in ((EMBED, MLP), (MLP, EMBED))]
    stored = LAYERS * EXPERTS * EMBED * MLP // 8
    assert kept and all(leaf.addressable_shards[0].data.size == stored for leaf in kept)


def test_bf16_stays_near_fp32():
    x, plan = inputs()[0], Plan("expert:2 fsdp:2 data:2")
    graph, state = split(lambda key: Moe(key, MoeConfig(EXPERTS, K), EMBED, MLP))
    wide, layout = jax.jit(lambda state, x: nnx.merge(graph, state)(x))(state, x), plan.layout()
    narrow = jax.tree.map(lambda w: w.astype(jnp.bfloat16), state)
    placed = jax.device_put(narrow, layout.param_shardings(narrow))

    def total(state, x):
        y = nnx.merge(graph, state)(x)
        return jnp.sum(y.astype(jnp.float32) ** 2), y

    with executing(plan.execution(layout)):
        grads, y = jax.jit(jax.grad(total, has_aux=True))(placed, jnp.bfloat16(x))
    assert y.dtype == jnp.bfloat16
    assert all(grad.dtype == jnp.bfloat16 and jnp.isfinite(grad).all() for grad in jax.tree.leaves(grads))
    close = np.abs(np.asarray(y, np.float32) - wide).max(-1) < 0.05 * np.abs(wide).max()
    assert close.mean() > 0.9  # a token whose second and third expert are as good may change its choice


def test_experts_that_do_not_divide_are_refused_with_numbers():
    params = nnx.state(nnx.eval_shape(lambda: Moe(jax.random.key(0), MoeConfig(6, 2), EMBED, MLP)))
    with pytest.raises(ValueError, match="experts 6 does not split over expert=4"):
        Plan("expert:4 data:2").layout().check(params)


def test_a_batch_that_does_not_divide_is_refused_with_numbers():
    plan = Plan("expert:4 data:2")
    with executing(plan.execution(plan.layout())), pytest.raises(ValueError, match="batch 6 does not split over"):
        expert_spread((6, SEQ, MLP))


def test_experts_over_an_axis_that_does_not_split_the_batch_are_refused():
    plan = Plan("tensor:2 data:4", rules={"experts": ("tensor",), "mlp": ()}, schemes=("data",))
    with executing(plan.execution(plan.layout())), pytest.raises(ValueError, match="use scheme expert"):
        expert_spread((8, SEQ, MLP))


@pytest.mark.parametrize("native", [False, True])
def test_grouped_products_equal_one_product_per_tile(native):
    rng = np.random.default_rng(0)
    x, kernel = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((6, 4, 5), (3, 5, 7)))
    owner, count, g = np.array([0, 0, 2, 2, 2, 2]), 5, rng.normal(size=(6, 4, 7)).astype(np.float32)
    tiles, use = Tiles(jnp.asarray(owner), jnp.int32(count)), GroupedUse(native=native)
    y, pullback = jax.vjp(lambda x, w: grouped_product(x, w, tiles, use), x, kernel)
    y, dx, dkernel = (np.asarray(one) for one in (y, *pullback(jnp.asarray(g))))
    wanted = np.zeros(kernel.shape)
    for i in range(count):
        np.testing.assert_allclose(y[i], x[i] @ kernel[owner[i]], atol=1e-5)
        np.testing.assert_allclose(dx[i], g[i] @ kernel[owner[i]].T, atol=1e-5)
        wanted[owner[i]] += x[i].T @ g[i]
    np.testing.assert_allclose(dkernel, wanted, atol=1e-5)
    assert not dkernel[1].any()
