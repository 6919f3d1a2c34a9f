"""A stage traced: its forward and its backward pass as two lines over one numbering."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxpp.pipeline.line import CALLS, REMATS, Atom, Numbers, Step, record
from jaxpp.pipeline.stage import Stage, stage_key


@dataclass(frozen=True)
class Backward:
    """A backward pass.

    Args:
        steps: in order.
        weights: the gradient of each weight.
        flow: the gradient of each floating leaf of x.
        chain: of what `flow` stands for where the pass is split: that, or the gradient of what ``entry`` returned.
    """

    steps: tuple[Step, ...]
    weights: tuple[Atom, ...]
    flow: tuple[Atom, ...]
    chain: tuple[Atom, ...]


@dataclass(frozen=True)
class Traced:
    """A stage as steps.

    Args:
        params: number of each weight.
        x: number of each leaf of x.
        batch: number of each leaf of the microbatch.
        flowing: of these, the floating ones.
        key: numbers of the run's key, of the step, the microbatch and the stage; none where there is no key.
        cotangents: number of the gradient of each floating leaf of y.
        forward: the steps of the forward pass.
        y: what it returns.
        y_shape: the same as a tree of ``jax.ShapeDtypeStruct``.
        fused: the backward pass; what is recomputed stays in one piece.
        inlined: the same with recomputation written out, to be split.
        numbers: of all these steps, for more.
    """

    params: tuple[int, ...]
    x: tuple[int, ...]
    flowing: tuple[int, ...]
    batch: tuple[int, ...]
    key: tuple[int, ...]
    cotangents: tuple[int, ...]
    forward: tuple[Step, ...]
    y: tuple[Atom, ...]
    y_shape: Any
    fused: Backward
    inlined: Backward
    numbers: Numbers

    @property
    def moving(self) -> tuple[int, ...]:
        """Places of the floating leaves of y among all leaves."""
        return tuple(i for i, leaf in enumerate(jax.tree.leaves(self.y_shape)) if is_floating(leaf))

    def of_weights(self, steps: tuple[Step, ...]) -> set[int]:
        """Return the numbers that `steps` and the forward pass compute from weights and constants alone."""
        own = set(self.params)
        for step in (*self.forward, *steps):
            if own.issuperset(step.reads) and not (step.equation is not None and step.equation.effects):
                own.update(step.outputs)
        return own - set(self.params)


def is_floating(leaf: Any) -> bool:
    """Say whether a leaf takes part in differentiation."""
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def _floating(values: Any) -> list[Any]:
    return [leaf for leaf in jax.tree.leaves(values) if is_floating(leaf)]


def _with_floating(values: Any, floating: list[Any]) -> Any:
    leaves, structure = jax.tree.flatten(values)
    rest = iter(floating)
    return jax.tree.unflatten(structure, [next(rest) if is_floating(leaf) else leaf for leaf in leaves])


def trace(stage: Stage, is_last: bool, params: Any, x: Any, batch: Any, key: Any) -> Traced:
    """Trace a stage on shapes.

    Args:
        stage: its function; the weights are given apart.
        is_last: whether it returns losses.
        params: shapes of its weights.
        x: shapes of what comes in; None on the first stage.
        batch: shapes of a microbatch.
        key: shape of the run's key, or None.

    Raises:
        ValueError: a last stage that does not return two scalars.
    """

    def body(params: Any, moving: list[Any], x: Any, batch: Any, key: Any) -> tuple[Any, Any]:
        y = stage.function(params, _with_floating(x, moving), batch, key)
        if is_last:
            y = _losses(y)
        return (y[0] if is_last else _floating(y)), y

    def forward(params: Any, x: Any, batch: Any, key: Any) -> tuple[Any, Any]:
        own = None if key is None else stage_key(*key)
        pulls = ()
        if stage.entry is not None:
            entry, enter = stage.entry, lambda p: (_floating(e := entry(p, batch)), e)
            _, pull, x = jax.vjp(enter, params, has_aux=True)
            pulls = (pull,)
        _, pull, y = jax.vjp(lambda p, moving: body(p, moving, x, batch, own), params, _floating(x), has_aux=True)
        return y, (pull, *pulls)

    def backward(pulls: Any, cotangents: list[Any]) -> tuple[Any, Any, Any]:
        weights, chain = pulls[0](jnp.ones((), jnp.float32) if is_last else cotangents)
        if len(pulls) == 1:
            return weights, chain, chain
        return jax.tree.map(jnp.add, weights, pulls[1](chain)[0]), [], chain

    numbers = Numbers()
    number = jax.ShapeDtypeStruct((), jnp.int32)
    keys = None if key is None else (key, number, number, number)
    places = tuple(numbers.new(len(jax.tree.leaves(value))) for value in (params, x, batch, keys))
    closed, (y, pulls) = jax.make_jaxpr(forward, return_shape=True)(params, x, batch, keys)
    steps, out = record(closed, [number for place in places for number in place], numbers, {**CALLS, **REMATS})
    num_y = len(jax.tree.leaves(y))
    given = [] if is_last else _floating(y)
    cotangents = numbers.new(len(given))
    closed, shapes = jax.make_jaxpr(backward, return_shape=True)(pulls, given)

    def write(through: Any) -> Backward:
        steps, grads = record(closed, [*out[num_y:], *cotangents], numbers, through)
        ends = [len(jax.tree.leaves(shape)) for shape in shapes]
        weights, flow, chain = grads[: ends[0]], grads[ends[0] : ends[0] + ends[1]], grads[ends[0] + ends[1] :]
        return Backward(tuple(steps), tuple(weights), tuple(flow), tuple(chain))

    of_params, of_x, of_batch, of_key = places
    flowing = tuple(n for n, leaf in zip(of_x, jax.tree.leaves(x), strict=True) if is_floating(leaf))
    lines = tuple(steps), tuple(out[:num_y]), y, write(CALLS), write({**CALLS, **REMATS})
    return Traced(of_params, of_x, flowing, of_batch, of_key, cotangents, *lines, numbers)


def _losses(y: Any) -> tuple[jax.Array, jax.Array]:
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(y)]
    if not isinstance(y, tuple | list) or shapes != [(), ()]:
        found = ", ".join(map(str, shapes)) or "nothing"
        raise ValueError(
            f"the last stage returned shapes {found}; (sum of losses, sum of weights), two scalars, is needed"
        )
    return jnp.asarray(y[0], jnp.float32), jnp.asarray(y[1], jnp.float32)
