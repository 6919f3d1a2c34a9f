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
from jaxpp.quantities import show_bytes
from jaxpp.train.config import Run, active_experts
from jaxpp.train.memory import Memory, memory
from jaxpp.train.program import Program
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
    predicted = memory(program, run.data.batch_size, run.data.seq_len, active_experts(run.model))
    parts = [_summary(run, program), _weights(program), _memory(program, predicted)]
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


def _summary(run: Run, program: Program) -> str:
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
        ("step", f"{data.batch_size} rows x {data.seq_len} = {tokens:,} tokens{parts}"),
        ("FLOPs", f"{flops:.4g} per token, {flops * tokens:.4g} per step (forward and backward, nothing recomputed)"),
    ]
    return "\n".join(columns(rows))


def _count(program: Program) -> int:
    return dims.num_parameters(program.params)


def _weights(program: Program) -> str:
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


def _memory(program: Program, m: Memory) -> str:
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


def abstract_batch(run: Run, program: Program) -> dict[str, Any]:
    """Return a batch of the run as ``jax.ShapeDtypeStruct``, laid out as the loader's."""
    shape, place = (run.data.batch_size, run.data.seq_len), program.layout.batch_sharding(2)
    return {name: jax.ShapeDtypeStruct(shape, dtype, sharding=place) for name, dtype in BATCH_DTYPES.items()}


def compiled_bytes(run: Run, program: Program) -> dict[str, int]:
    """Compile the step and return the compiler's account of one device: argument, output, temp, alias and peak."""
    executable = program.step.lower(program.abstract_state, abstract_batch(run, program)).compile()
    stats = executable.memory_analysis()
    kinds = ("argument", "output", "temp", "alias")
    found = {kind: getattr(stats, f"{kind}_size_in_bytes") for kind in kinds}
    return {**found, "peak": found["argument"] + found["output"] + found["temp"] - found["alias"]}


def _compiled(run: Run, program: Program, predicted: Memory) -> str:
    found = compiled_bytes(run, program)
    ratio = predicted.total_bytes / found["peak"]
    note = f"argument + output + temp - alias; predicted / compiled = {ratio:.2f}"
    rows = [(f"  {kind}", show_bytes(value), note if kind == "peak" else "") for kind, value in found.items()]
    return "\n".join(["the compiler's account of the same step, on each device", *columns(rows, right=(1,))])


def _notes(program: Program) -> str:
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
