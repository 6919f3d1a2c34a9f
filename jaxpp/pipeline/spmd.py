"""One program for all ranks: stacked blocks as a pipeline over mesh axis ``stage``, GPipe or circular (interleaved).

All ranks run the same tick in lock step, a ``scan`` over ticks inside a ``shard_map`` that is manual over ``stage``
alone: the axes of data, fsdp and tensor stay automatic. The backward pass is the transpose of the loop. Each tick ends
with one permute round the ring, outside of anything that depends on the rank.

Words: p ranks, v chunks per rank, m microbatches. Rank d holds chunks d, p + d, 2p + d ...; at tick t it works on
item ``k = t - d``: of group ``k // pv``, chunk ``k % pv // p``, microbatch ``group x p + k % p``. What rank p - 1 sends
round the ring thus arrives at rank 0 exactly when its next chunk needs it, and nothing is buffered.

Cost: ticks ``m v + p - 1``, of which each rank works ``m v``: the bubble is ``(p - 1) / v`` forward and backward
    passes. Memory: the input of each tick is kept (with remat), ``(m v + p - 1) x batch / m x seq x embed``. Chunks
    (v > 1) are gathered from the stored order of layers once a step, and their gradients sent back.

Source: Huang et al., GPipe, 2019; Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters,
    2021, section 2.2 (interleaving).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxpp.parallel import Layout, PipelineConfig

AXIS = "stage"

Body = Callable[[jax.Array, Any, Any], jax.Array]
"""``body(x, layers, shared)``: run the layers of one chunk, their weights stacked, on one microbatch."""


@dataclass(frozen=True)
class _Ring:
    num_ranks: int
    num_chunks: int
    num_microbatches: int

    @property
    def num_items(self) -> int:
        return self.num_microbatches * self.num_chunks

    @property
    def num_ticks(self) -> int:
        return self.num_items + self.num_ranks - 1

    def item(self, k: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return chunk and microbatch of an item, kept in range where there is none."""
        k = jnp.clip(k, 0, self.num_items - 1)
        group, rest = k // (self.num_ranks * self.num_chunks), k % (self.num_ranks * self.num_chunks)
        return rest // self.num_ranks, group * self.num_ranks + rest % self.num_ranks


def num_microbatches(pipeline: PipelineConfig, layout: Layout) -> int:
    """Return into how many microbatches a batch is cut; 1 where there is no pipeline."""
    ranks = layout.mesh.shape.get(AXIS, 1)
    return (pipeline.microbatches or ranks) if ranks > 1 else 1


def check(pipeline: PipelineConfig, layout: Layout, num_layers: int) -> None:
    """Refuse layers or microbatches that the ring cannot share out.

    Raises:
        ValueError: with the numbers that would do.
    """
    ranks = layout.mesh.shape.get(AXIS, 1)
    if ranks == 1:
        return
    parts = ranks * pipeline.num_chunks()
    if num_layers % parts:
        fits = [n for n in range(1, num_layers + 1) if num_layers % n == 0]
        raise ValueError(
            f"{num_layers} layers do not split into {ranks} stages x {pipeline.num_chunks()} chunks; "
            f"{', '.join(map(str, fits))} in all do"
        )
    count, chunks = num_microbatches(pipeline, layout), pipeline.num_chunks()
    if chunks > 1 and count % ranks:
        raise ValueError(
            f"plan.pipeline.microbatches = {count}: with {chunks} chunks a multiple of the {ranks} stages is needed, "
            f"{max(count // ranks, 1) * ranks} say"
        )


def check_rows(pipeline: PipelineConfig, layout: Layout, num_rows: int) -> None:
    """Refuse a batch whose pipeline microbatches do not split over the shards of the batch.

    Raises:
        ValueError: with the nearest sizes that do.
    """
    count = num_microbatches(pipeline, layout)
    shards = layout.num_shards("batch", "residual") // layout.mesh.shape.get(AXIS, 1)
    if count > 1 and num_rows % (count * shards):
        low, high = num_rows // (count * shards), num_rows // (count * shards) + 1
        sizes = " or ".join(str(n * count * shards) for n in (low, high) if n)
        raise ValueError(
            f"a batch of {num_rows} does not split into {count} pipeline microbatches over {shards} batch shards; "
            f"{sizes} would"
        )


