"""Stretched rotary frequencies against published check values and float64."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpp.nn.rope import angles, rotate
from jaxpp.nn.scaling import RopeScaling, scaled_frequencies

LLAMA3 = RopeScaling("llama3", 8.0, 8192)


def plain(dim: int, base: float) -> np.ndarray:
    return base ** (-np.arange(0, dim, 2) / dim)


def test_llama3_keeps_short_waves_and_stretches_long_ones():
    ratio = scaled_frequencies(128, 5e5, LLAMA3) / plain(128, 5e5)
    assert (ratio[:29] == 1).all() and (ratio[35:] == 1 / 8).all()
    np.testing.assert_allclose(ratio[29:35], [0.82817, 0.64374, 0.49351, 0.37112, 0.27143, 0.19021], atol=5e-6)


def test_the_factor_is_the_configs():
    """B7: 32 for the small Llama 3.2."""
    last = scaled_frequencies(64, 5e5, RopeScaling("llama3", 32.0, 8192))[-1]
    assert last == pytest.approx(5e5 ** (-62 / 64) / 32)


def test_linear_divides_all():
    np.testing.assert_allclose(scaled_frequencies(16, 1e4, RopeScaling("linear", 4.0)), plain(16, 1e4) / 4)


def test_yarn_ramps_between_fast_and_slow_dims():
    scaling = RopeScaling("yarn", 4.0, 4096)
    ratio = scaled_frequencies(128, 1e4, scaling) / plain(128, 1e4)
    assert ratio[0] == 1 and ratio[-1] == 0.25 and (np.diff(ratio) <= 0).all()
    turns = 4096 * plain(128, 1e4) / (2 * np.pi)
    assert (ratio[turns > 40] == 1).all() and (ratio[turns < 0.8] == 0.25).all()
    assert scaling.own_magnitude() == pytest.approx(1.138629, abs=1e-6)
    assert RopeScaling("yarn", 4.0, 4096, magnitude=1.5).own_magnitude() == 1.5


def test_longrope_takes_the_table_by_the_length_of_the_row():
    short, long = (1.0, 2.0), (3.0, 5.0)
    scaling = RopeScaling("longrope", 4.0, 8, magnitude=1.25, short_factors=short, long_factors=long)
    positions = np.array([[*range(8), 0, 1], [*range(10)]], np.int32)  # rows of at most 8 and of 10 tokens
    cosine, _ = angles(jnp.asarray(positions), 4, 1e4, scaling)
    for row, factors in ((0, short), (1, long)):
        wanted = 1.25 * np.cos(positions[row][:, None] * plain(4, 1e4) / factors)
        np.testing.assert_allclose(cosine[row], wanted, atol=1e-6)


def test_dynamic_stretches_the_base_beyond_the_original_length():
    scaling = RopeScaling("dynamic", 2.0, 8)
    positions = np.array([[*range(8), 0, 0, 0, 0], [*range(12)]], np.int32)
    cosine, sine = angles(jnp.asarray(positions), 8, 1e4, scaling)
    np.testing.assert_allclose(cosine[0], np.cos(positions[0][:, None] * plain(8, 1e4)), atol=1e-6)
    stretched = 1e4 * (2.0 * 12 / 8 - 1.0) ** (8 / 6)
    np.testing.assert_allclose(sine[1], np.sin(positions[1][:, None] * plain(8, stretched)), atol=1e-5)


def test_only_the_leading_dims_turn():
    x = np.random.default_rng(0).normal(size=(1, 3, 2, 8)).astype(np.float32)
    cosine, sine = angles(jnp.arange(3)[None], 4, 1e4)
    y = np.asarray(rotate(jnp.asarray(x), cosine, sine))
    np.testing.assert_array_equal(y[..., 4:], x[..., 4:])
    np.testing.assert_allclose(y[..., :4], rotate(jnp.asarray(x[..., :4]), cosine, sine), atol=1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RopeScaling("llama3", 8.0), "rope_scaling.original_positions = 0: rope_scaling.kind llama3 needs"),
        (lambda: RopeScaling("linear", 0.5), "rope_scaling.factor = 0.5: 1 or more is needed"),
        (
            lambda: scaled_frequencies(8, 1e4, RopeScaling("longrope", 1.0, 8, short_factors=(1.0,))),
            "rope_scaling.short_factors has 1 numbers; 4 are needed",
        ),
    ],
)
def test_rules_that_lack_something_are_refused(make, message):
    with pytest.raises(ValueError) as error:
        make()
    assert str(error.value).startswith(message)
