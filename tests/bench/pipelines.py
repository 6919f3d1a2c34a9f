"""``python -m tests.bench.pipelines``: our pipeline and torch's on two processes pinned to one core each.

Four pairs of processes stay up and are asked in turn, round after round: ours connected, ours unconnected (the
ceiling), and the same of ``torch.distributed.pipelining`` where ``--torch`` names a Python that has it.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jaxpp import runtime
from jaxpp.schedule import build
from tests.bench.pipeline_case import ANSWER, CHUNKS, RANKS, Case
from tests.bench.run import print_table

ROOT = Path(__file__).parents[2]
TOY = Case(width=16, hidden=32, rows=8, num_microbatches=4)
WANTED = {"ratio": 1.10, "share": 1.2}  # measured over simulated at most, our share over torch's at least
TOLERANCE = 1e-4  # of the loss and the squared gradient norm between both, relative
THREADS = "2"  # of ours: one for operations, one for transfers; no collective takes one here (see `jaxpp.runtime`)
TIMEOUT_S = 120.0  # of one answer, compilation included
HEAD = (
    "schedule", "simulated", "measured", "ratio", "ceiling", "share", "bound", "torch", "its ceiling", "its share",
    "shares", "note",
)  # fmt: skip
TITLE = """A step of {case}
    two processes on one core each; ms; a step is forward, backward and summed gradients of a whole batch, from the
    first start to the last end, after a barrier; each number is the median of {rounds} rounds', ratios too
    simulated: the schedule's makespan with the costs measured in the same round while both processes work
    ratio: measured / simulated, wanted {ratio} at most
    ceiling: two unconnected processes, at the same time, run the operations of one rank each back to back
    share: ceiling of the slower rank / measured step; bound: work of the busier rank / simulated makespan
    torch: torch.distributed.pipelining on gloo, the same weights and numbers (loss and gradients compared)
    shares: our share / torch's, wanted {share} at least"""


