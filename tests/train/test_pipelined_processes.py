"""Stages in processes of their own: the losses of one, a death that ends all, a run that goes on bit for bit."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests import command
from tests.train.test_processes import children, launched

PIPELINE = "plan.pipeline={schedule: 1f1b, microbatches: 4, cuts: [1, 3]}"
TRAIN = (
    "train", "run.yaml", "model.num_layers=4", "train.evaluate_every=3", "checkpoint.every=3",
)  # fmt: skip
pytestmark = pytest.mark.timeout(600)


def alike(out: Path, alone: Path) -> None:
    """Losses of training and of evaluation are those of another run."""
    assert command.losses(out) == pytest.approx(command.losses(alone), rel=1e-6)
    found, wanted = (
        {record["step"]: [record["loss"], record["tokens"]] for record in command.records(directory, "eval")}
        for directory in (out, alone)
    )
    assert list(found) == list(wanted)
    for step, values in wanted.items():
        assert found[step] == pytest.approx(values, rel=1e-6)


@pytest.mark.slow
def test_two_processes_with_collectives_inside_give_the_losses_of_one(tmp_path: Path) -> None:
    train = (*TRAIN, "plan.mesh=stage:2 tensor:2", PIPELINE, "train.num_steps=5")
    for name, processes in (("one", 1), ("two", 2)):
        command.write_run(tmp_path / name)
        command.jaxpp(*launched(processes, 4 // processes, *train), cwd=tmp_path / name)
    alike(tmp_path / "two" / "out", tmp_path / "one" / "out")


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "chimera"])
def test_four_processes_give_the_losses_of_one(schedule: str, tmp_path: Path) -> None:
    train = (*TRAIN, "plan.mesh=stage:4", f"plan.pipeline={{schedule: {schedule}}}", "train.num_steps=5")
    for name, processes in (("one", 1), ("four", 4)):
        command.write_run(tmp_path / name)
        command.jaxpp(*launched(processes, 4 // processes, *train), cwd=tmp_path / name)
    alike(tmp_path / "four" / "out", tmp_path / "one" / "out")


@pytest.mark.parametrize("member", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_process_that_dies_ends_the_others_and_the_run_goes_on_bit_for_bit(member: int, tmp_path: Path) -> None:
    killed, unkilled = tmp_path / "killed", tmp_path / "unkilled"
    train = (*TRAIN, "plan.mesh=stage:2", PIPELINE, "train.num_steps=60", "train.evaluate_every=0")
    for directory in (killed, unkilled):
        command.write_run(directory)
    process = command.start(*launched(2, 1, *train, "train.num_steps=1000000"), cwd=killed)
    command.wait_for(lambda: len(command.records(killed / "out")) > 12, process)
    members = children(process.pid)
    os.kill(members[member], signal.SIGKILL)
    start = time.monotonic()
    err = process.communicate()[1]
    assert time.monotonic() - start < 60
    assert process.returncode == 128 + signal.SIGKILL
    assert err.splitlines()[-1] == f"error: process {member} of 2 failed first, with SIGKILL; the others were stopped"
    assert not any(Path(f"/proc/{pid}").exists() for pid in members)
    told = command.jaxpp(*launched(2, 1, *train), cwd=killed).stdout
    assert "resumed from step " in told
    command.jaxpp(*launched(2, 1, *train), cwd=unkilled)
    assert command.losses(killed / "out") == command.losses(unkilled / "out")


@pytest.mark.slow
def test_ranks_that_share_processes_are_refused(tmp_path: Path) -> None:
    command.write_run(tmp_path)
    train = ("train", "run.yaml", "model.num_layers=4", "plan.mesh=stage:2 dcn.data:2", PIPELINE)
    told = command.jaxpp(*launched(2, 2, *train), cwd=tmp_path, code=2).stderr
    assert "ranks 0 and 1 of the pipeline both have devices of process 0 and of others" in told
    assert "Traceback" not in told and not (tmp_path / "out").exists()


@pytest.mark.slow
def test_ranks_of_several_processes_give_the_losses_of_one(tmp_path: Path) -> None:
    train = (*TRAIN, "plan.mesh=stage:2 data:2", PIPELINE, "train.num_steps=5")
    for name, processes in (("one", 1), ("four", 4)):
        command.write_run(tmp_path / name)
        command.jaxpp(*launched(processes, 4 // processes, *train), cwd=tmp_path / name)
    alike(tmp_path / "four" / "out", tmp_path / "one" / "out")
