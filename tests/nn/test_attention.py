"""Attention against a plain float64 oracle: heads, documents, positions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpp.nn import Attention, AttentionConfig, Context, Layer
from jaxpp.nn.attention import ALIKE, check_kernel, choose_kernel, document_mask
from jaxpp.nn.rope import angles
from jaxpp.parallel import Execution, executing

BATCH, SEQ, EMBED, HEAD_DIM, BASE = 2, 7, 12, 4, 10_000.0
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


def normed(x: np.ndarray, norm, epsilon: float) -> np.ndarray:
    """Divide by the root of the mean square over the dims of the scale."""
    axes = tuple(range(-wide(norm.scale).ndim, 0))
    return x / np.sqrt((x**2).mean(axes, keepdims=True) + epsilon) * wide(norm.scale)


def oracle(layer: Attention, x: np.ndarray, positions, segments=None, rope_base: float | None = BASE) -> np.ndarray:
    """Attend one query at a time, over the keys it may see."""
    config = layer.config
    q, k, v = (
        np.einsum("bte,ehd->bthd", x, wide(p.kernel)) + (0 if p.bias is None else wide(p.bias))
        for p in (layer.query, layer.key, layer.value)
    )
    if config.qk_norm != "none":
        q, k = normed(q, layer.query_norm, config.norm_epsilon), normed(k, layer.key_norm, config.norm_epsilon)
    if rope_base is not None:
        q, k = rotated(q, positions, rope_base), rotated(k, positions, rope_base)
    result = np.zeros_like(q)
    for b, t, h in np.ndindex(q.shape[:3]):
        kv = h // (config.num_heads // config.num_kv_heads)
        seen = [s for s in range(t + 1) if segments is None or segments[b, s] == segments[b, t]]
        seen = [s for s in seen if not config.window or positions[b, t] - positions[b, s] < config.window]
        scores = k[b, seen, kv] @ q[b, t, h] * (config.scale or config.head_dim**-0.5)
        scores = np.exp(config.soft_cap * np.tanh(scores / config.soft_cap) if config.soft_cap else scores)
        result[b, t, h] = scores @ v[b, seen, kv] / scores.sum()
    y = np.einsum("bthd,hde->bte", result, wide(layer.out.kernel))
    return y + (0 if layer.out.bias is None else wide(layer.out.bias))


def drawn(num_heads=4, num_kv_heads=4, **options) -> Attention:
    config = AttentionConfig(EMBED, num_heads, num_kv_heads, HEAD_DIM, **options)
    layer = Attention(jax.random.key(0), config)
    for i, part in enumerate((layer.query, layer.key, layer.value, layer.out)):
        if part.bias is not None:
            part.bias[...] = jax.random.normal(jax.random.key(i), part.bias.shape)
    for i, norm in enumerate((layer.query_norm, layer.key_norm)):
        if norm is not None:
            norm.scale[...] = jax.random.normal(jax.random.key(i), norm.scale.shape)
    return layer


@pytest.fixture(scope="module")
def x() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(BATCH, SEQ, EMBED)).astype(np.float32)


def attend(layer: Attention, x, positions, segments=None, rope_base: float | None = BASE, own=ALIKE) -> jax.Array:
    positions = jnp.asarray(positions)
    rotary = None if rope_base is None else angles(positions, HEAD_DIM, rope_base)
    context = Context(positions, None if segments is None else jnp.asarray(segments), rotary)
    return layer(jnp.asarray(x), context, own)


@pytest.mark.parametrize("num_kv_heads", [4, 2, 1], ids=["MHA", "GQA", "MQA"])
@pytest.mark.parametrize("packed", [False, True])
def test_attention_equals_float64(num_kv_heads, packed, x):
    layer = drawn(num_kv_heads=num_kv_heads)
    segments, positions = (SEGMENTS, POSITIONS) if packed else (None, np.tile(np.arange(SEQ), (BATCH, 1)))
    np.testing.assert_allclose(attend(layer, x, positions, segments), oracle(layer, x, positions, segments), atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        dict(qkv_bias=True),
        dict(qkv_bias=True, out_bias=True),
        dict(qk_norm="head", norm_epsilon=0.1),
        dict(qk_norm="full", norm_epsilon=0.1),
        dict(window=1),
        dict(window=3),
        dict(scale=0.9),
        dict(soft_cap=0.5),
        dict(window=2, soft_cap=0.5, scale=0.9, qk_norm="head"),
    ],
    ids=str,
)
def test_options_equal_float64(options, x):
    layer = drawn(num_kv_heads=2, **options)
    np.testing.assert_allclose(attend(layer, x, POSITIONS, SEGMENTS), oracle(layer, x, POSITIONS, SEGMENTS), atol=1e-5)


@pytest.mark.parametrize("base", [None, 100.0])
def test_rotary_bases_equal_float64(base, x):
    layer = drawn(num_kv_heads=2)
    found = attend(layer, x, POSITIONS, SEGMENTS, base)
    np.testing.assert_allclose(found, oracle(layer, x, POSITIONS, SEGMENTS, base), atol=1e-5)


@pytest.mark.parametrize("window", [True, False])
@pytest.mark.parametrize("rotary", [True, False])
def test_a_layer_of_a_scan_equals_one_that_is_unrolled(window, rotary, x):
    """Flags as scalars and as Python bools say the same."""
    layer = drawn(num_kv_heads=2, window=2)
    static = attend(layer, x, POSITIONS, SEGMENTS, own=Layer(window, rotary))
    traced = jax.jit(lambda own: attend(layer, x, POSITIONS, SEGMENTS, own=own))(Layer(window, rotary))
    np.testing.assert_allclose(traced, static, atol=1e-6)
    plain = drawn(num_kv_heads=2, window=2 if window else 0)
    np.testing.assert_allclose(static, oracle(plain, x, POSITIONS, SEGMENTS, BASE if rotary else None), atol=1e-5)


def test_layers_with_a_window_may_turn_by_a_base_of_their_own(x):
    layer, positions = drawn(window=3), jnp.asarray(POSITIONS)
    context = Context(positions, None, angles(positions, HEAD_DIM, BASE), angles(positions, HEAD_DIM, 10.0))
    local, whole = layer(jnp.asarray(x), context, Layer(True)), layer(jnp.asarray(x), context, Layer(False))
    np.testing.assert_allclose(local, oracle(layer, x, POSITIONS, None, 10.0), atol=1e-5)
    np.testing.assert_allclose(whole, oracle(drawn(), x, POSITIONS, None, BASE), atol=1e-5)
    scanned = jax.jit(lambda own: layer(jnp.asarray(x), context, own))
    np.testing.assert_allclose(scanned(Layer(True)), local, atol=1e-6)
    np.testing.assert_allclose(scanned(Layer(False)), whole, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("splash", dict(window=4), 'plan.attention = "splash" has no window, which this model needs; xla or cudnn has'),
        ("cudnn", dict(soft_cap=5.0), 'plan.attention = "cudnn" has no soft cap, which this model needs; xla has'),
    ],
)
def test_a_kernel_that_lacks_an_option_is_refused(name, options, message, monkeypatch):
    monkeypatch.setattr("jax.default_backend", lambda: {"cudnn": "gpu", "splash": "tpu"}[name])
    with pytest.raises(ValueError) as error:
        choose_kernel(name, jnp.dtype("bfloat16"), 128, 128, **options)
    assert str(error.value) == message
    assert choose_kernel("auto", jnp.dtype("bfloat16"), 128, 128, soft_cap=5.0) == "xla"


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
    y = attend(layer, jnp.asarray(x, jnp.bfloat16), POSITIONS, SEGMENTS)
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
