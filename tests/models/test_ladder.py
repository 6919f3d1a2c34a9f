"""The ladder residual: its wiring, on one device and several, its gradients, decoding, and what it refuses."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxpp import tree
from jaxpp.models import DecoderConfig
from jaxpp.nn import Context, rope
from jaxpp.parallel import Execution, Plan, executing
from jaxpp.parallel.pipelining import PipelineConfig
from jaxpp.serve import Engine
from jaxpp.serve.generate import greedy
from jaxpp.train.programs import make_program

LAYERS, VOCAB, BATCH, SEQ = 3, 64, 4, 12
SHAPE: dict[str, Any] = dict(
    vocab_size=VOCAB, num_layers=LAYERS, embed_dim=32, num_heads=4, num_kv_heads=2, mlp_dim=64, max_positions=32
)
STANDARD = DecoderConfig(**SHAPE)
OTHER = DecoderConfig(**SHAPE, norm_place="both", norm_scale="offset", window=3, window_layers=(True, False))


def with_ladder(config: DecoderConfig, ladder_layers: int) -> DecoderConfig:
    return dataclasses.replace(config, ladder_layers=ladder_layers)


@functools.cache
def weights(config: DecoderConfig) -> nnx.State:
    """The same weights for every ladder; norms are no ones, so that a norm in another's place shows."""

    def moved(path: str, node: Any) -> jax.Array:
        drawn = np.random.default_rng(len(path)).normal(size=node.shape)
        return jnp.asarray(node.get_value() + 0.2 * drawn * path.endswith("scale"), jnp.float32)

    return tree.map_named(moved, nnx.state(with_ladder(config, 0).build(nnx.Rngs(0))))


def model_of(config: DecoderConfig, state: Any = None) -> Any:
    graph = nnx.graphdef(nnx.eval_shape(lambda: config.build(nnx.Rngs(0))))
    return nnx.merge(graph, weights(with_ladder(config, 0)) if state is None else state)


@functools.cache
def batch() -> dict[str, np.ndarray]:
    rng, at = np.random.default_rng(0), np.arange(SEQ, dtype=np.int32)[None]
    tokens = rng.integers(0, VOCAB, (BATCH, SEQ + 1), dtype=np.int32)
    cut = rng.integers(2, SEQ - 1, (BATCH, 1))
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "segments": (1 + (at >= cut)).astype(np.int32),
        "positions": np.where(at >= cut, at - cut, at).astype(np.int32),
        "weights": (rng.random((BATCH, SEQ)) < 0.8).astype(np.float32),
    }


def in_delta_form(model: Any, batch: Any, num_ladder: int) -> jax.Array:
    """Logits, as one who waits for all-reduces would write it: a stream, and two branches that are still on their way.

    Source: the inference code beside the paper, github.com/mayank31398/ladder-residual-inference.
    """
    config = model.config
    stream = model.embed(batch)
    attended = fed = jnp.zeros_like(stream)
    rotary = rope.angles(batch["positions"], config.head_dim, config.rope_base)
    context = Context(batch["positions"], batch["segments"], rotary)
    graph, stacked = nnx.split(model.blocks)
    layers = config.layers() or [None] * LAYERS
    for i, layer in enumerate(layers):
        block = nnx.merge(graph, jax.tree.map(lambda leaf, i=i: leaf[i], stacked))
        post = [norm or (lambda y: y) for norm in (block.attention_post_norm, block.mlp_post_norm)]
        extra = () if layer is None else (layer,)
        stream, late = stream + attended, fed
        if i < LAYERS - num_ladder:
            stream, late = stream + late, 0.0
        attended = post[0](block.attention(block.attention_norm(stream), context, *extra))
        stream = stream + late
        read = stream if i >= LAYERS - num_ladder else stream + attended
        fed = post[1](block.mlp(block.mlp_norm(read)))
    return model.final_norm(stream + attended + fed) @ model.head.kernel[...]


@functools.cache
def oracle(config: DecoderConfig) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Logits, and the gradient of the loss by plain ``jax.grad``."""
    given = {name: jnp.asarray(x) for name, x in batch().items()}

    def total(state: Any) -> tuple[jax.Array, jax.Array]:
        logits = in_delta_form(model_of(config, state), given, config.ladder_layers)
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), given["targets"][..., None], -1)[..., 0]
        return -(picked * given["weights"]).sum(), logits

    grads, logits = jax.jit(jax.grad(total, has_aux=True))(weights(with_ladder(config, 0)))
    return np.asarray(logits), {name: np.asarray(x) for name, x in tree.named_leaves(grads).items()}


def in_value_form(config: DecoderConfig, execution: Execution) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Logits of the model itself, and its gradients."""

    def total(state: Any) -> tuple[jax.Array, jax.Array]:
        model = model_of(config, state)
        x = model.run(model.embed(batch()), batch())
        return model.loss_from(x, batch())[0], model.logits(x)

    with executing(execution):
        grads, logits = jax.jit(jax.grad(total, has_aux=True))(weights(with_ladder(config, 0)))
    return np.asarray(logits), {name: np.asarray(x) for name, x in tree.named_leaves(grads).items()}


def assert_alike(found: tuple[np.ndarray, dict[str, np.ndarray]], config: DecoderConfig) -> None:
    logits, grads = oracle(config)
    np.testing.assert_allclose(found[0], logits, rtol=0, atol=1e-5 * np.abs(logits).max())
    assert found[1].keys() == grads.keys()
    for name, wanted in grads.items():
        np.testing.assert_allclose(found[1][name], wanted, rtol=0, atol=2e-5 * np.abs(wanted).max(), err_msg=name)


