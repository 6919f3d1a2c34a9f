"""A learned map: what it starts from, that it learns, and that the weights made by it are those it was trained on."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxpp import tree
from jaxpp.grow.ligo import learn
from jaxpp.grow.step import Growth, Step
from jaxpp.models import DecoderConfig
from jaxpp.nn.moe import MoeConfig
from jaxpp.parallel import Execution, Plan
from tests.grow import growing

SMALL = replace(growing.LLAMA, num_layers=2, embed_dim=32, head_dim=8, rotary_dim=8, mlp_dim=48)
WIDE = replace(SMALL, embed_dim=48, num_heads=6, num_kv_heads=3, mlp_dim=72)
LARGE = replace(WIDE, num_layers=3)
ROWS = 8


def batches(seed: int = 0) -> Iterator[dict[str, np.ndarray]]:
    """Yield rows in which each token is the one before plus 1 or 2."""
    rng = np.random.default_rng(seed)
    while True:
        steps = rng.integers(1, 3, (ROWS, growing.SEQ + 1)).cumsum(-1)
        tokens = ((rng.integers(growing.VOCAB, size=(ROWS, 1)) + steps) % growing.VOCAB).astype(np.int32)
        yield dict(
            tokens=tokens[:, :-1], targets=tokens[:, 1:], weights=np.ones((ROWS, growing.SEQ), np.float32),
            positions=np.tile(np.arange(growing.SEQ, dtype=np.int32), (ROWS, 1)),
        )  # fmt: skip


def model(config: DecoderConfig = SMALL) -> Any:
    return growing.model_of(config, growing.weights(config))


def made(step: Step, small: Any = None) -> dict[str, jax.Array]:
    if small is None:
        return growing.grown_weights(Growth((step,)))
    held = tree.named_leaves(nnx.split(small, nnx.Param, ...)[1])
    leaves = step.leaves.items()
    return jax.jit(lambda held: {path: leaf.weight(held[leaf.source], growing.DTYPE) for path, leaf in leaves})(held)


def zipped(rows: Iterable[dict[str, np.ndarray]]) -> dict[str, list[np.ndarray]]:
    listed = list(rows)
    return {name: [row[name] for row in listed] for name in listed[0]}


def loss(config: DecoderConfig, weights: dict[str, jax.Array], batch: dict[str, np.ndarray]) -> float:
    total, weight = nnx.jit(lambda model, batch: model.loss(batch))(growing.model_of(config, weights), batch)
    return float(total / weight)


@pytest.fixture(scope="module")
def trained() -> Any:
    """Train the small model on other rows, until it knows something worth keeping."""
    graph, params, other = nnx.split(model(), nnx.Param, ...)
    optimizer = optax.adam(3e-3)
    moments = optimizer.init(params)

    @jax.jit
    def step(params: Any, moments: Any, batch: Any) -> tuple[Any, Any]:
        def mean(params: Any) -> jax.Array:
            total, weight = nnx.merge(graph, params, other).loss(batch)
            return total / weight

        updates, moments = optimizer.update(jax.grad(mean)(params), moments)
        return optax.apply_updates(params, updates), moments

    for batch in itertools.islice(batches(1), 150):
        params, moments = step(params, moments, batch)
    return nnx.merge(graph, params, other)


def test_a_hundred_steps_lower_the_loss_of_rows_never_seen(trained):
    unseen = {name: np.concatenate(rows) for name, rows in zipped(itertools.islice(batches(2), 8)).items()}
    start, end = (
        loss(LARGE, made(learn(trained, LARGE, batches(), num_steps=count), trained), unseen) for count in (0, 100)
    )
    assert end < start - 0.05


def test_the_weights_that_are_made_are_those_that_were_trained():
    options, losses = dict(learning_rate=1e-2), []
    found = made(learn(model(), LARGE, batches(), num_steps=3, **options))
    learn(model(), LARGE, batches(), num_steps=4, **options, progress=lambda _, loss: losses.append(loss))
    fourth = next(itertools.islice(batches(), 3, None))
    assert loss(LARGE, found, fourth) == pytest.approx(losses[3], rel=1e-5)
    assert abs(losses[3] - losses[0]) > 0.01


@pytest.mark.parametrize("target", [WIDE, replace(SMALL, num_heads=8, mlp_dim=50)], ids=["groups", "in groups"])
def test_old_units_keep_their_weights(target):
    """New heads stand behind the old ones, or inside their groups."""
    small, large = growing.weights(SMALL), made(learn(model(), target, batches(), num_steps=2, learning_rate=0.1))
    heads = [0, 1, 2, 3] if target is WIDE else [0, 1, 4, 5]
    embed, mlp = slice(SMALL.embed_dim), slice(SMALL.mlp_dim)
    block = "blocks/attention"
    for path, kept in {
        "tokens/table": np.s_[:, embed],
        f"{block}/query/kernel": np.s_[:, embed, heads],
        f"{block}/key/kernel": np.s_[:, embed, :2],
        f"{block}/out/kernel": np.s_[:, heads, :, embed],
        "blocks/mlp/up/kernel": np.s_[:, embed, mlp],
        "blocks/mlp/down/kernel": np.s_[:, mlp, embed],
        "final_norm/scale": np.s_[embed],
    }.items():
        assert np.array_equal(large[path][kept], small[path]), path
    assert not np.array_equal(large["blocks/mlp/down/kernel"][:, SMALL.mlp_dim], small["blocks/mlp/down/kernel"][:, 0])


def test_the_output_reads_new_heads_by_the_map_that_writes_their_values():
    step = learn(model(), WIDE, batches(), num_steps=2)
    small, large = growing.weights(SMALL), made(step)
    rows = step.leaves["blocks/attention/value/kernel"].learned["maps"]["value"]
    values = small["blocks/attention/value/kernel"].reshape(2, SMALL.embed_dim, -1)
    wanted = np.einsum("lpr,ler->lep", rows, values)
    new = large["blocks/attention/value/kernel"][:, : SMALL.embed_dim, 2:].reshape(wanted.shape)
    np.testing.assert_allclose(new, wanted, rtol=1e-5, atol=1e-6)
    out = small["blocks/attention/out/kernel"].reshape(2, 2, 2, 8, -1)  # layer, kv head, query of its group, ...
    wanted = np.einsum("lpdkc,lkgce->lpgde", rows.reshape(2, 1, 8, 2, 8), out).reshape(2, 2, 8, -1)
    new = large["blocks/attention/out/kernel"][:, 4:, :, : SMALL.embed_dim]
    np.testing.assert_allclose(new, wanted, rtol=1e-5, atol=1e-6)


def test_it_starts_from_means_of_units_and_the_stack_again():
    step = learn(model(), LARGE, [], num_steps=0)
    learned = step.leaves["tokens/table"].learned
    assert set(learned["maps"]) == {"embed", "query", "key", "value", "mlp"}
    for rows in learned["maps"].values():
        assert rows.min() >= 0
        np.testing.assert_allclose(rows.sum(-1), 1, rtol=1e-5)
    for alpha in learned["alpha"].values():
        np.testing.assert_allclose(alpha.sum(-1), 1, rtol=1e-5)
        assert alpha.argmax(-1).tolist() == [0, 1, 0] and 0.9 < alpha.max(-1).min() < 1


def test_nothing_grown_is_nothing_changed():
    large = made(learn(model(), SMALL, [], num_steps=0))
    assert all(np.array_equal(large[path], x) for path, x in growing.weights(SMALL).items())


def test_it_says_that_the_function_changes_and_moments_restart():
    step = learn(model(), LARGE, [], num_steps=0)
    assert not step.preserves
    assert step.maps["embed"] == "32 -> 48" and step.maps["layers"] == "2 -> 3"
    leaf, x = step.leaves["blocks/mlp/up/kernel"], growing.weights(SMALL)["blocks/mlp/up/kernel"]
    assert leaf.moment(x, 2).shape == leaf.weight(x, jnp.dtype(jnp.float32)).shape == (3, 48, 72)
    assert not leaf.moment(x, 1).any() and leaf.rate() == 1


@pytest.mark.parametrize(
    "name", ["gemma2", "shared", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt2", "olmo2"))]
)
def test_every_family_learns(name):
    shared = replace(SMALL, moe=MoeConfig(4, 2, 24, shared_mlp_dim=16, shared_gate=True))
    config = shared if name == "shared" else replace(growing.MODELS[name], num_layers=2)
    more = dict(num_layers=3, embed_dim=config.embed_dim + 16, num_heads=8)
    if config.moe.num_experts:
        more["moe"] = replace(config.moe, mlp_dim=60, shared_mlp_dim=config.moe.shared_mlp_dim * 2)
    kv_heads = config.num_kv_heads * (1 if config.num_kv_heads < config.num_heads else 2)
    target, losses = replace(config, **more, head_dim=config.head_dim, num_kv_heads=kv_heads), []
    one = next(batches())
    step = learn(
        model(config), target, [one] * 8, num_steps=8, learning_rate=1e-3, progress=lambda _, x: losses.append(x)
    )
    assert losses[-1] < losses[0]
    assert loss(target, made(step), one) < losses[0]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("mesh", ["fsdp:4 tensor:2", pytest.param("data:8", marks=pytest.mark.slow)])
def test_a_mesh_learns_what_one_device_learns(mesh):
    config = replace(SMALL, vocab_size=96)
    target = replace(LARGE, vocab_size=96, num_heads=8, num_kv_heads=4, embed_dim=64)
    drawn = itertools.islice(batches(), 4)
    rows = [dict(batch, tokens=batch["tokens"] % 96, targets=batch["targets"] % 96) for batch in drawn]
    options = dict(num_steps=4, learning_rate=1e-3)
    one = learn(model(config), target, rows, **options)
    many = learn(model(config), target, rows, layout=Plan(mesh=mesh).layout(), **options)
    wanted, found = (tree.named_leaves(step.leaves["tokens/table"].learned) for step in (one, many))
    assert wanted.keys() == found.keys()
    for path in wanted:
        np.testing.assert_allclose(found[path], wanted[path], atol=2e-4, err_msg=path)


@pytest.mark.slow
def test_a_loaded_model_learns_on_its_own_mesh():
    small, layout = model(), Plan(mesh="data:8").layout()

    class Loaded:
        execution = Execution(layout)

    small.loaded = Loaded()
    graph, params, other = nnx.split(small, nnx.Param, ...)
    spread = nnx.merge(graph, jax.device_put(params, layout.param_shardings(params)), other)
    losses: list[float] = []
    learn(spread, LARGE, batches(), num_steps=1, progress=lambda _, x: losses.append(x))
    start = made(learn(model(), LARGE, [], num_steps=0))
    assert losses[0] == pytest.approx(loss(LARGE, start, next(batches())), rel=1e-5)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (replace(SMALL, head_dim=16, rotary_dim=16), "head_dim 16 is not 8; grow it by the operator head_dim"),
        (replace(SMALL, vocab_size=100), "vocab_size 100 is not 97; grow it by the operator vocab"),
        (replace(SMALL, num_heads=4, num_kv_heads=4), "groups of 1, and the old ones of 2; 8 heads or more"),
        (replace(SMALL, embed_dim=16), "models only grow"),
        (replace(SMALL, norm="layer"), "different families"),
        (replace(SMALL, moe=MoeConfig(4, 2)), "moe.num_experts 4 is not 0"),
        (replace(SMALL, moe=MoeConfig(shared_mlp_dim=16)), "moe.shared_mlp_dim 16: 0 is needed"),
    ],
)
def test_what_no_map_reaches_is_refused(target, message):
    with pytest.raises(ValueError, match=message):
        learn(model(), target, [])


def test_batches_must_last():
    with pytest.raises(ValueError, match="3 batches for 5 steps"):
        learn(model(), WIDE, itertools.islice(batches(), 3), num_steps=5)
