"""Embedding tables: values, gradients of repeated ids, one device against several."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpp.nn import Embedding
from jaxpp.parallel import Plan, executing

BATCH, SEQ, VOCAB, EMBED = 8, 16, 48, 16


@pytest.fixture(scope="module")
def case():
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 12, (BATCH, SEQ)).astype(np.int32)  # few, so that each is met many times
    return ids, rng.normal(size=(BATCH, SEQ, EMBED)).astype(np.float32)


def gradient(table: Embedding, ids, g, plan: Plan | None = None) -> jax.Array:
    graph, state = nnx.split(table)

    def total(state, ids, g):
        return jnp.vdot(nnx.merge(graph, state)(ids), g)

    grad = jax.jit(jax.grad(total))
    if plan is None:
        return grad(state, ids, g)["table"][...]
    layout = plan.layout()
    with executing(plan.execution(layout)):
        state = jax.device_put(state, layout.param_shardings(state))
        return grad(state, *(jax.device_put(a, layout.batch_sharding(a.ndim)) for a in (ids, g)))["table"][...]


def drawn(dtype=jnp.float32) -> Embedding:
    table = Embedding(jax.random.key(0), "vocab -> embed", {"vocab": VOCAB, "embed": EMBED})
    table.table.set_value(table.table[...].astype(dtype))
    return table


def scattered(ids, g) -> np.ndarray:
    wanted = np.zeros((VOCAB, EMBED))
    np.add.at(wanted, ids, g.astype(np.float64))
    return wanted


def test_a_lookup_is_a_gather(case):
    table = drawn()
    np.testing.assert_array_equal(table(case[0]), np.asarray(table.table[...])[case[0]])


def test_the_gradient_adds_up_every_meeting(case):
    np.testing.assert_allclose(gradient(drawn(), *case), scattered(*case), atol=1e-5)


@pytest.mark.parametrize("mesh", ["tensor:4 data:2", "fsdp:2 tensor:4", "data:8"])
def test_the_gradient_on_a_mesh_equals_one_device(mesh, case):
    """B89: also where the vocabulary is split."""
    one = gradient(drawn(), *case)
    found = gradient(drawn(), *case, Plan(mesh=mesh))
    assert ("tensor" in mesh) == ("tensor" in str(found.sharding.spec))
    np.testing.assert_allclose(found, one, rtol=0, atol=1e-6 * np.abs(one).max())


def test_the_gradient_has_the_dtype_of_the_table(case):
    assert gradient(drawn(jnp.bfloat16), *case).dtype == jnp.bfloat16


def test_a_table_that_is_read_twice_says_so():
    sizes = {"vocab": 4, "embed": 2}
    assert Embedding(jax.random.key(0), "vocab -> embed", sizes, also="embed -> vocab").table.get_metadata()["also"]
    assert "also" not in Embedding(jax.random.key(0), "vocab -> embed", sizes).table.get_metadata()
