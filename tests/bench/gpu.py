"""``make bench-gpu``: a decoder of about 1 B parameters on one large GPU, three remat policies, one table.

Needs jax, flax, optax, orbax-checkpoint and chex only. Each policy runs in a process of its own, so that the peak of
its memory is its own and one that does not fit leaves the others alone. ``--tiny`` runs the same code on the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
POLICIES = ("none", "block", "full")
HEAD = ("remat", "tokens/s", "MFU", "s/step", "peak GiB", "planned GiB", "compile s", "loss", "note")


@dataclass(frozen=True)
class Size:
    """What is trained: preset and changes to it, rows, tokens a row, steps per block, seconds a row may take."""

    preset: str
    changes: dict[str, Any]
    batch_size: int
    seq_len: int
    block_steps: int
    limit_s: int


# Without remat a token keeps about 2 MB in bf16 at 1b: 8 rows of 4096 take 70 GB beside 20 GB of state and gradients.
LARGE = Size("1b", {}, 8, 4096, 4, 115)
TINY = Size("1m", {"num_layers": 2, "embed_dim": 64, "vocab_size": 256}, 2, 64, 2, 100)


def measure(size: Size, remat: str) -> dict[str, Any]:
    """Train for a few steps under one policy; return the row of the table as numbers."""
    import jax
    import numpy as np

    from jaxpp import OptimizerConfig, Plan, dims
    from jaxpp.models import SIZES, DecoderConfig
    from jaxpp.train import make_program
    from jaxpp.train.metrics import Rates, peak_flops_per_s
    from jaxpp.train.optimizer import make_optimizer

    config = DecoderConfig(**{**SIZES[size.preset], **size.changes})
    plan = Plan(mesh="data:1", remat=remat, compute_dtype="bfloat16")
    program = make_program(config, make_optimizer(OptimizerConfig()), plan, devices=jax.devices()[:1])
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (size.batch_size, size.seq_len + 1), np.int32)
    positions = np.broadcast_to(np.arange(size.seq_len, dtype=np.int32), tokens[:, 1:].shape)
    weights = np.ones(positions.shape, np.float32)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "positions": positions, "weights": weights}
    state, placed = program.init(0), program.place(batch)
    start = time.perf_counter()
    step = program.step.lower(state, placed).compile()
    compile_s = time.perf_counter() - start
    blocks = []
    for _ in range(4):
        start = time.perf_counter()
        for _ in range(size.block_steps):
            state, metrics = step(state, placed)
        loss = float(metrics["loss"])
        blocks.append((time.perf_counter() - start) / size.block_steps)
    peak = peak_flops_per_s(jax.devices()[0])
    num_tokens, flops = size.batch_size * size.seq_len, dims.flops_per_token(program.params, size.seq_len)
    seconds = statistics.median(blocks[1:])
    planned = step.memory_analysis()
    return {
        **Rates(num_tokens, flops, 1, peak).at(seconds),
        "seconds": seconds,
        "peak_bytes": (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
        "planned_bytes": planned.temp_size_in_bytes + planned.argument_size_in_bytes + planned.output_size_in_bytes
        - planned.alias_size_in_bytes,
        "compile_s": compile_s,
        "loss": loss,
        "num_parameters": dims.num_parameters(program.params),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
    }  # fmt: skip


def ask(size_name: str, remat: str, limit_s: int) -> dict[str, Any]:
    """Measure one policy in a process of its own; what went wrong comes back under ``problem``."""
    command = [sys.executable, str(Path(__file__)), "--row", remat, *(["--tiny"] if size_name == "tiny" else [])]
    environment = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95", **os.environ, "PYTHONPATH": str(ROOT)}
    if size_name == "tiny":
        environment |= {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "true"}  # quick to compile
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return {"problem": f"not done in {limit_s} s"}
    if done.returncode == 0:
        return json.loads(done.stdout.strip().splitlines()[-1])
    if "RESOURCE_EXHAUSTED" in done.stderr or "out of memory" in done.stderr.lower():
        return {"problem": "out of memory"}
    return {"problem": (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]}


def cells(remat: str, row: dict[str, Any]) -> list[str]:
    """Write one row of the table."""
    if "problem" in row:
        return [remat, *["-"] * (len(HEAD) - 2), row["problem"]]
    mfu = "n/a" if row["mfu"] is None else f"{100 * row['mfu']:.1f}%"
    peak = "n/a" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**30:.2f}"
    return [
        remat, f"{row['tokens_per_s']:,.0f}", mfu, f"{row['seconds']:.3f}", peak,
        f"{row['planned_bytes'] / 2**30:.2f}", f"{row['compile_s']:.1f}", f"{row['loss']:.3f}", "",
    ]  # fmt: skip


def main() -> int:
    """Print the table; exit code 1 if no row came out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="a toy size on the CPU")
    parser.add_argument("--row", choices=POLICIES, help="measure one policy here and print JSON")
    options = parser.parse_args()
    name, size = ("tiny", TINY) if options.tiny else ("large", LARGE)
    if options.row:
        print(json.dumps(measure(size, options.row)))
        return 0
    start = time.perf_counter()
    print(f"command  python {shlex.join(sys.argv)}")
    print(f"work     {size.preset} {size.changes or ''}, {size.batch_size} rows of {size.seq_len} tokens, bf16 compute")
    print("MFU      of the dense bf16 peak; attention counted in full, recomputation not")
    print("  ".join(word.rjust(11) for word in HEAD), flush=True)
    rows = []
    for remat in POLICIES:
        rows.append(ask(name, remat, size.limit_s))
        print("  ".join(cell.rjust(11) for cell in cells(remat, rows[-1])), flush=True)
    measured = [row for row in rows if "problem" not in row]
    for row in measured[:1]:
        print(f"device   {row['device']}, jax {row['jax']}, {row['num_parameters']:,} parameters")
    print(f"{time.perf_counter() - start:.0f} s in all")
    return 0 if measured else 1


if __name__ == "__main__":
    sys.exit(main())
