"""Feed-forward layers and linear maps against float64."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpp.nn import Linear, Mlp

erf = np.vectorize(math.erf)
ACTIVATIONS = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: x * (1 + erf(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "relu": lambda x: np.maximum(x, 0),
}


def wide(param) -> np.ndarray:
    return np.asarray(param[...], np.float64)


def drawn(kind, activation, bias):
    mlp = Mlp(jax.random.key(0), 8, 24, kind=kind, activation=activation, bias=bias)
    for i, layer in enumerate(layer for layer in (mlp.gate, mlp.up, mlp.down) if layer is not None):
        if bias:
            layer.bias[...] = jax.random.normal(jax.random.key(i), layer.bias.shape)
    return mlp


def apply(layer: Linear, x: np.ndarray) -> np.ndarray:
    return x @ wide(layer.kernel) + (0.0 if layer.bias is None else wide(layer.bias))


@pytest.mark.parametrize("kind", ["gated", "plain"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [False, True])
def test_mlp_equals_float64(kind, activation, bias):
    mlp = drawn(kind, activation, bias)
    x = np.random.default_rng(1).normal(size=(2, 3, 8))
    act = ACTIVATIONS[activation]
    up = apply(mlp.up, x)
    wanted = apply(mlp.down, act(apply(mlp.gate, x)) * up if kind == "gated" else act(up))
    np.testing.assert_allclose(mlp(jnp.asarray(x, jnp.float32)), wanted, atol=1e-5)


def test_a_plain_mlp_has_no_gate_and_no_bias_unless_asked():
    mlp = drawn("plain", "gelu", False)
    assert mlp.gate is None and mlp.up.bias is None and mlp.down.bias is None


def test_a_linear_contracts_and_writes_several_dims():
    sizes = {"embed": 6, "heads": 2, "head_dim": 3}
    x = np.random.default_rng(0).normal(size=(4, 5, 6)).astype(np.float32)
    to_heads = Linear(jax.random.key(0), "embed -> heads head_dim", sizes, bias=True)
    to_heads.bias[...] = jnp.arange(6.0).reshape(2, 3)
    wanted = np.einsum("bte,ehd->bthd", x, wide(to_heads.kernel)) + np.arange(6.0).reshape(2, 3)
    np.testing.assert_allclose(to_heads(x), wanted, atol=1e-5)
    back = Linear(jax.random.key(1), "heads head_dim -> embed", sizes)
    np.testing.assert_allclose(back(to_heads(x)), np.einsum("bthd,hde->bte", wanted, wide(back.kernel)), atol=1e-5)
    assert to_heads.bias.get_metadata()["dims"] == "-> heads head_dim"


def test_the_result_has_the_dtype_of_the_input():
    mlp = drawn("gated", "silu", True)
    assert mlp(jnp.ones((1, 2, 8), jnp.bfloat16)).dtype == jnp.bfloat16
