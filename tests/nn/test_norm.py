"""Norms against float64, also where the input is narrow."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpp.nn import Norm


def oracle(x: np.ndarray, kind: str, epsilon: float, scale: np.ndarray, bias: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    if kind == "layer":
        x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon) * scale + bias


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("epsilon", [1e-5, 0.1])
def test_norm_equals_float64(kind, epsilon):
    rng = np.random.default_rng(0)
    x, scale, bias = rng.normal(2.0, 3.0, (2, 3, 32)).astype(np.float32), rng.normal(size=32), rng.normal(size=32)
    norm = Norm(32, kind, epsilon)
    norm.scale[...] = jnp.asarray(scale, jnp.float32)
    if kind == "layer":
        norm.bias[...] = jnp.asarray(bias, jnp.float32)
    else:
        assert norm.bias is None
    np.testing.assert_allclose(norm(x), oracle(x, kind, epsilon, scale, bias if kind == "layer" else 0.0), atol=2e-5)


def test_epsilon_is_added_to_the_mean_square():
    """B49: not to the root, where it would be a thousand times weaker."""
    x = np.full((1, 8), 1e-3, np.float32)
    np.testing.assert_allclose(Norm(8, "rms", 1e-5)(x), 1e-3 / np.sqrt(1e-6 + 1e-5), rtol=1e-5)


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_bfloat16_is_summed_wide(kind):
    """B68: a running sum in bf16 stalls at 256; the result is within one bf16 ulp of float64."""
    near_one = 1 + np.random.default_rng(0).normal(0, 0.05, 4096)
    x = jnp.asarray(near_one, jnp.bfloat16)
    found = Norm(4096, kind)(x)
    assert found.dtype == jnp.bfloat16
    wanted = oracle(np.asarray(x, np.float64), kind, 1e-5, np.ones(4096), np.zeros(4096))
    ulp = np.exp2(np.floor(np.log2(np.maximum(np.abs(wanted), 1e-30))) - 7)
    assert np.all(np.abs(np.asarray(found, np.float64) - wanted) <= ulp)


def test_jit_equals_eager():
    """B70: in fp32, to 1e-6."""
    x = jax.random.normal(jax.random.key(0), (4, 64))
    norm = Norm(64)
    np.testing.assert_allclose(jax.jit(lambda x: norm(x))(x), norm(x), atol=1e-6)
