"""What a step costs one device: operations, bytes read, seconds, and the memory that it needs.

Peaks as in `jaxpp.partition.device_kinds`; products overlap with reading memory, and nothing overlaps with the wire.
The seconds are a bound to rank by, not a forecast: kernels reach less than peaks, and collectives can hide behind
products.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from jaxpp.partition.device_kinds import DeviceKind
from jaxpp.partition.layouts import Layout
from jaxpp.partition.sizes import ModelSizes, Weight
from jaxpp.partition.volumes import FP32, Collective, Work, step_collectives, up

USABLE = 0.9  # of a device's memory; the rest is the runtime's, and what fragments leave


@dataclass(frozen=True)
class Seconds:
    """Time of one step: products and reading overlap, the wire comes on top."""

    compute_s: float
    memory_s: float
    wire_s: float

    @property
    def total_s(self) -> float:
        """``max(compute, memory) + wire``."""
        return max(self.compute_s, self.memory_s) + self.wire_s

    @property
    def bound(self) -> str:
        """What the most time goes to."""
        parts = {"compute": self.compute_s, "memory": self.memory_s, "wire": self.wire_s}
        return max(parts, key=lambda name: parts[name])


@dataclass(frozen=True)
class Bytes:
    """Memory of one device."""

    weights: float
    kv: float
    activations: float

    @property
    def total(self) -> float:
        """All together."""
        return self.weights + self.kv + self.activations


def seconds(
    sizes: ModelSizes, layout: Layout, work: Work, device: DeviceKind, collectives: tuple[Collective, ...] | None = None
) -> Seconds:
    """Predict the time of one step.

    Args:
        sizes: of the model.
        layout: of this phase.
        work: what the step does.
        device: what it runs on.
        collectives: of the step, if they are known already.
    """
    if collectives is None:
        collectives = step_collectives(sizes, layout, work)
    flops = _product_flops(sizes, layout, work) + _attention_flops(sizes, layout, work)
    seen = work.length if work.prefill else work.context
    read = _weight_reads(sizes, layout, work) + kv_bytes(sizes, layout, work, seen)
    return Seconds(
        flops / device.flops("float32" if work.activation_bytes == FP32 else "bfloat16"),
        read / device.memory_bytes_per_s,
        sum(one.wire_bytes for one in collectives) / device.link_bytes_per_s
        + device.latency_s * sum(one.count for one in collectives),
    )


def weight_entries(sizes: ModelSizes, layout: Layout) -> tuple[float, float]:
    """Return the entries of weights that one device stores, and those that a gather adds for a while.

    Gathered: one layer, or one table where that is more.
    """
    stored = sum(_part(weight, layout, "weights") * max(weight.layers, 1) for weight in sizes.weights)
    if layout.gather == 1:
        return stored, 0.0
    layer = sum(_part(weight, layout, "compute") for weight in sizes.weights if weight.layers)
    tables = (_part(weight, layout, "compute") for weight in sizes.weights if not weight.layers)
    return stored, max(layer, *tables)


def memory(sizes: ModelSizes, layout: Layout, work: Work, entries: tuple[float, float] | None = None) -> Bytes:
    """Predict the memory of one device: weights as stored, the whole cache, and the most that one layer needs.

    Args:
        sizes: of the model.
        layout: of this phase.
        work: what the step does.
        entries: of weights, if they are known already (`weight_entries`).
    """
    stored, gathered = entries or weight_entries(sizes, layout)
    kv = kv_bytes(sizes, layout, work, work.context)
    activations = _activation_bytes(sizes, layout, work) + gathered * work.weight_bytes
    return Bytes(stored * work.weight_bytes, kv, activations)


def kv_bytes(sizes: ModelSizes, layout: Layout, work: Work, context: int) -> float:
    """Return the bytes of keys and values of `context` tokens of each sequence, on one device.

    A layer with a window keeps no more than the window.
    """
    heads = up(sizes.kv_heads, layout.cache_parts("kv_heads"))
    rows = work.rows(layout, layout.cache_parts("batch"))
    parts = layout.cache_parts("seq")
    kept = sum(n * up(min(context, window or context), parts) for window, n in Counter(sizes.windows).items())
    return 2 * kept * rows * heads * sizes.head_dim * work.kv_bytes


def _part(weight: Weight, layout: Layout, place: Literal["weights", "compute"]) -> float:
    """Return the entries of one layer's weight on one device; a vocabulary is filled up to divide."""
    shards = layout.shards(weight.arrow, place)
    if "vocab" not in weight.arrow.dims:
        return weight.size / shards
    rows = weight.shape[weight.arrow.dims.index("vocab")]
    parts = layout.over(getattr(layout, place).get("vocab", ()))
    return weight.size / shards * up(rows, parts) * parts / rows


