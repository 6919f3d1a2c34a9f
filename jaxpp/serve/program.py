"""What runs on the devices: a model that goes on from the pages of its cache, compiled once for each shape.

Shapes come from short lists: new tokens of a row (1, or a chunk of a prompt) and pages of a row. `Program.warm_up`
compiles all of them; afterwards nothing compiles.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxpp.nn import Layer
from jaxpp.nn.paged import PagedCache, Pages, Table, empty_pages
from jaxpp.nn.stack import Layers, unstack_blocks
from jaxpp.parallel import Execution, constrain, executing
from jaxpp.serve.pages import Span

FEW = 16
"""New tokens of a row up to which the sizes of tables are those of one."""


@dataclass(frozen=True)
class Geometry:
    """Sizes of the cache and of what is run at once.

    Args:
        slots: requests that run at once, over all batch shards.
        max_context: most tokens of prompt and answer together.
        page: tokens of a page.
        chunk: most tokens of a prompt run at once.
        pages: of each group of layers and batch shard, the one that belongs to nobody included.
        dtype: of keys and values; ``"int8"`` keeps a scale for each token and head.
    """

    slots: int
    max_context: int
    page: int
    chunk: int
    pages: tuple[int, ...]
    dtype: str

    def table_width(self, span: Span, step: int, num_new: int) -> int:
        """Return the pages of a row in a group of layers, where the whole context takes `step` pages."""
        return min(step, -(-(span.window + max(num_new, FEW)) // self.page) + 1) if span.window else step

    def chunk_sizes(self) -> list[int]:
        """Return the sizes that the last chunk of a prompt is filled up to."""
        return _steps(min(16, self.chunk), self.chunk, 4)

    def page_steps(self, num_new: int) -> list[int]:
        """Return the sizes that tables are filled up to: fine for decoding, coarse for chunks."""
        return _steps(max(1, -(-128 // self.page)), -(-self.max_context // self.page), 2 if num_new <= FEW else 4)


def _steps(least: int, most: int, factor: int) -> list[int]:
    found = [min(least, most)]
    while found[-1] < most:
        found.append(min(found[-1] * factor, most))
    return found


def at_least(steps: Sequence[int], wanted: int) -> int:
    """Return the first of ascending steps that reaches `wanted`."""
    return next(step for step in steps if step >= wanted)


def windows_of(config: Any) -> list[int]:
    """Return the window of each layer of a decoder; 0: it sees all before it."""
    layers = config.layers() or [Layer()] * config.num_layers
    return [config.window if layer.window else 0 for layer in layers]


class Program:
    """The model on its devices, with the pages of all layers.

    Args:
        model: a decoder; it is taken over, its blocks are kept one by one.
        execution: layout and kernels.
        geometry: sizes.
    """

    def __init__(self, model: Any, execution: Execution, geometry: Geometry):
        """Cut the blocks apart and lay out empty pages."""
        if not isinstance(model.blocks, Layers):
            model.blocks = unstack_blocks(model.blocks)
        self.geometry, self.execution, self.config = geometry, execution, model.config
        self.windows = windows_of(model.config)
        groups = sorted(set(self.windows))
        self.spans = tuple(Span(window, geometry.chunk, geometry.page) for window in groups)
        self.group_of = [groups.index(window) for window in self.windows]
        graph, state = nnx.split(model)
        self._weights, self._structure = jax.tree.flatten(state)
        self._graph = graph
        layout = execution.layout
        self.num_shards = layout.num_shards("batch", "cache") if layout else 1
        self.pages = self._empty()
        self.num_compiled = 0  # shapes
        self._compiled = jax.jit(self._run, donate_argnums=(1,), static_argnames=("every",))

    def _empty(self) -> list[Pages]:
        config, layout, geometry = self.config, self.execution.layout, self.geometry
        heads = max(config.num_kv_heads, layout.num_shards("kv_heads", "cache") if layout else 1)
        dtype = jnp.dtype(geometry.dtype)

        def make() -> list[Pages]:
            counts = [geometry.pages[group] * self.num_shards for group in self.group_of]
            return [empty_pages(count, geometry.page, heads, config.head_dim, dtype) for count in counts]

        if layout is None:
            return jax.jit(make)()
        dims = ("batch", "kv_heads", "page", "head_dim")
        abstract = jax.eval_shape(make)
        places = jax.tree.map(lambda x: layout.sharding(dims[: x.ndim], x.shape, "cache", "pages"), abstract)
        return jax.jit(make, out_shardings=places)()

    def extend(
        self,
        tokens: Any,
        positions: np.ndarray,
        lengths: np.ndarray,
        tables: Sequence[tuple[np.ndarray, np.ndarray]],
        every: bool = False,
    ) -> jax.Array:
        """Run new tokens of some rows behind those in their pages.

        Args:
            tokens: ``[rows, T]``, or ``[rows]`` for one each.
            positions: ``[rows, T]``, -1 for padding.
            lengths: ``[rows]``, tokens that each row will have when its prompt is in, or has now.
            tables: for each group of layers, pages ``[rows, P]`` and start ``[rows]`` (`jaxpp.nn.paged.Table`).
            every: give the logits of every token.

        Returns:
            Logits ``[rows, vocab]`` of each row's last token, fp32; of every token ``[rows, T, vocab]``.
        """
        arguments = tuple(Table(jnp.asarray(pages), jnp.asarray(start)) for pages, start in tables)
        given = (self._weights, self.pages, tokens, positions, lengths, arguments)
        logits, self.pages = self._compiled(*given, every=every)
        return logits

    def _run(
        self,
        weights: Any,
        pages: Any,
        tokens: jax.Array,
        positions: jax.Array,
        lengths: jax.Array,
        tables: Any,
        every: bool = False,
    ) -> tuple[jax.Array, list[Pages]]:
        self.num_compiled += 1  # only tracing comes here
        with executing(self.execution):  # where blocks want them, not where the cache does
            positions = constrain(positions, "batch seq")
            tokens = constrain(tokens.reshape(positions.shape), "batch seq")
        caches = [PagedCache(one, tables[group]) for one, group in zip(pages, self.group_of, strict=True)]
        batch: dict[str, Any] = {
            "tokens": jnp.maximum(tokens, 0),
            "positions": jnp.maximum(positions, 0),
            "segments": (positions >= 0).astype(jnp.int32),
            "lengths": lengths,
            "caches": caches,
        }
        with executing(self.execution):
            model: Any = nnx.merge(self._graph, jax.tree.unflatten(self._structure, weights))
            x = model.run(model.embed(batch), batch)
            if every:
                return model.logits(x), [cache.pages for cache in caches]
            last = jnp.argmax(positions, axis=1)
            x = jnp.take_along_axis(x, last[:, None, None], axis=1)
            return model.logits(x)[:, 0], [cache.pages for cache in caches]

    def warm_up_chunks(self) -> jax.Array:
        """Compile the shapes of prompts, by running each on padding; return the logits of a chunk."""
        rows = self.num_shards
        every = [self._warm_up(np.zeros((rows, size), np.int32), size) for size in self.geometry.chunk_sizes()]
        return every[-1]

    def warm_up_tokens(self, last: Any, verified: int = 0) -> None:
        """Compile the shapes of decoding.

        Args:
            last: ``[slots]``, tokens as the sampler leaves them: where they lie is a part of the shape.
            verified: tokens of a row that are run at once to verify a draft; 0: none.
        """
        self._warm_up(last, 1)
        if verified:
            self._warm_up(jnp.stack([last] * verified, axis=1), verified, every=True)

    def _warm_up(self, tokens: Any, size: int, every: bool = False) -> Any:
        geometry, rows, logits = self.geometry, len(tokens), None
        for step in geometry.page_steps(size):
            widths = [geometry.table_width(span, step, size) for span in self.spans]
            tables = [(np.zeros((rows, width), np.int32), np.zeros(rows, np.int32)) for width in widths]
            logits = self.extend(tokens, np.full((rows, size), -1, np.int32), np.ones(rows, np.int32), tables, every)
        return logits

    def bytes_of_pages(self) -> int:
        """Count the bytes of all pages, over all devices that hold a part of their own."""
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.pages))
