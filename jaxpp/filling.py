"""Tables filled up with rows that stand for no token, so that a mesh splits a vocabulary of any size.

A checkpoint holds its own rows alone: they are added while it is read, and cut off before it is written.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxpp import dims, tree
from jaxpp.model import ModelConfig
from jaxpp.models import DecoderConfig
from jaxpp.parallel import Layout

DIM = "vocab"


def filled_up(config: ModelConfig, layout: Layout) -> ModelConfig:
    """Return the config with as many rows more as the layout needs to split its vocabulary; others are returned."""
    if not isinstance(config, DecoderConfig):
        return config
    parts = math.lcm(*(layout.num_shards(DIM, place) for place in ("weights", "compute", "moments")))
    rows = -(-config.table_rows // parts) * parts
    return config if rows == config.table_rows else dataclasses.replace(config, vocab_rows=rows)


def read_filled(read: Callable[[Any], Any], like: Any, num_rows: int) -> Any:
    """Read weights onto `like`, whose tables may have more rows than the checkpoint.

    Args:
        read: reads weights onto an abstract state.
        like: abstract ``nnx.State`` of Params with shardings.
        num_rows: that the checkpoint's tables have.

    Returns:
        A state like `like`; rows that are not in the checkpoint are zero.

    Cost: a table that is filled up stands whole along ``vocab`` on each device until it is split.
    """
    wide = [path for path, node in tree.named_nodes(like).items() if _axis_of(node, num_rows) is not None]
    if not wide:
        return read(like)
    found = read(tree.map_named(lambda path, node: _narrow(node, num_rows), like))

    def fill(path: str, node: Any) -> jax.Array:
        goal, value = node.get_value(), tree.named_leaves(found)[path]
        if path not in wide:
            return value
        missing = [(0, n - m) for n, m in zip(goal.shape, value.shape, strict=True)]
        return jax.jit(lambda x: jnp.pad(x, missing), out_shardings=goal.sharding)(value)

    return tree.map_named(fill, like)


def cut_off(params: Any, config: ModelConfig) -> tuple[Any, ModelConfig]:
    """Return weights and config without the rows that stand for no token."""
    if not isinstance(config, DecoderConfig) or config.table_rows == config.vocab_size:
        return params, config

    def one(path: str, node: Any) -> jax.Array:
        value, axis = node.get_value(), _axis_of(node, config.vocab_size)
        if axis is None:
            return value
        place = NamedSharding(value.sharding.mesh, _without(value.sharding.spec, axis))
        cut = tuple(slice(config.vocab_size if i == axis else None) for i in range(value.ndim))
        return jax.jit(lambda x: x[cut], out_shardings=place)(value)

    return tree.map_named(one, params), dataclasses.replace(config, vocab_rows=0)


def _axis_of(node: Any, num_rows: int) -> int | None:
    """Return the axis of dim ``vocab`` where it is longer than `num_rows`."""
    text = node.get_metadata()["dims"]
    named = dims.parse(text, tuple(dims.parse_words(text))).dims
    axis = named.index(DIM) if DIM in named else None
    return axis if axis is not None and node.shape[axis] > num_rows else None


def _narrow(node: Any, num_rows: int) -> jax.ShapeDtypeStruct:
    leaf, axis = node.get_value(), _axis_of(node, num_rows)
    if axis is None:
        return leaf
    shape = tuple(num_rows if i == axis else n for i, n in enumerate(leaf.shape))
    place = NamedSharding(leaf.sharding.mesh, _without(leaf.sharding.spec, axis))
    return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=place)


def _without(spec: PartitionSpec, axis: int) -> PartitionSpec:
    return PartitionSpec(*(None if i == axis else entry for i, entry in enumerate(spec)))
