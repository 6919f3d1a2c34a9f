"""Examine this machine and its processes before a run, and name the fix for what is wrong."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxpp import runtime
from jaxpp.cluster import detect_cluster, slurm_local_devices

# Package -> lowest version, version no longer supported, is it needed by `import jaxpp`?
PACKAGES: dict[str, tuple[str, str, bool]] = {
    "jax": ("0.10", "0.13", True),
    "flax": ("0.12.8", "", True),
    "optax": ("0.2.8", "", True),
    "orbax-checkpoint": ("0.12.8", "", True),
    "chex": ("0.1.91", "", True),
    "numpy": ("2.0", "", True),
    "grain": ("0.2.16", "", False),
    "tokenizers": ("0.22", "", False),
    "jinja2": ("3.1", "", False),
    "gguf": ("0.17", "", False),
    "huggingface_hub": ("0.34", "", False),
    "jsonargparse": ("4.50", "", False),
    "pyyaml": ("6.0", "", False),
    "rich": ("14.0", "", False),
    "tensorboardX": ("2.6.2", "", False),
    "psutil": ("6.0", "", False),
}
TRANSFER_TIMEOUT_S = 30.0
COORDINATOR_TIMEOUT_S = 10.0
GIB = 2**30


@dataclass(frozen=True)
class Finding:
    """Hold one thing examined: its status is `ok`, `warn` or `fail`; `fix` says what to do."""

    name: str
    status: str
    value: str
    fix: str = ""


def examine() -> list[Finding]:
    """Examine versions, machine, environment and, where it can start, JAX and its processes."""
    found = [_python(), *packages(), _same_name(), *machine(), xla_flags(os.environ)]
    found += [gpu_visibility(os.environ), *_coordinator(os.environ)]
    if any(f.status == "fail" and f.name in ("jax", "XLA_FLAGS", "coordinator") for f in found):
        return found  # JAX would hang or abort
    try:
        runtime.initialize()
        return found + _devices()
    except (ValueError, RuntimeError, OSError) as error:
        fix = "see the message; JAX_PLATFORMS=cpu tells whether the accelerator is at fault"
        return [*found, Finding("start of JAX", "fail", str(error).splitlines()[0], fix)]


def exit_code(findings: list[Finding]) -> int:
    """Return 1 if anything failed, else 0."""
    return int(any(finding.status == "fail" for finding in findings))


def render(findings: list[Finding]) -> str:
    """Lay the findings out as aligned lines of at most 100 columns, fixes beneath."""
    width = max((len(f.name) for f in findings), default=0)
    indent = " " * (width + 8)
    lines = []
    for f in findings:
        head = f"{f.status:<4}  {f.name:<{width}}  "
        lines += textwrap.wrap(f.value, 100, initial_indent=head, subsequent_indent=indent)
        if f.fix:
            lines += textwrap.wrap(f.fix, 100, initial_indent=f"{indent}fix: ", subsequent_indent=indent)
    return "\n".join(lines)


def _python() -> Finding:
    value = ".".join(map(str, sys.version_info[:3]))
    if (3, 11) <= sys.version_info[:2] <= (3, 13):
        return Finding("python", "ok", value)
    return Finding("python", "fail", value, "make an environment with Python 3.11, 3.12 or 3.13")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", version.split("+")[0])[:3])


def packages(version_of: Callable[[str], str] = importlib.metadata.version) -> list[Finding]:
    """Compare installed versions with the supported ranges."""
    findings = []
    for name, (low, high, needed) in PACKAGES.items():
        bad = "fail" if needed else "warn"
        wanted = f"{name}>={low}" + (f",<{high}" if high else "")
        fix = f'pip install "{wanted}"'
        try:
            version = version_of(name)
        except importlib.metadata.PackageNotFoundError:
            findings.append(Finding(name, bad, "not installed", fix))
            continue
        numbers = _numbers(version)
        good = numbers >= _numbers(low) and (not high or numbers < _numbers(high))
        findings.append(Finding(name, "ok" if good else bad, version, "" if good else fix))
    return findings


def _same_name() -> Finding:
    try:
        version = importlib.metadata.version("jaxpp")
    except importlib.metadata.PackageNotFoundError:
        return Finding("name jaxpp", "ok", "no other package of this import name")
    fix = "pip uninstall jaxpp; then pip install --force-reinstall jaxpp-toolkit"
    return Finding("name jaxpp", "fail", f"NVIDIA's jaxpp {version} is installed too", fix)


def machine(directory: str = ".") -> list[Finding]:
    """Look at cores, memory, free disk and the right to write."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free = shutil.disk_usage(directory).free
    findings = [
        Finding("cores", "ok", str(cores)),
        Finding("host memory", "ok" if memory >= 4 * GIB else "warn", f"{memory / GIB:.1f} GiB"),
        Finding(
            "free disk",
            "ok" if free >= 10 * GIB else "warn",
            f"{free / GIB:.1f} GiB",
            "" if free >= 10 * GIB else "checkpoints may not fit; free space or choose another disk",
        ),
    ]
    try:
        with tempfile.TemporaryFile(dir=directory):
            return [*findings, Finding("write here", "ok", os.path.abspath(directory))]
    except OSError as error:
        fix = "run where you may write, or change the permissions"
        return [*findings, Finding("write here", "fail", f"{directory}: {error.strerror}", fix)]


