"""Chunked cross-entropy against the dense formula: value, gradients, memory."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpp.nn import cross_entropy
from jaxpp.nn.loss import CHUNK_TOKENS, num_chunks_for

BATCH, SEQ, EMBED, VOCAB = 2, 12, 8, 40


@pytest.fixture(scope="module")
def inputs():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(BATCH, SEQ, EMBED)).astype(np.float32)
    head = rng.normal(size=(EMBED, VOCAB)).astype(np.float32)
    targets = rng.integers(0, VOCAB, (BATCH, SEQ)).astype(np.int32)
    weights = rng.choice([0.0, 0.5, 1.0, 3.0], (BATCH, SEQ)).astype(np.float32)
    assert (weights == 0).any()
    return x, head, targets, weights


def dense(x, head, targets, weights):
    """Compute loss and gradients in float64, all logits at once."""
    x, head, weights = (np.asarray(a, np.float64) for a in (x, head, weights))
    logits = x @ head
    logits -= logits.max(-1, keepdims=True)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    one_hot = np.eye(head.shape[1])[targets]
    dlogits = (np.exp(log_p) - one_hot) * weights[..., None]
    loss = -(log_p * one_hot).sum(-1)
    return (loss * weights).sum(), dlogits @ head.T, np.einsum("btd,btv->dv", x, dlogits)


@functools.partial(jax.jit, static_argnames="num_chunks")
def value_and_grad(x, head, targets, weights, num_chunks=None):
    return jax.value_and_grad(cross_entropy, argnums=(0, 1))(x, head, targets, weights, num_chunks)


@pytest.mark.parametrize("num_chunks", [None, 1, 2, 3, 12])
def test_value_and_gradients_equal_the_dense_formula(num_chunks, inputs):
    loss, (dx, dhead) = value_and_grad(*inputs, num_chunks=num_chunks)
    wanted = dense(*inputs)
    assert loss.dtype == jnp.float32 and loss == pytest.approx(wanted[0], rel=1e-5)
    np.testing.assert_allclose(dx, wanted[1], atol=1e-5)
    np.testing.assert_allclose(dhead, wanted[2], atol=1e-5)
    assert not np.asarray(dx)[inputs[3] == 0].any()


def test_the_value_alone_is_the_same(inputs):
    for num_chunks in (1, 4):
        assert cross_entropy(*inputs, num_chunks) == pytest.approx(dense(*inputs)[0], rel=1e-5)


def test_all_weights_zero_is_zero_and_finite(inputs):
    x, head, targets, _ = inputs
    loss, (dx, dhead) = value_and_grad(x, head, targets, np.zeros((BATCH, SEQ), np.float32))
    assert loss == 0 and not np.asarray(dx).any() and not np.asarray(dhead).any()


def test_large_logits_do_not_overflow(inputs):
    x, head, targets, weights = inputs
    loss, (dx, _) = value_and_grad(1000 * x, head, targets, weights)
    assert loss == pytest.approx(dense(1000 * x, head, targets, weights)[0], rel=1e-4) and np.isfinite(dx).all()


def test_gradients_scale_with_what_follows(inputs):
    x, head, targets, weights = inputs
    grad = jax.grad(lambda x: 3.0 * cross_entropy(x, head, targets, weights) ** 2)(x)
    loss, dx, _ = dense(*inputs)
    np.testing.assert_allclose(grad, 6.0 * loss * dx, rtol=0, atol=1e-5 * np.abs(6.0 * loss * dx).max())


def test_bfloat16_states_and_gradients(inputs):
    x, head, targets, weights = inputs
    narrow = jnp.asarray(x, jnp.bfloat16), jnp.asarray(head, jnp.bfloat16)
    loss, (dx, dhead) = value_and_grad(*narrow, targets, weights)
    assert (loss.dtype, dx.dtype, dhead.dtype) == (jnp.float32, jnp.bfloat16, jnp.bfloat16)
    wanted = dense(*(np.asarray(a, np.float32) for a in narrow), targets, weights)
    assert loss == pytest.approx(wanted[0], rel=0.02)
    np.testing.assert_allclose(np.asarray(dhead, np.float32), wanted[2], atol=0.02 * np.abs(wanted[2]).max())


@pytest.mark.parametrize(
    ("tokens", "seq", "chunks"),
    [(64, 64, 1), (CHUNK_TOKENS, 128, 1), (CHUNK_TOKENS + 128, 128, 2), (16384, 512, 16), (10**9, 7, 7), (3072, 10, 5)],
)
def test_number_of_chunks(tokens, seq, chunks):
    assert num_chunks_for(tokens, seq) == chunks and seq % chunks == 0


def test_the_logits_of_all_tokens_never_exist_at_once():
    batch, seq, embed, vocab = 4, 1024, 16, 4096
    like = (
        jax.ShapeDtypeStruct((batch, seq, embed), jnp.float32),
        jax.ShapeDtypeStruct((embed, vocab), jnp.float32),
        jax.ShapeDtypeStruct((batch, seq), jnp.int32),
        jax.ShapeDtypeStruct((batch, seq), jnp.float32),
    )
    logits = batch * seq * vocab * 4

    def bytes_of(num_chunks):
        return value_and_grad.lower(*like, num_chunks=num_chunks).compile().memory_analysis().temp_size_in_bytes

    assert bytes_of(1) > logits  # so the measure sees them
    assert bytes_of(None) < logits
    assert bytes_of(16) < logits / 4
