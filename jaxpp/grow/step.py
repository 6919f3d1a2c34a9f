"""One act of growth, bound to the model that it grows: where each weight of the target comes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxpp import dims, tree
from jaxpp.grow.leaf import ByDims, Leaf
from jaxpp.grow.split import Split
from jaxpp.grow.spread import Spread, same
from jaxpp.models import DecoderConfig
from jaxpp.pretrained import abstract_params

Maps = Mapping[tuple[str, int], Spread]
"""Dim and its old size (an expert's mlp may be narrower than a shared one's) to its map; what is absent stays."""


@dataclass(frozen=True, eq=False)
class Step:
    """One operator on one model.

    Args:
        name: of the operator, in `jaxpp.grow.OPERATORS`.
        source: config of the model before.
        target: config of the model after.
        leaves: by the path of each weight of the target, where it comes from.
        maps: what happens to each dim that changes, in words, for people.
        gap: why the target does not compute the source's function; empty where it does.
        bound: largest difference of logits, over the largest logit, that rounding to fp32 explains in 8 layers.
    """

    name: str
    source: DecoderConfig
    target: DecoderConfig
    leaves: Mapping[str, Leaf]
    maps: Mapping[str, str] = field(default_factory=dict)
    gap: str = ""
    bound: float = 2e-6

    @property
    def preserves(self) -> bool:
        """Whether the target computes the source's function."""
        return not self.gap


@dataclass(frozen=True, eq=False)
class _After:
    """A leaf of a later step on top of one of an earlier."""

    first: Leaf
    second: Leaf

    @property
    def source(self) -> str:
        return self.first.source

    def weight(self, x: jax.Array, dtype: jnp.dtype) -> jax.Array:
        between = jnp.promote_types(x.dtype, jnp.float32)
        return self.second.weight(self.first.weight(x, between), dtype)

    def moment(self, x: jax.Array, power: int) -> jax.Array:
        return self.second.moment(self.first.moment(x, power), power)

    def rate(self) -> float:
        return self.first.rate() * self.second.rate()


@dataclass(frozen=True, eq=False)
class Growth:
    """Steps one after another, each on what the one before made.

    Raises:
        ValueError: no step, or steps that do not follow on one another.
    """

    steps: tuple[Step, ...]

    def __post_init__(self) -> None:
        if not self.steps:
            raise ValueError("nothing to grow: name a width, heads, an mlp, a depth, experts or a target")
        for before, after in zip(self.steps, self.steps[1:], strict=False):
            if before.target != after.source:
                raise ValueError(f"{after.name} was made for another model than {before.name} gives")

    @property
    def source(self) -> DecoderConfig:
        """Config of the model before all steps."""
        return self.steps[0].source

    @property
    def target(self) -> DecoderConfig:
        """Config of the model after all steps."""
        return self.steps[-1].target

    @property
    def gap(self) -> str:
        """Why the target does not compute the source's function; empty where it does."""
        return "; ".join(f"{step.name}: {step.gap}" for step in self.steps if step.gap)

    @property
    def bound(self) -> float:
        """Largest difference of logits, over the largest logit, that rounding to fp32 explains: it adds up by depth."""
        return max(step.bound for step in self.steps) * max(1.0, self.target.num_layers / 8)

    def leaves(self) -> dict[str, Leaf]:
        """Return where each weight of the last target comes from, through all steps."""
        found: dict[str, Leaf] = dict(self.steps[0].leaves)
        for step in self.steps[1:]:
            found = {path: _After(found[leaf.source], leaf) for path, leaf in step.leaves.items()}
        return found


def by_dims(
    name: str,
    source: DecoderConfig,
    target: DecoderConfig,
    maps: Maps,
    *,
    split: Split | None = None,
    changes: Mapping[str, Mapping[str, Any]] | None = None,
    gap: str = "",
) -> Step:
    """Grow every weight by the dims that its arrow names.

    Args:
        name: of the operator.
        source: config before.
        target: config after.
        maps: of each dim that changes.
        split: how read dims are divided over their copies.
        changes: fields of `ByDims` for the weights that are special, by path.
        gap: as in `Step`.

    Raises:
        ValueError: the maps do not lead from the source's shapes to the target's.
    """
    before, leaves = tree.named_nodes(abstract_params(source)), {}
    for path, node in tree.named_nodes(abstract_params(target)).items():
        arrow, old = dims.of(node, path), before[path].shape
        spreads = tuple(maps.get((dim, size), same(size)) for dim, size in zip(arrow.dims, old, strict=True))
        if (shape := tuple(spread.new for spread in spreads)) != tuple(node.shape):
            raise ValueError(f"{name}: {path} {tuple(old)} grows to {shape}, but the target has {tuple(node.shape)}")
        leaf = ByDims(path, path, arrow, spreads, split or Split())
        leaves[path] = replace(leaf, **(changes or {}).get(path, {}))
    words = {dim: str(spread) for (dim, _), spread in maps.items() if not spread.is_identity}
    return Step(name, source, target, leaves, words, gap)


def is_norm(path: str) -> bool:
    """Say whether a weight belongs to a norm."""
    return path.split("/")[-2].endswith("norm")


def branch_ends(config: DecoderConfig) -> list[str]:
    """Return the paths of the weights of a block which, all zero, make it add nothing to the residual stream.

    Where a norm follows a branch, these are its scale and bias: behind a norm, zero weights would have gradients
    divided by the root of its epsilon.
    """
    nodes = tree.named_nodes(abstract_params(config))
    writing = [path for path, node in nodes.items() if path.startswith("blocks/") and _ends(node, path)]
    after = config.norm_place in ("post", "both")
    return [path for path in writing if (path.split("/")[-2].endswith("post_norm") if after else not is_norm(path))]


def _ends(node: Any, path: str) -> bool:
    return dims.of(node, path).writes == ("embed",)


def scale_offset(config: DecoderConfig) -> float:
    """Return what the model adds to the scale of a norm."""
    return 1.0 if config.norm_scale == "offset" and config.norm == "rms" else 0.0
