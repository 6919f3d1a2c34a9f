"""How far growth moves the logits: every operator on models shaped as the families are.

`python -m tests.grow.exactness few 0 2` prints one line of JSON for each case of part 0 of 2; `all` in place of `few`:
for each operator on each model. Run it with JAX_ENABLE_X64=1, as fp64 is a choice for a whole process.
"""

from __future__ import annotations

import functools
import json
import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxpp import dims, tree
from jaxpp.grow.depth import identity
from jaxpp.grow.head_dim import head_dim
from jaxpp.grow.heads import heads
from jaxpp.grow.mlp import mlp, mlp_maps
from jaxpp.grow.split import Split
from jaxpp.grow.spread import random_copies
from jaxpp.grow.step import Growth, Step, by_dims, is_norm, scale_offset
from jaxpp.grow.upcycle import upcycle
from jaxpp.grow.vocab import vocab
from jaxpp.grow.width import hypercloning, lemon
from jaxpp.models import DecoderConfig
from jaxpp.models.published import read_config
from jaxpp.nn.moe import MoeConfig
from tests.golden import reading

# All cases share these sizes, so that most of what one compiles serves the others too.
# Heads x head_dim is not embed_dim.
SIZES = dict(vocab_size=61, num_layers=2, embed_dim=32, num_heads=4, head_dim=10, mlp_dim=48, max_positions=32)
SEQ = 12
EPSILON = 0.02  # large, so that a wrong one shows
GOLDEN = {
    "llama": "llama_gqa",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gpt2": "gpt2",
    "neox": "gpt_neox",
    "olmo2": "olmo2",
    "phi3": "phi3",
    "mixtral": "mixtral",
}
# Rows 0 to 2, and 3 to 5, hold each of the three attentions once, and both values of all else.
GRID = (
    dict(num_kv_heads=4, tied=False, norm="rms", mlp="gated"),
    dict(num_kv_heads=2, tied=True, norm="layer", mlp="gated", activation="gelu_tanh"),
    dict(num_kv_heads=1, tied=True, norm="rms", mlp="plain", activation="relu"),
    dict(num_kv_heads=4, tied=True, norm="layer", mlp="plain", activation="gelu", mlp_bias=True, positions="learned"),
    dict(num_kv_heads=2, tied=False, norm="rms", mlp="plain", activation="gelu", qkv_bias=True),
    dict(num_kv_heads=1, tied=False, norm="layer", mlp="gated", out_bias=True, embed_scale=True),
)
SHARED = MoeConfig(4, 2, mlp_dim=24, shared_mlp_dim=16, shared_gate=True)

Operator = Callable[[DecoderConfig], Step]


def _then(*operators: Operator) -> Callable[[DecoderConfig], tuple[Step, ...]]:
    def steps(config: DecoderConfig) -> tuple[Step, ...]:
        made: list[Step] = []
        for operator in operators:
            made.append(operator(made[-1].target if made else config))
        return tuple(made)

    return steps


def _mlp_dim(config: DecoderConfig) -> int:
    return config.moe.mlp_dim or config.mlp_dim


