"""Plans: plain config, checked when written."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jaxpp.parallel import Plan


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            dict(schemes=("tensr",)),
            'plan.schemes: unknown scheme "tensr"; did you mean "tensor"? known: data zero1 fsdp',
        ),
        (
            dict(schemes=("megatron9",)),
            'plan.schemes: unknown scheme "megatron9"; known: data zero1 fsdp tensor sequence',
        ),
        (dict(microbatches=0), "plan.microbatches = 0: 1 or more are needed"),
        (dict(mesh="dta:8"), 'unknown mesh axis "dta"; did you mean "data"?'),
        (dict(mesh="data:8 data:2"), "axis data stands twice"),
    ],
)
def test_wrong_plans_are_refused_at_once(fields, message):
    with pytest.raises(ValueError) as error:
        Plan(**fields)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("mesh", "names"),
    [
        ("data:-1", ("data",)),
        ("tp:2 dp:2 fsdp:2", ("data", "fsdp", "tensor")),
        ("fsdp:4 dcn.data:2", ("data", "fsdp")),
    ],
)
def test_without_schemes_each_axis_brings_its_own(mesh, names):
    plan = Plan(mesh=mesh)
    assert plan.scheme_names() == names and plan.layout().mesh.axis_names == names


def test_an_axis_without_a_scheme_of_its_name_is_refused():
    with pytest.raises(ValueError, match="mesh axis context:2 is used by no scheme of data"):
        Plan(mesh="data:4 context:2").layout()


def test_slices_keep_each_shard_group_together():
    mesh = Plan(mesh="fsdp:4 dcn.data:2").layout().mesh
    assert [[d.id for d in row] for row in mesh.devices] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_plan_on_some_devices():
    assert Plan().layout(jax.devices()[:2]).mesh.size == 2
    with pytest.raises(ValueError, match='mesh "data:8" needs 8 devices, but there are 2; "data:2" does'):
        Plan(mesh="data:8").layout(jax.devices()[:2])


def test_what_a_plan_says_to_whom():
    plan = Plan(remat="full", layers="unroll", attention="xla", compute_dtype="bfloat16")
    layout = plan.layout()
    execution = plan.execution(layout)
    assert (execution.layout, execution.remat, execution.layers, execution.attention) == (
        layout,
        "full",
        "unroll",
        "xla",
    )
    assert plan.dtype() == jnp.bfloat16 and Plan().dtype() == jnp.float32
