"""Run the command line in processes of its own, on a tiny model and a tiny corpus."""

from __future__ import annotations

import atexit
import functools
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
WORDS = "the quick brown fox jumps over lazy dogs and cats sleep under warm suns".split()
RUN: dict[str, Any] = {
    "directory": "out",
    "cpu_devices": 1,
    "model": {
        "num_layers": 1, "embed_dim": 32, "num_heads": 2, "mlp_dim": 64, "vocab_size": 300, "max_positions": 64,
    },
    "plan": {"mesh": "data:-1"},
    "data": {
        "corpora": [{"source": "corpus"}], "tokenizer": "bytes", "seq_len": 32, "batch_size": 8, "held_out": 0.2,
        "cache_dir": "cache",
    },
    "optimizer": {"learning_rate": 0.01, "warmup_steps": 2, "schedule_steps": 100},
    "train": {"num_steps": 12, "evaluate_every": 5, "evaluate_batches": 2},
    "checkpoint": {"every": 4},
}  # fmt: skip
EIGHT = ("cpu_devices=8", "plan.mesh=data:2 fsdp:2 tensor:2")


def write_run(directory: Path) -> Path:
    """Write ``run.yaml`` and its corpus of twelve documents."""
    corpus = directory / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    for i in range(12):
        (corpus / f"{i}.txt").write_text(" ".join(draw.choices(WORDS, k=400)))
    path = directory / "run.yaml"
    path.write_text(yaml.safe_dump(RUN, sort_keys=False))
    return path


@functools.cache
def _compiled() -> str:
    directory = tempfile.mkdtemp(prefix="jaxpp-tests-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory


def environment(in_a_hurry: bool = True) -> dict[str, str]:
    """Return the variables of a process: no devices of ours; in a hurry, it compiles each program once, and badly."""
    kept = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    hurry = {
        "JAX_COMPILATION_CACHE_DIR": _compiled(),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
    }
    return {**kept, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", **(hurry if in_a_hurry else {})}


def start(*words: str, cwd: Path, in_a_hurry: bool = True) -> subprocess.Popen[str]:
    """Start ``jaxpp WORDS`` and return at once."""
    return subprocess.Popen(
        [sys.executable, "-m", "jaxpp.cli", *words],
        cwd=cwd, env=environment(in_a_hurry), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def jaxpp(*words: str, cwd: Path, code: int = 0, in_a_hurry: bool = True) -> subprocess.CompletedProcess[str]:
    """Run ``jaxpp WORDS`` to its end, which must have this exit code."""
    process = start(*words, cwd=cwd, in_a_hurry=in_a_hurry)
    out, err = process.communicate()
    assert process.returncode == code, f"jaxpp {' '.join(words)}: exit code {process.returncode}\n{out}\n{err}"
    return subprocess.CompletedProcess(words, process.returncode, out, err)


def records(directory: Path, kind: str = "train") -> list[dict[str, Any]]:
    """Return what a run wrote to ``metrics.jsonl``; a line that is being written does not count yet."""
    path = directory / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def losses(directory: Path) -> dict[int, float]:
    """Return the loss of each step; no step may stand twice or be missing."""
    found = records(directory)
    assert [record["step"] for record in found] == list(range(1, len(found) + 1))
    return {record["step"]: record["loss"] for record in found}


def steps(directory: Path) -> list[int]:
    """List the checkpoints of a run."""
    return sorted(int(path.name) for path in (directory / "checkpoints").iterdir() if path.name.isdigit())


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 200) -> None:
    """Wait until something holds, while the process lives."""
    deadline = time.monotonic() + seconds
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise AssertionError(f"exit code {process.returncode}: {process.communicate()}")
        time.sleep(0.002)


def contents(directory: Path) -> dict[str, str]:
    """Map each path below a directory to a digest of what it holds."""
    return {
        path.relative_to(directory).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "/"
        for path in sorted(directory.rglob("*"))
    }
