"""What a step sends: every collective of a layout, with its message and how often it runs.

Letters: t tokens of this device, E embed, F mlp, x parts of embed, m parts of heads and mlp, p parts of kv_heads, N
devices over which weights are gathered, n all devices of the group. Sums over x occur where x > 1.

=================  ===================================================================================================
stationary 1D      all-reduce over m of ``t E``, after attention and after the mlp (parallel: one for both)
stationary 2D      for each of the two: all-gather over m to ``t E/x`` and reduce-scatter over m of the same; within
                   the mlp, reduce-scatter over x of ``t F/m`` for each input and all-gather over x of it; all-reduce
                   over n of fp32 mean squares
gathered over N    as 1D over n/N devices on t/N tokens, and all weights all-gathered over N
KV by heads        2D: queries, keys, values scattered over x by heads and the output gathered; 1D: nothing
KV by batch        all-to-all over m of queries, keys, values and of the output; 2D: first scattered over x by batch
KV mixed           the same over m/p of queries and output; keys and values stay
KV by sequence     decode: queries, keys, values all-gathered; max and sum all-reduced in fp32, the output
                   reduce-scattered; prefill: all-to-all to a share of the tokens, keys and values all-gathered over n
outside of layers  embedding: all-reduce over m of ``t E`` (2D: reduce-scatter of ``t E/x``); head: logits stay split
                   over vocab (2D: reduce-scattered over x, fp32); the best of each part and its id are all-gathered
=================  ===================================================================================================

Batches that do not divide are filled up. Source: Pope et al., Efficiently Scaling Transformer Inference, 2022, section
3 and appendix A; Shoeybi et al., Megatron-LM, 2019; factors (1 - 1/n) and the gated mlp: derived.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from jaxpp.partition.layouts import Layout
from jaxpp.partition.sizes import ModelSizes

Kind = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all"]
FP32 = 4


@dataclass(frozen=True)
class Work:
    """What one step does.

    Args:
        prefill: whether it reads prompts; else it adds one token to each sequence.
        batch: sequences, on the whole mesh.
        length: tokens of each sequence in this step.
        context: tokens of each sequence that the cache has room for, and that a token to be decoded sees.
        weight_bytes: of one entry of a weight.
        activation_bytes: of an activation.
        kv_bytes: of the cache.
    """

    prefill: bool
    batch: int
    length: int
    context: int
    weight_bytes: float
    activation_bytes: int
    kv_bytes: float

    def rows(self, layout: Layout, parts: int = 1) -> int:
        """Return the sequences of one device where a group splits them so often."""
        return up(up(self.batch, layout.data), parts)

    def tokens(self, layout: Layout) -> int:
        """Return the tokens that one device multiplies by weights."""
        if self.prefill and layout.kv == "sequence":
            return self.rows(layout) * up(self.length, layout.group) * layout.group // layout.gather
        return self.rows(layout, layout.gather) * self.length


@dataclass(frozen=True)
class Collective:
    """One kind of message of a step.

    Args:
        kind: as XLA calls it.
        part: what of the model sends it.
        group: devices that take part in one.
        message_bytes: of the whole array: the result of an all-gather, the argument of the others, on one device.
        count: how often it runs.
    """

    kind: Kind
    part: str
    group: int
    message_bytes: float
    count: int = 1

    @property
    def wire_bytes(self) -> float:
        """Bytes that one device sends for all of them, in rings."""
        times = 2 if self.kind == "all-reduce" else 1
        return self.count * times * self.message_bytes * (self.group - 1) / self.group


def up(size: int, parts: int) -> int:
    """Divide and round up."""
    return -(-size // parts)


def step_collectives(sizes: ModelSizes, layout: Layout, work: Work) -> tuple[Collective, ...]:
    """List the collectives of one step: those of all layers, and those outside."""
    each = (replace(one, count=one.count * sizes.num_layers) for one in layer_collectives(sizes, layout, work))
    return (*each, *outer_collectives(sizes, layout, work))


def layer_collectives(sizes: ModelSizes, layout: Layout, work: Work) -> tuple[Collective, ...]:
    """List the collectives of one layer."""
    attention = _sequence if layout.kv == "sequence" else _heads if layout.kv == "heads" else _batch
    parts = (_residual, attention, _mlp, _sums)
    each = (one for part in parts for one in part(sizes, layout, work))
    return _real((*each, *_gathers(sizes, layout, work, inside=True)))


def outer_collectives(sizes: ModelSizes, layout: Layout, work: Work) -> tuple[Collective, ...]:
    """List the collectives of embedding, final norm, head and the choice of the next token."""
    x, m, a = layout.x, layout.m, work.activation_bytes
    rows, embedded = work.rows(layout, layout.gather), work.tokens(layout) * sizes.embed // x * a
    vocab = up(sizes.vocab, x * m) * x
    found = [
        Collective("all-reduce" if x == 1 else "reduce-scatter", "embedding", m, embedded),
        Collective("all-gather", "head best", x * m, rows * x * m * FP32, 2),
    ]
    if x > 1:
        found += [
            Collective("all-reduce", "norm", layout.group, rows * FP32),
            Collective("all-gather", "head", m, rows * sizes.embed // x * a),
            Collective("reduce-scatter", "head", x, rows * vocab * FP32),
        ]
    return _real((*found, *_gathers(sizes, layout, work, inside=False)))


def _real(found: Iterable[Collective]) -> tuple[Collective, ...]:
    return tuple(one for one in found if one.group > 1 and one.count)


def _residual(sizes: ModelSizes, layout: Layout, work: Work) -> Iterator[Collective]:
    """Into and out of attention and mlp; 1D, each mlp adds up its own output."""
    size = work.tokens(layout) * sizes.embed // layout.x * work.activation_bytes
    if layout.x > 1:
        for part in ("block",) if sizes.parallel else ("attention", "mlp"):
            yield Collective("all-gather", part, layout.m, size)
            yield Collective("reduce-scatter", part, layout.m, size)
        return
    routed = sum(branch.routed for branch in sizes.branches)
    if sizes.parallel:
        yield Collective("all-reduce", "block", layout.m, size)
        yield Collective("all-reduce", "mlp", layout.m, size, routed)
    else:
        yield Collective("all-reduce", "attention", layout.m, size)
        yield Collective("all-reduce", "mlp", layout.m, size, len(sizes.branches))


def _mlp(sizes: ModelSizes, layout: Layout, work: Work) -> Iterator[Collective]:
    """Hidden units, which are partial sums over x; and the router's logits."""
    tokens, a = work.tokens(layout), work.activation_bytes
    for branch in sizes.branches:
        size = tokens * branch.visits * branch.width // layout.m * a
        yield Collective("reduce-scatter", "mlp", layout.x, size, branch.num_inputs)
        yield Collective("all-gather", "mlp", layout.x, size)
    small = {"mlp", "heads", "kv_heads", "vocab"}
    for weight in sizes.weights:
        if weight.layers and weight.arrow.reads == ("embed",) and not small & set(weight.arrow.writes):
            yield Collective("all-reduce", "router", layout.x, tokens * weight.size // sizes.embed * FP32)


def _sums(sizes: ModelSizes, layout: Layout, work: Work) -> Iterator[Collective]:
    """Mean squares over what is split: the residual stream in 2D, all heads where a norm spans them."""
    tokens = work.tokens(layout)
    if layout.x > 1:
        yield Collective("all-reduce", "norm", layout.group, tokens * FP32, sizes.norms)
    if layout.kv == "heads":
        yield Collective("all-reduce", "head norm", layout.group, tokens * FP32, sizes.qk_sums)
    elif layout.kv == "mixed":
        rows = work.rows(layout, layout.cache_parts("batch")) * work.length
        yield Collective("all-reduce", "head norm", layout.p, rows * FP32, sizes.qk_sums)


def _heads(sizes: ModelSizes, layout: Layout, work: Work) -> Iterator[Collective]:
    x, m, p = layout.x, layout.m, layout.p
    entry = work.tokens(layout) * sizes.head_dim * work.activation_bytes
    query = up(sizes.heads // m, x) * x * entry
    yield Collective("reduce-scatter", "attention query", x, query)
    if layout.cache_parts("kv_heads") > p:
        yield Collective("reduce-scatter", "attention kv", x, up(sizes.kv_heads // p, x) * x * entry, 2)
    else:
        yield Collective("all-reduce", "attention kv", x, sizes.kv_heads // p * entry, 2)
    yield Collective("all-gather", "attention out", x, query)


def _batch(sizes: ModelSizes, layout: Layout, work: Work) -> Iterator[Collective]:
    x, parts, kept = layout.x, layout.cache_parts("batch"), layout.cache_parts("kv_heads")
    change = parts // (layout.gather * x)  # devices that hand heads over for sequences
    query, kv = _entries(sizes, layout, work)
    rows = work.rows(layout, parts) * work.length
    kv_change = layout.p // kept
    yield Collective("reduce-scatter", "attention query", x, rows * x * change * query)
    yield Collective("reduce-scatter", "attention kv", x, rows * x * change * kv, 2)
    yield Collective("all-to-all", "attention query", change, rows * change * query)
    yield Collective("all-to-all", "attention kv", kv_change, rows * kv_change * kv, 2)
    yield Collective("all-to-all", "attention out", change, rows * change * query)
    yield Collective("all-gather", "attention out", x, rows * x * change * query)


def _sequence(sizes: ModelSizes, layout: Layout, work: Work) -> Iterator[Collective]:
    x, m, p, n, gather = layout.x, layout.m, layout.p, layout.group, layout.gather
    tokens, a = work.tokens(layout), work.activation_bytes
    query, kv = _entries(sizes, layout, work)
    yield Collective("reduce-scatter", "attention query", x, tokens * query)
    yield Collective("reduce-scatter", "attention kv", x, tokens * kv, 2)
    yield Collective("all-gather", "attention out", x, tokens * query)
    if work.prefill:
        share = tokens * gather // n
        yield Collective("all-to-all", "attention query", m, share * m * query)
        yield Collective("all-to-all", "attention kv", p, share * p * kv, 2)
        yield Collective("all-gather", "attention kv", n, tokens * gather * p * kv, 2)
        yield Collective("all-to-all", "attention out", m, share * m * query)
        return
    rows = tokens * gather
    yield Collective("all-gather", "attention query", n, rows * m * query)
    yield Collective("all-gather", "attention kv", x * p * gather, rows * p * kv, 2)
    yield Collective("all-reduce", "attention softmax", n, rows * sizes.heads * FP32, 2)
    yield Collective("reduce-scatter", "attention out", n, rows * sizes.heads * sizes.head_dim * a)


def _entries(sizes: ModelSizes, layout: Layout, work: Work) -> tuple[int, int]:
    """Return the bytes of one token's queries, and of its keys, on one device after their products."""
    entry = sizes.head_dim * work.activation_bytes
    return sizes.heads // layout.m * entry, sizes.kv_heads // layout.p * entry


def _gathers(sizes: ModelSizes, layout: Layout, work: Work, inside: bool) -> Iterator[Collective]:
    """Weights that are stored in finer parts than they are used in."""
    for weight in sizes.weights:
        used = layout.shards(weight.arrow, "compute")
        group = layout.shards(weight.arrow, "weights") // used
        if bool(weight.layers) == inside:
            yield Collective("all-gather", f"weights {weight.path}", group, weight.size / used * work.weight_bytes)