def _product_flops(sizes: ModelSizes, layout: Layout, work: Work) -> float:
    tokens, rows = work.tokens(layout), work.rows(layout, layout.gather)
    total = 0.0
    for weight in sizes.weights:
        if weight.multiplies:
            used = _part(weight, layout, "compute") * (sizes.visits / sizes.experts if weight.each_expert else 1)
            total += 2 * used * (tokens * weight.layers if weight.layers else rows)
    return total


def _attention_flops(sizes: ModelSizes, layout: Layout, work: Work) -> float:
    """Scores and values: 4 per query, key and entry of a head; in a prompt a token sees those before it."""
    heads, rows, share = sizes.heads, work.rows(layout, layout.cache_parts("batch")), 1.0
    if layout.kv == "heads":
        heads = up(sizes.heads // layout.m, layout.x)
    elif layout.kv == "mixed":
        heads = sizes.heads // layout.cache_parts("kv_heads")
    else:
        share /= layout.cache_parts("seq")  # of the queries of a prompt, of the keys of a token
    pairs = sum(n * _pairs(work, window) for window, n in Counter(sizes.windows).items())
    return 4 * pairs * rows * heads * sizes.head_dim * share


def _pairs(work: Work, window: int) -> float:
    """Return the pairs of query and key of one sequence in one layer."""
    if not work.prefill:
        return min(work.context, window or work.context)
    first = min(work.length, window or work.length)
    return first * (first + 1) / 2 + (work.length - first) * first


def _weight_reads(sizes: ModelSizes, layout: Layout, work: Work) -> float:
    """Return the bytes of weights that the products of a step read; experts that no token visits stay unread.

    Tokens are taken to choose experts evenly and independently. Gathered, all experts have been written.
    """
    total = 0.0
    for weight in sizes.weights:
        if not weight.multiplies:
            continue
        used = _part(weight, layout, "compute") * work.weight_bytes * max(weight.layers, 1)
        if weight.each_expert and layout.gather == 1:
            used *= 1 - (1 - sizes.visits / sizes.experts) ** work.tokens(layout)
        total += used
    return total


def _activation_bytes(sizes: ModelSizes, layout: Layout, work: Work) -> float:
    """Return the most bytes that a layer holds at once beside weights and cache: an estimate.

    The residual stream twice (kept, and what enters the branch), the larger of attention (queries, keys, values,
    output) and mlp (each input, and for experts the rows that were sorted), the logits.
    """
    tokens, a, x = work.tokens(layout), work.activation_bytes, layout.x
    stream = tokens * sizes.embed * (1 / layout.group + 1 / x if x > 1 else 2)
    spread = tokens * layout.gather if layout.kv == "sequence" and not work.prefill else 0
    query = max(tokens * sizes.heads / layout.m, spread * sizes.heads) * sizes.head_dim
    kv = max(tokens * sizes.kv_heads / layout.p, spread * sizes.kv_heads) * sizes.head_dim
    if layout.kv == "sequence" and work.prefill:
        kv = max(kv, tokens * layout.gather * sizes.kv_heads * sizes.head_dim)
    hidden = sum(
        tokens * branch.visits * (branch.num_inputs * branch.width / layout.m + 2 * branch.routed * sizes.embed / x)
        for branch in sizes.branches
    )
    logits = work.rows(layout, layout.gather) * up(sizes.vocab, layout.m) * FP32
    return a * (stream + max(2 * query + 2 * kv, hidden)) + logits
