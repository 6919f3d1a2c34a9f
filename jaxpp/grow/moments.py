"""Optimizer state grows by the maps of its weights: first moments as gradients do, second ones as their squares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from jaxpp import tree
from jaxpp.grow.leaf import Leaf

POWERS = {"mu": 1, "trace": 1, "nu": 2}
"""Field of an optax state to the power of gradients that it averages."""


def power_of(path: str, weight: str) -> int:
    """Return the power of gradients that a leaf of an optimizer state averages.

    Args:
        path: of the leaf, such as ``"0/mu/blocks/mlp/up/kernel"``.
        weight: path of its weight.

    Raises:
        ValueError: the optimizer keeps something else.
    """
    field = path.removesuffix(weight).strip("/").rpartition("/")[2]
    if field not in POWERS:
        raise ValueError(
            f"optimizer state {path}: averages of gradients ({', '.join(POWERS)}) grow, {field or 'this'} does not; "
            "start the optimizer anew (--optimizer reset), or train on with adamw, muon or sgd"
        )
    return POWERS[field]


def origin_of(path: str, leaves: Mapping[str, Leaf]) -> tuple[str, str] | None:
    """Return the prefix of a leaf of the target's optimizer state and its weight; None for counters."""
    words = path.split("/")
    for i in range(len(words)):
        if (weight := "/".join(words[i:])) in leaves:
            return "".join(f"{word}/" for word in words[:i]), weight
    return None


def _left_out(state: nnx.State) -> dict[str, Any]:
    """Return what optax put where a rule leaves a weight out (Muon's Adam, say), by the path of the weight."""
    flat, _ = jax.tree_util.tree_flatten_with_path(state, is_leaf=tree.is_variable)
    values = {tree.path_name(path): node.get_value() for path, node in flat}
    return {path: value for path, value in values.items() if not jax.tree.leaves(value)}


def grow_moments(state: Any, params: Any, leaves: Mapping[str, Leaf]) -> Any:
    """Grow an optax state that lies in memory.

    Args:
        state: over ``nnx.State`` of the source's weights.
        params: the target's weights, for structure.
        leaves: how each weight grows.

    Returns:
        The state over the target's weights; counters as they were.

    Raises:
        ValueError: as `power_of`.
    """

    def is_moments(node: Any) -> bool:
        return isinstance(node, nnx.State)

    def one(path: tuple[Any, ...], node: Any) -> Any:
        if not is_moments(node):
            return node
        name, held = tree.path_name(path), tree.named_leaves(node)
        left_out = _left_out(node)

        def grown(weight: str, param: Any) -> Any:
            leaf = leaves[weight]
            if leaf.source in left_out:
                return left_out[leaf.source]
            if leaf.source not in held:
                raise ValueError(f"optimizer state {name} has no moment of {leaf.source}, which grows {weight}")
            return leaf.moment(held[leaf.source], power_of(f"{name}/{weight}", weight))

        return tree.map_named(grown, params)

    return jax.tree_util.tree_map_with_path(one, state, is_leaf=is_moments)
