"""A language model without its weights: its embedding, some of its blocks, its loss, each on weights given apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpp import tree
from jaxpp.model import Model
from jaxpp.pipeline.line import CALLS, REMATS, Numbers, missing, needed, record

BLOCKS = "blocks"
Prepare = Callable[[Any], Any]
"""What is done to weights before they are used, e.g. a cast to the dtype to compute in."""


@dataclass(frozen=True, eq=False)
class Skeleton:
    """A model without its weights.

    Args:
        graph: of the whole model.
        params: shapes of all its weights.
        prepare: what is done to weights before they are used.
    """

    graph: Any
    params: Any
    prepare: Prepare

    def model(self, params: Any) -> Any:
        """Return a model with some of its weights; the rest are shapes, which nothing may touch."""
        flat = dict(nnx.to_flat_state(self.params))
        flat.update(nnx.to_flat_state(self.prepare(params)))
        return nnx.merge(self.graph, nnx.from_flat_state(list(flat.items())))


def as_is(params: Any) -> Any:
    """Use weights as they are stored."""
    return params


def skeleton_of(model: Any, prepare: Prepare = as_is) -> Skeleton:
    """Take a model's weights out.

    Args:
        model: with stacked ``blocks``, ``embed``, ``run``, ``loss_from`` (`jaxpp.model.Model`); concrete, or shapes
            alone as ``nnx.eval_shape`` gives it.
        prepare: what is done to weights before they are used.

    Raises:
        ValueError: no such model, or one with variables that are not weights.
    """
    if not isinstance(model, Model):
        name = type(model).__name__
        raise ValueError(f"{name} has not embed, blocks, run, logits, loss and loss_from, which a cut needs")
    graph, params, other = nnx.split(model, nnx.Param, ...)
    if left := list(tree.named_nodes(other)):
        raise ValueError(f"{type(model).__name__} has variables beside its weights ({left[0]}), which no stage owns")
    return Skeleton(graph, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params), prepare)


@dataclass(frozen=True)
class Entry:
    """What runs before the blocks: ``x = embed(batch)``."""

    skeleton: Skeleton

    def __call__(self, params: Any, batch: Any) -> Any:
        """Return the residual stream that enters the first block."""
        return self.skeleton.model(params).embed(batch)


@dataclass(frozen=True)
class Part:
    """Some of the blocks, and after the last of them the loss: the function of a stage."""

    skeleton: Skeleton
    first_layer: int
    is_last: bool

    def __call__(self, params: Any, x: Any, batch: Any, key: Any) -> Any:
        """Return the residual stream after the last of the blocks, or the losses."""
        model = self.skeleton.model(params)
        x = model.run(x, batch, self.first_layer)
        return model.loss_from(x, batch) if self.is_last else x


def weights_used(skeleton: Skeleton, num_stages: int, paths: Sequence[str]) -> tuple[frozenset[str], ...]:
    """Find which weights outside of the blocks each stage uses, on a batch of one row of two tokens."""
    integers = ("tokens", "targets", "segments", "positions")
    batch = {name: jax.ShapeDtypeStruct((1, 2), jnp.int32) for name in integers}
    batch["weights"] = jax.ShapeDtypeStruct((1, 2), jnp.float32)
    entry, through = Entry(skeleton), Part(skeleton, 0, False)
    x = jax.eval_shape(entry, skeleton.params, batch)
    first = _used(entry, paths, skeleton.params, batch)
    middle = _used(lambda p, b, x: through(p, x, b, None), paths, skeleton.params, batch, x)
    last = _used(lambda p, b, x: skeleton.model(p).loss_from(x, b), paths, skeleton.params, batch, x)
    found = [set(middle) for _ in range(num_stages)]
    found[0] |= first
    found[-1] |= last
    return tuple(frozenset(path for path in one if path.split("/")[0] != BLOCKS) for one in found)


def _used(function: Callable[..., Any], paths: Sequence[str], params: Any, *others: Any) -> set[str]:
    closed = jax.make_jaxpr(function)(params, *others)
    numbers = Numbers()
    inputs = numbers.new(len(closed.jaxpr.invars))
    steps, outputs = record(closed, inputs, numbers, {**CALLS, **REMATS})
    read = set(missing(needed(steps, outputs), outputs))
    return {path for path, number in zip(paths, inputs, strict=False) if number in read}
