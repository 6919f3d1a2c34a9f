"""Rounding to a grid: how far a number moves, what is kept exactly, and what two integers in a byte come back as."""

from __future__ import annotations

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpp.compress.grid import Grid, blocks_along, from_grid, pack, round_to_grid, unpack

GRIDS = (
    Grid(8),
    Grid(8, offset=True),
    Grid(4),
    Grid(4, True),
    Grid(4, stored="float16"),
    Grid(4, True, stored="float16"),
)


def weight(*shape: int) -> jnp.ndarray:
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32)


def there_and_back(x: jnp.ndarray, counts: tuple[int, ...], grid: Grid) -> np.ndarray:
    return np.asarray(from_grid(*round_to_grid(x, counts, grid), jnp.dtype(jnp.float32)))


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("counts", [(1, 12), (4, 12), (32, 3)])
def test_a_number_moves_by_half_a_step_of_its_block_at_most(grid, counts):
    x = weight(64, 12)
    found, steps = np.abs(there_and_back(x, counts, grid) - x), round_to_grid(x, counts, grid)[1].astype(jnp.float32)
    steps = np.repeat(np.repeat(steps, 64 // counts[0], 0), 12 // counts[1], 1)
    assert (found <= (0.5 if grid.stored == "float32" else 0.55) * steps + 1e-6).all()
    assert found.max() > 0.4 * steps.min()  # so that the bound bounds


@pytest.mark.parametrize("bits", [8, 4])
def test_numbers_that_lie_on_a_symmetric_grid_stay(bits):
    values, scales, _ = round_to_grid(weight(64, 12), (2, 12), Grid(bits))
    again, rescaled, _ = round_to_grid(from_grid(values, scales, None, jnp.dtype(jnp.float32)), (2, 12), Grid(bits))
    assert again.tolist() == values.tolist()
    np.testing.assert_allclose(rescaled, scales, rtol=1e-6)
    assert np.abs(values).max() == 2 ** (bits - 1) - 1


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("number", [0.0, 0.375, -0.375])
def test_a_block_of_one_number_is_exact(grid, number):
    if number and not grid.offset:
        assert there_and_back(jnp.full((8, 4), number), (2, 4), grid) == pytest.approx(number, rel=5e-3)
        return
    assert (there_and_back(jnp.full((8, 4), number), (2, 4), grid) == number).all()


def test_an_offset_makes_use_of_all_integers_on_one_side_of_zero():
    x = jnp.abs(weight(64, 4)) + 1
    errors = [np.square(there_and_back(x, (2, 4), Grid(4, offset)) - x).mean() for offset in (True, False)]
    assert errors[0] < errors[1] / 2


def test_clipping_never_makes_the_squared_error_of_a_block_larger():
    x = weight(64, 12)
    errors = [
        np.square(there_and_back(x, (2, 12), Grid(4, True, clip)) - x).reshape(2, 32, 12).sum(1)
        for clip in (True, False)
    ]
    assert (errors[0] <= errors[1] * 1.001).all() and errors[0].sum() < errors[1].sum()


def test_what_is_no_number_stays_so():
    x = weight(8, 4).at[3, 2].set(jnp.nan)
    assert np.isnan(there_and_back(x, (1, 4), Grid(8))[:, 2]).all()


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_two_integers_in_a_byte_come_back(axis):
    pairs = np.array(list(itertools.product(range(-8, 8), repeat=2)), np.int8)  # every pair there is
    x = jnp.moveaxis(jnp.asarray(pairs).reshape(512, 1, 1), 0, axis)
    packed = pack(x, axis)
    assert packed.size == 256 and packed.dtype == jnp.int8
    assert unpack(packed, axis).tolist() == x.tolist()


@pytest.mark.parametrize(
    ("sizes", "group", "blocks"),
    [((576,), 0, (1,)), ((576,), 32, (18,)), ((9, 64), 64, (9, 1)), ((9, 64), 576, (1, 1)), ((576,), 128, None),
     ((4, 16), 24, None), ((4, 16), 128, None)],
)  # fmt: skip
def test_groups_lie_along_the_read_dims_taken_as_one(sizes, group, blocks):
    assert blocks_along(sizes, group) == blocks
