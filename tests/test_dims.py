"""Arrows: what parses, what survives, what is counted."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpp import dims, tree
from jaxpp.models import SIZES, DecoderConfig
from jaxpp.parallel import Execution, executing

SMALL = DecoderConfig(96, 2, 32, num_heads=4, num_kv_heads=2, mlp_dim=64)


def abstract(config: DecoderConfig) -> nnx.State:
    return nnx.split(nnx.eval_shape(lambda: config.build(nnx.Rngs(0))), nnx.Param, ...)[1]


@st.composite
def arrow_strategy(draw: Any) -> dims.Arrow:
    """Draw any arrow that the rules allow: no dim twice on one side."""
    stacked = draw(st.lists(st.sampled_from(dims.STACKED), unique=True, max_size=2))
    side = st.lists(st.sampled_from([d for d in dims.DIMS if d not in stacked]), unique=True, max_size=3)
    return dims.Arrow(tuple(stacked), tuple(draw(side)), tuple(draw(side)))


@given(arrow_strategy())
@settings(max_examples=200, deadline=None)
def test_every_arrow_survives_its_text(arrow):
    assert dims.parse(str(arrow)) == arrow
    assert dims.parse(" " + str(arrow).replace(" ", "   ") + " ") == arrow
    if not arrow.stacked:
        assert arrow.stack("layers").unstack() == arrow
        assert arrow.stack("layers").dims == ("layers", *arrow.dims)


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("embed -> heads head_dim", ((), ("embed",), ("heads", "head_dim"))),
        ("heads head_dim -> embed", ((), ("heads", "head_dim"), ("embed",))),
        ("-> embed", ((), (), ("embed",))),
        ("embed ->", ((), ("embed",), ())),
        ("layers | embed -> mlp", (("layers",), ("embed",), ("mlp",))),
        ("layers experts | -> embed", (("layers", "experts"), (), ("embed",))),
        ("embed->embed", ((), ("embed",), ("embed",))),
    ],
)
def test_what_arrows_mean(text, groups):
    arrow = dims.parse(text)
    assert (arrow.stacked, arrow.reads, arrow.writes) == groups
    assert arrow.dims == sum(groups, ())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("embed mlp", 'arrow "embed mlp": write it "stacked | reads -> writes", e.g. "layers | embed -> mlp"'),
        ("a -> b -> c", 'write it "stacked | reads -> writes"'),
        ("embed -> layers | mlp", 'write it "stacked | reads -> writes"'),
        ("layers | experts | embed -> mlp", 'write it "stacked | reads -> writes"'),
        ("embde -> mlp", 'unknown dim "embde"; did you mean "embed"? known: batch seq'),
        ("embed -> zzz", "declare your own in the plan's dims"),
        ("embed embed -> mlp", 'dim "embed" stands twice on one side; each may stand once'),
        ("layers | embed -> layers", 'dim "layers" stands twice on one side'),
    ],
)
def test_wrong_arrows_are_refused_with_the_fix(text, message):
    with pytest.raises(ValueError) as error:
        dims.parse(text)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_own_dims_are_known_where_declared():
    assert dims.parse("pixels -> embed", ("pixels",)).reads == ("pixels",)
    node = dims.param(jnp.zeros((3, 4)), "pixels -> embed")
    assert dims.of(node, "stem", ("pixels",)).reads == ("pixels",)
    with pytest.raises(ValueError, match='parameter stem: arrow "pixels -> embed": unknown dim "pixels"'):
        dims.of(node, "stem")


class Pieces(nnx.Module):
    def __init__(self, **params: nnx.Variable):
        self.inner = nnx.Dict(params)


@pytest.mark.parametrize(
    ("shape", "metadata", "message"),
    [
        ((2, 3), {}, "parameter inner/w of shape (2, 3) has no arrow; write nnx.Param(value, dims="),
        ((2, 3), {"dims": "-> embed"}, 'inner/w: arrow "-> embed" names 1 dims, but the shape (2, 3) has 2'),
        ((2, 3), {"dims": "embed -> mpl"}, 'inner/w: arrow "embed -> mpl": unknown dim "mpl"; did you mean "mlp"?'),
        ((2,), {"dims": "embed"}, 'parameter inner/w: arrow "embed": write it'),
    ],
    ids=["none", "rank", "unknown", "syntax"],
)
def test_a_wrong_weight_names_its_path(shape, metadata, message):
    node = nnx.Param(jnp.zeros(shape), **metadata)
    with pytest.raises(ValueError) as error:
        dims.arrows(nnx.state(Pieces(w=node)))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_param_checks_the_arrow_against_the_shape_at_once():
    assert dims.param(jnp.zeros((2, 3)), dims.Arrow((), ("embed",), ("mlp",)), tag=7).get_metadata()["tag"] == 7
    with pytest.raises(ValueError, match="names 2 dims, but the shape"):
        dims.param(jnp.zeros(3), "embed -> mlp")
    with pytest.raises(ValueError, match="stands twice"):
        dims.param(jnp.zeros((3, 3, 3)), "embed embed -> mlp")


@pytest.mark.parametrize(
    ("arrow", "shape", "fan_in", "deviation"),
    [
        ("embed -> mlp", (64, 256), 64, 1 / 8),
        ("heads head_dim -> embed", (4, 16, 128), 64, 1 / 8),
        ("experts | embed -> mlp", (8, 64, 64), 64, 1 / 8),
        ("vocab -> embed", (256, 64), 1, 1.0),
        ("-> embed", (4096,), 1, 1.0),
    ],
)
def test_fan_in_is_the_product_of_the_read_dims(arrow, shape, fan_in, deviation):
    parsed = dims.parse(arrow)
    assert parsed.fan_in(shape) == fan_in
    sizes = dict(zip(parsed.dims, shape, strict=True))
    drawn = np.asarray(dims.normal(jax.random.key(0), arrow, sizes)[...])
    assert drawn.shape == shape and drawn.std() == pytest.approx(deviation, rel=0.05)
    assert abs(drawn.mean()) < 5 * deviation / math.sqrt(drawn.size)
    half = dims.normal(jax.random.key(0), arrow, sizes, 0.5, jnp.bfloat16)[...]
    assert half.dtype == jnp.bfloat16 and np.asarray(half, np.float32).std() == pytest.approx(deviation / 2, rel=0.05)


def test_deviations_of_a_decoder_follow_the_arrows_and_the_depth():
    config = DecoderConfig(1024, 8, 64, num_heads=4, mlp_dim=256)
    params = jax.jit(lambda: nnx.state(config.build(nnx.Rngs(0)), nnx.Param))()
    found = {name: float(np.asarray(leaf).std()) for name, leaf in tree.named_leaves(params).items()}
    wanted = {
        "tokens/table": 0.02,
        "blocks/attention/query/kernel": 64**-0.5,
        "blocks/attention/out/kernel": 64**-0.5 / 4,  # twice 8 layers add to the stream
        "blocks/mlp/gate/kernel": 64**-0.5,
        "blocks/mlp/down/kernel": 256**-0.5 / 4,
        "head/kernel": 64**-0.5,
        "blocks/mlp_norm/scale": 0.0,
    }
    for name, deviation in wanted.items():
        assert found[name] == pytest.approx(deviation, rel=0.05), name


def test_arrows_survive_split_eval_shape_stacking_and_optax():
    params = jax.jit(lambda: nnx.split(SMALL.build(nnx.Rngs(0)), nnx.Param, ...)[1])()
    arrows = dims.arrows(params)
    assert arrows == dims.arrows(abstract(SMALL))
    assert str(arrows["blocks/attention/query/kernel"]) == "layers | embed -> heads head_dim"
    assert str(arrows["blocks/attention/key/kernel"]) == "layers | embed -> kv_heads head_dim"
    assert str(arrows["blocks/mlp_norm/scale"]) == "layers | -> embed"
    assert str(arrows["tokens/table"]) == "vocab -> embed" and str(arrows["head/kernel"]) == "embed -> vocab"
    state = jax.jit(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)).init)(params)
    found = dims.moment_arrows(state, params)
    for name, arrow in arrows.items():
        owners = [path for path in found if path.endswith(f"/{name}")]
        assert {path.split("/")[-name.count("/") - 2] for path in owners} == {"mu", "nu"}
        assert all(found[path] == arrow for path in owners)
    counters = [path for path, arrow in found.items() if arrow is None]
    assert counters and all(path.endswith("count") for path in counters)


def test_factored_moments_have_no_arrow():
    params = abstract(DecoderConfig(256, 1, 256, num_heads=2, mlp_dim=256))
    state = jax.eval_shape(optax.scale_by_factored_rms().init, params)
    found = dims.moment_arrows(state, params)
    assert found["v_row/head/kernel"] is None and found["v_col/head/kernel"] is None
    assert str(found["v/final_norm/scale"]) == "-> embed"


def test_an_arrow_of_ones_own_in_optax_state():
    model = Pieces(w=nnx.Param(jnp.zeros((2, 3)), dims="pixels -> embed"))
    params = nnx.state(model)
    assert (
        str(dims.moment_arrows(optax.adam(1.0).init(params), params, ("pixels",))["0/mu/inner/w"]) == "pixels -> embed"
    )
    with pytest.raises(ValueError, match="0/mu/inner/w"):
        dims.moment_arrows(optax.adam(1.0).init(params), params)


def closed_form(config: DecoderConfig) -> int:
    """Count by hand."""
    d, h, k, m = config.embed_dim, config.head_dim, config.num_kv_heads, config.mlp_dim
    attention = 2 * d * config.num_heads * h + 2 * d * k * h
    mlp = (3 if config.mlp == "gated" else 2) * d * m
    if config.moe.num_experts:
        mlp = config.moe.num_experts * (mlp + d)  # and the router
    ends = (1 if config.tied else 2) * config.vocab_size * d
    return config.num_layers * (attention + mlp + 2 * d) + d + ends


@pytest.mark.parametrize("size", SIZES)
def test_parameters_of_every_preset(size):
    config = DecoderConfig(**SIZES[size])
    count = dims.num_parameters(abstract(config))
    assert count == closed_form(config)
    digits, unit = float(size.removeprefix("moe-")[:-1]), {"m": 1e6, "b": 1e9}[size[-1]]
    assert 0.6 < count / (digits * unit) < 1.6
    tied = DecoderConfig(**SIZES[size], tied=True)
    assert dims.num_parameters(abstract(tied)) == count - config.vocab_size * config.embed_dim


def test_flops_per_token_by_hand():
    d, layers, vocab, mlp, seq = 32, 2, 96, 64, 10
    attention = 2 * d * 4 * 8 + 2 * d * 2 * 8
    products = layers * (attention + 3 * d * mlp) + d * vocab
    wanted = 6 * products + layers * 12 * 4 * 8 * seq
    assert dims.flops_per_token(abstract(SMALL), seq) == wanted
    tied = DecoderConfig(96, 2, 32, num_heads=4, num_kv_heads=2, mlp_dim=64, tied=True)
    assert dims.flops_per_token(abstract(tied), seq) == wanted  # the table multiplies once, as the head


def test_flops_count_only_the_experts_visited():
    node = nnx.Param(jnp.zeros((8, 4, 16)), dims="experts | embed -> mlp")
    state = nnx.state(Pieces(w=node))
    assert dims.flops_per_token(state, 1) == 6 * 8 * 4 * 16
    assert dims.flops_per_token(state, 1, active_experts=2) == 6 * 2 * 4 * 16


def test_flops_against_what_xla_counts():
    """The forward pass is a third of it; element-wise work is the few percent between."""
    config = DecoderConfig(512, 2, 256, num_heads=4, mlp_dim=1024)
    graph, params = nnx.split(nnx.eval_shape(lambda: config.build(nnx.Rngs(0))))
    batch, seq = 2, 64
    ids = jax.ShapeDtypeStruct((batch, seq), jnp.int32)

    def forward(params, tokens, positions):
        with executing(Execution(layers="unroll")):  # XLA counts the body of a loop once
            return nnx.merge(graph, params)(tokens, positions=positions)

    cost = jax.jit(forward).lower(params, ids, ids).cost_analysis()
    predicted = dims.flops_per_token(params, seq) / 3 * batch * seq
    assert cost["flops"] == pytest.approx(predicted, rel=0.05)
    assert cost["flops"] > predicted
