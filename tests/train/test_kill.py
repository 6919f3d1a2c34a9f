"""`kill -9` at any moment: the run that goes on gives, bit for bit, the losses of one that was never killed."""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path

import pytest

from tests import command

TRAIN = (
    "train", "run.yaml", "cpu_devices=4", "plan.mesh=data:2 tensor:2", "train.evaluate_every=0", "checkpoint.every=10",
    "optimizer.schedule_steps=1000",
)  # fmt: skip


def newest(out: Path) -> int:
    return command.steps(out)[-1] if (out / "checkpoints").exists() and command.steps(out) else 0


def kill(directory: Path, train: tuple[str, ...], in_a_hurry: bool) -> int:
    """Start the run, kill it some time after it has a new checkpoint, and return the last step it told of."""
    out = directory / "out"
    before = newest(out)
    process = command.start(*train, cwd=directory, in_a_hurry=in_a_hurry)
    command.wait_for(lambda: newest(out) > before, process)
    step = len(command.records(out)) + random.randint(0, 12)
    command.wait_for(lambda: len(command.records(out)) >= step, process)
    time.sleep(random.uniform(0, 0.05))
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL, "it ended before it was killed"
    return len(command.records(out))


@pytest.mark.parametrize(
    "num_kills", [1, pytest.param(5, marks=[pytest.mark.slow, pytest.mark.timeout(600)])], ids="kills={}".format
)
def test_killed_runs_repeat_no_batch_and_skip_none(num_kills: int, tmp_path: Path) -> None:
    in_a_hurry, num_steps = num_kills == 1, 80 * (num_kills + 1)
    train = (*TRAIN, f"train.num_steps={num_steps}")
    killed, unkilled = tmp_path / "killed", tmp_path / "unkilled"
    for directory in (killed, unkilled):
        command.write_run(directory)
    moments = [kill(killed, train, in_a_hurry) for _ in range(num_kills)]
    told = command.jaxpp(*train, cwd=killed, in_a_hurry=in_a_hurry).stdout
    assert "resumed from step " in told, moments
    command.jaxpp(*train, cwd=unkilled, in_a_hurry=in_a_hurry)
    found, wanted = command.losses(killed / "out"), command.losses(unkilled / "out")
    assert list(wanted) == list(range(1, num_steps + 1))
    assert found == wanted, f"killed at {moments}"
    for directory in (killed, unkilled):
        position = json.loads((directory / "out" / "checkpoints" / str(num_steps) / "data.json").read_text())
        assert position["step"] == num_steps
    assert command.steps(killed / "out") == command.steps(unkilled / "out")
