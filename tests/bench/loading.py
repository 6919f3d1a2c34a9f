"""``python -m tests.bench.loading``: a checkpoint onto eight fake devices, against reading its files with `cat`.

Writes a random checkpoint of a Llama-like shape in five files, and loads it in fresh processes. Columns: seconds of
`cat`, seconds of the load, their ratio; `fill`: seconds to write zeros into as much fresh memory, by as many threads,
which no load into memory can beat; cpu s: processor seconds of the load; peak: resident memory of a process at most,
per byte of the checkpoint, and `before` the load (Python, JAX). Mapped pages of a file count as resident as long as
they are mapped. Without the right to drop the kernel's cache there are no cold rows.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jaxpp import runtime
from jaxpp.convert.part import Part
from jaxpp.convert.safetensors import INDEX, open_safetensors
from jaxpp.convert.stream import load_onto
from jaxpp.mesh import make_mesh

ROOT = Path(__file__).parents[2]
NUM_FILES = 5
LAYER = "model.layers.{layer}."
WEIGHTS: dict[str, tuple[str, Part]] = {
    "tokens": ("vocab -> embed", Part("model.embed_tokens.weight", "vocab embed")),
    "head": ("embed -> vocab", Part("lm_head.weight", "vocab embed")),
    "norm": ("-> embed", Part("model.norm.weight", "embed")),
    **{
        f"{name}_proj": (
            "layers | embed -> heads head_dim", Part(f"{LAYER}self_attn.{name}_proj.weight", "(heads head_dim) embed"),
        )
        for name in "qkv"
    },
    "o_proj": ("layers | heads head_dim -> embed", Part(f"{LAYER}self_attn.o_proj.weight", "embed (heads head_dim)")),
    "gate": ("layers | embed -> mlp", Part(f"{LAYER}mlp.gate_proj.weight", "mlp embed")),
    "up": ("layers | embed -> mlp", Part(f"{LAYER}mlp.up_proj.weight", "mlp embed")),
    "down": ("layers | mlp -> embed", Part(f"{LAYER}mlp.down_proj.weight", "embed mlp")),
    "input_norm": ("layers | -> embed", Part(f"{LAYER}input_layernorm.weight", "embed")),
    "post_norm": ("layers | -> embed", Part(f"{LAYER}post_attention_layernorm.weight", "embed")),
}  # fmt: skip
PARTS = {path: (part,) for path, (_, part) in WEIGHTS.items()}
LAUNCH = "import sys; from jaxpp.launch import launch; sys.exit(launch(sys.argv[3:], *map(int, sys.argv[1:3])))"
FILL = """
import os, sys, time
from concurrent.futures import ThreadPoolExecutor
import numpy as np
size, threads = int(sys.argv[1]), len(os.sched_getaffinity(0))
start = time.perf_counter()
with ThreadPoolExecutor(threads) as pool:
    list(pool.map(lambda part: part.fill(0), np.array_split(np.empty(size, np.uint8), 8)))
print(time.perf_counter() - start)
"""
WANTED = {1: 1.3, 2: 0.8}  # peak resident bytes of a process per byte of the checkpoint, by number of processes


def sizes(num_layers: int, scale: int = 16) -> dict[str, int]:
    """Return the size of each dim; `scale` 16 is that of a model of about 1e9 weights."""
    return {
        "layers": num_layers, "embed": 128 * scale, "heads": scale, "head_dim": 128, "mlp": 352 * scale,
        "vocab": 2000 * scale,
    }  # fmt: skip


def shapes(dims: dict[str, int]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of the files, layer by layer."""
    layers = {
        part.name(layer): part.shape(dims)
        for layer in range(dims["layers"])
        for _, part in WEIGHTS.values()
        if "{layer}" in part.tensor
    }
    return layers | {part.tensor: part.shape(dims) for _, part in WEIGHTS.values() if "{" not in part.tensor}


