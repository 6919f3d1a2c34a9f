"""One pass through a schedule that keeps what is needed to run its operations again, and counts what is held."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxpp.parallel import bytes_per_device
from jaxpp.pipeline.mpmd import Walk
from jaxpp.pipeline.operations import Operation
from jaxpp.schedule import Op

Name = tuple[str, int, int]
"""What is measured, the stage, the rank."""
IN_A_ROW = 8  # calls per sample on an accelerator, where handing over one alone would be measured with it


@dataclass(frozen=True)
class Call:
    """An operation with its inputs.

    Args:
        operation: compiled.
        first: gives what it adds to.
        rest: its other inputs.
        kind: of the operation.
        in_a_row: calls per sample.
    """

    operation: Operation
    first: Callable[[], Any]
    rest: Sequence[Any]
    kind: str
    in_a_row: int

    def samples(self, count: int, start: threading.Barrier | None = None) -> list[float]:
        """Run it as often, once all have come to `start`, and return the seconds until its results are there."""
        first, found = jax.block_until_ready(self.first()), []
        if start is not None:
            start.wait()
        for _ in range(count):
            out, begin = None, time.perf_counter()
            for _ in range(self.in_a_row):
                out = self.operation.call(first, *self.rest)
                if self.kind in "DW":  # the sums of gradients are donated; what comes out is added to next
                    first = out[0] if self.kind == "D" else out
            jax.block_until_ready(out)
            found.append((time.perf_counter() - begin) / self.in_a_row)
        return found


class Recorder(Walk):
    """A walk that keeps the inputs of one operation of each kind and stage, and counts what is held for later.

    Attributes:
        calls: the operations of this process's ranks.
        bytes: for each stage and rank, ``held`` from the forward pass on, and ``kept`` until it is recomputed.
    """

    def __init__(self, recompute: bool, *arguments: Any):
        """Get ready, as a `Walk` does; `recompute`: keep those of R too where the table has none."""
        super().__init__(*arguments)
        self.recompute = recompute
        self.calls: dict[Name, Call] = {}
        self.bytes: dict[Name, int] = {}

    def _call(self, operation: Operation, first: Any, rank: int, op: Op) -> Any:
        own, known = self.operations[op.stage, rank], self.calls.get((op.kind, op.stage, rank))
        if known is None or (operation is own.forward and known.operation is own.forward_alone):
            self._keep(operation, own.zeros if op.kind in "DW" else lambda: first, rank, op)
            if self.recompute and operation is own.forward:
                again = self._keep(own.recompute, lambda: None, rank, Op("R", op.stage, op.microbatch))
                again.samples(1)  # compiles it
        return super()._call(operation, first, rank, op)

    def _keep(self, operation: Operation, first: Callable[[], Any], rank: int, op: Op) -> Call:
        own, weights = self.live[rank][op.stage, op.microbatch], self.weights[op.stage, rank]
        rest = [own[n] if n in own else weights[n] for n in operation.inputs]
        in_order = self.executor.places[rank].mesh.devices.flat[0].platform != "cpu"  # a CPU runs calls side by side
        kept = Call(operation, first, rest, op.kind, IN_A_ROW if in_order else 1)
        self.calls[op.kind, op.stage, rank] = kept
        return kept

    def _f(self, rank: int, op: Op) -> None:
        super()._f(rank, op)
        self._count("kept" if (op.stage, op.microbatch) in self.executor.recomputed else "held", rank, op)

    def _r(self, rank: int, op: Op) -> None:
        super()._r(rank, op)
        self._count("held", rank, op)

    def _count(self, what: str, rank: int, op: Op) -> None:
        """Count what is held of a microbatch; its tokens and the key are there for all of the step, and not counted."""
        traced = self.operations[op.stage, rank].traced
        others = {*traced.batch, *traced.key, *(traced.x if what == "kept" else ())}
        live = self.live[rank].get((op.stage, op.microbatch), {})
        own = {id(leaf): bytes_per_device(leaf) for number, leaf in live.items() if number not in others}
        name = (what, op.stage, rank)
        self.bytes[name] = max(self.bytes.get(name, 0), sum(own.values()))
