"""What a run is made of, as plain text: every weight, its sharding, the memory and FLOPs of one step.

Reads abstract state only: no arrays, and no compile unless asked for. The formulas of the memory, and what they leave
out, stand in `jaxpp.train.memory`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxpp import dims, tree
from jaxpp.mesh import MeshSpec
from jaxpp.parallel import Layout, bytes_per_device
from jaxpp.pipeline.spmd import num_microbatches
from jaxpp.quantities import show_bytes
from jaxpp.train.config import Run, active_experts
from jaxpp.train.memory import Memory, memory
from jaxpp.train.pipelined import PipelineProgram
from jaxpp.train.pipelined_memory import rank_memory, unit_timeline
from jaxpp.train.program import Program
from jaxpp.train.programs import AnyProgram
from jaxpp.train.session import check

COLUMNS = 120  # a table is set closer where this lets it fit

SHORT_DTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "int32": "i32", "uint32": "u32"}

BATCH_DTYPES = {
    "tokens": jnp.int32, "targets": jnp.int32, "segments": jnp.int32, "positions": jnp.int32, "weights": jnp.float32,
}  # fmt: skip


def report(run: Run, compiled: bool = False) -> str:
    """Describe a run: its weights, their layout, the memory and FLOPs of one step.

    Args:
        run: what would be trained.
        compiled: compile the step too, and compare the compiler's own account with the prediction.

    Returns:
        Lines of at most 120 columns for weights of ordinary names.

    Raises:
        ValueError: the run cannot work; as `jaxpp train` would say.
    """
    program = check(run)
    if compiled and isinstance(program, PipelineProgram):
        raise ValueError(
            f"inspect --compile: schedule {program.schedule.name} runs a program for each stage and operation, which "
            "have no common account; leave --compile away"
        )
    sizes = run.data.batch_size, run.data.seq_len, active_experts(run.model)
    parts = [_summary(run, program), _weights(program)]
    if isinstance(program, PipelineProgram):
        ranks = rank_memory(program, *sizes)
        parts += [_ranks(program, ranks), _memory(program, max(ranks, key=lambda one: one.total_bytes))]
    else:
        predicted = memory(program, *sizes)
        parts.append(_memory(program, predicted))
        if compiled:
            parts.append(_compiled(run, program, predicted))
    return "\n\n".join(part for part in (*parts, _notes(program)) if part)


def columns(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Align the cells of a table; columns numbered in `right` end at the same place."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    gap = "  " if sum(widths) + 2 * len(widths) - 2 <= COLUMNS else " "

    def line(row: Sequence[str]) -> str:
        cells = [
            cell.rjust(w) if i in right else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        return gap.join(cells).rstrip()

    return [line(row) for row in rows]


def split_words(layout: Layout, arrow: dims.Arrow) -> str:
    """Write how a stored weight is split, ``"embed/fsdp heads/tensor"``; ``"-"`` where every device holds it whole."""
    split = [(dim, layout.axes(dim, "weights")) for dim in arrow.dims]
    return " ".join(f"{dim}/{'+'.join(axes)}" for dim, axes in split if axes) or "-"


def _summary(run: Run, program: AnyProgram) -> str:
    mesh, plan, data = program.layout.mesh, run.plan, run.data
    device = mesh.devices.flat[0]
    spec = MeshSpec.parse(plan.mesh).resolve(mesh.size)
    tokens = data.batch_size * data.seq_len
    flops = dims.flops_per_token(program.params, data.seq_len, plan.dims, active_experts(run.model))
    parts = f", in {plan.microbatches} microbatches" if plan.microbatches > 1 else ""
    rows = [
        ("model", f"{getattr(type(run.model), 'family', type(run.model).__name__)}, {_count(program):,} parameters"),
        ("mesh", f"{spec} = {mesh.size} x {device.device_kind}; schemes {' '.join(plan.scheme_names()) or 'none'}"),
        ("plan", f"compute {plan.compute_dtype}, remat {plan.remat}, layers {plan.layers}, attention {plan.attention}"),
        *([("pipeline", words)] if (words := _pipeline(program)) else []),
        ("step", f"{data.batch_size} rows x {data.seq_len} = {tokens:,} tokens{parts}"),
        ("FLOPs", f"{flops:.4g} per token, {flops * tokens:.4g} per step (forward and backward, nothing recomputed)"),
    ]
    return "\n".join(columns(rows))


def _pipeline(program: AnyProgram) -> str:
    """Say in one line how the ranks of axis stage work together; nothing where there is none."""
    ranks, config = program.layout.mesh.shape.get("stage", 1), program.plan.pipeline
    if ranks == 1:
        return ""
    if isinstance(program, PipelineProgram):
        cuts, bubble = "+".join(map(str, program.cut.cuts)), f"{unit_timeline(program).bubble_ratio:.0%}"
        count, how = program.schedule.num_microbatches, f"layers {cuts}, a program for each stage and operation"
    else:
        count, how = num_microbatches(config, program.layout), "one program for all"
        idle = ranks - 1
        bubble = f"{idle / (count * config.num_chunks() + idle):.0%}"
    return f"{config.schedule} on {ranks} ranks, {count} microbatches, {how}; bubble {bubble} (F = B = W)"


def _ranks(program: PipelineProgram, ranks: Sequence[Memory]) -> str:
    """Lay the ranks of a pipeline side by side; bytes are those on each device of a rank."""
    timeline = unit_timeline(program)
    rows: list[Sequence[str]] = [
        ("  rank", "stages", "layers", "weights", "optimizer", "gradients", "held", "kept", "peak", "idle")
    ]
    for rank, m in enumerate(ranks):
        stages = program.schedule.held_by(rank)
        sizes = (m.weights_bytes, m.moments_bytes, m.gradients_bytes)
        layers = "+".join(str(program.cut.cuts[stage]) for stage in stages)
        idle = timeline.bubble_s[rank] / timeline.makespan_s
        held = str(timeline.peak_activations[rank])
        ends = (show_bytes(m.kept_bytes), show_bytes(m.total_bytes), f"{idle:.0%}")
        rows.append((f"  {rank}", " ".join(map(str, stages)), layers, *map(show_bytes, sizes), held, *ends))
    title = "ranks of the pipeline; bytes are those on each device, held counts stages x microbatches"
    return "\n".join([title, *columns(rows, right=range(3, 10))])


def _count(program: AnyProgram) -> int:
    return dims.num_parameters(program.params)


def _weights(program: AnyProgram) -> str:
    arrows = dims.arrows(program.params, program.layout.dims)
    leaves = tree.named_leaves(program.abstract_state.params)
    shapes = {path: "x".join(map(str, leaf.shape)) for path, leaf in leaves.items()}
    width = max(map(len, shapes.values()))
    rows = [("parameter", "arrow", "shape and dtype", "sharding", "bytes")]
    for path, leaf in leaves.items():
        dtype = jnp.dtype(leaf.dtype).name
        kind = f"{shapes[path]:{width}} {SHORT_DTYPES.get(dtype, dtype)}"
        split = split_words(program.layout, arrows[path])
        rows.append((path, str(arrows[path]), kind, split, show_bytes(bytes_per_device(leaf))))
    total = sum(bytes_per_device(leaf) for leaf in leaves.values())
    rows.append(("total", "", f"{_count(program):,}", "", show_bytes(total)))
    lines = columns(rows, right=(4,))
    return "\n".join(["weights; bytes are those on each device", *lines])


def _memory(program: AnyProgram, m: Memory) -> str:
    loss_is_less, less = m.loss_bytes <= m.block_bytes, "not in the peak, the other being larger"
    rows = [
        ("weights", m.weights_bytes, ""),
        ("optimizer state", m.moments_bytes, ""),
        ("gradients", m.gradients_bytes, "two sets: microbatches add up" if program.plan.microbatches > 1 else ""),
        ("weights to compute with", m.copy_bytes, program.plan.compute_dtype if m.copy_bytes else "the stored ones"),
        ("gathered weights", m.gathered_bytes, "of one block, with their gradients before these are split"),
        ("activations kept", m.kept_bytes, f"remat {program.plan.remat}"),
        ("attention scores kept", m.scores_bytes, "" if m.scores_bytes else "none: fused, recomputed or no attention"),
        ("backward of one block", m.block_bytes, "" if loss_is_less else less),
        ("loss", m.loss_bytes, "logits of a chunk, the head, its gradient" + (f"; {less}" if loss_is_less else "")),
        ("predicted peak", m.total_bytes, ""),
    ]
    lines = columns([(f"  {name}", show_bytes(value), note) for name, value, note in rows], right=(1,))
    return "\n".join(["memory of one training step, on each device", *lines])


def abstract_batch(run: Run, program: AnyProgram) -> dict[str, Any]:
    """Return a batch of the run as ``jax.ShapeDtypeStruct``, laid out as the loader's."""
    shape, place = (run.data.batch_size, run.data.seq_len), program.layout.batch_sharding(2)
    return {name: jax.ShapeDtypeStruct(shape, dtype, sharding=place) for name, dtype in BATCH_DTYPES.items()}


