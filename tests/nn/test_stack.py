"""Stacked blocks: scanned, unrolled and recomputed, they give the same values and gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxpp import dims, tree
from jaxpp.nn import Mlp, Norm, num_blocks, run_blocks, split_blocks, stack_blocks
from jaxpp.nn.stack import KEPT, REMAT, remat_policy, unstack_blocks
from jaxpp.parallel import Execution, executing

LAYERS, EMBED, MLP = 3, 8, 16


class Block(nnx.Module):
    def __init__(self, key: jax.Array):
        self.norm, self.mlp = Norm(EMBED), Mlp(key, EMBED, MLP, bias=True)

    def __call__(self, x: jax.Array, gain: jax.Array) -> jax.Array:
        x = x + gain * checkpoint_name(self.mlp(self.norm(x)), KEPT)
        return x + 0.1 * jnp.tanh(x)


@pytest.fixture(scope="module")
def blocks() -> tuple[nnx.GraphDef, nnx.State]:
    return nnx.split(stack_blocks(Block, jax.random.key(0), LAYERS))


X = jax.random.normal(jax.random.key(1), (2, 5, EMBED))


def value_and_gradients(blocks, execution: Execution):
    graph, state = blocks

    def total(state, x, gain):
        y = run_blocks(nnx.merge(graph, state), x, gain)
        return jnp.sum(jnp.sin(y)), y

    with executing(execution):
        (_, y), grads = jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))(state, X, jnp.float32(0.5))
    return y, {**tree.named_leaves(grads[0]), "x": grads[1]}


@pytest.fixture(scope="module")
def oracle(blocks):
    """One block after another, by hand, no scan and no stack."""
    state = blocks[1]

    def total(state, x):
        for i in range(LAYERS):
            layer = jax.tree.map(lambda leaf, i=i: leaf[i], nnx.to_pure_dict(state))
            wide = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * layer["norm"]["scale"]
            mlp = layer["mlp"]
            gate, up = (wide @ mlp[name]["kernel"] + mlp[name]["bias"] for name in ("gate", "up"))
            x = x + 0.5 * ((jax.nn.silu(gate) * up) @ mlp["down"]["kernel"] + mlp["down"]["bias"])
            x = x + 0.1 * jnp.tanh(x)
        return jnp.sum(jnp.sin(x)), x

    (_, y), grads = jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))(state, X)
    return y, {**tree.named_leaves(grads[0]), "x": grads[1]}


@pytest.mark.parametrize("layers", ["scan", "unroll"])
@pytest.mark.parametrize("remat", REMAT)
def test_every_way_to_run_the_blocks_is_the_same(layers, remat, blocks, oracle):
    y, grads = value_and_gradients(blocks, Execution(remat=remat, layers=layers))
    np.testing.assert_allclose(y, oracle[0], atol=1e-5)
    assert set(grads) == set(oracle[1])
    for name, wanted in oracle[1].items():
        np.testing.assert_allclose(grads[name], wanted, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("at", [0, 1, LAYERS])
@pytest.mark.parametrize("kept", ["stacked", "one by one"])
def test_a_part_and_the_rest_are_the_whole(kept, at, blocks, oracle):
    whole = nnx.merge(blocks[0], jax.tree.map(jnp.copy, blocks[1]))
    parts = split_blocks(whole if kept == "stacked" else unstack_blocks(whole), at)
    assert [num_blocks(part) for part in parts] == [at, LAYERS - at]
    x = X
    for part in parts:
        x = run_blocks(part, x, jnp.float32(0.5)) if num_blocks(part) else x
    np.testing.assert_allclose(x, oracle[0], atol=1e-5)


def kept_bytes(blocks, remat: str) -> int:
    graph, state = blocks
    x = jnp.zeros((64, 64, EMBED))

    def total(state):
        return jnp.sum(run_blocks(nnx.merge(graph, state), x, jnp.float32(0.5)))

    with executing(Execution(remat=remat)):
        _, pullback = jax.vjp(total, state)
    return tree.total_bytes(pullback)


def test_remat_keeps_less(blocks):
    kept = {remat: kept_bytes(blocks, remat) for remat in REMAT}
    assert kept["full"] < kept["block"] < kept["dots"] < kept["none"]


def test_weights_are_stacked_and_each_layer_is_drawn_anew(blocks):
    stacked = nnx.merge(*blocks)
    assert stacked.mlp.up.kernel.shape == (LAYERS, EMBED, MLP)
    arrows = {path: str(arrow) for path, arrow in dims.arrows(blocks[1]).items()}
    assert arrows["mlp/up/kernel"] == "layers | embed -> mlp" and arrows["norm/scale"] == "layers | -> embed"
    first, second, _ = stacked.mlp.up.kernel[...]
    assert np.abs(first - second).max() > 0.1
    keys = jax.random.split(jax.random.key(0), LAYERS)
    np.testing.assert_allclose(first, Block(keys[0]).mlp.up.kernel[...], atol=1e-6)


def test_own_metadata_survives_stacking():
    class Tagged(nnx.Module):
        def __init__(self, key: jax.Array):
            self.scale = dims.param(jnp.ones(4), "-> embed", tag="mine")

    scale = nnx.state(stack_blocks(Tagged, jax.random.key(0), 2))["scale"]
    assert scale.get_metadata()["tag"] == "mine" and scale.get_metadata()["dims"] == "layers | -> embed"


def test_an_unknown_policy_names_the_nearest(blocks):
    with pytest.raises(ValueError) as error:
        remat_policy("ful")
    assert str(error.value) == 'plan.remat: unknown policy "ful"; did you mean "full"? known: none full dots block'
    with pytest.raises(ValueError, match="plan.remat"):
        value_and_gradients(blocks, Execution(remat="everything"))
