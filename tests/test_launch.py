from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxpp.launch import launch

ROOT = Path(__file__).resolve().parents[1]
LAUNCH = """
import sys
from jaxpp.launch import launch
sys.exit(launch(sys.argv[3:], int(sys.argv[1]), int(sys.argv[2])))
"""
RANK = "import os, sys, time, signal\nrank = int(os.environ['JAXPP_PROCESS_ID'])\n"


def start(tmp_path: Path, body: str, num: int = 2, devices: int = 1) -> subprocess.Popen[str]:
    script = tmp_path / "program.py"
    script.write_text(RANK + body)
    return subprocess.Popen(
        [sys.executable, "-c", LAUNCH, str(num), str(devices), sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
    )


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_for(condition, seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return False


def pids(tmp_path: Path, num: int = 2) -> list[int]:
    files = [tmp_path / f"pid{k}" for k in range(num)]
    assert wait_for(lambda: all(f.exists() and f.read_text() for f in files))
    return [int(f.read_text()) for f in files]


WRITE_PID = "open(f'pid{rank}', 'w').write(str(os.getpid()))\n"


@pytest.mark.timeout(120)
def test_only_process_0_is_heard(tmp_path: Path) -> None:
    out, err = start(tmp_path, "print('out', rank)\nprint('err', rank, file=sys.stderr)").communicate()
    assert out == "out 0\n" and err == "err 0\n"


@pytest.mark.timeout(120)
def test_first_failure_is_told_and_the_rest_end(tmp_path: Path) -> None:
    body = (
        WRITE_PID
        + "signal.signal(15, signal.SIG_IGN)\n"
        + "if rank == 1:\n    time.sleep(1); sys.exit('boom')\ntime.sleep(100)"
    )
    process, began = start(tmp_path, body), time.monotonic()
    out, err = process.communicate()
    assert process.returncode == 1 and time.monotonic() - began < 30
    assert "[process 1] boom" in err and err.rstrip().splitlines()[-1].startswith("error: process 1 of 2")
    assert all(gone(pid) for pid in pids(tmp_path))


@pytest.mark.timeout(120)
def test_sigterm_lets_every_process_save(tmp_path: Path) -> None:
    body = (
        "def stop(*_):\n    time.sleep(0.5); open(f'saved{rank}', 'w'); sys.exit(0)\n"
        "signal.signal(15, stop)\n" + WRITE_PID + "time.sleep(100)"
    )
    process = start(tmp_path, body)
    pids(tmp_path)
    process.send_signal(signal.SIGTERM)
    process.communicate()
    assert process.returncode == 0 and all((tmp_path / f"saved{k}").exists() for k in range(2))


@pytest.mark.timeout(120)
def test_killed_launcher_leaves_no_orphans(tmp_path: Path) -> None:
    process = start(tmp_path, WRITE_PID + "time.sleep(100)")
    children = pids(tmp_path)
    process.kill()
    process.communicate()
    assert wait_for(lambda: all(gone(pid) for pid in children))


@pytest.mark.parametrize(("num", "devices", "command"), [(0, 1, ["x"]), (1, 0, ["x"]), (1, 1, [])])
def test_wrong_counts_are_refused(num: int, devices: int, command: list[str]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        launch(command, num, devices)
