"""A checkpoint that is another one grown: opened like any, and its weights made while they are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxpp import dims, tree
from jaxpp.data import Tokenizer
from jaxpp.filling import read_filled
from jaxpp.grow.leaf import Leaf
from jaxpp.grow.places import carried_over, make_weight
from jaxpp.grow.settings import settings_of
from jaxpp.grow.step import Growth
from jaxpp.models import DecoderConfig
from jaxpp.pretrained import Checkpoint, Progress, abstract_params

GROWTH = "growth.yaml"


@dataclass(frozen=True, eq=False)
class Grown:
    """What `jaxpp.load` and `jaxpp.conversion.convert` take for a checkpoint; no weight is read before they ask.

    Args:
        origin: the checkpoint that grows.
        growth: how.

    Raises:
        ValueError: the growth is of another model.
    """

    origin: Checkpoint
    growth: Growth

    def __post_init__(self) -> None:
        if self.origin.config != self.growth.source:
            raise ValueError(f"the growth was planned for another model than that of {self.origin.name}")

    @property
    def name(self) -> str:
        """What the user called the origin."""
        return self.origin.name

    @property
    def format(self) -> str:
        """That of the origin."""
        return self.origin.format

    @property
    def config(self) -> DecoderConfig:
        """The grown model's config."""
        return self.growth.target

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know of how the origin was read."""
        return self.origin.notes

    @property
    def texts(self) -> Mapping[str, str]:
        """The documents that travel with the weights, and ``growth.yaml``: where they came from."""
        return {**self.origin.texts, GROWTH: settings_of(self.growth).text(self.origin.name, self.growth)}

    @cached_property
    def _leaves(self) -> dict[str, Leaf]:
        return self.growth.leaves()

    @property
    def dtypes(self) -> Mapping[str, np.dtype]:
        """The dtype of each weight: of the one that it comes from."""
        stored = self.origin.dtypes
        return {path: stored[leaf.source] for path, leaf in self._leaves.items()}

    def tokenizer(self) -> Tokenizer | None:
        """Return the origin's tokenizer."""
        return self.origin.tokenizer()

    def read(self, like: Any, progress: Progress | None = None) -> Any:
        """Make the weights onto the shardings and into the dtypes of `like`, one at a time.

        Cost: memory: the process's shards, and of one weight its source and what makes it; on the wire, what of a
            source lies elsewhere than its copies.
        """
        sources = tree.named_nodes(abstract_params(self.origin.config))

        def make(path: str, node: Any) -> jax.Array:
            goal, leaf = node.get_value(), self._leaves[path]
            x = self._read_source(sources[leaf.source], leaf.source, dims.of(node, path), goal)
            made = jax.block_until_ready(make_weight(leaf, x, goal.dtype, goal.sharding))
            if progress:
                progress(tree.num_bytes(made))
            return made

        return read_filled(lambda like: tree.map_named(make, like), like, self.config.table_rows)

    def _read_source(self, source: Any, path: str, arrow: dims.Arrow, goal: Any) -> jax.Array:
        place = carried_over(goal.sharding, arrow.dims, dims.of(source, path), source.shape)
        stored = jax.ShapeDtypeStruct(source.shape, self.origin.dtypes[path], sharding=place)
        wanted = {path: nnx.Param(stored, dims=str(dims.of(source, path)))}
        return self.origin.read(wanted)[path].get_value()