def write(directory: Path, dims: dict[str, int], dtype: str) -> int:
    """Write a random checkpoint and return its bytes."""
    from safetensors.numpy import save_file

    draw, width = np.random.default_rng(0), np.dtype(jnp.dtype(dtype)).itemsize
    names = shapes(dims)
    total = sum(int(np.prod(shape)) * width for shape in names.values())
    files: dict[str, dict[str, np.ndarray]] = {}
    written, weight_map = 0, {}
    for name, shape in names.items():
        file = f"model-{written * NUM_FILES // total + 1:05}-of-{NUM_FILES:05}.safetensors"
        weight_map[name] = file
        words = draw.integers(0, 2**63, -(-int(np.prod(shape)) * width // 8), np.int64)
        array = words.view(np.uint8)[: int(np.prod(shape)) * width].view(jnp.dtype(dtype)).reshape(shape)
        files.setdefault(file, {})[name] = array
        written += array.nbytes
        for ready in [one for one in files if one != file]:
            save_file(files.pop(ready), directory / ready)
    for file, tensors in files.items():
        save_file(tensors, directory / file)
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    os.sync()
    return total


def abstract(dims: dict[str, int], dtype: str, mesh_spec: str = "fsdp:8") -> nnx.State:
    """Return the abstract weights, `embed` split over the devices."""
    mesh, flat = make_mesh(mesh_spec), {}
    for path, (arrow, _) in WEIGHTS.items():
        names = [word for word in arrow.split() if word not in ("->", "|")]
        sharding = NamedSharding(mesh, PartitionSpec(*("fsdp" if name == "embed" else None for name in names)))
        shape = tuple(dims[name] for name in names)
        flat[(path,)] = nnx.Param(jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding), dims=arrow)
    return nnx.from_flat_state(flat)


def peak_bytes() -> int:
    """Return the most that this process ever had resident."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def measure(request: dict[str, Any]) -> None:
    """Load once, in this process (or as one of several), and write what it took into a file."""
    runtime.initialize()
    like, counted = abstract(request["dims"], request["dtype"]), []
    before = peak_bytes()
    runtime.barrier("start")
    start, used = time.perf_counter(), time.process_time()
    params = load_onto(open_safetensors(request["directory"]), PARTS, like, progress=counted.append)
    jax.block_until_ready(params)
    answer = {
        "seconds": time.perf_counter() - start,
        "processor": time.process_time() - used,
        "read": sum(counted),
        "before": before,
        "peak": peak_bytes(),
    }
    runtime.barrier("end")
    Path(f"{request['answer']}-{runtime.process_index()}").write_text(json.dumps(answer))


def load(directory: Path, dims: dict[str, int], dtype: str, processes: int) -> list[dict[str, Any]]:
    """Load in fresh processes with eight devices in all and return what each took.

    Raises:
        RuntimeError: it failed; the message ends with its last line.
    """
    with tempfile.TemporaryDirectory() as place:
        request = {"directory": str(directory), "dims": dims, "dtype": dtype, "answer": f"{place}/answer"}
        command = [sys.executable, "-m", "tests.bench.loading", "--measure", json.dumps(request)]
        if processes > 1:
            command = [sys.executable, "-c", LAUNCH, str(processes), str(8 // processes), *command]
        environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": str(ROOT),
            "XLA_FLAGS": runtime.flags_with_devices("", 8),
        }
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"load: {(done.stderr.strip() or 'no message').splitlines()[-1]}")
        return [json.loads(Path(f"{place}/answer-{i}").read_text()) for i in range(processes)]


def cat(directory: Path) -> float:
    """Return the seconds that `cat` takes to read the files."""
    files = sorted(map(str, directory.glob("*.safetensors")))
    start = time.perf_counter()
    subprocess.run(["cat", *files], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start


def fill(num_bytes: int) -> float:
    """Return the seconds to fill fresh memory, in a fresh process, with as many threads as a load uses."""
    done = subprocess.run([sys.executable, "-c", FILL, str(num_bytes)], capture_output=True, text=True, check=True)
    return float(done.stdout)


def drop_caches() -> bool:
    """Make the kernel forget the files it has read, where this user may."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("1")
    except OSError:
        return False
    return True


@dataclass(frozen=True)
class Measured:
    """What one repetition took: `cat`, the load of each process, and filling as much memory."""

    cat: float
    loads: list[dict[str, Any]]
    fill: float

    @property
    def seconds(self) -> float:
        """Seconds of the load, until its last process is done."""
        return max(answer["seconds"] for answer in self.loads)


def repetition(directory: Path, total: int, dims: dict[str, int], dtype: str, processes: int, cold: bool) -> Measured:
    """Measure `cat` and the load, each with the files in the kernel's cache, or neither."""
    drop_caches() if cold else cat(directory)
    reading = cat(directory)
    if cold:
        drop_caches()
    found = Measured(reading, load(directory, dims, dtype, processes), fill(total))
    assert sum(answer["read"] for answer in found.loads) == total
    return found


def rows(directory: Path, total: int, dims: dict[str, int], dtype: str, repeats: int) -> Iterable[Sequence[str]]:
    """Measure one checkpoint: one and two processes, files in the kernel's cache and not."""
    for cold, processes in itertools.product((False, True) if drop_caches() else (False,), (1, 2)):
        found = [repetition(directory, total, dims, dtype, processes, cold) for _ in range(repeats)]
        columns = (
            [one.cat for one in found],
            [one.seconds for one in found],
            [one.cat / one.seconds for one in found],
            [one.fill for one in found],
            [sum(answer["processor"] for answer in one.loads) for one in found],
        )
        most = [max(answer[name] for one in found for answer in one.loads) / total for name in ("peak", "before")]
        yield (
            dtype, f"{processes} x {8 // processes}", "cold" if cold else "warm",
            *(f"{statistics.median(column):.2f}" for column in columns), *(f"{one:.2f}" for one in most),
            f"{WANTED[processes]}",
        )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    from tests.bench.run import print_table

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="size of the checkpoint")
    parser.add_argument("--repeats", type=int, default=3, help="fresh processes for each row; medians are shown")
    parser.add_argument("--directory", help="where to write the checkpoint; a temporary directory if not given")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.measure:
        return measure(json.loads(options.measure))

    def all_rows() -> Iterable[Sequence[str]]:
        for dtype in ("bfloat16", "float32"):
            with tempfile.TemporaryDirectory(dir=options.directory) as place:
                width = np.dtype(jnp.dtype(dtype)).itemsize
                one, two = (sum(int(np.prod(s)) for s in shapes(sizes(n)).values()) * width for n in (1, 2))
                dims = sizes(max(1, round((options.gigabytes * 1e9 - one) / (two - one)) + 1))
                total = write(Path(place), dims, dtype)
                yield from rows(Path(place), total, dims, dtype, options.repeats)

    head = ("dtype", "processes", "files", "cat s", "ours s", "cat/ours", "fill s", "cpu s", "peak", "before", "wanted")
    title = f"Loading {options.gigabytes} GB in {NUM_FILES} files onto fsdp:8, {len(os.sched_getaffinity(0))} cores"
    print_table(title, head, all_rows())


if __name__ == "__main__":
    main()
