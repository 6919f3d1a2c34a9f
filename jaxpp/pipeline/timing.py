"""What the operations of a pipeline cost on its own devices, measured while every rank works.

The compiled operations of the executor are run on the inputs that one pass gave them, each rank's by a thread of its
own, all ranks at once: cores, memory and links are shared, so that an operation alone is faster than in the pipeline.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpp import runtime
from jaxpp.parallel import bytes_per_device
from jaxpp.pipeline.batch import lay_out, microbatch_shapes
from jaxpp.pipeline.executor import Executor
from jaxpp.pipeline.pipeline import Pipeline
from jaxpp.pipeline.place import Place
from jaxpp.pipeline.recorder import Call, Name, Recorder
from jaxpp.pipeline.transfer import absent, like, move
from jaxpp.schedule import Costs, Schedule, StageCosts

KINDS = "FDBWR"
PASSES = 3  # through all operations, so that a slow moment of the machine falls on all of them
LEAST_S = 0.02  # of a pass of one operation: all ranks work at the same time though they do not start at the same time


def measure(
    pipeline: Pipeline, params: Sequence[Any], batch: Any, key: Any = None, repeats: int = 10, recompute: bool = False
) -> Costs:
    """Measure what the operations of a pipeline's schedule, and the transfers between its ranks, cost.

    Every rank runs an operation of the same kind at the same time as the others, as often as the longest of them takes
    for `repeats` samples; what counts is the median, of a stage that several ranks hold the mean of theirs. A transfer
    is half of the way there and back, while all ranks run forward passes. Bytes are those on one device. Kinds that the
    schedule does not use cost nothing, a fused backward pass that it does not use as much as B and W.

    Args:
        pipeline: whose stages run on whose places; what it has compiled is used.
        params: of each stage, on its owner's devices (see `Pipeline.lay_out`).
        batch: host arrays ``[batch, ...]``, the same on every process.
        key: PRNG key of the run; None where nothing is drawn.
        repeats: samples of the longest operation, 1 or more.
        recompute: whether to measure R where the schedule does not recompute.

    Returns:
        The same on every process; all processes make the same call.

    Cost: one pass through the schedule, which compiles what is not compiled yet, then about ``repeats`` times the
        longest operation for each kind and each stage of a rank. Memory: the inputs of one operation of each kind and
        stage.
    """
    if repeats < 1:
        raise ValueError(f"repeats = {repeats}: 1 or more are needed")
    executor = pipeline.executor
    recorder = _record(pipeline, params, batch, key, recompute)
    found: dict[Name, float] = {name: float(value) for name, value in recorder.bytes.items()}
    found.update({name: statistics.median(samples) for name, samples in _samples(recorder, repeats)})
    boundaries = range(executor.schedule.num_stages - 1)
    kinds = [recorder.operations[s, executor.schedule.placement[0][s]].y for s in boundaries]
    with _busy(recorder):
        for stage, kind in enumerate(kinds):
            if ends := _ends(executor.schedule, stage):
                source, goal = (executor.places[rank] for rank in ends)
                found["T", stage, 0] = time_transfer(kind, source, goal, repeats)
    recorder.calls.clear()
    names = [(what, *pair) for what in (*KINDS, "held", "kept") for pair in executor.held]
    told = exchange(found, [*names, *(("T", stage, 0) for stage in boundaries)])
    stages = tuple(_stage_costs(executor, stage, told) for stage in range(executor.schedule.num_stages))
    transfers = tuple(told["T", stage, 0] for stage in boundaries)
    return Costs(stages, transfers or (0.0,), tuple(sum(map(bytes_per_device, kind)) for kind in kinds) or (0,))


def time_transfer(leaves: Sequence[jax.ShapeDtypeStruct], source: Place, goal: Place, repeats: int = 10) -> float:
    """Return the seconds that arrays take from one place to another: half of the way there and back.

    Args:
        leaves: shapes with shardings on `source`.
        source: where they start.
        goal: where they go.
        repeats: samples, of which the median counts.

    Returns:
        The same on every process; all processes make the same call.
    """
    goals = [leaf.sharding for leaf in leaves]
    make = jax.jit(lambda: [jnp.ones(leaf.shape, leaf.dtype) for leaf in leaves], out_shardings=goals)
    values = jax.block_until_ready(make()) if source.is_local else absent(leaves)
    runtime.barrier("transfers")
    samples = []
    for _ in range(repeats + 2):
        begin = time.perf_counter()
        there = move(values, goal)
        back = move(there if goal.is_local else absent(like(there)), source)
        if source.is_local or goal.is_local:
            jax.block_until_ready(back if source.is_local else there)
        samples.append((time.perf_counter() - begin) / 2)
    own = {("T", 0, 0): statistics.median(samples[2:])} if source.is_local else {}
    return exchange(own, [("T", 0, 0)])["T", 0, 0]


def exchange(found: Mapping[Name, float], names: Sequence[Name]) -> dict[Name, float]:
    """Return numbers that some processes know on all of them; 0 where none does, the largest where several do."""
    own = np.asarray([found.get(name, -1.0) for name in names], np.float64)
    if runtime.process_count() > 1:
        from jax.experimental import multihost_utils

        words = own.view(np.uint32)  # JAX would round to 32 bits
        rows = np.asarray(multihost_utils.process_allgather(words)).reshape(-1, words.size)
        own = np.ascontiguousarray(rows).view(np.float64).max(axis=0)
    return {name: max(float(value), 0.0) for name, value in zip(names, own, strict=True)}


def _record(pipeline: Pipeline, params: Sequence[Any], batch: Any, key: Any, recompute: bool) -> Recorder:
    executor = pipeline.executor
    data = None if key is None else np.asarray(jax.random.key_data(key))
    shape = None if data is None else jax.ShapeDtypeStruct(data.shape, data.dtype)
    operations = executor.operations(microbatch_shapes(executor, batch), shape)
    local = [(rank, place) for rank, place in enumerate(executor.places) if place.is_local]
    keys = {} if data is None else {rank: place.put(data, place.layout.replicated()) for rank, place in local}
    parts = lay_out(executor, operations, batch)
    recorder = Recorder(recompute, executor, pipeline.held(params), parts, operations, keys)
    recorder.run()
    jax.block_until_ready((recorder.sums, recorder.totals))
    recorder.sums.clear()
    return recorder


@dataclass
class _Team:
    """A thread for each rank of this process."""

    ranks: Sequence[int]
    start: threading.Barrier = field(init=False)
    pool: ThreadPoolExecutor = field(init=False)

    def __post_init__(self) -> None:
        self.start = threading.Barrier(len(self.ranks))
        self.pool = ThreadPoolExecutor(len(self.ranks))

    def run(self, calls: Mapping[int, tuple[Call, int]]) -> dict[int, list[float]]:
        """Run the call of every rank as often as it says, all at once."""
        runtime.barrier("operations")
        found = {rank: self.pool.submit(call.samples, count, self.start) for rank, (call, count) in calls.items()}
        return {rank: one.result() for rank, one in found.items()}


@contextlib.contextmanager
def _busy(recorder: Recorder) -> Iterator[None]:
    """Let every rank of this process run forward passes, one after the other, inside of a ``with`` block.

    Those that wait for other processes, in a collective, do not run: these may run another number of them.
    """
    places, calls = recorder.executor.places, {}
    for (kind, _, rank), call in recorder.calls.items():
        if kind == "F" and places[rank].processes == {jax.process_index()}:
            calls.setdefault(rank, call)
    stop = threading.Event()

    def work(call: Call) -> None:
        while not stop.is_set():
            call.samples(1)

    with ThreadPoolExecutor(max(len(calls), 1)) as pool:
        running = [pool.submit(work, call) for call in calls.values()]
        try:
            yield
        finally:
            stop.set()
    for one in running:
        one.result()


def _rounds(schedule: Schedule, recompute: bool) -> list[list[Name]]:
    """Return what runs at the same time: one operation of each rank."""
    used: dict[tuple[str, int], list[int]] = {}
    for rank, op in schedule.ops():
        for kind in ("F", "R") if recompute and op.kind == "F" else (op.kind,):
            stages = used.setdefault((kind, rank), [])
            stages += [op.stage] if op.stage not in stages else []
    found = []
    for kind in KINDS:
        turns = max((len(stages) for (one, _), stages in used.items() if one == kind), default=0)
        for turn in range(turns):
            # A rank without this kind runs forward passes: it has to be busy.
            own = [kind if (kind, rank) in used else "F" for rank in range(schedule.num_ranks)]
            found.append([(k, used[k, rank][turn % len(used[k, rank])], rank) for rank, k in enumerate(own)])
    return found


def _samples(recorder: Recorder, repeats: int) -> Iterable[tuple[Name, list[float]]]:
    """Return the seconds of each sample of this process's operations."""
    executor, calls = recorder.executor, recorder.calls
    rounds = _rounds(executor.schedule, recorder.recompute)
    team = _Team([rank for rank, place in enumerate(executor.places) if place.is_local])
    passes = min(PASSES, repeats)
    found: dict[Name, list[float]] = {name: [] for name in calls}
    with team.pool:
        first: dict[Name, float] = {}
        for number, names in enumerate(rounds):
            tried = team.run({rank: (calls[names[rank]], 2) for rank in team.ranks})
            first.update({("", number, rank): seconds[-1] for rank, seconds in tried.items()})
        # How often each runs is agreed on: the devices of a rank may belong to several processes.
        ranks = range(len(executor.places))
        told = exchange(first, [("", number, rank) for number in range(len(rounds)) for rank in ranks])
        for _ in range(passes):
            for number, names in enumerate(rounds):
                seconds = [max(told["", number, rank], 1e-6) for rank in ranks]
                span = max(max(seconds) * repeats / passes, LEAST_S)
                counts = {rank: (calls[names[rank]], math.ceil(span / seconds[rank])) for rank in team.ranks}
                for rank, samples in team.run(counts).items():
                    found[names[rank]] += samples
    return found.items()


