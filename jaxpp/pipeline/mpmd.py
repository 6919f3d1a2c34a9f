"""The MPMD executor: one jitted function per stage and operation on a rank's own devices, called in table order.

Nothing in the loop waits for a device: operations are handed over in the order of the table, each rank's queue of them
is its schedule, and boundary tensors follow by ``jax.device_put``. On several processes each walks the whole table,
runs what its own devices run, and issues the same transfers in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxpp.pipeline.executor import Executor, Held
from jaxpp.pipeline.operations import Operation, StageOperations
from jaxpp.pipeline.transfer import absent, add, move
from jaxpp.schedule import Op


class Walk:
    """One pass through the table.

    Attributes:
        sums: for each held stage the summed gradients of its weights, fp32.
        totals: for each rank that holds the last stage, the summed losses and weights.
        peak: for each rank, the most activations (one stage, one microbatch) held at once.
    """

    def __init__(
        self, executor: Executor, weights: Mapping[Held, Any], parts: Mapping[tuple[int, int], Mapping[int, Any]],
        operations: Mapping[Held, StageOperations], keys: Mapping[int, Any], step: int = 0,
    ):  # fmt: skip
        """Get ready.

        Args:
            executor: stages, table, places.
            weights: leaves of the weights of every held stage.
            parts: for each local rank and microbatch the leaves that it needs, by their place.
            operations: as `Executor.operations` gives them.
            keys: the run's key on each local rank; empty where there is none.
            step: of the run, for keys.
        """
        self.executor, self.operations, self.parts = executor, operations, parts
        self.keys, self.step = keys, step
        local = [pair for pair in executor.held if executor.places[pair[1]].is_local]
        self.weights = {pair: dict(zip(operations[pair].traced.params, weights[pair], strict=True)) for pair in local}
        self.sums = {pair: operations[pair].zeros() for pair in local if operations[pair].kinds}
        last = len(executor.stages) - 1
        zero = np.zeros((), np.float32)
        ends = [(rank, executor.places[rank]) for stage, rank in executor.held if stage == last]
        self.totals = {rank: [p.put(zero, p.layout.replicated())] * 2 if p.is_local else [] for rank, p in ends}
        self.arrived: dict[tuple[int, int], Any] = {}
        self.returned: dict[tuple[int, int], Any] = {}
        self.live: list[dict[tuple[int, int], dict[int, Any]]] = [{} for _ in executor.places]
        self.peak = [0] * len(executor.places)

    def run(self) -> None:
        """Hand every operation over."""
        step = {"F": self._f, "D": self._d, "B": self._b, "W": self._w, "R": self._r}
        for rank, op in self.executor.order:
            step[op.kind](rank, op)

    def _call(self, operation: Operation, first: Any, rank: int, op: Op) -> Any:
        own, weights = self.live[rank][op.stage, op.microbatch], self.weights[op.stage, rank]
        return operation.call(first, *[own[n] if n in own else weights[n] for n in operation.inputs])

    def _send(self, values: Any, rank: int, stage: int, microbatch: int) -> Any:
        """Move boundary values to the rank that runs another stage of the microbatch."""
        goal = self.executor.places[self.executor.schedule.rank_of(stage, microbatch)]
        return values if goal is self.executor.places[rank] else move(values, goal)

    def _f(self, rank: int, op: Op) -> None:
        own, live = self.operations[op.stage, rank], self.live[rank]
        where, x = (op.stage, op.microbatch), self.arrived.pop((op.stage, op.microbatch), ())
        live[where] = {}
        self.peak[rank] = max(self.peak[rank], len(live))
        y = self._forward(own, rank, op, x) if own.place.is_local else absent(own.y)
        if not own.kinds:  # nothing comes back
            del live[where]
        if not own.is_last:
            self.arrived[op.stage + 1, op.microbatch] = self._send(y, rank, op.stage + 1, op.microbatch)

    def _forward(self, own: StageOperations, rank: int, op: Op, x: Any) -> Any:
        where, values = (op.stage, op.microbatch), dict(zip(own.traced.x, x, strict=True))
        values.update({own.traced.batch[place]: leaf for place, leaf in self.parts[rank, op.microbatch].items()})
        if rank in self.keys:
            numbers = self.keys[rank], *map(np.int32, (self.step, op.microbatch, op.stage))
            values.update(zip(own.traced.key, numbers, strict=True))
        self.live[rank][where] = values
        again = where in self.executor.recomputed
        operation = own.forward_alone if again else own.forward
        y, kept = self._call(operation, self.totals[rank] if own.is_last else [], rank, op)
        later = own.after_forward.get(self.executor.schedule.backward_of.get(where, ""), frozenset())
        if again:
            later = later.union(own.recompute.inputs)
        elif not own.is_last:
            values.update(
                (number, leaf) for number, leaf in zip(own.traced.y, y, strict=True) if isinstance(number, int)
            )
        values.update(zip(operation.kept, kept, strict=True))
        self.live[rank][where] = {number: value for number, value in values.items() if number in later}
        if own.is_last:
            self.totals[rank] = y
        return y

    def _r(self, rank: int, op: Op) -> None:
        own, where = self.operations[op.stage, rank], (op.stage, op.microbatch)
        if own.place.is_local:
            kept = self._call(own.recompute, None, rank, op)
            self.live[rank][where].update(zip(own.recompute.kept, kept, strict=True))

    def _take_gradient(self, own: StageOperations, rank: int, op: Op) -> None:
        gradient = self.returned.pop((op.stage, op.microbatch), ())
        if own.place.is_local:
            self.live[rank][op.stage, op.microbatch].update(zip(own.traced.cotangents, gradient, strict=True))

    def _give_gradient(self, own: StageOperations, rank: int, op: Op, flow: Any) -> None:
        if op.stage == 0:
            return
        if not own.place.is_local:
            before = self.operations[op.stage - 1, self.executor.schedule.rank_of(op.stage - 1, op.microbatch)]
            leaves = [before.y[place] for place in before.traced.moving]
            flow = absent(
                jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), leaves, own.flow)
            )
        self.returned[op.stage - 1, op.microbatch] = self._send(flow, rank, op.stage - 1, op.microbatch)

    def _d(self, rank: int, op: Op) -> None:
        own, flow = self.operations[op.stage, rank], ()
        self._take_gradient(own, rank, op)
        if own.place.is_local:
            pair = op.stage, rank
            self.sums[pair], flow = self._call(own.fused, self.sums[pair], rank, op)
        del self.live[rank][op.stage, op.microbatch]
        self._give_gradient(own, rank, op, flow)

    def _b(self, rank: int, op: Op) -> None:
        own, flow = self.operations[op.stage, rank], ()
        self._take_gradient(own, rank, op)
        if own.place.is_local:
            flow, kept = self._call(own.input_gradient, None, rank, op)
            values = self.live[rank][op.stage, op.microbatch]
            values.update(zip(own.input_gradient.kept, kept, strict=True))
            taken = own.weight_gradient.inputs
            self.live[rank][op.stage, op.microbatch] = {n: values[n] for n in taken if n in values}
        self._give_gradient(own, rank, op, flow)

    def _w(self, rank: int, op: Op) -> None:
        own, pair = self.operations[op.stage, rank], (op.stage, rank)
        if own.place.is_local:
            self.sums[pair] = self._call(own.weight_gradient, self.sums[pair], rank, op)
        del self.live[rank][op.stage, op.microbatch]

    def own_sums(self, stage: int) -> list[jax.Array]:
        """Return a stage's summed gradients on its owner: those of all ranks that hold it."""
        first, *others = [pair for pair in self.executor.held if pair[0] == stage]
        total = self._sums_of(first)
        for pair in others:
            total = add(self.executor.owner(stage), total, move(self._sums_of(pair), self.executor.owner(stage)))
        return total

    def _sums_of(self, pair: Held) -> list[jax.Array]:
        return self.sums[pair] if pair in self.sums else absent(self.operations[pair].sums)

    def totals_everywhere(self) -> list[list[jax.Array]]:
        """Return the sum of losses and the sum of weights on every rank."""
        hub = self.executor.owner(len(self.executor.stages) - 1)
        whole = [jax.ShapeDtypeStruct((), np.float32, sharding=hub.layout.replicated())] * 2
        total = None
        for rank, found in self.totals.items():
            place = self.executor.places[rank]
            goal = [jax.ShapeDtypeStruct((), np.float32, sharding=place.layout.replicated())] * 2
            here = move(found if place.is_local else absent(goal), hub)
            total = here if total is None else add(hub, total, here)
        return [move(total or absent(whole), place) for place in self.executor.places]
