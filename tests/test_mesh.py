"""Mesh specs: what is written is what is built, and what does not fit says what would."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType

from jaxpp.mesh import ALIASES, AXES, MeshSpec, make_mesh

sizes = st.dictionaries(st.sampled_from(AXES), st.integers(1, 64), max_size=5)


@given(sizes, sizes)
@settings(max_examples=200, deadline=None)
def test_every_spec_survives_its_text(ici, dcn):
    spec = MeshSpec(ici, dcn)
    parsed = MeshSpec.parse(str(spec))
    assert parsed == spec and str(parsed) == str(spec)
    assert set(spec.axes) == {*ici, *dcn} and list(spec.axes) == sorted(spec.axes, key=AXES.index)
    for axis in spec.axes:
        assert spec.size(axis) == ici.get(axis, 1) * dcn.get(axis, 1)


@given(
    st.lists(st.sampled_from(["data", "tp", "dcn.", "dcn.dp", ":", "2", "-1", "-", "--3", " ", ",", "x", "²"])).map(
        "".join
    )
)
@settings(max_examples=300, deadline=None)
def test_no_text_ends_in_an_unreadable_error(text):
    try:
        MeshSpec.parse(text)
    except ValueError as error:
        assert "mesh" in str(error) and "\n" not in str(error)


@pytest.mark.parametrize(("alias", "axis"), ALIASES.items())
def test_aliases(alias, axis):
    assert str(MeshSpec.parse(f"{alias}:4 dcn.{alias}:2")) == f"{axis}:4 dcn.{axis}:2"


def test_commas_separate_too():
    assert MeshSpec.parse("dp:2,tp:-1") == MeshSpec({"data": 2, "tensor": -1})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dat:2", 'unknown mesh axis "dat"; did you mean "data"? axes and aliases: stage data'),
        ("qqqq:2", 'unknown mesh axis "qqqq"; axes and aliases: stage data fsdp expert context tensor'),
        ("dcn.dat:2", 'unknown mesh axis "dat"; did you mean "data"?'),
        ("data", 'mesh "data": "data" is not axis:size, e.g. "data:2 fsdp:-1"'),
        ("data:", '"data:" is not axis:size'),
        ("data:two", '"data:two" is not axis:size'),
        ("data=2", '"data=2" is not axis:size'),
        ("data:2 dp:2", 'mesh "data:2 dp:2": axis data stands twice'),
        ("data:0", "mesh axis data:0: a size is 1 or more, or -1 for the rest"),
        ("data:-2", "mesh axis data:-2: a size is 1 or more, or -1 for the rest"),
        ("data:-1 fsdp:-1", 'mesh "data:-1 fsdp:-1": only one axis may be -1'),
        ("fsdp:2 dcn.data:-1", "a dcn size is the number of slices; it cannot be -1"),
    ],
)
def test_wrong_specs_are_refused_with_the_fix(text, message):
    with pytest.raises(ValueError) as error:
        MeshSpec.parse(text)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "num_devices", "resolved"),
    [
        ("data:-1", 8, "data:8"),
        ("fsdp:-1 tensor:2", 8, "fsdp:4 tensor:2"),
        ("fsdp:-1 dcn.data:2", 8, "fsdp:4 dcn.data:2"),
        ("data:8 tensor:-1", 8, "data:8 tensor:1"),
        ("data:2 tensor:2", 4, "data:2 tensor:2"),
    ],
)
def test_the_rest(text, num_devices, resolved):
    assert str(MeshSpec.parse(text).resolve(num_devices)) == resolved


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data:3", 'mesh "data:3" makes 3 devices, but there are 8; "data:8" does, or set cpu_devices=3'),
        ("data:16", 'mesh "data:16" needs 16 devices, but there are 8; "data:8" does, or set cpu_devices=16'),
        ("fsdp:4 tensor:4", 'needs 16 devices, but there are 8; "fsdp:2 tensor:4" does'),
        ("data:-1 tensor:3", 'needs a multiple of 3 devices, but there are 8; "data:-1 tensor:8" does'),
        ("data:3 tensor:5", 'needs 15 devices, but there are 8; "data:8" does'),
        ("fsdp:8 dcn.data:2", 'needs 16 devices, but there are 8; "fsdp:4 dcn.data:2" does'),
    ],
)
def test_a_wrong_device_count_names_sizes_that_work(text, message):
    with pytest.raises(ValueError) as error:
        make_mesh(text)
    assert message in str(error.value)
    offered = str(error.value).split('"')[3]
    assert make_mesh(offered).size == 8


def test_the_mesh_is_what_was_asked_for():
    """B82: the axes, the sizes and every device once; all axes automatic."""
    mesh = make_mesh("tp:2 dp:2 fsdp:2")
    assert dict(mesh.shape) == {"data": 2, "fsdp": 2, "tensor": 2}  # slowest network first, whatever the order written
    assert [d.id for d in mesh.devices.flat] == [d.id for d in jax.devices()]
    assert mesh.axis_types == (AxisType.Auto,) * 3


def test_a_mesh_on_some_of_the_devices():
    chosen = jax.devices()[2:6]
    assert list(make_mesh(MeshSpec({"data": -1}), chosen).devices.flat) == chosen
    with pytest.raises(ValueError, match="needs 8 devices, but there are 4"):
        make_mesh("data:8", chosen)


def blocks(mesh, over: str) -> list[set[int]]:
    """Return the device ids of each slice of the mesh along the other axes."""
    keep = mesh.axis_names.index(over)
    rows = np.moveaxis(mesh.devices, keep, -1).reshape(-1, mesh.devices.shape[keep])
    return [{d.id for d in row} for row in rows]


def test_slices_are_blocks_of_devices():
    mesh = make_mesh("fsdp:4 dcn.data:2")
    assert dict(mesh.shape) == {"data": 2, "fsdp": 4}
    assert blocks(mesh, "fsdp") == [{0, 1, 2, 3}, {4, 5, 6, 7}]


def test_an_axis_within_and_across_slices():
    mesh = make_mesh("data:2 tensor:2 dcn.data:2")
    assert dict(mesh.shape) == {"data": 4, "tensor": 2}
    assert blocks(mesh, "tensor") == [{0, 1}, {2, 3}, {4, 5}, {6, 7}]
    assert blocks(mesh, "data") == [{0, 2, 4, 6}, {1, 3, 5, 7}]
    firsts = [{d.id for d in half.flat} for half in np.split(mesh.devices, 2)]
    assert firsts == [{0, 1, 2, 3}, {4, 5, 6, 7}]  # the slow network is the outer part of the axis


def test_two_axes_across_slices():
    mesh = make_mesh("tensor:2 dcn.stage:2 dcn.data:2")
    assert dict(mesh.shape) == {"stage": 2, "data": 2, "tensor": 2}
    assert blocks(mesh, "tensor") == [{0, 1}, {2, 3}, {4, 5}, {6, 7}]


def test_one_slice_is_no_slice():
    assert dict(make_mesh("fsdp:8 dcn.data:1").shape) == {"data": 1, "fsdp": 8}