class Pair:
    """Two processes, one for each rank and core.

    Args:
        python: that runs them.
        module: to run.
        case: the work.
        connected: whether they know of each other.
    """

    def __init__(self, python: str, module: str, case: Case, connected: bool):
        """Start them."""
        address = f"127.0.0.1:{runtime.free_port('127.0.0.1')}"
        self.processes, self.errors = [], [tempfile.TemporaryFile("w+") for _ in range(RANKS)]
        for rank, core in enumerate(cores()):
            kept = {k: v for k, v in os.environ.items() if k not in ("JAX_COMPILATION_CACHE_DIR", "XLA_FLAGS")}
            environment = {"NPROC": THREADS, **kept, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
            if connected:
                environment |= {
                    "JAXPP_COORDINATOR_ADDRESS": address, "JAXPP_NUM_PROCESSES": str(RANKS),
                    "JAXPP_PROCESS_ID": str(rank),
                }  # fmt: skip
            request = json.dumps({"case": asdict(case), "rank": rank, "connected": connected})
            process = subprocess.Popen(
                [python, "-m", module, request], env=environment, cwd=ROOT, text=True, stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=self.errors[rank], preexec_fn=_pin(core),
            )  # fmt: skip
            self.processes.append(process)

    def ask(self, **question: Any) -> list[Any]:
        """Return the answer of each rank.

        Raises:
            RuntimeError: a process ended, or was ended because it did not answer; with its last line.
        """
        for process in self.processes:
            process.stdin.write(json.dumps(question) + "\n")
            process.stdin.flush()
        return self._answers()

    def _answers(self) -> list[Any]:
        timer = threading.Timer(TIMEOUT_S, self.kill)
        timer.start()
        try:
            return [self._answer(rank) for rank in range(RANKS)]
        finally:
            timer.cancel()

    def _answer(self, rank: int) -> Any:
        for line in self.processes[rank].stdout:
            if line.startswith(ANSWER):
                return json.loads(line.removeprefix(ANSWER))
        self.errors[rank].seek(0)
        lines = self.errors[rank].read().strip().splitlines() or ["no message"]
        raise RuntimeError(f"{self.processes[rank].args[2]}, rank {rank}: {lines[-1]}")

    def kill(self) -> None:
        """End them at once."""
        for process in self.processes:
            process.kill()

    def close(self) -> None:
        """Let them end."""
        for process in self.processes:
            process.stdin.close()
        try:
            for process in self.processes:
                process.wait(20)
        except subprocess.TimeoutExpired:
            self.kill()


def cores() -> list[int]:
    """Return the core of each rank.

    Raises:
        ValueError: there are too few.
    """
    known = sorted(os.sched_getaffinity(0))
    if len(known) < RANKS:
        raise ValueError(f"{len(known)} core to run on; {RANKS} are needed, one for each process")
    return known[:RANKS]


def _pin(core: int) -> Any:
    return lambda: os.sched_setaffinity(0, {core})


def step_s(answers: Sequence[Any]) -> float:
    """Return the seconds of a step: from the first start to the last end, the median of several."""
    spans = zip(*(answer["spans"] for answer in answers), strict=True)
    return statistics.median(max(end for _, end in both) - min(start for start, _ in both) for both in spans)


def ceiling_s(answers: Sequence[Any]) -> float:
    """Return the seconds of a pass of the slower rank."""
    return max(statistics.median(end - start for start, end in answer["spans"]) for answer in answers)


@dataclass(frozen=True)
class Bench:
    """What is asked.

    Args:
        case: the work.
        rounds: of all measurements of a schedule.
        steps: in a round.
        seconds: of a round's measurement of a ceiling.
        ours: our processes, connected and not.
        torch: torch's, or none.
    """

    case: Case
    rounds: int
    steps: int
    seconds: float
    ours: tuple[Pair, Pair]
    torch: tuple[Pair, Pair] | None

    def row(self, name: str) -> tuple[str, ...]:
        """Return the table's row of a schedule."""
        self.round(name, 2, 0.0)  # compiles
        found = [self.round(name, self.steps, self.seconds) for _ in range(self.rounds)]
        middle = {key: statistics.median(one[key] for one in found) for key in found[0]}
        cells = [f"{1e3 * middle[key]:.1f}" for key in ("simulated", "measured")]
        cells += [f"{middle['ratio']:.3f}", f"{1e3 * middle['ceiling']:.1f}"]
        cells += [f"{middle[key]:.3f}" for key in ("share", "bound")]
        if self.torch:
            cells += [f"{1e3 * middle[key]:.1f}" for key in ("torch", "torch ceiling")]
            cells += [f"{middle[key]:.3f}" for key in ("torch share", "shares")]
        else:
            cells += ["-"] * 4
        notes = ["ratio"] * (middle["ratio"] > WANTED["ratio"])
        notes += ["shares"] * bool(self.torch and middle["shares"] < WANTED["share"])
        return (name, *cells, ", ".join(notes))

    def round(self, name: str, steps: int, seconds: float) -> dict[str, float]:
        """Measure everything once, one after the other."""
        table = build(name, RANKS, self.case.num_microbatches, CHUNKS[name])
        orders = [[tuple(op) for cell in order for op in cell] for order in table.orders]
        connected, alone = self.ours
        simulated = connected.ask(question="simulated", schedule=name)[0]
        told = connected.ask(question="step", schedule=name, count=steps)
        found = {**simulated, "measured": step_s(told)}
        found["ceiling"] = ceiling_s(alone.ask(question="alone", schedule=name, seconds=seconds))
        if self.torch:
            connected, alone = self.torch
            theirs = connected.ask(question="step", schedule=name, count=steps)
            check_agreement(name, told, theirs)
            found["torch"] = step_s(theirs)
            question = {"question": "alone", "schedule": name, "seconds": seconds, "orders": orders}
            found["torch ceiling"] = ceiling_s(alone.ask(**question))
        return found | ratios(found)


def ratios(found: Mapping[str, float]) -> dict[str, float]:
    """Return what the times of a schedule are to each other."""
    made = {"ratio": found["measured"] / found["simulated"], "share": found["ceiling"] / found["measured"]}
    if "torch" in found:
        made["torch share"] = found["torch ceiling"] / found["torch"]
        made["shares"] = made["share"] / made["torch share"]
    return made


def check_agreement(name: str, ours: Sequence[Any], theirs: Sequence[Any]) -> None:
    """Check that both did the same.

    Raises:
        AssertionError: losses or gradient norms that differ.
    """
    for what, total in (("loss", lambda told: told[-1]["loss"]), ("squares", lambda t: sum(x["squares"] for x in t))):
        one, other = total(ours), total(theirs)
        if not abs(one - other) <= TOLERANCE * abs(other):
            raise AssertionError(f"{name}: {what} of ours {one}, of torch's {other}")


@contextlib.contextmanager
def pairs(python: str, module: str, case: Case) -> Iterator[tuple[Pair, Pair]]:
    """Start processes that are connected and processes that are not."""
    with contextlib.ExitStack() as stack:
        yield tuple(
            stack.enter_context(contextlib.closing(Pair(python, module, case, connected)))
            for connected in (True, False)
        )  # type: ignore[misc]


def _version(python: str) -> str:
    command = [python, "-c", "import torch; print(torch.__version__)"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch", help="a Python that has torch; without it, ours alone")
    parser.add_argument("--only", choices=CHUNKS, action="append", help="one schedule (may be repeated)")
    parser.add_argument("--microbatches", type=int, default=8, help="in a batch")
    parser.add_argument("--rounds", type=int, default=9, help="of all measurements of a schedule")
    parser.add_argument("--toy", action="store_true", help="tiny, one round: to see that it runs, not to quote")
    options = parser.parse_args(arguments)
    case = TOY if options.toy else Case(num_microbatches=options.microbatches)
    rounds, steps, seconds = (1, 2, 0.05) if options.toy else (options.rounds, 3, 0.5)
    versions = " ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "jaxlib"))
    torch = f"torch {_version(options.torch)}" if options.torch else "no torch"
    print(f"device   CPU, cores {', '.join(map(str, cores()))}, {platform.machine()} {platform.system()}")
    print(f"versions Python {platform.python_version()} {versions}, {torch}")
    print(f"command  python -m tests.bench.pipelines {shlex.join(arguments or sys.argv[1:])}")
    start = time.perf_counter()
    with contextlib.ExitStack() as stack:
        ours = stack.enter_context(pairs(sys.executable, "tests.bench.pipeline_rank", case))
        theirs = options.torch and stack.enter_context(pairs(options.torch, "tests.bench.torch_rank", case))
        bench = Bench(case, rounds, steps, seconds, ours, theirs or None)

        def rows() -> Iterable[Sequence[str]]:
            return (bench.row(name) for name in options.only or CHUNKS)

        print_table(TITLE.format(case=case, rounds=rounds, **WANTED), HEAD, rows())
    print(f"\n{time.perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    main()
