"""A small model and the same model grown, leaf by leaf on one device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpp import dims, tree
from jaxpp.grow.leaf import Leaf
from jaxpp.grow.step import Growth, Step
from jaxpp.models import DecoderConfig
from jaxpp.nn.moe import MoeConfig

Operator = Callable[[DecoderConfig], Step]

VOCAB, SEQ = 97, 24
DTYPE = jnp.float32
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (2, SEQ))
LLAMA = DecoderConfig(
    vocab_size=VOCAB, num_layers=3, embed_dim=64, num_heads=4, num_kv_heads=2, mlp_dim=96, max_positions=64
)
TIED = replace(LLAMA, tied=True)
GPT2 = replace(
    LLAMA, num_kv_heads=4, positions="learned", norm="layer", mlp="plain", activation="gelu_tanh", qkv_bias=True,
    out_bias=True, mlp_bias=True, tied=True,
)  # fmt: skip
NEOX = replace(GPT2, positions="rope", parallel=True, rotary_dim=4, tied=False)
GEMMA2 = replace(
    TIED, embed_scale=True, norm_scale="offset", norm_place="both", activation="gelu_tanh", attention_scale=0.2,
    attention_soft_cap=50.0, logit_soft_cap=30.0, window=8, window_layers=(True, False),
)  # fmt: skip
QWEN3 = replace(LLAMA, qk_norm="head")
OLMO2 = replace(LLAMA, qk_norm="full", norm_place="post")
MIXTRAL = replace(LLAMA, moe=MoeConfig(4, 2, 48))
MODELS = dict(llama=LLAMA, tied=TIED, gpt2=GPT2, neox=NEOX, gemma2=GEMMA2, qwen3=QWEN3, olmo2=OLMO2, mixtral=MIXTRAL)


@functools.cache
def abstract(config: DecoderConfig) -> Any:
    """Return graph, abstract weights and the rest of a model."""
    return nnx.split(nnx.eval_shape(lambda: config.build(nnx.Rngs(0))), nnx.Param, ...)


@functools.cache
def weights(config: DecoderConfig) -> dict[str, jax.Array]:
    """Draw all weights by numpy; what training starts at 0 or 1 (biases, norms) is drawn around it."""
    rng = np.random.default_rng(1)

    def one(path: str, node: Any) -> jax.Array:
        arrow, shape = dims.of(node, path), tuple(node.shape)
        around = 1.0 if path.endswith("norm/scale") and config.norm_scale != "offset" else 0.0
        deviation = arrow.fan_in(shape) ** -0.5 if arrow.reads and not arrow.is_lookup() else 0.1
        return jnp.asarray(around + deviation * rng.normal(size=shape), DTYPE)

    return {path: one(path, node) for path, node in tree.named_nodes(abstract(config)[1]).items()}


def model_of(config: DecoderConfig, leaves: dict[str, jax.Array]) -> Any:
    """Put weights into a model."""
    graph, params, rest = abstract(config)
    return nnx.merge(graph, tree.map_named(lambda path, node: leaves[path], params), rest)


def growth_of(config: DecoderConfig, *operators: Operator) -> Growth:
    """Plan one operator after another."""
    steps: list[Step] = []
    for operator in operators:
        steps.append(operator(steps[-1].target if steps else config))
    return Growth(tuple(steps))


def grown_weights(growth: Growth | Step, dtype: Any = DTYPE) -> dict[str, jax.Array]:
    """Grow the weights of `weights`; each has the shape that the target asks for."""
    source, dtype = weights(growth.source), jnp.dtype(dtype)
    leaves = growth.leaves() if isinstance(growth, Growth) else growth.leaves

    @jax.jit  # one program compiles faster than each of its operations alone
    def grow(source: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return {path: leaf.weight(source[leaf.source], dtype) for path, leaf in leaves.items()}

    found = grow(source)
    wanted = {path: tuple(leaf.shape) for path, leaf in tree.named_leaves(abstract(growth.target)[1]).items()}
    assert {path: leaf.shape for path, leaf in found.items()} == wanted
    return found


def logits(config: DecoderConfig, leaves: dict[str, jax.Array]) -> np.ndarray:
    """Run a model on `TOKENS`."""
    return np.asarray(model_of(config, leaves)(TOKENS))


@functools.cache
def source_logits(config: DecoderConfig) -> np.ndarray:
    """Run the small model on `TOKENS`."""
    return logits(config, weights(config))


def difference(config: DecoderConfig, *operators: Operator) -> float:
    """Return the largest difference of logits between a model and its growth, over the largest logit."""
    growth = growth_of(config, *operators)
    old, new = source_logits(config), logits(growth.target, grown_weights(growth))
    return float(np.abs(new[..., : old.shape[-1]] - old).max() / np.abs(old).max())


def gradients(config: DecoderConfig, leaves: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Return the gradient of the loss on `TOKENS` for each weight, by plain ``jax.grad``."""
    graph, params, rest = nnx.split(model_of(config, leaves), nnx.Param, ...)
    batch = dict(
        tokens=jnp.asarray(TOKENS), targets=jnp.asarray(np.roll(TOKENS, -1, 1)),
        positions=jnp.broadcast_to(jnp.arange(SEQ), TOKENS.shape), weights=jnp.ones(TOKENS.shape),
    )  # fmt: skip
    loss = jax.jit(jax.grad(lambda params: nnx.merge(graph, params, rest).loss(batch)[0]))
    return tree.named_leaves(loss(params))


@functools.cache
def source_gradients(config: DecoderConfig) -> dict[str, jax.Array]:
    """Return the gradients of the small model."""
    return gradients(config, weights(config))


def same_bits_when_sharded(leaf: Leaf, x: jax.Array, axis: int) -> bool:
    """Say whether a weight that grows from shards along one of its source's axes has the bits of one device's."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("fsdp",))
    place = NamedSharding(mesh, PartitionSpec(*(None,) * axis, "fsdp"))
    grow = jax.jit(lambda x: leaf.weight(x, jnp.dtype(jnp.float32)))
    return bool((np.asarray(grow(x)) == np.asarray(grow(jax.device_put(x, place)))).all())
