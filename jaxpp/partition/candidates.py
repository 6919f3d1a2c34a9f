"""One question to the partitioner, and one priced answer: a layout of a phase with its time and memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from jaxpp.partition.costs import USABLE, Bytes, Seconds, memory, seconds, weight_entries
from jaxpp.partition.device_kinds import DeviceKind
from jaxpp.partition.layouts import Layout, ServingMesh
from jaxpp.partition.sizes import ModelSizes
from jaxpp.partition.volumes import Collective, Work, step_collectives

Objective = Literal["latency", "cost"]
Phase = Literal["prefill", "decode"]

DTYPES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "int8": 1.0, "int4": 0.5}
"""Bytes of one entry; scales of quantised arrays add a few percent that are not counted."""

MOST_SEQUENCES = 2**24


@dataclass(frozen=True)
class Request:
    """What is asked: a model, a mesh, a load.

    Args:
        sizes: of the model.
        mesh: of the devices.
        device: their kind.
        batch: sequences at once, on the whole mesh.
        context: tokens of each that the cache has room for.
        prompt: tokens of each that a prompt has.
        dtype: of weights; activations are bfloat16 where it is an integer.
        kv_dtype: of the cache.
        objective: what to rank by.
        kv_share: most of a device's memory that the cache may take.
    """

    sizes: ModelSizes
    mesh: ServingMesh
    device: DeviceKind
    batch: int
    context: int
    prompt: int
    dtype: str
    kv_dtype: str
    objective: Objective
    kv_share: float

    def work(self, phase: Phase, batch: int, context: int) -> Work:
        """Return what a step of a phase does with so many sequences of such a length."""
        length = min(self.prompt, context) if phase == "prefill" else 1
        activation_bytes = 4 if self.dtype == "float32" else 2
        return Work(
            phase == "prefill", batch, length, context, DTYPES[self.dtype], activation_bytes, DTYPES[self.kv_dtype]
        )

    def changed(self, **changes: Any) -> Request:
        """Return a request with other numbers; the prompt stays within the context."""
        new = replace(self, **changes)
        return replace(new, prompt=min(new.prompt, new.context))

    def problem(self, taken: Bytes) -> str:
        """Say why so much memory is too much; empty if it is not."""
        room, kv_room = USABLE * self.device.memory_bytes, self.kv_share * self.device.memory_bytes
        if taken.total > room:
            return f"needs {taken.total / 2**30:.1f} of {room / 2**30:.1f} GiB"
        if taken.kv > kv_room:
            return f"cache needs {taken.kv / 2**30:.1f} of {kv_room / 2**30:.1f} GiB"
        return ""


@dataclass(frozen=True)
class Candidate:
    """A layout of one phase, and what it costs.

    Args:
        layout: where everything lies.
        phase: whose.
        seconds: of one step at the batch that was asked for.
        bytes: of one device.
        collectives: of one step.
        max_batch: most sequences that fit at the context that was asked for, on the whole mesh; 0: none.
        max_context: longest context that fits at the batch that was asked for; 0: none.
        tokens_per_s: of the whole mesh: read from prompts, or decoded.
        full_tokens_per_s: the same with `max_batch` sequences.
        problem: why it does not fit; empty if it does.
    """

    layout: Layout
    phase: Phase
    seconds: Seconds
    bytes: Bytes
    collectives: tuple[Collective, ...]
    max_batch: int
    max_context: int
    tokens_per_s: float
    full_tokens_per_s: float
    problem: str

    @property
    def total_s(self) -> float:
        """Seconds of one step."""
        return self.seconds.total_s

    def tokens_per_device_s(self, objective: Objective) -> float:
        """Tokens for each second of each device: at the batch asked for (latency) or at the largest (cost)."""
        tokens = self.tokens_per_s if objective == "latency" else self.full_tokens_per_s
        return tokens / self.layout.num_devices

    def key(self, objective: Objective) -> float:
        """What is smaller for the better."""
        return self.total_s if objective == "latency" else 1 / max(self.full_tokens_per_s, 1e-30)


def candidate(request: Request, layout: Layout, phase: Phase) -> Candidate:
    """Price one layout."""
    sizes, device = request.sizes, request.device
    work = request.work(phase, request.batch, request.context)
    collectives = step_collectives(sizes, layout, work)
    entries = weight_entries(sizes, layout)
    taken = memory(sizes, layout, work, entries)

    def fits(batch: int, context: int) -> bool:
        return not request.problem(memory(sizes, layout, request.work(phase, batch, context), entries))

    max_batch = most(lambda batch: fits(batch, request.context), MOST_SEQUENCES)
    full = request.work(phase, max(max_batch, 1), request.context)
    time = seconds(sizes, layout, work, device, collectives)
    full_s = seconds(sizes, layout, full, device).total_s
    return Candidate(
        layout, phase, time, taken, collectives, max_batch,
        most(lambda context: fits(request.batch, context), sizes.max_positions),
        work.batch * work.length / time.total_s, full.batch * full.length / full_s, request.problem(taken),
    )  # fmt: skip


def most(holds: Callable[[int], bool], limit: int) -> int:
    """Return the largest number from 0 to `limit` for which something holds that holds for all smaller ones.

    Example:
        >>> most(lambda n: n * n < 50, 100), most(lambda n: False, 9), most(lambda n: True, 9)
        (7, 0, 9)
    """
    low, high = 0, 1
    while high <= limit and holds(high):
        low, high = high, high * 2
    high = min(high, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
