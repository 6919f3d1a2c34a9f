"""The decoder: its presets, its documents, its tied table, one device against several."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxpp import dims, tree
from jaxpp.model import Model, ModelConfig, Trainable
from jaxpp.models import FAMILIES, SIZES, Decoder, DecoderConfig
from jaxpp.nn import Context, rope
from jaxpp.nn.scaling import RopeScaling
from jaxpp.parallel import Execution, Plan, executing
from jaxpp.train.programs import make_program

VOCAB, EMBED, SEQ = 64, 32, 12
SHAPE = dict(vocab_size=VOCAB, num_layers=2, embed_dim=EMBED, num_heads=4, num_kv_heads=2, mlp_dim=64, max_positions=16)
CONFIG = DecoderConfig(**SHAPE)
TIED = DecoderConfig(**{**SHAPE, "num_kv_heads": 4}, tied=True)


@functools.cache
def drawn(config: DecoderConfig) -> Decoder:
    graph = nnx.graphdef(nnx.eval_shape(lambda: config.build(nnx.Rngs(0))))
    return nnx.merge(graph, jax.jit(lambda: nnx.state(config.build(nnx.Rngs(0))))())


def logits(model: Decoder, batch) -> jax.Array:
    return model(batch["tokens"], positions=batch.get("positions"), segment_ids=batch.get("segments"))


@nnx.jit
def loss(model: Decoder, batch) -> tuple[jax.Array, jax.Array]:
    return model.loss(batch)


def row(*lengths: int, seed: int = 0, size: int = 0) -> dict[str, np.ndarray]:
    """Return one row of documents of these lengths, filled up with padding to `size`."""
    rng, used = np.random.default_rng(seed), sum(lengths)
    pad = max(size - used, 0)
    tokens = rng.integers(0, VOCAB, used + pad)
    return {
        "tokens": tokens[None].astype(np.int32),
        "targets": rng.integers(0, VOCAB, (1, used + pad)).astype(np.int32),
        "segments": np.repeat([*range(1, len(lengths) + 1), 0], [*lengths, pad])[None].astype(np.int32),
        "positions": np.concatenate([np.arange(n) for n in (*lengths, pad)])[None].astype(np.int32),
        "weights": np.repeat([1.0, 0.0], [used, pad])[None].astype(np.float32),
    }


def cut(batch: dict[str, np.ndarray], start: int, stop: int) -> dict[str, np.ndarray]:
    """Take a piece of a row as a row of its own."""
    return {name: x[:, start:stop] for name, x in batch.items() if name != "segments"}


def test_the_protocols_hold():
    model = nnx.eval_shape(lambda: CONFIG.build(nnx.Rngs(0)))
    assert isinstance(model, Model) and isinstance(model, Trainable) and isinstance(CONFIG, ModelConfig)
    assert FAMILIES[CONFIG.family][0] is DecoderConfig


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("num_shards", [2, 4, 8])
def test_presets_fit_a_tensor_axis_where_their_dims_divide(size, num_shards):
    config = DecoderConfig(**SIZES[size])
    layout = Plan(mesh=f"data:{8 // num_shards} tensor:{num_shards}").layout()
    params = nnx.split(nnx.eval_shape(lambda: config.build(nnx.Rngs(0))), nnx.Param, ...)[1]
    split = {
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "mlp": config.mlp_dim,
        "vocab": config.vocab_size,
    }
    wrong = [dim for dim, n in split.items() if n % num_shards]
    if not wrong:
        layout.check(params)
        return
    with pytest.raises(ValueError) as error:
        layout.check(params)
    for dim in wrong:
        assert f"{dim} {split[dim]} does not split over tensor={num_shards}; size" in str(error.value)


def test_the_large_presets_fit_eight_devices():
    for size in ("400m", "1b", "3b", "8b"):
        assert make_program(DecoderConfig(**SIZES[size]), optax.sgd(0.1), "tensor:8").abstract_state
        assert make_program(DecoderConfig(**SIZES[size]), optax.sgd(0.1), "data:2 fsdp:4").abstract_state


def test_a_block_adds_attention_then_mlp_and_the_head_reads_the_norm():
    model, batch = drawn(CONFIG), {k: jnp.asarray(v) for k, v in row(5, 7).items()}

    @nnx.jit
    def by_hand(model, batch):
        x = model.tokens.table[...][batch["tokens"]]
        rotary = rope.angles(batch["positions"], CONFIG.head_dim, CONFIG.rope_base)
        graph, stacked = nnx.split(model.blocks)
        for i in range(CONFIG.num_layers):
            block = nnx.merge(graph, jax.tree.map(lambda leaf, i=i: leaf[i], stacked))
            x = x + block.attention(block.attention_norm(x), Context(batch["positions"], batch["segments"], rotary))
            x = x + block.mlp(block.mlp_norm(x))
        return model.final_norm(x) @ model.head.kernel[...]

    np.testing.assert_allclose(logits(model, batch), by_hand(model, batch), atol=1e-5)


def test_packed_documents_equal_rows_of_their_own():
    """B124: logits and loss, to 1e-6."""
    model, packed = drawn(CONFIG), row(5, 7)
    together = np.asarray(logits(model, packed))
    apart = [cut(packed, 0, 5), cut(packed, 5, 12)]
    for piece, start in zip(apart, (0, 5), strict=True):
        found = together[:, start : start + piece["tokens"].shape[1]]
        np.testing.assert_allclose(found, logits(model, piece), rtol=0, atol=1e-6 * np.abs(together).max())
    totals, weights = zip(*(loss(model, piece) for piece in apart), strict=True)
    assert loss(model, packed)[0] == pytest.approx(float(sum(totals)), rel=1e-6)
    assert loss(model, packed)[1] == float(sum(weights)) == 12


def test_padding_changes_nothing():
    """B121: a row and five pads equal the row alone."""
    model, padded = drawn(CONFIG), row(7, size=SEQ)
    alone = cut(padded, 0, 7)
    wanted = np.asarray(logits(model, alone))
    np.testing.assert_allclose(logits(model, padded)[:, :7], wanted, rtol=0, atol=1e-6 * np.abs(wanted).max())
    assert loss(model, padded)[0] == pytest.approx(float(loss(model, alone)[0]), rel=1e-6)
    assert np.isfinite(logits(model, padded)).all()


def test_the_loss_is_that_of_the_logits():
    model, batch = drawn(CONFIG), row(5, 4, size=SEQ)
    found = np.asarray(logits(model, batch), np.float64)
    log_p = found - np.log(np.exp(found).sum(-1, keepdims=True))
    picked = np.take_along_axis(log_p, batch["targets"][..., None], -1)[..., 0]
    total, weight = loss(model, batch)
    assert total == pytest.approx(-(picked * batch["weights"]).sum(), rel=1e-5) and weight == 9


def test_learned_positions_are_added_and_start_anew_in_each_document():
    config = DecoderConfig(**SHAPE, positions="learned")
    model, batch = drawn(config), row(5, 7)
    table, places = np.asarray(model.tokens.table[...]), np.asarray(model.places.table[...])
    assert places.shape == (16, EMBED)
    found = model.embed({k: jnp.asarray(v) for k, v in batch.items()})
    np.testing.assert_allclose(found, table[batch["tokens"]] + places[batch["positions"]], atol=1e-6)
    together = np.asarray(logits(model, batch))
    np.testing.assert_allclose(together[:, 5:], logits(model, cut(batch, 5, 12)), atol=1e-5)
    shifted = {**cut(batch, 5, 12), "positions": np.arange(1, 8, dtype=np.int32)[None]}
    assert np.abs(together[:, 5:] - logits(model, shifted)).max() > 1e-3  # and no rotation hides them


def test_rotary_positions_hold_no_weight():
    assert drawn(CONFIG).places is None


def test_options_reach_the_blocks():
    model = nnx.eval_shape(
        lambda: DecoderConfig(**SHAPE, mlp="plain", activation="relu", norm="layer", qkv_bias=True).build(nnx.Rngs(0))
    )
    assert model.blocks.mlp.gate is None and model.blocks.mlp.activation == "relu"
    assert model.blocks.attention.query.bias.shape == (2, 4, 8) and model.final_norm.bias.shape == (EMBED,)


PATTERNS = dict(
    window=3, window_layers=(True, False), window_rope_base=100.0, rope_layers=(True, True, False), num_layers=4
)


@pytest.mark.parametrize(
    "fields",
    [
        dict(norm_place="both", norm_scale="offset", embed_scale=True, attention_soft_cap=2.0, logit_soft_cap=1.5),
        dict(norm_place="post", qk_norm="full", norm_scale="wide"),
        dict(parallel=True, norm="layer", rotary_dim=4, qkv_bias=True, out_bias=True, mlp_bias=True, mlp="plain"),
        PATTERNS,
        dict(rope_scaling=RopeScaling("longrope", 2.0, 8, short_factors=(1.0,) * 4, long_factors=(3.0,) * 4)),
    ],
    ids=str,
)
def test_scanned_layers_equal_unrolled_ones_and_the_loss_that_of_the_logits(fields):
    model, batch = drawn(DecoderConfig(**{**SHAPE, **fields})), row(5, 7)
    found = np.asarray(logits(model, batch), np.float64)
    with executing(Execution(layers="unroll")):
        np.testing.assert_allclose(logits(model, batch), found, atol=1e-5)
    log_p = found - np.log(np.exp(found).sum(-1, keepdims=True))
    picked = np.take_along_axis(log_p, batch["targets"][..., None], -1)[..., 0]
    assert loss(model, batch)[0] == pytest.approx(-picked.sum(), rel=1e-5)


def test_patterns_repeat_over_the_depth():
    layers = DecoderConfig(**{**SHAPE, **PATTERNS}).layers()
    assert layers is not None
    assert [layer.window for layer in layers] == [True, False, True, False]
    assert [layer.rotary for layer in layers] == [True, True, False, True]
    assert CONFIG.layers() is None


def test_a_capped_loss_has_the_gradient_of_the_capped_logits():
    config = DecoderConfig(**SHAPE, logit_soft_cap=0.3)
    batch = row(5, 7)

    def plain(state):
        model = nnx.merge(nnx.graphdef(drawn(config)), state)
        log_p = jax.nn.log_softmax(logits(model, batch))
        return -jnp.take_along_axis(log_p, batch["targets"][..., None], -1).sum()

    wanted = tree.named_leaves(jax.jit(jax.grad(plain))(nnx.state(drawn(config))))
    for name, found in gradients(config).items():
        np.testing.assert_allclose(found, wanted[name], atol=1e-5 * np.abs(wanted[name]).max(), err_msg=name)


@pytest.mark.parametrize("fields", [dict(tied=True), dict(logit_soft_cap=0.5)], ids=str)
def test_rows_that_fill_the_table_up_change_nothing(fields):
    """Logits, loss and gradients are those of the table without them, which then splits over any mesh."""
    config = DecoderConfig(**{**SHAPE, "vocab_size": 61, **fields})
    wide = dataclasses.replace(config, vocab_rows=64)
    batch = {k: np.minimum(v, 60) if k in ("tokens", "targets") else v for k, v in full_batch().items()}

    def fill(path, node):
        value = np.asarray(tree.named_leaves(nnx.state(drawn(config)))[path])
        missing = [(0, n - m) for n, m in zip(node.shape, value.shape, strict=True)]
        return jnp.asarray(np.pad(value, missing, constant_values=3.0))

    params = tree.map_named(fill, nnx.state(drawn(wide)))
    found = logits(nnx.merge(nnx.graphdef(drawn(wide)), params), batch)
    np.testing.assert_allclose(found, logits(drawn(config), batch), atol=1e-6)
    results = []
    for one, state, plan in ((config, nnx.state(drawn(config)), "data:8"), (wide, params, "data:4 tensor:2")):
        program = make_program(one, optax.sgd(0.1), plan)
        start = program.begin(jax.device_put(state, program.shardings.params))
        results.append(program.loss_and_gradients(start, program.place(batch)))
    assert results[0][0] == pytest.approx(float(results[1][0]), rel=1e-6)
    for (path, one), other in zip(
        tree.named_leaves(results[0][1]).items(), tree.named_leaves(results[1][1]).values(), strict=True
    ):
        cut = np.asarray(other)[tuple(slice(n) for n in one.shape)]
        np.testing.assert_allclose(cut, one, atol=1e-5 * np.abs(one).max(), err_msg=path)


def test_padding_on_the_left_changes_nothing():
    """B139: positions count real tokens."""
    model, tokens = drawn(CONFIG), row(7)["tokens"]
    padded = np.concatenate([np.zeros((1, 5), np.int32), tokens], axis=1)
    found = model(padded, segment_ids=jnp.asarray(padded[:, :] * 0 + np.repeat([0, 1], [5, 7])))
    np.testing.assert_allclose(found[:, 5:], model(tokens), atol=1e-5)


def test_wrong_calls_are_refused():
    model = drawn(CONFIG)
    with pytest.raises(ValueError, match="token ids 0 to 64; this model takes 0 to 63"):
        model([[0, 64]])
    with pytest.raises(ValueError, match=r"tokens of shape \(2,\); \[batch, seq\] is needed"):
        model([0, 1])
    with pytest.raises(ValueError, match="a sequence of 17 tokens; this model takes 16"):
        drawn(DecoderConfig(**SHAPE, positions="learned"))([[0] * 17])


def test_a_batch_that_does_not_divide_is_filled_up():
    """B85: one, three and five rows on eight batch shards."""
    plan = Plan(mesh="data:8")
    model, tokens = drawn(CONFIG), np.random.default_rng(0).integers(0, VOCAB, (5, SEQ)).astype(np.int32)
    wanted = model(tokens)
    for rows in (1, 3, 5):
        with executing(plan.execution(plan.layout())):
            found = model(tokens[:rows])
        np.testing.assert_allclose(found, wanted[:rows], atol=1e-5)


def gradients(config: DecoderConfig, change=None):
    model = drawn(config)
    graph, state = nnx.split(model)
    if change is not None:
        state = change(state)
    batch = row(5, 7)
    grads = jax.jit(jax.grad(lambda state: nnx.merge(graph, state).loss(batch)[0]))(state)
    return tree.named_leaves(grads)


def test_a_tied_table_is_one_leaf_and_its_gradient_the_sum_of_both_uses():
    untied = DecoderConfig(**{**SHAPE, "num_kv_heads": 4})

    def with_the_table_as_head(state):
        values = tree.named_leaves(nnx.state(drawn(TIED)))
        return tree.fill(state, {**values, "head/kernel": values["tokens/table"].T})

    tied, split = gradients(TIED), gradients(untied, with_the_table_as_head)
    assert "head/kernel" not in tied and set(split) - set(tied) == {"head/kernel"}
    wanted = np.asarray(split["tokens/table"]) + np.asarray(split["head/kernel"]).T
    np.testing.assert_allclose(tied["tokens/table"], wanted, atol=1e-5 * np.abs(wanted).max())
    for name in set(tied) - {"tokens/table"}:
        np.testing.assert_allclose(tied[name], split[name], atol=1e-5, err_msg=name)


def full_batch(rows: int = 8) -> dict[str, np.ndarray]:
    parts = [row(5, 7, seed=i) for i in range(rows)]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


@pytest.mark.parametrize("mesh", ["data:4 tensor:2", "data:2 tensor:4"])
def test_a_tied_table_on_a_tensor_axis(mesh):
    """B29: both uses share the split over vocab: equal logits, and the table is never gathered."""
    program = make_program(TIED, optax.sgd(0.1), mesh)
    state, batch = program.init(0), program.place(full_batch())
    graph = nnx.graphdef(drawn(TIED))

    def forward(params, batch):
        with executing(program.plan.execution(program.layout)):
            return logits(nnx.merge(graph, params), batch)

    compiled = jax.jit(forward).lower(state.params, batch).compile()
    np.testing.assert_allclose(compiled(state.params, batch), logits(drawn(TIED), full_batch()), atol=1e-5)
    gathered = re.findall(r"= \(?(\w+\[[0-9,]*\])[^\n]* all-gather", compiled.as_text())
    assert not [shape for shape in gathered if re.search(rf"\[{VOCAB},{EMBED}\]|\[{EMBED},{VOCAB}\]", shape)]
    table = state.params["tokens"]["table"][...]
    assert table.sharding.shard_shape(table.shape) == (VOCAB // program.layout.mesh.shape["tensor"], EMBED)


def test_a_tied_table_stays_one_through_an_update():
    """B28: one leaf, counted once; the head reads what the embedding reads."""
    program = make_program(TIED, optax.adam(1e-2), "data:2 tensor:4")
    state, _ = program.step(program.init(0), program.place(full_batch()))
    model = nnx.merge(nnx.graphdef(drawn(TIED)), state.params)
    np.testing.assert_array_equal(model.head_weight(), np.asarray(model.tokens.table[...]).T)
    assert np.abs(np.asarray(model.tokens.table[...] - drawn(TIED).tokens.table[...])).max() > 1e-3
    untied = nnx.eval_shape(lambda: DecoderConfig(**{**SHAPE, "num_kv_heads": 4}).build(nnx.Rngs(0)))
    assert tree.total_bytes(nnx.state(untied)) - tree.total_bytes(state.params) == 4 * VOCAB * EMBED


def test_a_vocabulary_that_does_not_divide_is_refused_not_replicated():
    """B31: 251 rows over eight devices."""
    config = DecoderConfig(**{**SHAPE, "vocab_size": 251, "num_heads": 8, "num_kv_heads": 8})
    with pytest.raises(
        ValueError, match=r"(tokens/table|head/kernel): vocab 251 does not split over tensor=8; sizes 248 or 256 would"
    ):
        _ = make_program(config, optax.sgd(0.1), "tensor:8").abstract_state
    padded = DecoderConfig(**{**SHAPE, "vocab_size": 256, "num_heads": 8, "num_kv_heads": 8})
    table = make_program(padded, optax.sgd(0.1), "tensor:8").abstract_state.params["tokens"]["table"].get_value()
    assert table.sharding.shard_shape(table.shape) == (32, EMBED)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(num_heads=5), "model.embed_dim 32 does not split into num_heads 5; 1, 2, 4, 8 heads do, or set head_dim"),
        (dict(num_heads=4, num_kv_heads=3), "model.num_kv_heads 3 does not divide num_heads 4; 1, 2, 4 do"),
        (dict(head_dim=7), "model.head_dim 7 is odd; rotary positions need 8"),
        (dict(num_layers=0), "model.num_layers = 0: 1 or more are needed"),
        (dict(vocab_size=-1), "model.vocab_size = -1: 1 or more are needed"),
        (dict(max_positions=0), "model.max_positions = 0: 1 or more are needed"),
        (dict(num_heads=0), "model.num_heads = 0: 1 or more are needed"),
        (dict(mlp_dim=-8), "model.mlp_dim"),
        (dict(num_kv_heads=-2), "model.num_kv_heads"),
        (dict(head_dim=-8), "model.head_dim"),
        (dict(vocab_rows=63), "model.vocab_rows 63: vocab_size 64 or more are needed, or 0"),
        (dict(rotary_dim=3), "model.rotary_dim 3: an even number up to head_dim 8 is needed"),
        (dict(rotary_dim=10), "model.rotary_dim 10: an even number up to head_dim 8 is needed"),
    ],
)
def test_shapes_that_cannot_be_are_refused(fields, message):
    with pytest.raises(ValueError) as error:
        DecoderConfig(**{**SHAPE, **fields})
    assert message in str(error.value)


def test_defaults_follow_from_the_others():
    config = DecoderConfig(embed_dim=96, num_heads=6)
    assert (config.head_dim, config.num_kv_heads, config.mlp_dim) == (16, 6, 256)
    assert DecoderConfig(embed_dim=96, num_heads=6, mlp="plain").mlp_dim == 384
    assert DecoderConfig(embed_dim=96, num_heads=5, head_dim=8).head_dim == 8
    assert dims.num_parameters(nnx.state(nnx.eval_shape(lambda: config.build(nnx.Rngs(0))))) > 0