def xla_flags(environment: Mapping[str, str]) -> Finding:
    """Try XLA_FLAGS in a process of its own: an unknown flag aborts the process that reads it."""
    flags = environment.get("XLA_FLAGS", "")
    if all(flag.startswith(runtime.DEVICE_COUNT_FLAG) for flag in flags.split()):
        return Finding("XLA_FLAGS", "ok", flags or "not set")
    alone = {k: v for k, v in environment.items() if not k.startswith("JAXPP_")}
    command = [sys.executable, "-c", "import jax; jax.devices()"]
    done = subprocess.run(command, env={**alone, "JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, timeout=120)
    if done.returncode == 0:
        return Finding("XLA_FLAGS", "ok", flags)
    unknown = re.search(r"Unknown flags? in XLA_FLAGS: *([^\n]*)", done.stderr)
    value = f"unknown: {unknown[1]}" if unknown else f"JAX does not start with {flags}"
    fix = "remove them (flags go away between releases); --xla_tpu_... belong in LIBTPU_INIT_ARGS"
    return Finding("XLA_FLAGS", "fail", value, fix)


def gpu_visibility(environment: Mapping[str, str]) -> Finding:
    """Compare CUDA_VISIBLE_DEVICES with what SLURM allotted."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    on_node = environment.get("SLURM_GPUS_ON_NODE")
    if on_node is None:
        return Finding("visible GPUs", "ok", "all" if visible is None else repr(visible))
    taken = slurm_local_devices(environment)
    if visible == "" or not taken:
        fix = "ask for --gpus-per-node in sbatch and do not empty CUDA_VISIBLE_DEVICES"
        return Finding("visible GPUs", "fail", f"none of SLURM's {on_node} for this task", fix)
    return Finding("visible GPUs", "ok", f"task takes {taken} of SLURM's {on_node}")


def _coordinator(environment: Mapping[str, str]) -> list[Finding]:
    try:
        cluster = detect_cluster(environment)
    except ValueError as error:
        return [Finding("coordinator", "fail", str(error), "correct these variables")]
    if cluster is None:
        return [Finding("coordinator", "ok", "one process, none needed")]
    address = cluster.arguments.get("coordinator_address")
    if address is None:
        return [Finding("coordinator", "ok", f"{cluster.kind}: found by JAX at the start")]
    if cluster.arguments["process_id"] == 0:
        return [Finding("coordinator", "ok", f"this process, {address}")]
    return [reach(address)]


def reach(address: str, timeout_s: float = COORDINATOR_TIMEOUT_S) -> Finding:
    """Try to connect to the coordinator until the time is over."""
    host, port = address.rsplit(":", 1)
    deadline, reason = time.monotonic() + timeout_s, "no answer"
    while time.monotonic() < deadline:
        try:
            with socket.create_connection((host, int(port)), timeout=2):
                return Finding("coordinator", "ok", f"{address} answers")
        except OSError as error:
            reason = str(error)
            time.sleep(0.2)
    fix = f"start process 0 there and let TCP port {port} through the firewall"
    return Finding("coordinator", "fail", f"{address}: {reason}", fix)


def _devices() -> list[Finding]:
    import jax

    local, total = jax.local_device_count(), jax.device_count()
    config: Mapping[str, Any] = jax.config.values
    platform = jax.default_backend()
    forced = "cpu" in os.environ.get("JAX_PLATFORMS", "")
    idle_gpu = platform == "cpu" and not forced and os.path.exists("/dev/nvidia0")
    findings = [
        Finding(
            "platform",
            "warn" if idle_gpu else "ok",
            f"{platform} ({jax.devices()[0].device_kind})",
            'a GPU is here but unused: pip install "jaxpp-toolkit[gpu]"' if idle_gpu else "",
        ),
        Finding("devices", "ok", f"{local} local, {total} in all"),
        Finding("processes", "ok", f"{jax.process_index()} of {jax.process_count()}"),
        Finding("CPU collectives", "ok", str(config["jax_cpu_collectives_implementation"])),
    ]
    if jax.process_count() == 1:
        return [*findings, Finding("cross-host transfer", "ok", "one process, not needed")]
    return [*findings, transfer(move_between_processes, str(config.get(runtime.SOCKET_OPTION)))]


def transfer(move: Callable[[], None], address: str, timeout_s: float = TRANSFER_TIMEOUT_S) -> Finding:
    """Run a cross-host transfer, and say so when it fails or hangs."""
    outcome: list[str] = []

    def attempt() -> None:
        try:
            move()
            outcome.append("")
        except Exception as error:  # whatever JAX raises is the finding
            outcome.append(str(error).splitlines()[0] or type(error).__name__)

    worker = threading.Thread(target=attempt, daemon=True)
    worker.start()
    worker.join(timeout_s)
    problem = outcome[0] if outcome else f"no answer within {timeout_s:g} s"
    if not problem:
        return Finding("cross-host transfer", "ok", f"device_put works, socket {address}")
    fix = "set JAXPP_TRANSFER_ADDRESS to an address that the other hosts reach, open TCP ports"
    return Finding("cross-host transfer", "fail", f"socket {address}: {problem}", fix)


def move_between_processes() -> None:
    """Send a small array from the first device to the last, as a pipeline does.

    Raises:
        ValueError: other numbers arrived.
    """
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    sent = np.arange(16, dtype=np.float32)
    first, last = (NamedSharding(Mesh(np.array([jax.devices()[k]]), ("x",)), PartitionSpec()) for k in (0, -1))
    source = jax.make_array_from_callback(sent.shape, first, lambda i: sent[i], dtype=sent.dtype)
    moved = jax.device_put(source, last)
    for shard in moved.addressable_shards:
        if not np.array_equal(np.asarray(shard.data), sent):
            raise ValueError(f"sent {sent.tolist()}, received {np.asarray(shard.data).tolist()}")
