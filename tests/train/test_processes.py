"""Several real processes: the losses of one, signals that reach all, a death that ends all."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests import command

STEPS = 6
TRAIN = (
    "train", "run.yaml", "plan.mesh=data:2 fsdp:2 tensor:2", f"train.num_steps={STEPS}", "train.evaluate_every=3",
)  # fmt: skip
pytestmark = pytest.mark.timeout(600)


def launched(processes: int, devices: int, *words: str) -> tuple[str, ...]:
    return ("launch", "--processes", str(processes), "--devices-per-process", str(devices), "--", *words)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process with eight devices."""
    directory = tmp_path_factory.mktemp("alone")
    command.write_run(directory)
    command.jaxpp(*launched(1, 8, *TRAIN), cwd=directory)
    return directory / "out"


def alike(out: Path, alone: Path) -> None:
    assert command.losses(out) == pytest.approx(command.losses(alone), rel=1e-6)
    found, wanted = (
        {record["step"]: [record[k] for k in ("loss", "bits_per_byte", "tokens", "bytes")] for record in records}
        for records in (command.records(out, "eval"), command.records(alone, "eval"))
    )
    assert list(wanted) == [3, 6] and list(found) == [3, 4, 6]
    for step, values in wanted.items():
        assert found[step] == pytest.approx(values, rel=1e-6)


@pytest.mark.parametrize(
    "processes, devices, then",
    [(2, 4, (1, 8)), pytest.param(4, 2, (2, 4), marks=pytest.mark.slow)],
    ids=["2x4-then-1x8", "4x2-then-2x4"],
)
def test_processes_do_not_change_the_losses(
    processes: int, devices: int, then: tuple[int, int], alone: Path, tmp_path: Path
) -> None:
    command.write_run(tmp_path)
    out = tmp_path / "out"
    told = command.jaxpp(*launched(processes, devices, *TRAIN, "train.num_steps=4"), cwd=tmp_path).stdout
    assert told.count("step 4/4 ") == 1, "only process 0 is heard"
    assert command.steps(out) == [4]
    told = command.jaxpp(*launched(*then, *TRAIN), cwd=tmp_path).stdout
    assert "resumed from step 4\n" in told
    alike(out, alone)


def test_a_signal_to_the_launcher_saves_on_all(tmp_path: Path) -> None:
    command.write_run(tmp_path)
    out = tmp_path / "out"
    train = ("train", "run.yaml", "plan.mesh=data:2", "train.evaluate_every=0", "checkpoint.every=1000000")
    process = command.start(*launched(2, 1, *train, "train.num_steps=1000000"), cwd=tmp_path)
    command.wait_for(lambda: len(command.records(out)) > 3, process)
    process.send_signal(signal.SIGTERM)
    told, err = process.communicate()
    step = max(command.losses(out))
    assert process.returncode == 0, err
    assert told.endswith(f"stopped by a signal at step {step}; saved, run the same command to go on\n")
    assert command.steps(out) == [step]


@pytest.mark.slow  # stages that die so are in test_pipelined_processes.py
def test_a_process_that_dies_ends_all_with_a_message(tmp_path: Path) -> None:
    command.write_run(tmp_path)
    out = tmp_path / "out"
    train = ("train", "run.yaml", "plan.mesh=data:2", "train.evaluate_every=0", "train.num_steps=1000000")
    process = command.start(*launched(2, 1, *train), cwd=tmp_path)
    command.wait_for(lambda: len(command.records(out)) > 10, process)
    members = children(process.pid)
    assert len(members) == 2
    os.kill(members[1], signal.SIGKILL)
    err = process.communicate()[1]
    assert process.returncode == 128 + signal.SIGKILL
    assert err.splitlines()[-1] == "error: process 1 of 2 failed first, with SIGKILL; the others were stopped"
    assert not any(Path(f"/proc/{pid}").exists() for pid in members)
    assert command.steps(out), "what was saved before is still there"


def test_a_mistake_is_told_once_with_its_exit_code(tmp_path: Path) -> None:
    command.write_run(tmp_path)
    done = command.jaxpp(*launched(2, 1, *TRAIN), cwd=tmp_path, code=2)
    told = [line for line in done.stderr.splitlines() if 'mesh "data:2 fsdp:2 tensor:2" needs 8 devices' in line]
    assert told and "but there are 2" in told[0]
    assert "Traceback" not in done.stderr and not (tmp_path / "out").exists()
