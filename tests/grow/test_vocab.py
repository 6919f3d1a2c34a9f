"""New tokens: the logits of the old ones stay, and a new one has the mean of theirs."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpp.grow.vocab import vocab
from jaxpp.models import DecoderConfig
from tests.grow.growing import (
    GEMMA2,
    GPT2,
    LLAMA,
    MIXTRAL,
    VOCAB,
    grown_weights,
    logits,
    same_bits_when_sharded,
    source_logits,
    weights,
)  # fmt: skip


def larger(config: DecoderConfig):
    return vocab(config, vocab_size=130)


@pytest.mark.parametrize("config", [LLAMA, GPT2, MIXTRAL], ids=["untied", "tied", "mixture"])
def test_old_tokens_keep_their_logits_and_new_ones_have_the_mean(config: DecoderConfig) -> None:
    step, old = larger(config), source_logits(config)
    new = logits(step.target, grown_weights(step))
    top = np.abs(old).max()
    assert step.preserves and new.shape[-1] == 130
    np.testing.assert_allclose(new[..., :VOCAB], old, atol=2e-6 * top)
    np.testing.assert_allclose(new[..., VOCAB:], np.repeat(old.mean(-1, keepdims=True), 33, -1), atol=2e-6 * top)


def test_new_tokens_take_at_most_their_share_of_the_probability() -> None:
    step = larger(LLAMA)
    odds = np.exp(logits(step.target, grown_weights(step)).astype(np.float64))
    assert (odds[..., VOCAB:].sum(-1) / odds.sum(-1)).max() <= 33 / 130


def test_rows_that_only_fill_a_table_up_go_and_do_not_count_in_the_mean() -> None:
    config, path = replace(GEMMA2, vocab_rows=128), "tokens/table"
    step, old = larger(config), np.asarray(weights(config)[path])
    new = np.asarray(grown_weights(step)[path])
    assert step.source == config and step.target.vocab_rows == 0
    assert np.array_equal(new[:VOCAB], old[:VOCAB])
    np.testing.assert_allclose(new[VOCAB:], np.tile(old[:VOCAB].mean(0), (33, 1)), atol=1e-6)


def test_moments_of_new_rows_begin_at_zero() -> None:
    leaf, x = larger(LLAMA).leaves["head/kernel"], weights(LLAMA)["head/kernel"]
    for power in (1, 2):
        grown = np.asarray(leaf.moment(x, power))
        assert np.array_equal(grown[:, :VOCAB], np.asarray(x)) and not grown[:, VOCAB:].any()


@pytest.mark.timeout(120)
def test_means_have_the_same_bits_on_shards() -> None:
    x = jnp.asarray(np.random.default_rng(3).normal(size=(96, 64)), jnp.float32)
    leaf = vocab(replace(LLAMA, vocab_size=96), vocab_size=130).leaves["tokens/table"]
    assert same_bits_when_sharded(leaf, x, axis=0)


def test_fewer_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="vocab_size 90: 97 or more are needed"):
        vocab(LLAMA, vocab_size=90)
