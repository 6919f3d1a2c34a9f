"""What grows behind masks is the old model at the start of the ramp, and itself at its end."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpp import tree
from jaxpp.grow.masked import Masked, masked, ramp_settings
from jaxpp.models import DecoderConfig
from jaxpp.nn.moe import MoeConfig
from jaxpp.train.ramp import Ramp, RampConfig, make_ramp, ramped

UNTIED = DecoderConfig(
    48, 2, 24, num_heads=4, num_kv_heads=2, head_dim=8, mlp_dim=32, max_positions=16, norm_epsilon=1e-2,
    qkv_bias=True, out_bias=True, mlp_bias=True,
)  # fmt: skip
MODELS = {
    "untied": UNTIED,
    "tied": dataclasses.replace(UNTIED, tied=True),
    "gemma": dataclasses.replace(
        UNTIED, tied=True, embed_scale=True, norm_scale="offset", norm_place="both", qk_norm="head"
    ),
    "ladder": dataclasses.replace(UNTIED, ladder_layers=1),
    "experts": dataclasses.replace(UNTIED, mlp_bias=False, moe=MoeConfig(4, 2, mlp_dim=16)),
}
SIZES = {"embed_dim": 40, "mlp_dim": 48, "num_heads": 6, "num_layers": 3}
CASES = [
    *((model, (name,)) for model in ("untied", "tied") for name in SIZES),
    *((model, tuple(SIZES)) for model in MODELS),
]


def grown(model: str, names: tuple[str, ...]) -> Masked:
    return masked(MODELS[model], **{name: SIZES[name] for name in names}, deviation=0.2)


def abstract(config: DecoderConfig) -> Any:
    return nnx.eval_shape(lambda: config.build(nnx.Rngs(0)))


def source_params(model: str) -> Any:
    """Weights of which none is 0 or 1, as scales and biases begin."""
    draw = np.random.RandomState(1)

    def one(path: str, node: Any) -> jax.Array:
        start = 1.0 if path.endswith("scale") and MODELS[model].norm_scale != "offset" else 0.0
        return jnp.asarray(start + 0.2 * draw.normal(size=node.shape), jnp.float32)

    return tree.map_named(one, nnx.split(abstract(MODELS[model]), nnx.Param, ...)[1])


def target_params(step: Masked, params: Any) -> Any:
    old = tree.named_leaves(params)
    goal = nnx.split(abstract(step.target), nnx.Param, ...)[1]
    return tree.map_named(lambda path, node: step.leaves[path].weight(old[path], node.dtype), goal)


def ramp_of(step: Masked) -> Ramp:
    ramp = make_ramp(RampConfig(**ramp_settings(step)), abstract(step.target))
    assert ramp is not None
    return ramp


@cache
def batch() -> dict[str, Any]:
    tokens = np.random.RandomState(0).randint(0, 48, (2, 13)).astype(np.int32)
    positions, weights = np.tile(np.arange(12), (2, 1)), np.ones((2, 12), np.float32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "positions": positions, "weights": weights}


def merged(config: DecoderConfig, params: Any) -> Any:
    graph, _, other = nnx.split(abstract(config), nnx.Param, ...)
    return nnx.merge(graph, params, other)


def logits(config: DecoderConfig, params: Any) -> jax.Array:
    model = merged(config, params)
    return model.logits(model.run(model.embed(batch()), batch()))


@cache
def source_logits(model: str) -> np.ndarray:
    return np.asarray(jax.jit(lambda params: logits(MODELS[model], params))(source_params(model)))


@pytest.mark.parametrize(("model", "names"), CASES, ids=lambda x: x if isinstance(x, str) else "+".join(x))
def test_at_the_start_of_the_ramp_it_computes_the_sources_function(model: str, names: tuple[str, ...]) -> None:
    step, wanted = grown(model, names), source_logits(model)
    ramp, largest = ramp_of(step), np.abs(wanted).max()
    at = jax.jit(lambda params, c: logits(step.target, ramped(target_params(step, params), ramp, c)))
    np.testing.assert_allclose(at(source_params(model), 0.0), wanted, rtol=0, atol=2e-6 * largest)
    assert np.abs(at(source_params(model), 0.5) - wanted).max() > 1e-3 * largest


@pytest.mark.parametrize("model", MODELS)
def test_at_the_end_of_the_ramp_its_weights_are_their_own(model: str) -> None:
    step = grown(model, tuple(SIZES))
    params, ramp = jax.jit(lambda p: target_params(step, p))(source_params(model)), ramp_of(step)
    found = tree.named_leaves(jax.jit(lambda p, c: ramped(p, ramp, c))(params, 1.0))
    for path, wanted in tree.named_leaves(params).items():
        np.testing.assert_array_equal(found[path], wanted, err_msg=path)


def test_gradients_of_old_weights_are_those_of_the_source() -> None:
    """So old moments stay as they are; new weights have none as long as nothing of them is let in."""
    step = grown("gemma", tuple(SIZES))
    ramp, params = ramp_of(step), source_params("gemma")

    def loss(new: Any) -> jax.Array:
        return merged(step.target, ramped(new, ramp, 0.0)).loss(batch())[0]

    old = tree.named_leaves(jax.jit(jax.grad(lambda p: merged(step.source, p).loss(batch())[0]))(params))
    new = tree.named_leaves(jax.jit(lambda p: jax.grad(loss)(target_params(step, p)))(params))
    largest = max(float(np.abs(g).max()) for g in old.values())
    moments = jax.jit(lambda old: {path: step.leaves[path].moment(x, 1) for path, x in old.items()})(old)
    for path, wanted in old.items():
        moment = np.asarray(moments[path])
        is_old = tuple(slice(size) for size in wanted.shape)
        np.testing.assert_allclose(new[path][is_old], wanted, rtol=0, atol=1e-5 * largest, err_msg=path)
        np.testing.assert_array_equal(moment[is_old], wanted)
        assert np.count_nonzero(moment) == np.count_nonzero(wanted)


def test_every_sharding_draws_the_same_bits() -> None:
    step = masked(UNTIED, **SIZES)
    leaf, x = step.leaves["blocks/mlp/down/kernel"], jnp.ones((2, 32, 24), jnp.float32)
    mesh = jax.make_mesh((2, 4), ("a", "b"))
    spread = jax.NamedSharding(mesh, jax.P(None, "a", "b"))
    grow = lambda x: leaf.weight(x, jnp.dtype("float32"))  # noqa: E731
    found, wanted = jax.jit(grow, out_shardings=spread)(jax.device_put(x, spread)), np.asarray(grow(x))
    np.testing.assert_array_equal(np.asarray(found), wanted)
    new = np.concatenate([wanted[2].ravel(), wanted[:2, 32:].ravel(), wanted[:2, :32, 24:].ravel()])
    assert new.std() == pytest.approx(0.02, rel=0.05) and (wanted[:2, :32, :24] == 1).all()


def test_the_settings_of_its_ramp() -> None:
    step = masked(UNTIED, num_heads=8, num_layers=3, ramp_steps=50)
    assert ramp_settings(step) == {"dims": {"heads": 4, "kv_heads": 2, "layers": 2}, "num_steps": 50}
    assert step.maps == {"heads": "4 -> 8", "kv_heads": "2 -> 4", "layers": "2 -> 3"} and not step.preserves


@pytest.mark.parametrize(
    ("config", "sizes", "words"),
    [
        (UNTIED, {}, "nothing grows"),
        (UNTIED, {"mlp_dim": 40, "ramp_steps": 0}, "ramp_steps 0: 1 or more"),
        (UNTIED, {"embed_dim": 16}, "embed_dim 16: 24 or more are needed"),
        (UNTIED, {"num_heads": 7}, "groups of 2 grow by whole groups; 6 or 8 would do"),
        (dataclasses.replace(UNTIED, norm="layer"), {"embed_dim": 32}, "layer norms subtract a mean"),
        (dataclasses.replace(UNTIED, qk_norm="full"), {"num_heads": 8}, "is over all heads"),
        (
            dataclasses.replace(UNTIED, mlp_bias=False, moe=MoeConfig(4, 2, 16, 32)),
            {"mlp_dim": 32},
            "a shared expert of width 32",
        ),
    ],
)
def test_what_no_mask_can_bring_in_is_refused(config: DecoderConfig, sizes: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        masked(config, **sizes)