def _whole_groups(config: DecoderConfig, groups: int) -> Step:
    return heads(config, num_heads=config.num_heads // config.num_kv_heads * groups, num_kv_heads=groups)


def _in_groups(config: DecoderConfig, times: float) -> Step:
    group = int(config.num_heads // config.num_kv_heads * times)
    return heads(config, num_heads=group * config.num_kv_heads, num_kv_heads=config.num_kv_heads, noise_db=None)


def _net2net_mlp(config: DecoderConfig) -> Step:
    maps, changed = mlp_maps(config, 75, lambda old, new: random_copies(old, new, 0))
    return by_dims("net2net", config, replace(config, **changed), maps, split=Split("symmetric", 10.0))


OPERATORS: dict[str, Callable[[DecoderConfig], tuple[Step, ...]]] = {
    "cloned": _then(lambda c: hypercloning(c, noise_db=None)),
    "cloned, noisy": _then(lambda c: hypercloning(c, noise_db=10.0, seed=1)),
    "cloned, diagonal": _then(lambda c: hypercloning(c, variant="diagonal", noise_db=None)),
    "cloned, diagonal, noisy": _then(lambda c: hypercloning(c, variant="diagonal", noise_db=10.0)),
    "cloned 3 times": _then(lambda c: hypercloning(c, width=3)),
    "cloned, mlp 3 times": _then(lambda c: hypercloning(c, width=2, mlp=3)),
    "cloned twice": _then(hypercloning, lambda c: hypercloning(c, seed=1)),
    "lemon to D + r": _then(lambda c: lemon(c, embed_dim=c.embed_dim + 8)),
    "lemon to 2D": _then(lambda c: lemon(c, width=2)),
    "lemon to 2D + r": _then(lambda c: lemon(c, embed_dim=2 * c.embed_dim + 8)),
    "net2net's mlp": _then(_net2net_mlp),
    "twice the groups": _then(lambda c: _whole_groups(c, 2 * c.num_kv_heads)),
    "one group more": _then(lambda c: _whole_groups(c, c.num_kv_heads + 1)),
    "twice as many in each group": _then(lambda c: _in_groups(c, 2)),
    "some more in each group": _then(lambda c: _in_groups(c, 2.5)),
    "mlp uneven": _then(lambda c: mlp(c, mlp_dim=75)),
    "mlp 2 times, diagonal": _then(lambda c: mlp(c, mlp_dim=2 * _mlp_dim(c), variant="diagonal")),
    "heads twice as wide": _then(lambda c: head_dim(c, head_dim=2 * c.head_dim)),
    "layers that add nothing": _then(lambda c: identity(c, num_layers=3)),
    "more tokens": _then(lambda c: vocab(c, vocab_size=70)),
    "upcycled": _then(lambda c: upcycle(c, num_experts=3, experts_per_token=2)),
    "upcycled in slices": _then(lambda c: upcycle(c, num_experts=3, experts_per_token=2, granularity=2)),
    "all uneven": _then(
        lambda c: lemon(c, embed_dim=c.embed_dim + 8),
        lambda c: _whole_groups(c, c.num_kv_heads + 1),
        lambda c: mlp(c, mlp_dim=75),
    ),
}
EVERYWHERE = ("cloned, noisy",)
"""Operators that meet each family; the others meet one model, and all where that is asked."""


@functools.cache
def families() -> dict[str, DecoderConfig]:
    """Return a small model of each family: its traits, the sizes of `SIZES`."""
    found = {}
    for name, case in GOLDEN.items():
        config = read_config(reading.load(case).config)[1]
        some = config.num_kv_heads < config.num_heads
        turned = dict(rotary_dim=4 if config.rotary_dim < config.head_dim else 0, window=5 if config.window else 0)
        kept = dict(num_kv_heads=2 if some else 4, norm_epsilon=EPSILON, moe=replace(config.moe, mlp_dim=0))
        found[name] = replace(config, **{**SIZES, **turned, **kept})
    found["shared expert"] = replace(found["mixtral"], moe=SHARED)
    return found


def models() -> dict[str, DecoderConfig]:
    """Return all models by name: the families, and the grid."""
    grid = {f"grid {i}": DecoderConfig(**SIZES, norm_epsilon=EPSILON, **row) for i, row in enumerate(GRID)}
    return families() | grid


def cases() -> list[tuple[str, str]]:
    """List model and operator of each case."""
    found, names = [], list(families())
    for i, operator in enumerate(OPERATORS):
        models = names if operator in EVERYWHERE else [names[i % len(names)] if i % 2 else f"grid {i % len(GRID)}"]
        found += [(model, operator) for model in models]
    return found


def all_cases() -> list[tuple[str, str]]:
    """List every operator on every model."""
    return [(model, operator) for operator in OPERATORS for model in models()]


def weights(config: DecoderConfig, dtype: Any) -> dict[str, jax.Array]:
    """Draw weights of which every one counts: branches as large as the stream, scales that are no 1, biases no 0."""

    def one(path: str, node: Any) -> jax.Array:
        arrow = dims.of(node, path)
        drawn = np.random.default_rng(zlib.crc32(path.encode())).normal(size=node.shape)
        if is_norm(path) and path.endswith("scale"):
            return 1 - scale_offset(config) + 0.3 * drawn
        if not arrow.reads:
            return 0.3 * drawn
        lookup = config.embed_dim**-0.5 if config.embed_scale or config.tied else 0.5
        return drawn * (lookup if arrow.is_lookup() else arrow.fan_in(node.shape) ** -0.5)

    nodes = tree.named_nodes(_abstract(config)[1])
    return {path: jnp.asarray(one(path, node), dtype) for path, node in nodes.items()}


def batch() -> dict[str, jax.Array]:
    """Return two rows, the first of two documents."""
    segments = np.ones((2, SEQ), np.int32)
    segments[0, SEQ // 2 :] = 2
    positions = np.tile(np.arange(SEQ), (2, 1))
    positions[0] %= SEQ // 2
    tokens = np.random.default_rng(0).integers(SIZES["vocab_size"], size=(2, SEQ))
    return {
        k: jnp.asarray(x, jnp.int32) for k, x in dict(tokens=tokens, positions=positions, segments=segments).items()
    }


@functools.cache
def _abstract(config: DecoderConfig) -> tuple[Any, Any, Any]:
    return nnx.split(nnx.eval_shape(lambda: config.build(nnx.Rngs(0))), nnx.Param, ...)


def logits(config: DecoderConfig, params: dict[str, jax.Array]) -> np.ndarray:
    """Run a model, operation by operation: what is compiled for one model serves the next."""
    graph, like, rest = _abstract(config)
    model, rows = nnx.merge(graph, tree.fill(like, params), rest), batch()
    with jax.disable_jit():
        return np.asarray(model.logits(model.run(model.embed(rows), rows)))


_compiled: dict[Any, Any] = {}


def grown(growth: Growth, params: dict[str, jax.Array], dtype: Any) -> dict[str, jax.Array]:
    """Grow the weights; leaves that are equal are compiled once."""
    found = {}
    for path, leaf in growth.leaves().items():
        x = params[leaf.source]
        key = (_content(leaf), x.shape, x.dtype)
        if key not in _compiled:
            _compiled[key] = jax.jit(functools.partial(leaf.weight, dtype=jnp.dtype(dtype)))
        found[path] = _compiled[key](x)
    return found


def _content(value: Any) -> Any:
    if is_dataclass(value):
        return type(value).__name__, *(_content(getattr(value, field.name)) for field in fields(value))
    if isinstance(value, np.ndarray):
        return value.shape, value.tobytes()
    return tuple(map(_content, value)) if isinstance(value, tuple | list) else value


@functools.cache
def _source(model: str, dtype: Any) -> tuple[dict[str, jax.Array], np.ndarray]:
    config = models()[model]
    params = weights(config, dtype)
    return params, logits(config, params)


def measure(model: str, steps: Callable[[DecoderConfig], tuple[Step, ...]], dtype: Any) -> dict[str, Any]:
    """Grow a model; say how far its logits are from the source's, over the largest, or why it was refused."""
    config = models()[model]
    try:
        growth = Growth(steps(config))
    except ValueError as error:
        return dict(refused=str(error))
    params, before = _source(model, dtype)
    after = logits(growth.target, grown(growth, params, dtype))[..., : config.vocab_size]
    assert before.dtype == after.dtype == dtype, f"logits of {after.dtype}, {dtype} are needed"
    largest = abs(before).max()
    return dict(difference=float(abs(after - before).max() / largest), largest=float(largest), gap=growth.gap)


def run(chosen: Sequence[tuple[str, str]], dtype: Any) -> list[dict[str, Any]]:
    """Measure cases."""
    return [dict(model=model, operator=name, **measure(model, OPERATORS[name], dtype)) for model, name in chosen]


if __name__ == "__main__":
    which, part, parts = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    own = list(OPERATORS)[part::parts]
    for line in run([case for case in (all_cases() if which == "all" else cases()) if case[1] in own], np.float64):
        print(json.dumps(line))