def compiled_bytes(run: Run, program: AnyProgram) -> dict[str, int]:
    """Compile the step and return the compiler's account of one device: argument, output, temp, alias and peak."""
    assert isinstance(program, Program)
    executable = program.step.lower(program.abstract_state, abstract_batch(run, program)).compile()
    stats = executable.memory_analysis()
    kinds = ("argument", "output", "temp", "alias")
    found = {kind: getattr(stats, f"{kind}_size_in_bytes") for kind in kinds}
    return {**found, "peak": found["argument"] + found["output"] + found["temp"] - found["alias"]}


def _compiled(run: Run, program: AnyProgram, predicted: Memory) -> str:
    found = compiled_bytes(run, program)
    ratio = predicted.total_bytes / found["peak"]
    note = f"argument + output + temp - alias; predicted / compiled = {ratio:.2f}"
    rows = [(f"  {kind}", show_bytes(value), note if kind == "peak" else "") for kind, value in found.items()]
    return "\n".join(["the compiler's account of the same step, on each device", *columns(rows, right=(1,))])


def _notes(program: AnyProgram) -> str:
    layout = program.layout
    splitting = sorted({a for dim in layout.rules.weights for a in layout.axes(dim, "weights")})
    if not splitting:
        return ""
    arrows, leaves = dims.arrows(program.params, layout.dims), tree.named_leaves(program.abstract_state.params)
    whole = [path for path, arrow in arrows.items() if split_words(layout, arrow) == "-"]
    if not whole:
        return ""
    held = show_bytes(sum(bytes_per_device(leaves[path]) for path in whole))
    named = ", ".join(whole[:3]) + (", ..." if len(whole) > 3 else "")
    return f"note: axes {' '.join(splitting)} split no dim of {len(whole)} weights, {held} on each device:\n  {named}"
