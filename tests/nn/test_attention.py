"""Attention against a plain float64 oracle: heads, documents, positions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpp.nn import Attention, AttentionConfig, Context
from jaxpp.nn.attention import check_kernel, document_mask
from jaxpp.parallel import Execution, executing

BATCH, SEQ, EMBED, HEAD_DIM = 2, 7, 12, 4
SEGMENTS = np.array([[1, 1, 1, 2, 2, 2, 2], [1, 1, 1, 1, 2, 0, 0]], np.int32)
POSITIONS = np.array([[0, 1, 2, 0, 1, 2, 3], [0, 1, 2, 3, 0, 1, 2]], np.int32)


def wide(param) -> np.ndarray:
    return np.asarray(param[...], np.float64)


def rotated(x: np.ndarray, positions: np.ndarray, base: float) -> np.ndarray:
    half = x.shape[-1] // 2
    z = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * positions[..., None] * base ** (-np.arange(half) / half))[
        :, :, None
    ]
    return np.concatenate([z.real, z.imag], axis=-1)


def oracle(layer: Attention, x: np.ndarray, positions: np.ndarray, segments: np.ndarray | None) -> np.ndarray:
    """Attend one query at a time, over the keys it may see."""
    config = layer.config
    q, k, v = (
        np.einsum("bte,ehd->bthd", x, wide(p.kernel)) + (0 if p.bias is None else wide(p.bias))
        for p in (layer.query, layer.key, layer.value)
    )
    if config.rope_base is not None:
        q, k = rotated(q, positions, config.rope_base), rotated(k, positions, config.rope_base)
    result = np.zeros_like(q)
    for b, t, h in np.ndindex(q.shape[:3]):
        kv = h // (config.num_heads // config.num_kv_heads)
        seen = [s for s in range(t + 1) if segments is None or segments[b, s] == segments[b, t]]
        scores = np.exp(k[b, seen, kv] @ q[b, t, h] / np.sqrt(config.head_dim))
        result[b, t, h] = scores @ v[b, seen, kv] / scores.sum()
    y = np.einsum("bthd,hde->bte", result, wide(layer.out.kernel))
    return y + (0 if layer.out.bias is None else wide(layer.out.bias))


def drawn(num_heads=4, num_kv_heads=4, bias=False, rope_base: float | None = 10_000.0) -> Attention:
    config = AttentionConfig(EMBED, num_heads, num_kv_heads, HEAD_DIM, bias, rope_base)
    layer = Attention(jax.random.key(0), config)
    if bias:
        for i, part in enumerate((layer.query, layer.key, layer.value, layer.out)):
            part.bias[...] = jax.random.normal(jax.random.key(i), part.bias.shape)
    return layer


@pytest.fixture(scope="module")
def x() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(BATCH, SEQ, EMBED))


def attend(layer: Attention, x: np.ndarray, positions, segments=None) -> jax.Array:
    context = Context(jnp.asarray(positions), None if segments is None else jnp.asarray(segments))
    return layer(jnp.asarray(x, jnp.float32), context)


@pytest.mark.parametrize("num_kv_heads", [4, 2, 1], ids=["MHA", "GQA", "MQA"])
@pytest.mark.parametrize("packed", [False, True])
def test_attention_equals_float64(num_kv_heads, packed, x):
    layer = drawn(num_kv_heads=num_kv_heads)
    segments, positions = (SEGMENTS, POSITIONS) if packed else (None, np.tile(np.arange(SEQ), (BATCH, 1)))
    np.testing.assert_allclose(attend(layer, x, positions, segments), oracle(layer, x, positions, segments), atol=1e-5)


@pytest.mark.parametrize("fields", [dict(bias=True), dict(rope_base=None), dict(rope_base=100.0)], ids=str)
def test_options_equal_float64(fields, x):
    layer = drawn(num_kv_heads=2, **fields)
    np.testing.assert_allclose(attend(layer, x, POSITIONS, SEGMENTS), oracle(layer, x, POSITIONS, SEGMENTS), atol=1e-5)


def test_query_heads_share_kv_heads_in_groups(x):
    """B77: query head h reads kv head h // group, so a silent kv head 0 silences heads 0 and 1."""
    layer = drawn(num_kv_heads=2)
    layer.value.kernel[...] = layer.value.kernel[...].at[:, 0].set(0.0)
    layer.out.kernel[...] = jnp.eye(16)[:, :EMBED].reshape(4, HEAD_DIM, EMBED)  # heads 0 to 2, as they are
    y = np.asarray(attend(layer, x, POSITIONS))
    assert not y[..., :8].any() and y[..., 8:].any()


def test_documents_do_not_see_each_other_nor_the_future(x):
    layer = drawn(num_kv_heads=2)
    before = np.asarray(attend(layer, x, POSITIONS, SEGMENTS))
    changed = x.copy()
    changed[0, 1] += 1.0
    after = np.asarray(attend(layer, changed, POSITIONS, SEGMENTS))
    differs = np.abs(after - before).max(-1) > 1e-6
    assert differs.tolist() == [[False, True, True, False, False, False, False], [False] * SEQ]


def test_padding_leaves_the_row_alone(x):
    """B121: a row with padding behind it equals the row alone, and the padding itself is finite."""
    layer = drawn()
    padded = np.asarray(attend(layer, x, POSITIONS, SEGMENTS))
    alone = np.asarray(attend(layer, x[1:, :4], POSITIONS[1:, :4]))
    np.testing.assert_allclose(padded[1, :4], alone[0], atol=1e-6)
    assert np.isfinite(padded).all()


def test_the_mask_of_documents():
    mask = np.asarray(document_mask(jnp.array([[1, 2, 0, 0]])))
    assert mask.shape == (1, 1, 4, 4)
    assert mask[0, 0].tolist() == [
        [True, False, False, False],
        [False, True, False, False],
        [False, False, True, True],
        [False, False, True, True],
    ]


def test_jit_equals_eager(x):
    """B70: in fp32, to 1e-6."""
    layer = drawn(num_kv_heads=2)
    found = jax.jit(lambda x: attend(layer, x, POSITIONS, SEGMENTS))(jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(found, attend(layer, x, POSITIONS, SEGMENTS), atol=1e-6)


def test_bfloat16_stays_bfloat16(x):
    layer = drawn()
    y = layer(jnp.asarray(x, jnp.bfloat16), Context(jnp.asarray(POSITIONS), jnp.asarray(SEGMENTS)))
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(y, np.float32), oracle(layer, x, POSITIONS, SEGMENTS), atol=0.1)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cudn", 'plan.attention: unknown kernel "cudn"; did you mean "cudnn"? known: auto xla cudnn'),
        ("cudnn", 'plan.attention = "cudnn" needs a gpu, and this is a cpu; "auto" picks what there is'),
        ("splash", 'plan.attention = "splash" needs a tpu, and this is a cpu; "auto" picks what there is'),
    ],
)
def test_a_kernel_that_is_not_there_is_refused(name, message, x):
    with pytest.raises(ValueError) as error:
        check_kernel(name)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)
    with executing(Execution(attention=name)), pytest.raises(ValueError, match="plan.attention"):
        attend(drawn(), x, POSITIONS)


def test_kernels_that_are_there_pass():
    check_kernel("auto")
    check_kernel("xla")
