"""Constraints by dim: idle on one device, exact on a mesh, never silent."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from jaxpp.parallel import Execution, Plan, batch_shards, constrain, current, executing, residual
from jaxpp.parallel.execution import active_layout

PLAN = Plan(mesh="data:2 fsdp:2 tensor:2", schemes=("data", "fsdp", "tensor", "sequence"))


@pytest.fixture(scope="module")
def execution() -> Execution:
    return PLAN.execution(PLAN.layout())


def test_an_execution_holds_inside_its_block_only(execution):
    outside = current()
    assert outside.layout is None and active_layout() is None
    with executing(execution):
        assert current() is execution and active_layout() is execution.layout
        with executing(Execution(remat="full")):
            assert current().remat == "full" and active_layout() is None
        assert current() is execution
    assert current() is outside


def test_it_ends_with_an_error_too(execution):
    with pytest.raises(RuntimeError), executing(execution):
        raise RuntimeError
    assert current().layout is None


def test_one_device_is_idle():
    plan = Plan(mesh="data:1")
    x = jnp.ones((3, 5, 7))
    with executing(plan.execution(plan.layout(jax.devices()[:1]))):
        assert active_layout() is None and constrain(x, "batch seq heads") is x and residual(x) is x


def test_outside_of_a_plan_nothing_changes():
    x = jnp.ones((3, 5, 7))
    assert constrain(x, "batch seq mlp") is x and residual(x) is x and batch_shards(8) == 1


def test_activations_lie_where_the_rules_say(execution):
    x = jnp.ones((8, 4, 6))
    with executing(execution):
        inside, between = jax.jit(lambda x: (constrain(x, "batch seq mlp"), residual(x)))(x)
    assert inside.sharding.spec == PartitionSpec(("data", "fsdp"), None, "tensor")
    assert between.sharding.spec == PartitionSpec(("data", "fsdp"), "tensor")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: constrain(jnp.ones((8, 4, 7)), "batch seq mlp"),
            "activation batch seq mlp: mlp 7 does not split over tensor=2; sizes 6 or 8 would, or a split by 1, 7",
        ),
        (
            lambda: residual(jnp.ones((6, 4, 8))),
            "residual stream: batch 6 does not split over data=2 fsdp=2; sizes 4 or 8 would, or a split by 1, 2, 3, 6",
        ),
        (lambda: residual(jnp.ones((8, 3, 8))), "residual stream: seq 3 does not split over tensor=2"),
        (
            lambda: constrain(jnp.ones((8, 4, 4)), "batch heads mlp"),
            "activation batch heads mlp: dims heads and mlp are both split over axis tensor",
        ),
    ],
    ids=["mlp", "batch", "seq", "twice"],
)
def test_a_constraint_that_does_not_divide_is_refused(call, message, execution):
    """B31, B88: JAX replicates it in silence."""
    with executing(execution), pytest.raises(ValueError) as error:
        jax.eval_shape(call)
    assert message in str(error.value)


def test_batch_shards(execution):
    with executing(execution):
        assert [batch_shards(n) for n in (4, 8, 6, 1)] == [4, 4, 1, 1]
