"""The backward pass in two: together the whole, without a step done twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxpp.pipeline import Stage, make_places
from jaxpp.pipeline.executor import operations_of
from jaxpp.pipeline.operations import Operation, StageOperations
from tests.pipeline import functions

LAYERS, ROWS, WIDTH = 3, 16, 32


def layer(x: jax.Array, weights: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
    return x + jax.nn.gelu(x @ weights[0]) @ weights[1], None


def unrolled(params: Any, x: jax.Array, batch: Any, key: Any, run: Callable[..., Any] = layer) -> jax.Array:
    for i in range(LAYERS):
        x = run(x, (params["up"][i], params["down"][i]))[0]
    return x


def scanned(params: Any, x: jax.Array, batch: Any, key: Any, run: Callable[..., Any] = layer) -> jax.Array:
    return jax.lax.scan(run, x, (params["up"], params["down"]))[0]


def shared_in_a_loop(params: Any, x: jax.Array, batch: Any, key: Any) -> jax.Array:
    return jax.lax.scan(lambda x, bias: (jnp.tanh(x @ params["square"] + bias), None), x, params["bias"])[0]


def inner_calls(params: Any, x: jax.Array, batch: Any, key: Any) -> jax.Array:
    return jax.jit(jax.jit(lambda p, x: jax.nn.relu(x @ p["up"][0]) @ p["down"][0]))(params, x)


class Halves:
    """A stage whose operations are called by hand."""

    def __init__(self, function: Callable[..., Any]) -> None:
        draw = np.random.RandomState(0)
        shapes = {"up": (LAYERS, WIDTH, 4 * WIDTH), "down": (LAYERS, 4 * WIDTH, WIDTH), "square": (WIDTH, WIDTH)}
        shapes["bias"] = (LAYERS, WIDTH)
        self.function = function
        self.params = {name: jnp.asarray(draw.normal(size=s, scale=0.1), jnp.float32) for name, s in shapes.items()}
        self.x, self.g = (jnp.asarray(draw.normal(size=(ROWS, WIDTH)), jnp.float32) for _ in range(2))
        place = make_places("stage:1", 1, jax.devices()[:1])[0]
        stage = Stage(function, jax.eval_shape(lambda: self.params))
        shape = jax.ShapeDtypeStruct(self.x.shape, self.x.dtype)
        self.own: StageOperations = operations_of(
            stage, place, False, frozenset("BD"), shape, (PartitionSpec(),), (), None
        )
        traced = self.own.traced
        self.values = dict(zip(traced.params, jax.tree.leaves(self.params), strict=True))
        self.values[traced.x[0]] = self.x

    def zeros(self) -> list[jax.Array]:
        return self.own.zeros()

    def call(self, operation: Operation, start: Any) -> Any:
        return operation.call(start, *[self.values[number] for number in operation.inputs])

    def flops(self, operation: Operation, start: Any) -> float:
        lowered: Any = operation.call
        return lowered.lower(start, *[self.values[n] for n in operation.inputs]).compile().cost_analysis()["flops"]

    def forward(self) -> None:
        y, kept = self.call(self.own.forward, [])
        self.values.update(zip(self.own.forward.kept, kept, strict=True))
        self.values[self.own.traced.y[0]] = y[0]  # type: ignore[index]
        self.values[self.own.traced.cotangents[0]] = self.g

    def input_gradient(self) -> jax.Array:
        flow, kept = self.call(self.own.input_gradient, None)
        self.values.update(zip(self.own.input_gradient.kept, kept, strict=True))
        return flow[0]


CASES = {
    "unrolled": unrolled,
    "scanned": scanned,
    "inner calls": inner_calls,
    "shared in a loop": shared_in_a_loop,
    "recomputed": lambda *given: unrolled(*given, run=jax.checkpoint(layer)),
    "recomputed in a loop": lambda *given: scanned(*given, run=jax.checkpoint(layer)),
}


@pytest.mark.parametrize("name", CASES)
def test_the_halves_make_the_whole(name: str) -> None:
    halves = Halves(CASES[name])
    halves.forward()
    fused, flow = halves.call(halves.own.fused, halves.zeros())
    dx, sums = halves.input_gradient(), halves.call(halves.own.weight_gradient, halves.zeros())
    pull = jax.vjp(lambda p, x: halves.function(p, x, None, None), halves.params, halves.x)[1]
    params, x = pull(halves.g)
    wanted = [*jax.tree.leaves(params), x]
    functions.alike([*fused, flow[0]], wanted, 1e-5)
    functions.alike([*sums, dx], wanted, 1e-5)


@pytest.mark.parametrize("name", ["unrolled", "scanned", "inner calls"])
def test_forward_and_both_halves_cost_the_same(name: str) -> None:
    halves = Halves(CASES[name])
    halves.forward()
    halves.input_gradient()
    own, zeros = halves.own, halves.zeros()
    costs = [
        halves.flops(*pair) for pair in ((own.forward, []), (own.input_gradient, None), (own.weight_gradient, zeros))
    ]
    assert max(costs) <= 1.1 * min(costs), costs
    assert halves.flops(own.fused, zeros) == pytest.approx(costs[1] + costs[2], rel=0.02)


def test_recomputation_is_done_once() -> None:
    plain, again = Halves(CASES["unrolled"]), Halves(CASES["recomputed"])
    for halves in (plain, again):
        halves.forward()
        halves.input_gradient()
    weights = [halves.flops(halves.own.weight_gradient, halves.zeros()) for halves in (plain, again)]
    assert weights[1] <= 1.1 * weights[0], "W takes what B has recomputed"
    assert len(again.own.forward.kept) < len(plain.own.forward.kept)


def test_nothing_of_the_weights_alone_is_kept() -> None:
    def narrowed(params: Any, x: jax.Array, batch: Any, key: Any) -> jax.Array:
        return x @ (params["up"][0].astype(jnp.bfloat16).astype(jnp.float32) * 2) @ params["down"][0].T.T

    halves = Halves(narrowed)
    halves.forward()
    shapes = [halves.values[number].shape for number in halves.own.forward.kept]
    assert shapes == [(ROWS, 4 * WIDTH)]


def test_the_first_stage_is_split_at_its_entry() -> None:
    def entry(params: Any, batch: jax.Array) -> jax.Array:
        return params["square"][batch]

    halves = Halves(unrolled)
    place = make_places("stage:1", 1, jax.devices()[:1])[0]
    stage = Stage(unrolled, jax.eval_shape(lambda: halves.params), entry)
    tokens = jax.ShapeDtypeStruct((ROWS,), jnp.int32)
    own = operations_of(stage, place, False, frozenset("B"), None, (), tokens, None)
    halves.own, halves.x = own, halves.params["square"][jnp.arange(ROWS)]
    halves.values = dict(zip(own.traced.params, jax.tree.leaves(halves.params), strict=True))
    halves.values[own.traced.batch[0]] = jnp.arange(ROWS)
    halves.forward()
    kept = halves.call(own.input_gradient, None)[1]
    halves.values.update(zip(own.input_gradient.kept, kept, strict=True))
    costs = [halves.flops(own.input_gradient, None), halves.flops(own.weight_gradient, halves.zeros())]
    assert max(costs) <= 1.1 * min(costs), costs
    found = halves.call(own.weight_gradient, halves.zeros())
    pull = jax.vjp(lambda p: unrolled(p, entry(p, jnp.arange(ROWS)), None, None), halves.params)[1]
    functions.alike(found, jax.tree.leaves(pull(halves.g)[0]), 1e-5)