@pytest.mark.parametrize(
    ("config", "num_ladder", "layers"),
    [
        *((STANDARD, num_ladder, "scan") for num_ladder in (0, 1, 2, LAYERS)),
        *((STANDARD, num_ladder, "unroll") for num_ladder in (1, LAYERS)),
        (OTHER, 2, "scan"),
        (OTHER, LAYERS, "unroll"),
    ],
    ids=lambda x: "windows, norms before and after" if x == OTHER else "" if x == STANDARD else str(x),
)
def test_values_and_deltas_are_the_same_wiring(config, num_ladder, layers):
    """What is added to is the newest stream; what is read is one branch older, of the last layers alone."""
    config = with_ladder(config, num_ladder)
    assert_alike(in_value_form(config, Execution(layers=layers)), config)


def test_each_layer_on_the_ladder_is_another_function():
    found = [oracle(with_ladder(STANDARD, k))[0] for k in (0, 1, 2, LAYERS)]
    for one, other in zip(found, found[1:], strict=False):
        assert np.abs(one - other).max() > 1e-3 * np.abs(one).max()


@pytest.mark.parametrize(("remat", "layers"), [("full", "scan"), ("block", "unroll"), ("dots", "scan")])
def test_what_is_recomputed_changes_nothing(remat, layers):
    config = with_ladder(STANDARD, 2)
    assert_alike(in_value_form(config, Execution(layers=layers, remat=remat)), config)


def carries(config: DecoderConfig) -> list[int]:
    """Count what each loop over layers hands on."""

    def run(state: Any) -> jax.Array:
        model = model_of(config, state)
        return model.run(model.embed(batch()), batch())

    jaxpr = jax.make_jaxpr(run)(weights(STANDARD))
    return [len(eqn.outvars) for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]


def test_a_second_stream_goes_along_only_where_a_layer_reads_it():
    assert carries(STANDARD) == [1]
    assert carries(with_ladder(STANDARD, 1)) == [2, 2]
    assert carries(with_ladder(STANDARD, LAYERS)) == [2]


def by_program(config: DecoderConfig, plan: Plan, count: int) -> tuple[float, dict[str, np.ndarray]]:
    program = make_program(config, optax.sgd(0.1), plan, devices=jax.devices()[:count])
    drawn = make_program(config, optax.sgd(0.1), Plan("data:1"), devices=jax.devices()[:1]).init(0)
    state = jax.device_put(drawn, program.shardings)
    loss, grads = program.loss_and_gradients(state, program.place(batch()))
    return float(loss), {name: np.asarray(g) for name, g in tree.named_leaves(grads).items()}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("mesh", "schemes", "layers"),
    [
        ("tensor:2", ("tensor",), "unroll"),
        ("data:2 tensor:2", ("data", "tensor"), "scan"),
        ("data:2 tensor:2", ("data", "tensor", "sequence"), "scan"),
        ("fsdp:2 tensor:2", ("fsdp", "tensor", "sequence"), "unroll"),
    ],
    ids=str,
)
def test_tensor_parallel_is_one_device_values_and_gradients(mesh, schemes, layers):
    config = with_ladder(STANDARD, 2)
    wanted, grads = single()
    count = 2 if mesh == "tensor:2" else 4
    found, others = by_program(config, Plan(mesh, schemes=schemes, layers=layers), count)
    assert found == pytest.approx(wanted, rel=1e-5)
    for name, gradient in grads.items():
        np.testing.assert_allclose(others[name], gradient, rtol=0, atol=1e-5 * np.abs(gradient).max(), err_msg=name)


@functools.cache
def single() -> tuple[float, dict[str, np.ndarray]]:
    return by_program(with_ladder(STANDARD, 2), Plan("data:1"), 1)


@pytest.mark.parametrize("num_ladder", [2, LAYERS])
def test_decoding_step_by_step_is_the_whole_prompt_at_once(num_ladder):
    """The engine, whose prompt comes in chunks and whose answer comes token by token, against no cache at all."""
    config = with_ladder(OTHER, num_ladder)
    prompts = [[5, 9, 2, 7, 1, 3, 8, 8, 4, 6], [11, 3]]
    wanted = [greedy(model_of(config), prompt, 8) for prompt in prompts]
    assert wanted != [greedy(model_of(OTHER), prompt, 8) for prompt in prompts]
    own = jax.tree.map(jnp.copy, weights(OTHER))  # the engine takes its weights apart
    engine = Engine(model_of(config, own), slots=2, max_context=32, page=4, chunk=4)
    found = engine.generate(prompts, max_tokens=8, temperature=0)
    engine.close()
    assert [answer.ids for answer in found] == wanted


def test_a_pipeline_is_refused_before_it_compiles():
    config = dataclasses.replace(STANDARD, num_layers=4, ladder_layers=1)
    with pytest.raises(ValueError, match=r"2 residual streams \(ladder_layers\), and mesh axis stage: 2 hands on one"):
        by_program(config, Plan("stage:2"), 2)
    plan = Plan("stage:2", pipeline=PipelineConfig(schedule="1f1b"))
    with pytest.raises(ValueError, match="a stage with 2 of 4 layers hands on one residual stream, and ladder_layers"):
        by_program(config, plan, 2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(ladder_layers=4), "model.ladder_layers 4: 0 to num_layers 3 are needed"),
        (dict(ladder_layers=-1), "model.ladder_layers -1: 0 to num_layers 3 are needed"),
        (dict(ladder_layers=2, parallel=True), "model.ladder_layers 2 with model.parallel"),
    ],
    ids=str,
)
def test_a_ladder_that_does_not_fit_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        DecoderConfig(**SHAPE, **fields)
