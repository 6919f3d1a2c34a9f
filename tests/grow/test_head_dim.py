"""Wider heads: the same logits whatever turns them, by tiled frequencies and factors on queries and keys."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from jaxpp.grow.head_dim import head_dim
from jaxpp.models import DecoderConfig
from jaxpp.nn.scaling import RopeScaling, scaled_frequencies
from tests.grow.growing import (
    GEMMA2,
    LLAMA,
    MODELS,
    NEOX,
    QWEN3,
    SEQ,
    abstract,
    difference,
    grown_weights,
    logits,
    same_bits_when_sharded,
    source_logits,
    weights,
)  # fmt: skip

SHORT, LONG = tuple(1 + 0.1 * k for k in range(8)), tuple(2 + 0.3 * k for k in range(8))
SCALINGS = {
    "none": RopeScaling(),
    "linear": RopeScaling("linear", factor=2.0),
    "llama3": RopeScaling("llama3", factor=8.0, original_positions=16),
    "yarn": RopeScaling("yarn", factor=4.0, original_positions=16),
    "longrope": RopeScaling(
        "longrope", original_positions=SEQ // 2, short_factors=SHORT, long_factors=LONG, magnitude=1.2
    ),
}


def wider(config: DecoderConfig, times: int, **options):
    return head_dim(config, head_dim=times * config.head_dim, **options)


@pytest.mark.parametrize("name", MODELS)
def test_wider_heads_keep_the_logits(name: str) -> None:
    assert difference(MODELS[name], lambda config: wider(config, 3)) <= 2e-6


def test_a_diagonal_output_keeps_the_logits() -> None:
    assert difference(GEMMA2, lambda config: wider(config, 2, variant="diagonal", noise_db=10.0)) <= 2e-6


@pytest.mark.parametrize("kind", ["yarn", "longrope"])
def test_stretched_positions_keep_the_logits(kind: str) -> None:
    assert difference(replace(LLAMA, rope_scaling=SCALINGS[kind]), lambda config: wider(config, 2)) <= 2e-6


def test_growing_twice_keeps_the_logits() -> None:
    assert difference(NEOX, lambda config: wider(config, 2), lambda config: wider(config, 2)) <= 2e-6


def test_frequencies_that_are_not_tiled_would_not() -> None:
    step = wider(LLAMA, 2)
    plain = replace(step.target, rope_scaling=RopeScaling())
    gap = np.abs(logits(plain, grown_weights(step)) - source_logits(LLAMA)).max()
    assert gap > 1e-2 * np.abs(source_logits(LLAMA)).max()


@pytest.mark.parametrize("beyond", [False, True])
@pytest.mark.parametrize("kind", SCALINGS)
def test_frequencies_are_those_of_the_source_tiled(kind: str, beyond: bool) -> None:
    config = replace(LLAMA, rope_scaling=SCALINGS[kind])
    target = wider(config, 3).target
    old = scaled_frequencies(config.rotary_dim, config.rope_base, config.rope_scaling, beyond)
    new = scaled_frequencies(target.rotary_dim, target.rope_base, target.rope_scaling, beyond)
    np.testing.assert_allclose(new, np.concatenate([old, old, old]), rtol=1e-15)


def test_the_factor_of_yarn_on_cosine_and_sine_stays() -> None:
    target = wider(replace(LLAMA, rope_scaling=SCALINGS["yarn"]), 2).target
    assert target.rope_scaling.own_magnitude() == 0.1 * math.log(4.0) + 1


def test_noise_tells_copies_of_a_query_apart_and_leaves_their_sum() -> None:
    step, path = wider(LLAMA, 2), "blocks/attention/query/kernel"
    pairs = np.asarray(grown_weights(step)[path]).reshape(3, 64, 4, 2, 2, 8)  # half, copy, dim of a half
    old = np.asarray(weights(LLAMA)[path]).reshape(3, 64, 4, 2, 8) * 2**-0.25
    np.testing.assert_allclose(pairs.mean(4), old, atol=1e-6 * np.abs(old).max())
    noise = (pairs[..., 0, :] - pairs[..., 1, :]) / 2
    assert 10 * np.log10((old**2).mean() / (noise**2).mean()) == pytest.approx(15, abs=0.1)


def test_a_norm_of_queries_takes_noise_and_factor_on_its_scale() -> None:
    quiet, noisy = grown_weights(wider(QWEN3, 2, noise_db=None)), grown_weights(wider(QWEN3, 2))
    changed = {path for path in quiet if not np.array_equal(quiet[path], noisy[path])}
    assert changed == {"blocks/attention/query_norm/scale", "blocks/attention/out/kernel"}


@pytest.mark.timeout(120)
def test_queries_have_the_same_bits_on_shards() -> None:
    path = "blocks/attention/query/kernel"
    assert same_bits_when_sharded(wider(LLAMA, 2).leaves[path], weights(LLAMA)[path], axis=1)


def test_learned_positions_need_no_frequencies() -> None:
    config = replace(LLAMA, positions="learned")
    assert wider(config, 2).target == replace(config, head_dim=32)


@pytest.mark.parametrize(
    ("config", "new", "message"),
    [
        (LLAMA, 24, "head_dim 24: a multiple of 16, from 32 on, is needed: 32;"),
        (LLAMA, 40, "head_dim 40: a multiple of 16, from 32 on, is needed: 32 or 48;"),
        (LLAMA, 16, "head_dim 16: a multiple of 16, from 32 on, is needed: 32;"),
        (replace(LLAMA, rope_scaling=RopeScaling("dynamic", 2.0, 32)), 32, "dynamic change with the length"),
        (replace(LLAMA, window=8, window_rope_base=5e3), 32, "window_rope_base 5000, which cannot be scaled"),
    ],
)
def test_what_no_factors_describe_is_refused(config: DecoderConfig, new: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        head_dim(config, head_dim=new)


def test_a_base_of_the_window_that_is_the_same_is_no_obstacle() -> None:
    config = replace(LLAMA, window=8, window_rope_base=LLAMA.rope_base)
    assert abstract(wider(config, 2).target)
    assert wider(config, 2).target.window_rope_base == 0
