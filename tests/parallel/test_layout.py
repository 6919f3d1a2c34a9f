"""Layouts: schemes composed, arrows to shardings, and what is refused before any compile."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from jaxpp.mesh import make_mesh
from jaxpp.parallel import SCHEMES, Layout, Plan, Rules, bytes_per_device, compose


def layout_of(mesh: str, *schemes: str, **fields) -> Layout:
    return Plan(mesh=mesh, schemes=schemes, **fields).layout()


def state(**weights: tuple[str, tuple[int, ...]]) -> nnx.State:
    like = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, (_, shape) in weights.items()}
    return nnx.State({name: nnx.Param(like[name], dims=arrow) for name, (arrow, _) in weights.items()})


def test_rules_add_up_in_the_order_of_the_schemes():
    left, right = Rules(inside={"batch": ("data",)}), Rules(inside={"batch": ("fsdp",), "mlp": ("tensor",)})
    assert (left + right).inside == {"batch": ("data", "fsdp"), "mlp": ("tensor",)}
    assert (right + left).inside["batch"] == ("fsdp", "data")
    assert left + Rules() == left and left.inside == {"batch": ("data",)}


@pytest.mark.parametrize(
    ("schemes", "place", "dims", "spec"),
    [
        (("data",), "weights", "embed mlp", (None, None)),
        (("data",), "inside", "batch seq embed", ("data", None, None)),
        (("data", "zero1"), "weights", "embed mlp", (None, None)),
        (("data", "zero1"), "moments", "embed mlp", ("data", None)),
        (("fsdp",), "weights", "layers embed mlp", (None, "fsdp", None)),
        (("fsdp",), "compute", "embed mlp", (None, None)),
        (("fsdp",), "residual", "batch seq embed", ("fsdp", None, None)),
        (("tensor",), "weights", "heads head_dim embed", ("tensor", None, None)),
        (("tensor",), "compute", "embed kv_heads head_dim", (None, "tensor", None)),
        (("tensor",), "inside", "batch seq mlp", (None, None, "tensor")),
        (("tensor",), "residual", "batch seq embed", (None, None, None)),
        (("tensor", "sequence"), "residual", "batch seq embed", (None, "tensor", None)),
        (("tensor", "sequence"), "inside", "batch seq embed", (None, None, None)),
        (("data", "fsdp"), "residual", "batch seq embed", (("data", "fsdp"), None, None)),
        (("fsdp", "data"), "residual", "batch seq embed", (("fsdp", "data"), None, None)),
        (("data", "zero1", "fsdp", "tensor"), "moments", "vocab embed", ("tensor", ("data", "fsdp"))),
    ],
)
def test_what_each_composition_splits(schemes, place, dims, spec):
    layout = layout_of("data:2 fsdp:2 tensor:2" if len(schemes) > 2 else mesh_for(schemes), *schemes)
    assert layout.spec(dims.split(), place) == PartitionSpec(*spec)


def mesh_for(schemes: tuple[str, ...]) -> str:
    axes = list(dict.fromkeys(SCHEMES[name].axis for name in schemes))
    return f"{axes[0]}:8" if len(axes) == 1 else " ".join(f"{axis}:{n}" for axis, n in zip(axes, (2, 4), strict=True))


def test_an_axis_of_one_splits_nothing():
    layout = layout_of("data:8 tensor:1", "data", "tensor")
    assert layout.axes("mlp", "weights") == () and layout.num_shards("mlp", "weights") == 1
    layout.check(state(w=("embed -> mlp", (3, 5))))


@pytest.mark.parametrize(
    ("mesh", "schemes", "message"),
    [
        ("data:8", ("data", "data"), "scheme data stands twice in data, data; once is enough"),
        (
            "data:8",
            ("data", "tensor"),
            'scheme tensor needs mesh axis "tensor", but the mesh is "data:8"; '
            'add "tensor:N" to the mesh or drop the scheme',
        ),
        ("data:2 tensor:4", ("data", "sequence"), "scheme sequence builds on scheme tensor; add tensor to the schemes"),
        ("data:8", ("zero1",), "scheme zero1 builds on scheme data; add data to the schemes"),
        (
            "data:2 tensor:4",
            ("data",),
            "mesh axis tensor:4 is used by no scheme of data: its devices would all compute the same; "
            "add a scheme that uses it or drop the axis",
        ),
        ("expert:8", (), "mesh axis expert:8 is used by no scheme of none"),
    ],
)
def test_illegal_compositions_are_refused_with_the_fix(mesh, schemes, message):
    with pytest.raises(ValueError) as error:
        compose(make_mesh(mesh), [SCHEMES[name] for name in schemes])
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_weight_that_does_not_divide_names_its_path_and_what_would():
    """B31, B88: JAX itself would replicate a constraint in silence."""
    layout = layout_of("data:2 tensor:4", "data", "tensor")
    with pytest.raises(ValueError) as error:
        layout.check(
            state(w=("embed -> mlp", (6, 6)), v=("vocab -> embed", (251, 6)), u=("layers | mlp -> embed", (2, 6, 6)))
        )
    assert str(error.value) == (
        "u: mlp 6 does not split over tensor=4; sizes 4 or 8 would, or a split by 1, 2, 3, 6; "
        "v: vocab 251 does not split over tensor=4; sizes 248 or 252 would, or a split by 1, 251; "
        "model.vocab_rows=252 fills the table up"
    )


def test_a_dim_split_over_two_axes_names_both():
    layout = layout_of("data:2 fsdp:4", "data", "zero1", "fsdp")
    with pytest.raises(ValueError, match="w: embed 12 does not split over data=2 fsdp=4; sizes 8 or 16 would"):
        layout.check(state(w=("-> embed", (12,))))


def test_two_dims_on_one_axis_are_refused():
    layout = layout_of("data:2 tensor:4", "data", "tensor")
    with pytest.raises(ValueError, match="w: dims mlp and vocab are both split over axis tensor; one weight, one dim"):
        layout.check(state(w=("mlp -> vocab", (8, 8))))


def test_a_size_below_the_split_offers_only_sizes_that_exist():
    layout = layout_of("tensor:8", "tensor")
    with pytest.raises(ValueError) as error:
        layout.sharding(("heads",), (3,), "weights", "w")
    assert str(error.value) == "w: heads 3 does not split over tensor=8; size 8 would, or a split by 1, 3"


@given(st.integers(1, 4096))
@settings(max_examples=100, deadline=None)
def test_every_offered_fix_works(size):
    layout = layout_of("data:2 tensor:4", "data", "tensor")
    found = layout.problems(("mlp",), (size,), "weights")
    if size % 4 == 0:
        assert not found
        return
    sizes, _, splits = (
        found[0].replace("; sizes ", "; size ").partition("; size ")[2].partition(" would, or a split by ")
    )
    assert not any(layout.problems(("mlp",), (int(fix),), "weights") for fix in sizes.split(" or "))
    assert splits and all(size % int(fix) == 0 for fix in splits.split(", "))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((6, 16, 1), "data.batch_size 6 does not split into 1 microbatches over 4 batch shards; sizes 4 or 8 would"),
        ((8, 16, 4), "data.batch_size 8 does not split into 4 microbatches over 4 batch shards; size 16 would"),
        ((1, 16, 1), "data.batch_size 1 does not split into 1 microbatches over 4 batch shards; size 4 would"),
        ((8, 15, 1), "data.seq_len: seq 15 does not split over tensor=2; sizes 14 or 16 would"),
        ((8, 16, 0), "plan.microbatches = 0: 1 or more are needed"),
    ],
)
def test_a_batch_that_does_not_divide_names_what_would(sizes, message):
    """B83: the batch size is global."""
    layout = layout_of("data:2 fsdp:2 tensor:2", "data", "fsdp", "tensor", "sequence")
    layout.check_batch(16, 16, 4)
    with pytest.raises(ValueError) as error:
        layout.check_batch(*sizes)
    assert str(error.value).startswith(message)


def test_own_rules_and_own_dims():
    layout = layout_of("data:2 tensor:4", "data", rules={"pixels": ("tensor",)}, dims=("pixels",))
    weights = state(w=("pixels -> embed", (8, 6)))
    layout.check(weights)
    assert layout.param_shardings(weights)["w"].get_value().spec == PartitionSpec("tensor", None)
    assert layout.spec(("batch", "pixels"), "inside") == PartitionSpec("data", "tensor")
    with pytest.raises(ValueError, match='parameter w: arrow "pixels -> embed": unknown dim "pixels"'):
        layout_of("data:8", "data").check(weights)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"mpl": ("tensor",)}, 'plan.rules: unknown dim "mpl"; known: batch seq'),
        ({"mlp": ("tenser",)}, 'plan.rules.mlp: the mesh has no axis "tenser"; it has data tensor'),
    ],
)
def test_a_typo_in_a_rule_is_refused(rules, message):
    """B88."""
    with pytest.raises(ValueError) as error:
        layout_of("data:2 tensor:4", "data", rules=rules)
    assert message in str(error.value)


def test_moments_follow_their_weight_and_counters_are_whole():
    layout = layout_of("data:2 fsdp:2 tensor:2", "data", "zero1", "fsdp", "tensor")
    weights = state(w=("layers | embed -> mlp", (2, 8, 8)), b=("-> mlp", (8,)))
    moments = jax.eval_shape(optax.adam(1.0).init, weights)
    found = layout.moment_shardings(moments, weights)[0]
    assert found.mu["w"].get_value().spec == PartitionSpec(None, ("data", "fsdp"), "tensor")
    assert found.nu["b"].get_value().spec == PartitionSpec("tensor")
    assert found.count.spec == PartitionSpec()


def test_the_batch_is_split_over_all_axes_that_share_it():
    layout = layout_of("data:2 fsdp:2 tensor:2", "data", "fsdp", "tensor", "sequence")
    assert layout.batch_sharding().spec == PartitionSpec(("data", "fsdp"), None)
    assert layout.batch_sharding(1).spec == PartitionSpec(("data", "fsdp"))
    assert layout.replicated().is_fully_replicated


def test_bytes_per_device():
    sharding = layout_of("data:2 tensor:4", "data", "tensor").sharding(("embed", "mlp"), (6, 8), "weights")
    leaf = jax.ShapeDtypeStruct((6, 8), jnp.bfloat16, sharding=sharding)
    assert bytes_per_device(leaf) == 6 * 2 * 2
    assert bytes_per_device(jax.ShapeDtypeStruct((6, 8), jnp.bfloat16)) == 96
    placed = jax.device_put(np.zeros((6, 8), np.float32), sharding)
    assert bytes_per_device(placed) == placed.addressable_shards[0].data.nbytes == 48
