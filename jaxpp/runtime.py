"""Processes: start `jax.distributed`, cross-host transfers, fake devices, and agreement checks.

Environment variables read here (the launcher and `tpu_scripts/` set the first three):

    JAXPP_COORDINATOR_ADDRESS  host:port where process 0 listens
    JAXPP_NUM_PROCESSES        how many processes take part
    JAXPP_PROCESS_ID           which of them this one is, from 0
    JAXPP_INIT_TIMEOUT_S       seconds until a start that lacks a process is given up (300)
    JAXPP_SHUTDOWN_TIMEOUT_S   seconds that an ending process waits for the others (60)
    JAXPP_TRANSFER_ADDRESS     this machine's address for cross-host transfers (found by itself)
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import resource
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from types import TracebackType
from typing import Any, NoReturn

import jax
import numpy as np

from jaxpp.cluster import Cluster, detect_cluster

DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"
SOCKET_OPTION = "jax_cross_host_transfer_socket_address"
TRANSPORT_OPTION = "jax_cross_host_transport_addresses"


def flags_with_devices(flags: str, num_devices: int) -> str:
    """Put the CPU device count into a value of XLA_FLAGS, keeping the other flags.

    >>> flags_with_devices("--a=1 --xla_force_host_platform_device_count=2", 8)
    '--a=1 --xla_force_host_platform_device_count=8'
    """
    kept = [flag for flag in flags.split() if not flag.startswith(DEVICE_COUNT_FLAG)]
    return " ".join([*kept, f"{DEVICE_COUNT_FLAG}={num_devices}"])


def _backend_started() -> bool:
    before = jax.config.values["jax_num_cpu_devices"]
    try:  # JAX refuses this option, and says so, once a backend runs
        jax.config.update("jax_num_cpu_devices", 2 if before == 1 else 1)
    except RuntimeError:
        return True
    jax.config.update("jax_num_cpu_devices", before)
    return False


def fake_devices(num_devices: int) -> None:
    """Let this process see `num_devices` CPU devices; call it before the first use of JAX.

    Raises:
        ValueError: a backend already runs with another count or platform.
    """
    if num_devices < 1:
        raise ValueError(f"{num_devices} fake devices; at least 1 is needed")
    if not _backend_started():
        os.environ["XLA_FLAGS"] = flags_with_devices(os.environ.get("XLA_FLAGS", ""), num_devices)
        os.environ["JAX_PLATFORMS"] = "cpu"
        jax.config.update("jax_platforms", "cpu")
        return
    platform, running = jax.default_backend(), jax.local_device_count()
    if (platform, running) != ("cpu", num_devices):
        raise ValueError(
            f"JAX already runs with {running} {platform} device(s), {num_devices} cpu were asked "
            "for; ask before the first JAX call, or start with JAX_PLATFORMS=cpu "
            f"XLA_FLAGS={DEVICE_COUNT_FLAG}={num_devices}"
        )


def _option_set(name: str, value: str) -> bool:
    if name not in jax.config.values:
        return False
    jax.config.update(name, value)
    return True


def _own_address(coordinator: str | None) -> str:
    if "JAXPP_TRANSFER_ADDRESS" in os.environ:
        return os.environ["JAXPP_TRANSFER_ADDRESS"]
    # Connecting a UDP socket sends nothing; it only picks the interface that leads there.
    target = coordinator.rsplit(":", 1)[0] if coordinator else "192.0.2.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, 9))
            return probe.getsockname()[0]
        except OSError:
            return socket.gethostbyname(socket.gethostname())


def _configure_transfers(coordinator: str | None) -> None:
    _option_set("jax_cpu_collectives_implementation", "gloo")
    if jax.config.values.get(SOCKET_OPTION, "set by nobody") != "":
        return
    # With no more threads than a small machine has cores, a collective may wait for a transfer that waits for it; two
    # for one device were too few. On one core 16 cost time: 38 ms for an operation of 27.
    os.environ.setdefault("NPROC", "16")
    address = _own_address(coordinator)
    # The socket's port is told to the other processes as it stands: with 0 they would wait for ever.
    _option_set(SOCKET_OPTION, f"{address}:{free_port(address)}")
    _option_set(TRANSPORT_OPTION, ",".join([f"{address}:0"] * 4))


def free_port(address: str) -> int:
    """Find a free port that the system does not hand out by itself: nobody else takes it before JAX binds it."""
    ports = range(20_000, 32_768)
    for port in random.SystemRandom().sample(ports, 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((address, port))
            return port
    raise ValueError(f"no free port on {address} between {ports.start} and {ports.stop}")


def initialize() -> None:
    """Join the other processes, where there are any; do nothing in a process on its own.

    Call it before the first use of JAX's devices; a second call does nothing.

    Raises:
        ValueError: the environment is contradictory, or JAX already runs its backend.
        ConnectionError: a process is missing when JAXPP_INIT_TIMEOUT_S is over.
    """
    if jax.distributed.is_initialized():
        return
    cluster = detect_cluster(os.environ)
    if cluster is None:
        return
    if _backend_started():
        raise ValueError("initialize() came after the first JAX call; call it before")
    timeout_s = float(os.environ.get("JAXPP_INIT_TIMEOUT_S", "300"))
    arguments = dict(cluster.arguments)
    _configure_transfers(arguments.get("coordinator_address"))
    if cluster.kind == "launcher":
        meet(
            arguments["coordinator_address"],
            arguments["num_processes"],
            arguments["process_id"],
            timeout_s,
        )
    with _watched(cluster, timeout_s):
        jax.distributed.initialize(
            **arguments,
            initialization_timeout=int(timeout_s) + 1,
            shutdown_timeout_seconds=int(os.environ.get("JAXPP_SHUTDOWN_TIMEOUT_S", "60")),
        )
    sys.excepthook = _end_on_exception


def prepare(cpu_devices: int) -> None:
    """Start the processes, with made-up CPU devices where asked for and where no launcher has set them."""
    launched = "JAXPP_COORDINATOR_ADDRESS" in os.environ or detect_cluster(os.environ) is not None
    if cpu_devices and not launched:
        fake_devices(cpu_devices)
    initialize()


@contextlib.contextmanager
def _watched(cluster: Cluster, timeout_s: float) -> Iterator[None]:
    # JAX aborts the process with a C++ stack when it waits too long: speak before it does.
    def speak() -> None:
        address = cluster.arguments.get("coordinator_address", "found by JAX")
        print(
            f"error: jax.distributed ({cluster.kind}, coordinator {address}) did not start within "
            f"{timeout_s:g} s; start the program on every host and open the coordinator's port",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)

    timer = threading.Timer(timeout_s + 0.5, speak)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def meet(address: str, num_processes: int, process_id: int, timeout_s: float) -> None:
    """Wait at the coordinator's port until every process is there, before JAX uses that port.

    Raises:
        ConnectionError: names the processes that did not come, or the address that did not answer.
    """
    deadline = time.monotonic() + timeout_s
    if process_id == 0:
        _receive_processes(address, num_processes, deadline, timeout_s)
    else:
        _report_to_coordinator(address, process_id, deadline, timeout_s)


def _receive_processes(address: str, count: int, deadline: float, timeout_s: float) -> None:
    host, port = address.rsplit(":", 1)
    peers: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as stack:
        bind_to = (host if host.startswith("127.") else "", int(port))
        server = stack.enter_context(socket.create_server(bind_to, backlog=max(128, count)))
        try:
            while len(peers) < count - 1:
                server.settimeout(max(deadline - time.monotonic(), 0.001))
                peer = stack.enter_context(server.accept()[0])
                peer.settimeout(5)
                with contextlib.suppress(OSError):  # a port scan or a doctor's probe
                    word = peer.recv(64).decode(errors="replace").split()
                    if len(word) == 2 and word[0] == "jaxpp" and word[1].isdigit():
                        peers[int(word[1])] = peer
        except TimeoutError:
            missing = ", ".join(str(k) for k in range(1, count) if k not in peers)
            line = (
                f"process(es) {missing} of {count} did not reach the coordinator {address} within "
                f"{timeout_s:g} s; start them all and let TCP port {port} through the firewall"
            )
            _tell(peers.values(), line)
            raise ConnectionError(line) from None
        _tell(peers.values(), "go")


def _tell(peers: Any, line: str) -> None:
    for peer in peers:
        with contextlib.suppress(OSError):
            peer.sendall(line.encode())
            peer.shutdown(socket.SHUT_WR)
            peer.recv(1)  # the peer closes first, so that the port stays free of TIME_WAIT


def _report_to_coordinator(address: str, index: int, deadline: float, timeout_s: float) -> None:
    host, port = address.rsplit(":", 1)
    answer = ""
    while not answer and time.monotonic() < deadline:
        try:
            with socket.create_connection((host, int(port)), timeout=5) as link:
                link.sendall(f"jaxpp {index}".encode())
                # Process 0 ends the wait; a little more time lets its list of the missing arrive.
                link.settimeout(max(deadline + 2 - time.monotonic(), 0.1))
                answer = link.recv(4096).decode()
        except OSError:
            time.sleep(0.1)
    if answer != "go":
        raise ConnectionError(
            answer
            or f"process {index} got no answer from the coordinator {address} (process 0) within "
            f"{timeout_s:g} s; start process 0 and let TCP port {port} through the firewall"
        )


def _end_on_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    sys.__excepthook__(kind, error, trace)
    leave(130 if issubclass(kind, KeyboardInterrupt) else 1)


def leave(code: int) -> NoReturn:
    """End this process; on failure at once, not after JAX has waited for the other processes."""
    if code == 0 or not jax.distributed.is_initialized():
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def process_index() -> int:
    """Return which process this is, from 0."""
    return jax.process_index()


def process_count() -> int:
    """Return how many processes take part."""
    return jax.process_count()


def is_main() -> bool:
    """Say whether this process is the one that logs."""
    return process_index() == 0


def barrier(name: str) -> None:
    """Wait until every process has called `barrier` with this name."""
    from jax.experimental import multihost_utils

    if process_count() > 1:
        multihost_utils.sync_global_devices(name)


def agree(value: str | bytes, name: str) -> None:
    """Check that all processes hold the same value; every process must call it.

    Raises:
        ValueError: on every process, naming those that differ from the majority.

    Cost: one all-gather of 32 bytes per process.
    """
    from jax.experimental import multihost_utils

    if process_count() == 1:
        return
    content = value.encode() if isinstance(value, str) else value
    digest = np.frombuffer(hashlib.sha256(content).digest(), dtype=np.uint8)
    rows = np.asarray(multihost_utils.process_allgather(digest)).reshape(-1, digest.size)
    digests = [row.tobytes().hex()[:8] for row in rows]
    common = Counter(digests).most_common(1)[0][0]  # a tie goes to the lowest process
    different = [k for k, digest in enumerate(digests) if digest != common]
    if different:
        names = ", ".join(f"process {k} ({digests[k]})" for k in different)
        raise ValueError(
            f"{name} differs between processes: {names} against {common} on "
            f"{len(digests) - len(different)} of {len(digests)}; give all the same files and flags"
        )


def device_memory_bytes() -> int | None:
    """Return the peak bytes in use on this process's fullest device; None where unreported."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [s["peak_bytes_in_use"] for s in stats if "peak_bytes_in_use" in s]
    return max(peaks, default=None)


def peak_host_bytes() -> int:
    """Return the largest resident memory that this process has had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
