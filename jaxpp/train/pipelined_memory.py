"""What one step of a pipeline takes on a device of each rank, predicted: stages, schedule and formulas, no compile.

The formulas are those of `jaxpp.train.memory`, on a rank's own mesh, for the rows of a microbatch. A rank holds the
weights of its stages and their gradients, the optimizer state of those that it owns, and the activations of as many
microbatches as the table says. Values that go from one operation to another are arrays: nothing is fused away.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax

from jaxpp.parallel import PipelineConfig
from jaxpp.schedule import Costs, simulate, unit_costs
from jaxpp.schedule.simulate import Timeline
from jaxpp.train.memory import FP32_BYTES, Memory, Sizes, state_bytes
from jaxpp.train.pipelined import PipelineProgram


def rank_memory(program: PipelineProgram, batch_size: int, seq_len: int, active_experts: int = 0) -> tuple[Memory, ...]:
    """Predict, for each rank, the memory of one step on one of its devices.

    Args:
        program: its shapes are all that is read.
        batch_size: rows of the global batch.
        seq_len: tokens of a row.
        active_experts: experts that each token visits, where there are experts.
    """
    plan = replace(program.plan, pipeline=PipelineConfig())
    alone = replace(program.whole, plan=plan, layout=program.pipeline.places[0].layout)
    sizes = Sizes(alone, batch_size // program.schedule.num_microbatches, seq_len, active_experts)
    held = _timeline(program, sizes).peak_activation_bytes
    return tuple(_of_rank(program, sizes, rank, held[rank]) for rank in range(program.schedule.num_ranks))


def _timeline(program: PipelineProgram, sizes: Sizes) -> Timeline:
    """Play the table with the bytes that each stage keeps of a microbatch."""
    scores = sizes.scores_elements * (FP32_BYTES + sizes.item) if program.plan.remat == "none" else 0
    unit = unit_costs(program.schedule, recompute=1.0)
    stages = [
        replace(one, activation_bytes=int(layers * (sizes.kept_by_block + scores)))
        for one, layers in zip(unit.stages, program.cut.cuts, strict=True)
    ]
    # The loss makes the gradient of the head in its forward pass; it is held as an activation.
    stages[-1] = replace(stages[-1], activation_bytes=stages[-1].activation_bytes + FP32_BYTES * sizes.head)
    boundary = int(sizes.stream * sizes.item)
    return simulate(program.schedule, Costs(tuple(stages), (0.0,), (boundary,)))


def _of_rank(program: PipelineProgram, sizes: Sizes, rank: int, kept_bytes: int) -> Memory:
    schedule, place, stages = program.schedule, program.pipeline.places[rank], program.cut.stages
    held = [stages[stage].params for stage in schedule.held_by(rank)]
    owned = [stage for stage in schedule.held_by(rank) if program.pipeline.executor.owner(stage) is place]
    recomputed, is_last = program.plan.remat != "none", schedule.num_stages - 1 in schedule.held_by(rank)
    scores, narrow = sizes.scores_elements * (FP32_BYTES + sizes.item), sizes.item < FP32_BYTES
    again = int(sizes.block_bytes - sizes.kept_by_block + scores) if recomputed else 0
    return Memory(
        weights_bytes=sum(_bytes(one, place.weight_shardings(one)) for one in held),
        moments_bytes=sum(state_bytes(program.trainer.abstract_optimizer[stage]) for stage in owned),
        gradients_bytes=sum(_bytes(one, place.weight_shardings(one, "moments"), FP32_BYTES) for one in held),
        copy_bytes=max(_bytes(x, place.weight_shardings(x), sizes.item) for x in held) if narrow else 0,
        gathered_bytes=sizes.gathered_bytes,
        kept_bytes=kept_bytes,
        scores_bytes=0,
        block_bytes=sizes.flight_bytes + again,
        loss_bytes=sizes.loss_bytes if is_last else 0,
    )


def _bytes(params: Any, shardings: Any, item: int | None = None) -> int:
    """Count the bytes of weights on one device, with `item` bytes each where that is given."""
    pairs = zip(jax.tree.leaves(params), jax.tree.leaves(shardings), strict=True)
    return sum(math.prod(s.shard_shape(tuple(x.shape))) * (item or x.dtype.itemsize) for x, s in pairs)


def unit_timeline(program: PipelineProgram) -> Timeline:
    """Play the table with F = B = W = R = 1 for a rank's share, to tell its bubble."""
    return simulate(program.schedule, unit_costs(program.schedule, recompute=1.0))
