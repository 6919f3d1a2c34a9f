"""Expert parallelism: experts on their own devices, tokens travel to them and back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxpp.compress import Quantized
from jaxpp.parallel.execution import active_layout, current
from jaxpp.parallel.grouped import GroupedUse, has_native_ragged_dot
from jaxpp.parallel.layout import Layout
from jaxpp.parallel.rules import Rules


@dataclass(frozen=True)
class Expert:
    """Split dim ``experts`` of weights over axis ``expert``, and the batch of all activations with them.

    All that is no expert sees one more data axis: its gradients are all-reduced over ``expert``.

    Cost: over ``expert`` (n shards), per layer and microbatch, 2 all-to-all in the forward pass (to the experts and
        back) and 2 in the backward pass, each of ``n x rows x embed`` per device, and an all-gather of
        ``n x num_experts`` integers. Dropless, `rows` is the worst case, ``tokens x min(k, num_experts / n)`` with the
        tokens of one device and k experts per token: up to n times what is sent on average (``k / n x tokens``); the
        products follow what came. With a capacity factor, ``rows = capacity x num_experts / n``. The router's weights
        (``embed x num_experts``) are gathered whole. `jax.lax.ragged_all_to_all`, which would send no empty row, exists
        on GPU and TPU alone and is not used.

    Source: Lepikhin, Lee, Xu, Chen, Firat, Huang, Krikun, Shazeer, Chen, GShard, 2020, section 3.
    """

    name: str = "expert"
    axis: str = "expert"
    needs: tuple[str, ...] = ()

    def rules(self) -> Rules:
        """``experts`` of weights and moments to ``expert``, and the batch of all activations."""
        experts, batch = {"experts": ("expert",)}, {"batch": ("expert",)}
        return Rules(weights=experts, compute=experts, moments=experts, inside=batch, residual=batch, cache=batch)


@dataclass(frozen=True)
class Spread:
    """Over which mesh axes a mixture of experts is spread; without a layout nothing moves.

    Its methods are collectives: but for `specs` and `use`, call them inside `with_collectives`.

    Args:
        layout: the layout in force; None for one device.
        tokens: axes that split batch and seq.
        experts: axes that split the experts; they are among `tokens`.
        mlp: axes that split each expert's width, and leave partial sums.
    """

    layout: Layout | None = None
    tokens: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()
    mlp: tuple[str, ...] = ()

    @property
    def num_shards(self) -> int:
        """Shards of the experts."""
        return math.prod(self.layout.mesh.shape[axis] for axis in self.experts) if self.layout else 1

    def activation(self) -> PartitionSpec:
        """Return how ``[batch, seq, ...]`` is split inside a block, its other dims whole."""
        return self.layout.spec(("batch", "seq"), "inside") if self.layout else PartitionSpec()

    def weight(self, dims: Sequence[str]) -> PartitionSpec:
        """Return how a weight of these dims enters: as stored, where `use` gathers it, else as computed with."""
        if self.layout is None:
            return PartitionSpec()
        axes = [(*self.layout.axes(dim, "compute"), *self._gathered(dim)) for dim in dims]
        return PartitionSpec(*(one or None for one in axes))

    def split(self, kernel: jax.Array | Quantized, dims: Sequence[str]) -> Any:
        """Return how a weight enters, as `weight` says; of a quantised one, each of its parts."""
        spec = self.weight(dims)
        return kernel.specs(spec) if isinstance(kernel, Quantized) and self.layout else spec

    def use(self, dims: Sequence[str]) -> GroupedUse:
        """Return what a weight of these dims gathers for use and how its gradient is reduced."""
        gathers = tuple((i, axes) for i, axes in enumerate(map(self._gathered, dims)) if axes)
        done = {*self.experts, *(axis for _, axes in gathers for axis in axes)}
        reduces = tuple(axis for axis in self.tokens if axis not in done)
        varies, barrier = (*self.tokens, *self.mlp), current().layers == "unroll"
        return GroupedUse(gathers, reduces, varies, barrier, has_native_ragged_dot())

    def _gathered(self, dim: str) -> tuple[str, ...]:
        """Return the axes that split `dim` as stored but not in use, if every device on them has tokens of its own."""
        if self.layout is None:
            return ()
        stored, used = self.layout.axes(dim, "weights"), self.layout.axes(dim, "compute")
        more = stored[len(used) :]
        return more if stored[: len(used)] == used and set(more) <= set(self.tokens) else ()

    def enter(self, x: jax.Array) -> jax.Array:
        """Mark what every shard of the experts' width reads. Cost: in the backward pass one all-reduce over `mlp`."""
        return jax.lax.pcast(x, self.mlp, to="varying") if self.mlp else x

    def leave(self, y: jax.Array) -> jax.Array:
        """Add up partial sums. Cost: one all-reduce over `mlp`."""
        return jax.lax.psum(y, self.mlp) if self.mlp else y

    def total(self, x: jax.Array) -> jax.Array:
        """Add up over all tokens. Cost: one all-reduce over `tokens`."""
        return jax.lax.psum(x, self.tokens) if self.tokens else x

    def exchange(self, rows: jax.Array) -> jax.Array:
        """Send part i of ``[shards, ...]`` to shard i; part i of the result came from shard i. Cost: one all-to-all."""
        return jax.lax.all_to_all(rows, self.experts, 0, 0, tiled=True) if self.experts else rows

    def arriving(self, counts: jax.Array) -> jax.Array:
        """Return how many rows come from each shard for each expert here, ``[shards, experts here]``.

        Args:
            counts: ``[experts]``, rows that this shard sends to each.

        Cost: one all-gather of integers.
        """
        num_here = counts.size // self.num_shards
        if not self.experts:
            return counts[None]
        everyone = jax.lax.all_gather(counts, self.experts)
        first = jax.lax.axis_index(self.experts) * num_here
        return jax.lax.dynamic_slice_in_dim(everyone, first, num_here, axis=1)


def expert_spread(shape: Sequence[int]) -> Spread:
    """Return how a mixture is spread under the layout in force, for activations ``[batch, seq, mlp]`` of this shape.

    Raises:
        ValueError: batch, seq or mlp does not divide; the experts are split over an axis that does not split the batch.
    """
    layout = active_layout()
    if layout is None:
        return Spread()
    layout.sharding(("batch", "seq", "mlp"), shape, "inside", "mixture of experts, activation batch seq mlp")
    tokens = (*layout.axes("batch", "inside"), *layout.axes("seq", "inside"))
    experts = layout.axes("experts", "compute")
    if stray := [axis for axis in experts if axis not in tokens]:
        raise ValueError(
            f"experts are split over axis {stray[0]}={layout.mesh.shape[stray[0]]}, which does not split the batch, so "
            "that its devices would all send the same tokens; use scheme expert, which splits both"
        )
    return Spread(layout, tokens, experts, layout.axes("mlp", "compute"))
