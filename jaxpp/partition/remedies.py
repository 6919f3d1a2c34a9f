"""What to say where nothing fits: how much is missing, and what would fit, in numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jaxpp.partition.candidates import Candidate, Phase, Request, most
from jaxpp.partition.choose import described
from jaxpp.partition.costs import USABLE, memory
from jaxpp.partition.layouts import layouts

MOST_TIMES = 64  # devices that are tried, over those there are


def nothing_fits(request: Request, prefill: Sequence[Candidate], decode: Sequence[Candidate]) -> str:
    """Write the message for a mesh on which no layout fits in one of the phases."""
    name, failing = ("prefill", prefill) if prefill[0].problem else ("decode", decode)
    least = min(failing, key=lambda one: one.bytes.total)
    gib, device = 2**30, request.device
    taken = least.bytes
    load = f"batch {request.batch} x context {request.context}"
    load += f", prompts of {request.prompt} in one step" if name == "prefill" else ""
    limit = f"{USABLE * device.memory_bytes / gib:.1f} GiB, {USABLE:.0%} of a device's memory"
    if request.kv_share < USABLE:
        limit += f" (cache {request.kv_share * device.memory_bytes / gib:.1f} GiB)"
    return (
        f'mesh "{request.mesh}" of {device.name}: no layout fits for {name} at {load}. The least, '
        f"{described(least)}, takes {taken.total / gib:.1f} GiB (weights {taken.weights / gib:.1f}, cache "
        f"{taken.kv / gib:.1f}, activations {taken.activations / gib:.1f}); there are {limit}. "
        f"{'; '.join(_remedies(request)) or 'Nothing alone would do: combine more devices, int8 and a smaller load'}"
    )


def _remedies(request: Request) -> Iterator[str]:
    times = next((t for t in _powers() if fits(request.changed(mesh=request.mesh.times(t)))), 0)
    if times:
        yield f'mesh "{request.mesh.times(times)}" would'
    if prompt := most(lambda n: fits(request.changed(prompt=n)), request.prompt - 1):
        yield f"prompt {prompt} would"
    if batch := most(lambda n: fits(request.changed(batch=n)), request.batch - 1):
        yield f"batch {batch} would"
    if context := most(lambda n: fits(request.changed(context=n)), request.context - 1):
        yield f"context {context} would"
    if request.dtype not in ("int8", "int4") and fits(request.changed(dtype="int8")):
        yield "dtype int8 would"
    if request.kv_dtype not in ("int8", "int4") and fits(request.changed(kv_dtype="int8")):
        yield "kv_dtype int8 would"
    if not request.dtype.startswith("int") and fits(request.changed(dtype="int8", kv_dtype="int8")):
        yield "dtype and kv_dtype int8 would"


def _powers() -> Iterator[int]:
    times = 2
    while times <= MOST_TIMES:
        yield times
        times *= 2


def fits(request: Request) -> bool:
    """Say whether each phase has a layout that fits."""
    found, _ = layouts(request.sizes, request.mesh)
    phases: tuple[Phase, ...] = ("prefill", "decode")

    def one(phase: Phase) -> bool:
        work = request.work(phase, request.batch, request.context)
        return any(not request.problem(memory(request.sizes, layout, work)) for layout in found)

    return all(one(phase) for phase in phases)
