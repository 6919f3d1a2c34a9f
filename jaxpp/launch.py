"""Start several real processes of one command on this machine, and end them together."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from jaxpp import runtime

NUM_TAIL_LINES = 40
FAILURE_GRACE_S = 3.0  # from SIGTERM to SIGKILL once a process has failed
SETTLE_S = 0.3  # failures this close together are compared to find the one that came first

# Runs before the command: ask the kernel to end it with the launcher, even by `kill -9`.
_SHIM = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.exit(f"error: cannot start {sys.argv[2]}: {error.strerror}")
"""


@dataclass
class _Member:
    index: int
    process: subprocess.Popen[bytes]
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=NUM_TAIL_LINES))
    reader: threading.Thread | None = None

    def send(self, number: int) -> None:
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)

    def kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)


def launch(
    command: list[str],
    processes: int,
    devices_per_process: int,
    environment: Mapping[str, str] | None = None,
) -> int:
    """Run `command` as `processes` processes of one `jax.distributed` program, on CPU devices.

    Process 0 writes to this terminal; the last lines of another are shown if it fails first.
    SIGINT and SIGTERM are passed on, and the processes are awaited. Call from the main thread.

    Args:
        command: program and arguments, the same for every process.
        processes: how many.
        devices_per_process: fake CPU devices of each.
        environment: variables set for every process, over those of this one.

    Returns:
        0, or the exit code of the process that failed first (128 + signal if a signal ended it).

    Raises:
        ValueError: a count below 1, or an empty command.
    """
    if processes < 1 or devices_per_process < 1 or not command:
        raise ValueError(
            f"launch of {processes} process(es) with {devices_per_process} device(s) of "
            f"{command!r}; needed: at least 1, at least 1, and a command after --"
        )
    variables = _variables(processes, devices_per_process, environment or {})
    members: list[_Member] = []
    ended: queue.SimpleQueue[_Member] = queue.SimpleQueue()
    try:
        with _forwarded(members):
            for index in range(processes):
                members.append(_start(command, index, variables, ended))
            return _await(members, ended)
    finally:
        for member in members:
            member.kill_group()


def _variables(processes: int, devices: int, extra: Mapping[str, str]) -> dict[str, str]:
    variables = {**os.environ, **extra}
    return variables | {
        "JAXPP_COORDINATOR_ADDRESS": f"127.0.0.1:{runtime.free_port('127.0.0.1')}",
        "JAXPP_NUM_PROCESSES": str(processes),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": runtime.flags_with_devices(variables.get("XLA_FLAGS", ""), devices),
    }


def _start(command: list[str], index: int, variables: dict[str, str], ended: queue.SimpleQueue[_Member]) -> _Member:
    shown = index == 0
    process = subprocess.Popen(
        [sys.executable, "-ISc", _SHIM, str(os.getpid()), *command],
        env=variables | {"JAXPP_PROCESS_ID": str(index)},
        stdin=subprocess.DEVNULL,
        stdout=None if shown else subprocess.PIPE,
        stderr=None if shown else subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C reaches it once, from us, and its children die with it
    )
    member = _Member(index, process)
    if not shown:
        member.reader = threading.Thread(target=_keep_tail, args=(member,), daemon=True)
        member.reader.start()
    threading.Thread(target=_report_end, args=(member, ended), daemon=True).start()
    return member


def _report_end(member: _Member, ended: queue.SimpleQueue[_Member]) -> None:
    member.process.wait()
    ended.put(member)


def _keep_tail(member: _Member) -> None:
    assert member.process.stdout is not None
    while line := member.process.stdout.readline(65536):
        member.tail.append(line.decode(errors="replace").rstrip("\n"))


@contextlib.contextmanager
def _forwarded(members: list[_Member]) -> Iterator[None]:
    def forward(number: int, _frame: object) -> None:
        for member in members:
            member.send(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _await(members: list[_Member], ended: queue.SimpleQueue[_Member]) -> int:
    for _ in members:
        member = _next(ended)
        if member.process.returncode != 0:
            first = _first_failure(member, ended)
            _bring_down(members)
            _explain(first, len(members))
            code = first.process.returncode
            return code if code > 0 else 128 - code
    return 0


def _next(ended: queue.SimpleQueue[_Member]) -> _Member:
    while True:  # wake up now and then, so that signal handlers run
        with contextlib.suppress(queue.Empty):
            return ended.get(timeout=0.2)


def _first_failure(seen: _Member, ended: queue.SimpleQueue[_Member]) -> _Member:
    # JAX's coordination service aborts the survivors of a death: an abort is rarely the cause.
    failed, deadline = [seen], time.monotonic() + SETTLE_S
    while (left := deadline - time.monotonic()) > 0:
        with contextlib.suppress(queue.Empty):
            member = ended.get(timeout=left)
            if member.process.returncode != 0:
                failed.append(member)
    causes = [m for m in failed if m.process.returncode != -signal.SIGABRT]
    return (causes or failed)[0]


def _bring_down(members: list[_Member]) -> None:
    for member in members:
        member.send(signal.SIGTERM)
    deadline = time.monotonic() + FAILURE_GRACE_S
    for member in members:
        try:
            member.process.wait(max(deadline - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            member.kill_group()
            member.process.wait()


def _explain(first: _Member, num_processes: int) -> None:
    if first.reader is not None:
        first.reader.join(timeout=1)
    for line in list(first.tail):
        print(f"[process {first.index}] {line}", file=sys.stderr)
    code = first.process.returncode
    how = f"exit code {code}" if code > 0 else signal.Signals(-code).name
    print(
        f"error: process {first.index} of {num_processes} failed first, with {how}; the others were stopped",
        file=sys.stderr,
        flush=True,
    )
