"""Paths, bytes and comparison of pytrees: names that do not depend on containers, Variables kept whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxpp import tree


class Pair(NamedTuple):
    left: Any
    right: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Box:
    inside: Any


def weights() -> nnx.State:
    return nnx.State({"b": {"scale": nnx.Param(jnp.ones(3), dims="-> embed")}, "a": nnx.Param(jnp.zeros((2, 3)))})


def test_names_of_dicts_tuples_namedtuples_dataclasses_and_states():
    names = list(tree.named_leaves({"x": (1, Pair(2, [3])), "y": Box(4), "z": weights()}))
    assert names == ["x/0", "x/1/left", "x/1/right/0", "y/inside", "z/a", "z/b/scale"]


def test_nodes_keep_variables_and_leaves_open_them():
    nodes, leaves = tree.named_nodes(weights()), tree.named_leaves(weights())
    assert isinstance(nodes["b/scale"], nnx.Param) and nodes["b/scale"].get_metadata()["dims"] == "-> embed"
    assert isinstance(leaves["b/scale"], jax.Array) and leaves["a"].shape == (2, 3)
    assert tree.is_variable(nodes["a"]) and not tree.is_variable(leaves["a"])


def test_a_variable_that_holds_nothing_has_no_name():
    masked = optax.masked(optax.trace(0.9), {"a": True, "b": {"scale": False}}).init(nnx.to_pure_dict(weights()))
    assert [name for name in tree.named_leaves(masked)] == ["inner_state/trace/a"]
    empty = {"kept": nnx.Param(jnp.ones(1)), "left_out": nnx.Param(optax.MaskedNode())}
    assert list(tree.named_nodes(empty)) == ["kept"]
    seen: list[str] = []
    mapped = tree.map_named(lambda path, node: seen.append(path) or node.get_value() + 1, empty)
    assert seen == ["kept"] and jax.tree.structure(mapped) == jax.tree.structure(empty)


def test_fill_puts_named_leaves_back():
    like = {"x": (1, Pair(2, [3])), "z": weights()}
    leaves = {name: np.full((2,), i) for i, name in enumerate(tree.named_leaves(like))}
    filled = tree.fill(like, leaves)
    assert isinstance(filled["x"][1], Pair) and isinstance(filled["z"], nnx.State)
    assert filled["z"]["b"]["scale"].get_metadata()["dims"] == "-> embed"
    for name, leaf in tree.named_leaves(filled).items():
        assert leaf is leaves[name]


def test_fill_names_what_is_missing_and_what_is_left_over():
    with pytest.raises(ValueError, match=r"missing \['b'\], unexpected \['c'\]"):
        tree.fill({"a": 1, "b": 2}, {"a": 1, "c": 3})


def test_map_named_keeps_class_and_metadata():
    mapped = tree.map_named(lambda path, node: f"{path} {node.shape}", weights())
    assert mapped["b"]["scale"].get_value() == "b/scale (3,)"
    assert isinstance(mapped["b"]["scale"], nnx.Param) and mapped["b"]["scale"].get_metadata()["dims"] == "-> embed"
    assert tree.map_named(lambda path, node: path, {"x": (1, 2)}) == {"x": ("x/0", "x/1")}


def test_bytes_of_concrete_and_abstract_arrays():
    assert tree.num_bytes(jax.ShapeDtypeStruct((3, 5), jnp.bfloat16)) == 30
    assert tree.num_bytes(np.zeros((), np.int8)) == 1
    assert tree.total_bytes({"a": jnp.zeros((4, 4)), "b": (np.zeros(3, np.int8), None, 7)}) == 64 + 3
    assert tree.total_bytes(weights()) == 4 * (3 + 6)


def test_bytes_count_each_value_once_on_a_mesh():
    mesh = jax.make_mesh((8,), ("data",))
    whole = jax.NamedSharding(mesh, jax.P())
    assert tree.total_bytes(jax.device_put(np.zeros((8, 2), np.float32), whole)) == 64


def test_differences_are_one_line_each():
    found = {
        "a": np.zeros((2, 3), np.float32),
        "b": np.zeros(3, np.float32),
        "c": np.zeros(1, np.int32),
        "e": np.zeros(()),
    }
    wanted = {
        "a": np.zeros((2, 3), np.float32),
        "b": np.zeros(4, np.float32),
        "d": np.zeros((), np.int32),
        "e": np.zeros(()),
    }
    assert tree.differences(found, wanted) == [
        "b: found float32[3], needed float32[4]",
        "c: unexpected int32[1]",
        "d: missing, needed int32[]",
    ]
    assert tree.differences(found, found) == []
    half = {"a": jax.ShapeDtypeStruct((2, 3), jnp.bfloat16)}
    assert tree.differences({"a": found["a"]}, half) == ["a: found float32[2,3], needed bfloat16[2,3]"]