def pipelined(
    body: Body, weights: Any, x: jax.Array, shared: Any, layout: Layout, pipeline: PipelineConfig, remat: Any = None
) -> jax.Array:
    """Run stacked blocks over the whole batch, in microbatches, each rank its own layers.

    Args:
        body: runs the layers of one chunk; traced once.
        weights: tree of arrays ``[layers, ...]``, split over ``stage``.
        x: ``[batch, seq, embed]``.
        shared: tree of what every layer gets; arrays ``[batch, ...]`` are cut along with `x`.
        layout: on a mesh with axis ``stage``.
        pipeline: chunks and microbatches.
        remat: policy of what each tick's backward pass recomputes; None: nothing.

    Returns:
        ``[batch, seq, embed]`` after the last layer, on every rank.

    Raises:
        ValueError: as `check` and `check_rows`.
    """
    ring = _Ring(layout.mesh.shape[AXIS], pipeline.num_chunks(), num_microbatches(pipeline, layout))
    check(pipeline, layout, jax.tree.leaves(weights)[0].shape[0])
    check_rows(pipeline, layout, len(x))
    batch = len(x)
    cut = [leaf for leaf in jax.tree.leaves(shared)]
    is_cut = [bool(leaf.ndim) and leaf.shape[0] == batch for leaf in cut]
    structure = jax.tree.structure(shared)
    count = ring.num_microbatches
    dealt = [dealt_out(leaf, count, layout) if one else leaf for leaf, one in zip(cut, is_cut, strict=True)]
    chunked = jax.tree.map(lambda leaf: _chunked(leaf, ring), weights)

    def local(weights: Any, xs: jax.Array, dealt: list[jax.Array]) -> jax.Array:
        rank = jax.lax.axis_index(AXIS)
        own = jax.tree.map(lambda leaf: leaf[:, 0], weights)  # [chunks, layers of one, ...]

        def tick(carry: tuple[jax.Array, jax.Array], t: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
            arrived, done = carry
            chunk, microbatch = ring.item(t - rank)
            entering = jnp.where((rank == 0) & (chunk == 0), xs[microbatch], arrived)
            layers = jax.tree.map(lambda leaf: leaf[chunk], own)
            mine = [leaf[microbatch] if one else leaf for leaf, one in zip(dealt, is_cut, strict=True)]
            y = body(entering, layers, jax.tree.unflatten(structure, mine))
            real = (t >= rank) & (t - rank < ring.num_items)
            leaves = real & (rank == ring.num_ranks - 1) & (chunk == ring.num_chunks - 1)
            done = jnp.where(leaves, done.at[microbatch].set(y), done)
            turn = [(i, (i + 1) % ring.num_ranks) for i in range(ring.num_ranks)]
            return (jax.lax.ppermute(y, AXIS, turn), done), None

        step = tick if remat is None else jax.checkpoint(tick, policy=remat, prevent_cse=False)
        start = (_varying(jnp.zeros_like(xs[0])), _varying(jnp.zeros_like(xs)))
        (_, done), _ = jax.lax.scan(step, start, jnp.arange(ring.num_ticks))
        return jax.lax.psum(jnp.where(rank == ring.num_ranks - 1, done, 0), AXIS)

    run = jax.shard_map(
        local, mesh=layout.mesh, axis_names={AXIS}, out_specs=PartitionSpec(),
        in_specs=(PartitionSpec(None, AXIS), PartitionSpec(), PartitionSpec()),
    )  # fmt: skip
    return put_back(run(chunked, dealt_out(x, count, layout), dealt), layout)


def _varying(x: jax.Array) -> jax.Array:
    return jax.lax.pcast(x, (AXIS,), to="varying")


def _chunked(leaf: jax.Array, ring: _Ring) -> jax.Array:
    """Turn ``[layers, ...]`` into ``[chunks, ranks, layers of a chunk, ...]``."""
    return leaf.reshape(ring.num_chunks, ring.num_ranks, -1, *leaf.shape[1:])


def dealt_out(x: jax.Array, num_microbatches: int, layout: Layout) -> jax.Array:
    """Deal ``[batch, ...]`` out as ``[microbatches, batch / microbatches, ...]``, whole on every rank."""
    axes = _batch_axes(layout)
    # In two steps: the partitioner of jax 0.12 crashes on some of these reshapes where `stage` has to go as well.
    whole = jax.lax.with_sharding_constraint(x, NamedSharding(layout.mesh, PartitionSpec(axes)))
    dealt = jnp.moveaxis(whole.reshape(-1, num_microbatches, *x.shape[1:]), 1, 0)
    return jax.lax.with_sharding_constraint(dealt, NamedSharding(layout.mesh, PartitionSpec(None, axes)))


def put_back(dealt: jax.Array, layout: Layout) -> jax.Array:
    """Undo `dealt_out`."""
    x = jnp.moveaxis(dealt, 0, 1).reshape(-1, *dealt.shape[2:])
    return jax.lax.with_sharding_constraint(x, NamedSharding(layout.mesh, PartitionSpec(_batch_axes(layout))))


def _batch_axes(layout: Layout) -> tuple[str, ...] | None:
    """Return the axes that split a microbatch inside of the pipeline."""
    return tuple(axis for axis in layout.axes("batch", "inside") if axis != AXIS) or None
