"""Pytree paths, bytes and comparison.

Knows how any state of ours (``nnx.State``, optax tuples, dicts, dataclasses) is named leaf by leaf. Does not know what
a leaf means: that is `jaxpp.dims`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx


def is_variable(node: Any) -> bool:
    """Say whether `node` is an ``nnx.Variable`` (a leaf of ours that carries metadata)."""
    return isinstance(node, nnx.Variable)


def _word(key: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def path_name(path: tuple[Any, ...]) -> str:
    """Write a JAX key path as ``"blocks/attention/query/kernel"``."""
    return "/".join(_word(key) for key in path)


def _is_empty(node: Any) -> bool:
    """Say whether a Variable holds nothing: optax puts a ``MaskedNode`` where a rule leaves a weight out."""
    return is_variable(node) and not jax.tree.leaves(node.get_value())


def named_nodes(tree: Any) -> dict[str, Any]:
    """Map each leaf's path to the leaf, keeping ``nnx.Variable`` whole and leaving out those that hold nothing.

    Example:
        >>> named_nodes({"a": (1, {"b": 2})})
        {'a/0': 1, 'a/1/b': 2}
    """
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_variable)
    return {path_name(path): node for path, node in flat if not _is_empty(node)}


def named_leaves(tree: Any) -> dict[str, Any]:
    """Map each leaf's path to its array, with ``nnx.Variable`` opened.

    The names do not depend on the classes of the containers, so a tree saved under these names can be restored into
    any tree of the same structure.
    """
    nodes = named_nodes(tree)
    return {k: (v.get_value() if is_variable(v) else v) for k, v in nodes.items()}


def fill(like: Any, leaves: Mapping[str, Any]) -> Any:
    """Return a tree with the structure of `like` and the leaves named in `leaves`.

    Args:
        like: any pytree.
        leaves: one value for every name of ``named_leaves(like)``.

    Raises:
        ValueError: names are missing or left over.
    """
    names = list(named_leaves(like))
    missing = [name for name in names if name not in leaves]
    extra = sorted(set(leaves) - set(names))
    if missing or extra:
        raise ValueError(f"leaves do not fit the tree: missing {missing}, unexpected {extra}")
    return jax.tree.unflatten(jax.tree.structure(like), [leaves[name] for name in names])


def map_named(function: Callable[[str, Any], Any], tree: Any) -> Any:
    """Apply ``function(path, node)`` to each node of `tree`; an ``nnx.Variable`` counts as one node.

    A Variable keeps its class and metadata; the function's result replaces its value.
    """

    def visit(path: tuple[Any, ...], node: Any) -> Any:
        if _is_empty(node):
            return node
        result = function(path_name(path), node)
        return node.replace(result) if is_variable(node) else result

    return jax.tree_util.tree_map_with_path(visit, tree, is_leaf=is_variable)


def num_bytes(leaf: Any) -> int:
    """Count the bytes of one whole array (or abstract array), over all devices, each value once."""
    return math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize


def total_bytes(tree: Any) -> int:
    """Count the bytes of all arrays of `tree`, each value once."""
    return sum(num_bytes(leaf) for leaf in jax.tree.leaves(tree) if hasattr(leaf, "shape"))


def _describe(leaf: Any) -> str:
    shape = ",".join(str(size) for size in leaf.shape)
    return f"{np.dtype(leaf.dtype).name}[{shape}]"


def differences(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """List, one line each, how two named sets of arrays differ in names, shapes and dtypes.

    Args:
        found: name to array (or anything with ``shape`` and ``dtype``), e.g. what a checkpoint holds.
        wanted: the same, e.g. what the model needs.

    Returns:
        Lines such as ``"params/head/kernel: found float32[64,100], needed float32[64,128]"``; empty if equal.
    """
    lines = []
    for name in sorted(set(found) | set(wanted)):
        if name not in found:
            lines.append(f"{name}: missing, needed {_describe(wanted[name])}")
        elif name not in wanted:
            lines.append(f"{name}: unexpected {_describe(found[name])}")
        elif _describe(found[name]) != _describe(wanted[name]):
            lines.append(f"{name}: found {_describe(found[name])}, needed {_describe(wanted[name])}")
    return lines
