"""Rotary positions against float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpp.nn import rope


def rotated(x: np.ndarray, positions: np.ndarray, base: float) -> np.ndarray:
    """Rotate ``[batch, seq, heads, head_dim]`` as complex numbers, in float64."""
    half = x.shape[-1] // 2
    turn = positions[..., None] * np.float64(base) ** (-np.arange(half) / half)
    z = (x[..., :half] + 1j * x[..., half:].astype(np.float64)) * np.exp(1j * turn)[:, :, None]
    return np.concatenate([z.real, z.imag], axis=-1)


def rotate(x, positions, base):
    cosine, sine = rope.angles(jnp.asarray(positions, jnp.int32), x.shape[-1], base)
    return rope.rotate(jnp.asarray(x), cosine, sine)


@pytest.mark.parametrize("head_dim", [2, 8, 64])
@pytest.mark.parametrize("base", [10_000.0, 500_000.0])
def test_rotation_equals_float64(head_dim, base):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 6, 3, head_dim)).astype(np.float32)
    positions = np.array([[0, 1, 2, 3, 4, 5], [0, 1, 0, 17, 255, 511]])
    found = rotate(x, positions, base)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, rotated(x, positions, base), atol=1e-4)
    np.testing.assert_array_equal(found[:, :1][positions[:, :1] == 0], x[:, :1][positions[:, :1] == 0])


@pytest.mark.parametrize("position", [32_767, 32_768, 40_000, 65_535, 131_071])
def test_far_positions(position):
    """B16: no wrap at 16 bits, and an angle of thousands of turns keeps its fraction."""
    x = np.random.default_rng(1).normal(size=(1, 1, 1, 64)).astype(np.float32)
    found = rotate(x, np.array([[position]]), 10_000.0)
    np.testing.assert_allclose(found, rotated(x, np.array([[position]]), 10_000.0), atol=1e-4)


def test_scores_depend_on_the_distance_alone():
    rng = np.random.default_rng(2)
    q, k = rng.normal(size=(2, 1, 1, 1, 16)).astype(np.float32)
    scores = [
        float(jnp.vdot(rotate(q, np.array([[at + 5]]), 1e4), rotate(k, np.array([[at]]), 1e4))) for at in (0, 3, 100)
    ]
    np.testing.assert_allclose(scores, scores[0], atol=1e-4)


def test_the_result_keeps_its_dtype_and_its_length():
    x = jax.random.normal(jax.random.key(0), (1, 4, 2, 8))
    half = rotate(x.astype(jnp.bfloat16), np.arange(4)[None], 1e4)
    assert half.dtype == jnp.bfloat16
    full = rotate(x, np.arange(4)[None], 1e4)
    np.testing.assert_allclose(jnp.linalg.norm(full, axis=-1), jnp.linalg.norm(x, axis=-1), rtol=1e-5)
    np.testing.assert_allclose(np.asarray(half, np.float32), full, atol=0.05)
