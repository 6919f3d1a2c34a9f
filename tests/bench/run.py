"""``make bench``: our training step against the plain one, one table per question.

Each measurement runs in a process of its own (`tests/bench/measure.py`) with as many fake CPU devices as it needs.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MODEL = {"num_layers": 4, "embed_dim": 256, "num_heads": 4, "vocab_size": 4096}
BATCH = {"batch_size": 8, "seq_len": 128}
MEMORY_MODEL = {**MODEL, "num_layers": 8, "vocab_size": 16384}
MEMORY_BATCH = {"batch_size": 8, "seq_len": 512}
TINY = {"num_layers": 4, "embed_dim": 32, "num_heads": 4, "vocab_size": 64}
MESHES = {1: ("data:1",), 8: ("data:8", "fsdp:8", "data:2 fsdp:4", "data:2 fsdp:2 tensor:2")}
WANTED = {1: 0.97, 8: 1.0}  # least ratio of our tokens/s to the plain step's, by number of devices


def ask(num_devices: int, question: str, case: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Run one measurement in a process with `num_devices` fake CPU devices.

    Raises:
        RuntimeError: it failed; the message ends with its last line.
    """
    kept = {k: v for k, v in os.environ.items() if k not in ("JAX_COMPILATION_CACHE_DIR", "XLA_FLAGS")}
    flags = f"--xla_force_host_platform_device_count={num_devices}"
    environment = {**kept, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)}
    request = json.dumps({"question": question, "case": case, **options})
    command = [sys.executable, "-m", "tests.bench.measure", request]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{question} {case}: {(done.stderr.strip() or 'no message').splitlines()[-1]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def print_table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table of text, each row as soon as it is there."""
    widths = [max(len(name), 9) for name in head]
    widths[0] = max(widths[0], 24)
    print(f"\n{title}\n")
    print("  ".join(name.rjust(width) for name, width in zip(head, widths, strict=True)))
    for row in rows:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)), flush=True)


def _verdict(num_devices: int, mesh: str, answer: dict[str, Any]) -> str:
    if "tensor" in mesh:
        return "tensor"
    return "" if answer["ratio"] >= WANTED[num_devices] else f"below {WANTED[num_devices]}"


def speed(quick: bool) -> None:
    """Tokens/s of both steps, run in turn."""

    def rows() -> Iterable[Sequence[str]]:
        options = {"num_blocks": 3, "block_steps": 1} if quick else {"num_blocks": 10, "block_steps": 1}
        for num_devices, meshes in MESHES.items():
            for mesh, dtype, remat in itertools.product(meshes, ("float32", "bfloat16"), ("none", "full")):
                case = {"mesh": mesh, "dtype": dtype, "remat": remat, "model": MODEL, **BATCH}
                answer = ask(num_devices, "speed", case, **options)
                yield (
                    mesh, dtype, remat, f"{answer['ours']:,.0f}", f"{answer['plain']:,.0f}", f"{answer['ratio']:.3f}",
                    f"{answer['low']:.2f}-{answer['high']:.2f}", f"{answer['processor_ratio']:.3f}",
                    f"{answer['difference']:.0e}", _verdict(num_devices, mesh, answer),
                )  # fmt: skip

    head = ("mesh", "dtype", "remat", "ours t/s", "plain t/s", "ratio", "quartiles", "cpu ratio", "differ", "note")
    title = (
        f"(a) tokens/s of the training step against the plain one: {MODEL}, {BATCH}\n"
        "    cpu ratio: the same of processor seconds, which other programs on the machine hardly change\n"
        "    ratio: median over pairs of neighbouring blocks, above 1 ours is faster; differ: largest relative\n"
        f"    difference of loss and gradient norm; wanted {WANTED[1]} on one device, {WANTED[8]} on eight\n"
        '    (rows marked "tensor": nothing is promised)'
    )
    print_table(title, head, rows())


def compile_time(quick: bool) -> None:
    """Seconds to trace and compile, scanned and unrolled."""
    num_layers = 4 if quick else 8

    def rows() -> Iterable[Sequence[str]]:
        for layers in ("scan", "unroll"):
            answer = ask(1, "compile", {"layers": layers, "model": {**MODEL, "num_layers": num_layers}, **BATCH})
            cells = (f"{answer[who][what]:.2f}" for who in ("ours", "plain") for what in ("trace", "compile"))
            yield (layers, *cells)

    head = ("layers", "trace s", "compile s", "plain: trace", "plain: compile")
    print_table(f"(b) seconds to trace and compile the step, {num_layers} layers, one device", head, rows())


def memory(quick: bool) -> None:
    """Peak bytes, chunked and full cross-entropy, each remat policy."""

    def rows() -> Iterable[Sequence[str]]:
        for remat in ("none", "full") if quick else ("none", "dots", "block", "full"):
            answer = ask(1, "memory", {"remat": remat, "model": MEMORY_MODEL, **MEMORY_BATCH})
            plain = f"{answer['plain'] / 2**20:,.0f}" if remat in ("none", "full") else "-"
            cells = [f"{answer[name] / 2**20:,.0f}" for name in ("state", "chunked", "full")]
            yield (remat, *cells, plain, f"{answer['full'] / answer['chunked']:.2f}")

    head = ("remat", "state", "chunked", "full", "plain", "full/chunked")
    title = (
        f"(c) peak MiB of the compiled step on one device: {MEMORY_MODEL}, {MEMORY_BATCH}\n"
        "    chunked: cross-entropy in chunks; full: through all logits at once; plain: the plain step"
    )
    print_table(title, head, rows())


def dispatch(quick: bool) -> None:
    """Python's share of a step."""

    def rows() -> Iterable[Sequence[str]]:
        for num_devices in (1, 8):
            mesh = MESHES[num_devices][-1]
            tiny = {"mesh": mesh, "model": TINY, "batch_size": 8, "seq_len": 8}
            answer = ask(num_devices, "dispatch", tiny, num_steps=20 if quick else 200)
            real = ask(num_devices, "speed", {"mesh": mesh, "model": MODEL, **BATCH}, num_blocks=2, block_steps=1)
            for who in ("ours", "plain"):
                placing, calling = answer[who]["place"], answer[who]["call"]
                share = (placing + calling) * real[who] / (BATCH["batch_size"] * BATCH["seq_len"])
                yield (mesh, who, f"{1e3 * placing:.2f}", f"{1e3 * calling:.2f}", f"{100 * share:.2f}%")

    head = ("mesh", "step", "place ms", "call ms", "share")
    title = (
        "(d) Python's part of a step: placing the batch and calling the jitted step, measured on a toy model;\n"
        "    share: of a step of (a)"
    )
    print_table(title, head, rows())


TABLES: dict[str, Callable[[bool], None]] = {
    "speed": speed, "compile": compile_time, "memory": memory, "dispatch": dispatch,
}  # fmt: skip


def main() -> None:
    """Print the tables asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=TABLES, help="print one table only")
    parser.add_argument("--quick", action="store_true", help="fewer steps: to see that it runs, not to quote")
    options = parser.parse_args()
    versions = " ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "jaxlib", "flax", "optax"))
    print(f"device   CPU, {os.cpu_count()} cores, {platform.machine()} {platform.system()}")
    print(f"versions Python {platform.python_version()} {versions}")
    print(f"command  python {shlex.join(sys.argv)}")
    start = time.perf_counter()
    for name in [options.only] if options.only else TABLES:
        TABLES[name](options.quick)
    print(f"\n{time.perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    main()
