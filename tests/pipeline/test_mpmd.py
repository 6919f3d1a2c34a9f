"""Any table gives the loss and the gradients of plain JAX, and holds what the simulator says."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpp import pipeline, schedule
from jaxpp.pipeline.executor import global_order
from tests.pipeline import functions

LEAST = {"zb-v": lambda p: 2 * p - 1, "dualpipe": lambda p: 2 * p, "dualpipe-v": lambda p: 2 * p, "merak": lambda p: 4}
CASES = [
    (name, ranks, times * ranks)
    for name in schedule.SCHEDULES
    for ranks in (2, 4)
    for times in (1, 2, 3)
    if times * ranks >= LEAST.get(name, lambda p: 1)(ranks)
]


def check(table: schedule.Schedule, known: list, tolerance: float = 1e-6) -> pipeline.Result:
    data = functions.batch(functions.ROWS * table.num_microbatches)
    found = pipeline.run(known, table, data, functions.places(table.num_ranks), key=functions.KEY)
    loss, gradients = functions.plain(known, data, table.num_microbatches, functions.KEY)
    np.testing.assert_allclose(found.loss, loss, rtol=1e-6)
    functions.alike(list(found.gradients), gradients, tolerance)
    return found


QUICK = [case for case in CASES if case[1] == 2 or case[2] == 8]


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in CASES],
)
def test_every_schedule_gives_the_gradients_of_plain_jax(name: str, ranks: int, microbatches: int) -> None:
    table = schedule.build(name, ranks, microbatches)
    found = check(table, functions.stages(table.num_stages))
    simulated = schedule.simulate(table, schedule.unit_costs(table)).peak_activations
    assert found.peak_activations == simulated


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v", "chimera", "merak"])
def test_stages_of_different_shapes(name: str) -> None:
    table = schedule.build(name, 2, 4)
    check(table, functions.stages(table.num_stages, (6, 10, 3)))


def test_one_stage_is_plain_accumulation() -> None:
    def alone(w: jax.Array, x: None, batch: jax.Array, key: None) -> tuple[jax.Array, jax.Array]:
        return jnp.sum((batch * w) ** 2), jnp.float32(batch.size)

    found = pipeline.run([(alone, jnp.float32(3))], schedule.build("1f1b", 1, 3), jnp.arange(6.0))
    assert float(found.loss) == pytest.approx(9 * 55 / 6) and float(found.gradients[0]) == pytest.approx(6 * 55 / 6)


def test_operations_are_handed_over_after_what_they_need() -> None:
    for name, ranks, microbatches in CASES:
        table, done = schedule.build(name, ranks, microbatches), set()
        order = global_order(table)
        for _, op in order:
            assert done.issuperset(table.needs(op)), f"{name}: {op}"
            done.add(op)
        for rank in range(ranks):
            own = [op for cell in table.orders[rank] for op in cell]
            assert [op for r, op in order if r == rank] == own


@pytest.mark.parametrize("name", ["gpipe", "zb-h1", "merak"])
def test_one_compile_for_any_number_of_microbatches(name: str) -> None:
    traced = []

    def counted(params: jax.Array, x: jax.Array, batch: jax.Array, key: None) -> jax.Array:
        traced.append(params.shape)
        return jnp.tanh((batch if x is None else x) @ params)

    def end(params: jax.Array, x: jax.Array, batch: jax.Array, key: None) -> tuple[jax.Array, jax.Array]:
        return jnp.sum((x @ params) ** 2), jnp.float32(x.size)

    places = pipeline.make_places("stage:2", 2, jax.devices()[:2])
    for microbatches in (4, 12):
        table = schedule.build(name, 2, microbatches)
        known = [(counted, jnp.eye(3)), (end, jnp.eye(3))]
        pipeline.run(known, table, np.ones((2 * microbatches, 3), np.float32), places)
    assert len(traced) == 1
    kinds = {"gpipe": 2, "zb-h1": 3, "merak": 4}[name]
    for place in places:
        (own,) = place.memo.values()
        sizes = {name: op.call._cache_size() for name, op in vars(own).items() if hasattr(op, "call")}
        assert len(sizes) <= kinds and set(sizes.values()) == {1}, sizes


def test_stages_on_submeshes_keep_their_layout() -> None:
    table = schedule.build("zb-h1", 2, 4)
    known, data = functions.stages(2), functions.batch(16)
    found = pipeline.run(known, table, data, "stage:2 data:2 tensor:2")
    loss, gradients = functions.plain(known, data, 4)
    np.testing.assert_allclose(found.loss, loss, rtol=1e-6)
    functions.alike(list(found.gradients), gradients)
    assert [leaf.sharding.mesh.shape for leaf in jax.tree.leaves(found.gradients)] == 3 * [{"data": 2, "tensor": 2}]
    held = [
        {device.id for device in leaf.sharding.device_set}
        for leaf in (found.gradients[0]["w"], found.gradients[1]["w"])
    ]
    assert held == [{0, 1, 2, 3}, {4, 5, 6, 7}]


@pytest.mark.parametrize(("name", "ranks"), [("1f1b", 4), ("zb-v", 2), ("chimera", 4)])
def test_a_tied_weight_has_the_gradient_of_all_its_uses(name: str, ranks: int) -> None:
    known, data = functions.tied_stages(), functions.tokens(8)
    found = pipeline.run(known, schedule.build(name, ranks, 4), data, functions.places(ranks), tied=functions.TIED)

    def loss(params: list) -> jax.Array:
        x: Any = None
        for (function, _), own in zip(known, params, strict=True):
            x = function(own, x, data, None)
        return x[0] / x[1]

    value, gradients = jax.value_and_grad(loss)([params for _, params in known])
    both = gradients[0]["table"] + gradients[3]["table"]
    wanted = [{"scale": gradients[0]["scale"], "table": both}, *gradients[1:3], {"table": both}]
    np.testing.assert_allclose(found.loss, value, rtol=1e-6)
    functions.alike(list(found.gradients), wanted)
