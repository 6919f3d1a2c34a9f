"""Blocked copies equal NumPy's, whatever the order of the axes, the shapes and the types."""

from __future__ import annotations

import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpp.convert.transpose import copy_into, pieces

SHAPES = [(), (7,), (1, 1), (3, 1000), (1000, 3), (513, 257), (1025, 520), (5, 70, 300), (4, 1, 600, 9), (2, 3, 5, 7)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [np.int8, jnp.bfloat16, np.float32, np.float64], ids=str)
def test_every_order_of_axes(shape: tuple[int, ...], dtype: Any) -> None:
    for order in itertools.permutations(range(len(shape))):
        stored = np.random.default_rng(0).integers(0, 100, [shape[axis] for axis in order]).astype(dtype)
        source = stored.transpose(np.argsort(order))
        target = np.zeros(shape, dtype)
        copy_into(target, source)
        assert target.tobytes() == source.tobytes(), order


@pytest.mark.parametrize(
    "source, target", list(itertools.permutations([np.float32, np.float16, jnp.bfloat16, np.float64], 2))
)
@pytest.mark.parametrize("transposed", [False, True])
def test_conversions(source: Any, target: Any, transposed: bool) -> None:
    values = np.random.default_rng(0).standard_normal((600, 300)).astype(source)
    values[0, :4] = [np.inf, -np.inf, np.nan, -0.0]
    values = values.T if transposed else values
    found = np.zeros(values.shape, target)
    copy_into(found, values)
    np.testing.assert_array_equal(found.astype(np.float64), values.astype(target).astype(np.float64))
    assert np.signbit(found[(3, 0) if transposed else (0, 3)])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("max_bytes", [1, 1000, 100_000])
def test_pieces_cover_all_once(shape: tuple[int, ...], max_bytes: int) -> None:
    source = np.arange(np.prod(shape, dtype=int)).reshape(shape).T
    target = np.full(source.shape, -1)
    for part, values in pieces(target, source, max_bytes):
        assert (part == -1).all()
        part[...] = values
    assert np.array_equal(target, source)


def test_views_with_gaps() -> None:
    whole = np.arange(40 * 50 * 6).reshape(40, 50, 6)
    target = np.zeros((60, 45, 8), int)
    copy_into(target[5:30, 3:43, 1:7:2], whole[:, :50:2, 1:4].transpose(1, 0, 2))
    assert np.array_equal(target[5:30, 3:43, 1:7:2], whole[:, ::2, 1:4].transpose(1, 0, 2))
    assert target.sum() == whole[:, ::2, 1:4].sum()
