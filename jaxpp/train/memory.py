"""What one training step takes on one device, predicted from arrows, layout and batch alone: no compile, no arrays.

What a block keeps for its backward pass is read off its weights. A *branch* is a weight that reads something and writes
``embed``, back to the residual stream: one that reads ``heads head_dim`` ends an attention, any other an mlp with an
activation function. All sizes below are those on one device; N is the tokens of a microbatch there, c the bytes of the
compute dtype.

    kept by a block     N c x (what its weights into heads, mlp ... write + what its branches read), and per branch
                        N embed (8 + 2 c) for the norm, and per mlp 3 N c hidden for the activation function
    attention scores    batch x heads x seq x seq x (4 + c), where the kernel is xla
    loss                2 fp32 copies of a chunk's logits, 2 of the head's gradient
    gradients           fp32, split as the moments; twice when microbatches are added up

Not counted: batch, counters, collective buffers, workspaces of library calls, fragmentation, fusions that the compiler
refuses. On XLA:CPU bf16 is kept as fp32 (predicted / compiled = 0.65), and unrolled layers are not recomputed whatever
the remat policy (0.35 for full). Of experts, those that a token visits count, without the padding of their tiles and
the buffers of their exchange (0.6 on expert:4 data:2). Weights that multiply in a way of their own count as products.

Scanned fp32 decoders of 1 M to 15 M parameters (jax 0.10.2, eight CPU devices, meshes data:1, data:8, fsdp:8 and data:2
fsdp:2 tensor:2, all remat policies, 1 and 2 microbatches): predicted / compiled = 0.88 to 1.22.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from jaxpp import dims, tree
from jaxpp.nn.attention import choose_kernel
from jaxpp.nn.loss import num_chunks_for
from jaxpp.parallel import Layout, bytes_per_device
from jaxpp.parallel.layout import Place
from jaxpp.pipeline.spmd import num_microbatches
from jaxpp.schedule import simulate, unit_costs
from jaxpp.train.program import Program

STREAM = "embed"  # the dim of the residual stream
LOGITS_IN_FLIGHT = 2  # fp32 arrays of a chunk's logits alive at once
FP32_BYTES = 4


@dataclass(frozen=True)
class Memory:
    """Bytes of one training step on one device.

    Args:
        weights_bytes: as stored.
        moments_bytes: optimizer state.
        gradients_bytes: of all weights.
        copy_bytes: weights in the compute dtype; 0 where it is the stored one.
        gathered_bytes: weights whole in use, beside their shards, and their gradients before they are split.
        kept_bytes: activations that the forward pass keeps, by remat policy, without scores.
        scores_bytes: attention scores that it keeps.
        block_bytes: what the backward pass of one block takes besides.
        loss_bytes: a chunk of logits and the gradient of the head.
    """

    weights_bytes: int
    moments_bytes: int
    gradients_bytes: int
    copy_bytes: int
    gathered_bytes: int
    kept_bytes: int
    scores_bytes: int
    block_bytes: int
    loss_bytes: int

    @property
    def state_bytes(self) -> int:
        """Weights and optimizer state: what lives between steps."""
        return self.weights_bytes + self.moments_bytes

    @property
    def total_bytes(self) -> int:
        """The peak; of `block_bytes` and `loss_bytes`, which are not alive together, the larger."""
        held = self.state_bytes + self.gradients_bytes + self.copy_bytes + self.gathered_bytes
        return held + self.kept_bytes + self.scores_bytes + max(self.block_bytes, self.loss_bytes)


def memory(program: Program, batch_size: int, seq_len: int, active_experts: int = 0) -> Memory:
    """Predict the memory of one step.

    Args:
        program: its abstract state is all that is read.
        batch_size: rows of the global batch.
        seq_len: tokens of a row.
        active_experts: experts that each token visits, where there are experts.
    """
    state, sizes = program.abstract_state, Sizes(program, batch_size, seq_len, active_experts)
    scores = sizes.scores_elements * (FP32_BYTES + sizes.item)
    kept, recomputed = sizes.kept_by_block, program.plan.remat != "none"
    return Memory(
        weights_bytes=state_bytes(state.params),
        moments_bytes=state_bytes(state.optimizer),
        gradients_bytes=sizes.gradients_bytes * (2 if program.plan.microbatches > 1 else 1),
        copy_bytes=sizes.copy_bytes,
        gathered_bytes=sizes.gathered_bytes,
        kept_bytes=int(sizes.num_layers * kept * sizes.ticks + sizes.ends_bytes),
        scores_bytes=0 if recomputed else scores * sizes.num_layers,
        block_bytes=int(sizes.flight_bytes + (sizes.block_bytes - kept + scores if recomputed else 0)),
        loss_bytes=sizes.loss_bytes,
    )


def state_bytes(part: Any) -> int:
    """Count the bytes of a part of an abstract state on one device."""
    return sum(bytes_per_device(leaf) for leaf in jax.tree.leaves(part))


@dataclass(frozen=True)
class Weight:
    """One weight as the formulas see it.

    Args:
        arrow: its arrow.
        shape: its whole shape.
        also: the second arrow by which it is read, if it is tied.
    """

    arrow: dims.Arrow
    shape: tuple[int, ...]
    also: dims.Arrow | None

    @property
    def sizes(self) -> dict[str, int]:
        """Size of each of its dims."""
        return dict(zip(self.arrow.dims, self.shape, strict=True))

    @property
    def multiplies(self) -> bool:
        """Whether it is a product inside a block (not a scale, a table or the head)."""
        return bool(self.arrow.reads) and not self.arrow.is_lookup() and "vocab" not in self.arrow.writes


@dataclass(frozen=True)
class Sizes:
    """The sizes that the formulas are made of, on one device.

    Args:
        program: a program for all devices.
        batch_size: rows of the global batch.
        seq_len: tokens of a row.
        active_experts: experts that each token visits, where there are experts.
    """

    program: Program
    batch_size: int
    seq_len: int
    active_experts: int

    @property
    def layout(self) -> Layout:
        """Where arrays live."""
        return self.program.layout

    @property
    def item(self) -> int:
        """Bytes of a number in the compute dtype."""
        return self.program.plan.dtype().itemsize

    @cached_property
    def weights(self) -> list[Weight]:
        """All weights."""
        known = self.layout.dims
        nodes, arrows = tree.named_nodes(self.program.params), dims.arrows(self.program.params, known)
        also = {path: node.get_metadata().get("also") for path, node in nodes.items()}
        return [Weight(a, nodes[p].shape, dims.parse(also[p], known) if also[p] else None) for p, a in arrows.items()]

    @cached_property
    def size(self) -> dict[str, int]:
        """Size of each dim, of any weight that has it."""
        return {dim: size for w in self.weights for dim, size in w.sizes.items()}

    def width(self, names: tuple[str, ...], place: Place = "inside", of: Weight | None = None) -> int:
        """Return the elements that one device holds of an array with these dims, sized as those of a weight."""
        sizes = of.sizes if of else self.size
        return math.prod(-(-sizes[dim] // self.layout.num_shards(dim, place)) for dim in names)

    def visits(self, weight: Weight) -> int:
        """Return how many of the arrays that a weight is a stack of (experts) each token meets."""
        return self.active_experts if "experts" in weight.arrow.stacked and self.active_experts else 1

    def rows(self, place: Place) -> float:
        """Return the rows of a microbatch on one device."""
        return self.batch_size / self.program.plan.microbatches / self.layout.num_shards("batch", place)

    @property
    def inside(self) -> float:
        """Tokens of a microbatch on one device, inside a block."""
        return self.rows("inside") * self.seq_len

    @property
    def stream(self) -> float:
        """Elements of the residual stream on one device."""
        between = self.rows("residual") * self.seq_len / self.layout.num_shards("seq", "residual")
        return between * self.size.get(STREAM, 0)

    @property
    def num_layers(self) -> int:
        """Blocks."""
        return max((w.sizes.get("layers", 1) for w in self.weights if w.multiplies), default=1)

    @property
    def ticks(self) -> float:
        """Microbatches whose activations a pipeline holds, over all of them.

        Differentiated, each tick keeps its own, the bubble's too; by a table, a rank keeps as many as that says.
        """
        pipeline, layout, table = self.program.plan.pipeline, self.layout, self.program.table
        if table is not None:
            return max(simulate(table, unit_costs(table)).peak_activations) / table.num_microbatches
        work = num_microbatches(pipeline, layout) * pipeline.num_chunks()
        return (work + layout.mesh.shape.get("stage", 1) - 1) / work

    @property
    def products(self) -> list[Weight]:
        """Weights that multiply inside a block."""
        return [w for w in self.weights if w.multiplies]

    @property
    def branches(self) -> list[Weight]:
        """Products that write the residual stream."""
        return [w for w in self.products if w.arrow.writes == (STREAM,)]

    @property
    def attends(self) -> bool:
        """Whether there is attention."""
        return any(w.arrow.reads == ("heads", "head_dim") for w in self.branches)

    @property
    def scores_elements(self) -> int:
        """Elements of one block's attention scores on one device; 0 where a fused kernel never holds them."""
        if not self.attends:
            return 0
        plan = self.program.plan
        kernel = choose_kernel(plan.attention, plan.dtype(), self.seq_len, self.size["head_dim"])
        return 0 if kernel != "xla" else int(self.rows("inside") * self.width(("heads",)) * self.seq_len**2)

    @property
    def written(self) -> float:
        """Elements that the weights into a branch write."""
        into = [w for w in self.products if w.arrow.writes != (STREAM,)]
        return self.inside * sum(self.visits(w) * self.width(w.arrow.writes, of=w) for w in into)

    @property
    def block_bytes(self) -> int:
        """Bytes that one block keeps when nothing is recomputed, without scores."""
        hidden = [
            (self.visits(w) * self.width(w.arrow.reads, of=w), w.arrow.reads == ("heads", "head_dim"))
            for w in self.branches
        ]
        read = sum(width if attends else 4 * width for width, attends in hidden)
        entered = self.inside * self.size.get(STREAM, 0)
        norms = len(self.branches) * (self.stream * (2 * FP32_BYTES + self.item) + entered * self.item)
        return int(norms + self.item * (self.written + self.inside * read))

    @property
    def kept_by_block(self) -> float:
        """Bytes that one block keeps for its backward pass under the remat policy, without scores."""
        stream = self.stream * self.item
        return {
            "none": self.block_bytes,
            "full": stream,
            "block": stream * len(self.branches),
            "dots": stream * len(self.branches) + self.written * self.item,
        }[self.program.plan.remat]

    @property
    def ends_bytes(self) -> float:
        """Bytes of the stream kept before the first block and after the last."""
        return self.stream * (2 * FP32_BYTES + 2 * self.item)

    @property
    def flight_bytes(self) -> int:
        """Bytes of gradients of scores alive in the backward pass of a block."""
        alive = 3 if self.program.plan.remat == "none" else 2
        return alive * FP32_BYTES * self.scores_elements

    @property
    def copy_bytes(self) -> int:
        """Bytes of the weights in the compute dtype, where they are stored in another."""
        stored = jax.tree.leaves(self.program.abstract_state.params)
        other = [x for x in stored if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize != self.item]
        return sum(bytes_per_device(x) * self.item // x.dtype.itemsize for x in other)

    @property
    def gradients_bytes(self) -> int:
        """Bytes of the gradients of all weights, fp32."""
        return FP32_BYTES * sum(self.width(w.arrow.dims, "moments", w) for w in self.weights)

    @property
    def gathered_bytes(self) -> int:
        """Bytes of one block's weights gathered, and of their gradients before these are split."""
        total = 0
        for w in self.products:
            dims_of_one = w.arrow.unstack().dims
            whole = self.width(dims_of_one, "compute", w)
            total += self.item * whole * (whole > self.width(dims_of_one, "weights", w))
            total += FP32_BYTES * whole * (whole > self.width(dims_of_one, "moments", w))
        return total

    @cached_property
    def head(self) -> int:
        """Elements of the head in use on one device; 0 where there is none."""
        heads = [a for w in self.weights for a in (w.arrow, w.also) if a and a.reads and "vocab" in a.writes]
        return self.width(heads[0].dims, "inside") if heads else 0

    @property
    def loss_bytes(self) -> int:
        """Bytes of a chunk's logits, of the head's gradient as it adds up, and of the head in use."""
        if not self.head:
            return 0
        chunk = self.inside / num_chunks_for(int(self.inside), self.seq_len)
        logits = FP32_BYTES * LOGITS_IN_FLIGHT * chunk * self.width(("vocab",))
        return int(logits + (2 * FP32_BYTES + self.item) * self.head)