def _ends(schedule: Schedule, stage: int) -> tuple[int, int] | None:
    """Return the ranks between which a stage's result travels; None where it stays."""
    pairs = [(ranks[stage], ranks[stage + 1]) for ranks in schedule.placement]
    return next((pair for pair in pairs if pair[0] != pair[1]), None)


def _stage_costs(executor: Executor, stage: int, told: Mapping[Name, float]) -> StageCosts:
    ranks = [rank for held, rank in executor.held if held == stage]
    owner, params = executor.owner(stage), executor.stages[stage].params
    leaves, goals = jax.tree.leaves(params), jax.tree.leaves(owner.weight_shardings(params))
    laid = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=goal) for x, goal in zip(leaves, goals, strict=True)]

    def seconds(kind: str) -> float:
        known = [told[kind, stage, rank] for rank in ranks if told[kind, stage, rank]]
        return statistics.fmean(known) if known else 0.0

    return StageCosts(
        forward_s=seconds("F"),
        input_gradient_s=seconds("B"),
        weight_gradient_s=seconds("W"),
        recompute_s=seconds("R"),
        fused_s=seconds("D") or -1.0,
        activation_bytes=int(max(told["held", stage, rank] for rank in ranks)),
        weight_bytes=sum(map(bytes_per_device, laid)),
        kept_bytes=int(max(told["kept", stage, rank] for rank in ranks)),
    )
