"""``python -m tests.bench.growing SRC``: growing a checkpoint, against copying the target's bytes and reading SRC.

Each row runs in fresh processes: SRC grows into a Hugging Face directory on the same disk, without the proof. Columns:
seconds of the growth (from an opened source to files in their place, flushed), seconds to copy as many bytes from file
to file (flushed) and to read the source, and grow / (2 x copy + read), wanted 1 at most; peak: most resident memory
of a process, per byte of the target, and `before` the growth (Python, JAX, the tokenizer).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from jaxpp import runtime
from tests.bench.loading import LAUNCH, ROOT, peak_bytes

REQUESTS: dict[str, dict[str, Any]] = {
    "width 2, 15 dB": dict(width=2),
    "width 2": dict(width=2, noise_db=None),
    "depth 1.5": dict(depth=45),
}
WANTED = {1: 1.25, 2: 0.7}  # peak resident bytes of a process per byte of the target, by number of processes


def measure(request: dict[str, Any]) -> None:
    """Grow once, in this process (or as one of several), and write what it took into a file."""
    from jaxpp.conversion import load
    from jaxpp.grow import Grown, Request
    from jaxpp.grow.write import grow
    from jaxpp.pretrained import open_checkpoint, stored_bytes

    runtime.initialize()
    checkpoint = open_checkpoint(request["source"])
    growth = Request(**request["wishes"]).growth(checkpoint.config)
    before, reading = peak_bytes(), 0.0
    if request["read"]:
        start = time.perf_counter()
        load(checkpoint)
        reading = time.perf_counter() - start
    runtime.barrier("start")
    start = time.perf_counter()
    if not request["read"]:
        grow(checkpoint, request["target"], growth, "hf", mesh=request["mesh"])
        os.sync()
    seconds = time.perf_counter() - start
    num_bytes = stored_bytes(Grown(checkpoint, growth))
    answer = dict(seconds=seconds, reading=reading, before=before, peak=peak_bytes(), bytes=num_bytes)
    runtime.barrier("end")
    Path(f"{request['answer']}-{runtime.process_index()}").write_text(json.dumps(answer))


def run(source: str, place: Path, wishes: dict[str, Any], processes: int, read: bool) -> list[dict[str, Any]]:
    """Measure in fresh processes and return what each took.

    Raises:
        RuntimeError: it failed; the message ends with its last line.
    """
    request = dict(
        source=source, target=str(place / "out"), wishes=wishes, answer=str(place / "answer"), read=read,
        mesh=f"fsdp:{processes}",
    )  # fmt: skip
    command = [sys.executable, "-m", "tests.bench.growing", source, "--measure", json.dumps(request)]
    if processes > 1:
        command = [sys.executable, "-c", LAUNCH, str(processes), "1", *command]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    shutil.rmtree(place / "out", ignore_errors=True)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"grow: {(done.stderr.strip() or 'no message').splitlines()[-1]}")
    return [json.loads(Path(f"{place}/answer-{i}").read_text()) for i in range(processes)]


def copy(place: Path) -> float:
    """Return the seconds to copy the target's weights on the same disk, flushed."""
    os.sync()
    start = time.perf_counter()
    for path in (place / "out").glob("*.safetensors"):
        shutil.copyfile(path, place / f"copy-{path.name}")
    os.sync()
    seconds = time.perf_counter() - start
    for path in place.glob("copy-*"):
        path.unlink()
    return seconds


def rows(source: str, directory: str | None, repeats: int) -> Iterable[Sequence[str]]:
    """Measure each growth, by one process and by two."""
    for name, wishes in REQUESTS.items():
        for processes in (1, 2):
            with tempfile.TemporaryDirectory(dir=directory) as place:
                grown, copied, read = [], [], []
                for _ in range(repeats):
                    grown.append(run(source, Path(place), wishes, processes, read=False))
                    copied.append(copy(Path(place)))
                    read.append(run(source, Path(place), wishes, 1, read=True)[0]["reading"])
            seconds = [max(answer["seconds"] for answer in answers) for answers in grown]
            allowed = [2 * one + other for one, other in zip(copied, read, strict=True)]
            ratios = [one / other for one, other in zip(seconds, allowed, strict=True)]
            total = grown[0][0]["bytes"]
            most = [max(answer[key] for one in grown for answer in one) / total for key in ("peak", "before")]
            yield (
                name, str(processes), f"{total / 2**30:.2f}",
                *(f"{statistics.median(column):.2f}" for column in (seconds, copied, read, ratios)),
                *(f"{one:.2f}" for one in most), f"{WANTED[processes]}",
            )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    from tests.bench.run import print_table

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", metavar="SRC", help="a checkpoint of any format")
    parser.add_argument("--repeats", type=int, default=3, help="fresh processes for each row; medians are shown")
    parser.add_argument("--directory", help="where to write; a temporary directory if not given")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.measure:
        return measure(json.loads(options.measure))
    head = (
        "growth",
        "processes",
        "target GiB",
        "grow s",
        "copy s",
        "read s",
        "grow/allowed",
        "peak",
        "before",
        "wanted",
    )
    cores = len(os.sched_getaffinity(0))
    print_table(
        f"Growing {Path(options.source).name}, {cores} cores",
        head,
        rows(options.source, options.directory, options.repeats),
    )


if __name__ == "__main__":
    main()
