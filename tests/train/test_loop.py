"""A run from the command line: resumed, laid out anew, taken back, stopped, diverged."""

from __future__ import annotations

import re
import shutil
import signal
from pathlib import Path

import pytest
import yaml

from jaxpp import runs
from tests import command


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve steps in one go, on eight devices; every checkpoint is kept."""
    directory = tmp_path_factory.mktemp("whole")
    command.write_run(directory)
    command.jaxpp("train", "run.yaml", "checkpoint.keep=9", *command.EIGHT, cwd=directory)
    return directory / "out"


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    command.write_run(tmp_path)
    return tmp_path


def at(whole: Path, workspace: Path, step: int) -> Path:
    """Return the directory of the run as it was at a checkpoint."""
    out = workspace / "out"
    shutil.copytree(whole, out, ignore=lambda _, names: [name for name in names if name.isdigit() and int(name) > step])
    assert command.steps(out)[-1] == step
    return out


def test_a_run_leaves_what_it_should(whole: Path) -> None:
    assert list(command.losses(whole)) == list(range(1, 13))
    assert [record["step"] for record in command.records(whole, "eval")] == [5, 10, 12]
    assert command.steps(whole) == [4, 8, 12]
    assert {path.name for path in whole.iterdir()} == {
        "checkpoints", "config.yaml", "metrics.jsonl", "tensorboard", "tokenizer.json",
    }  # fmt: skip
    written = yaml.safe_load((whole / "config.yaml").read_text())
    assert written["plan"]["mesh"] == "data:2 fsdp:2 tensor:2" and written["model"]["head_dim"] == 16


def test_a_resumed_run_repeats_no_step_and_changes_no_bit(whole: Path, workspace: Path) -> None:
    command.jaxpp("train", "run.yaml", "train.num_steps=6", *command.EIGHT, cwd=workspace)
    assert list(command.losses(workspace / "out")) == [1, 2, 3, 4, 5, 6]
    told = command.jaxpp("train", "run.yaml", *command.EIGHT, cwd=workspace).stdout
    assert told.startswith("resumed from step 6\nchanged since: train.num_steps: 6 -> 12\nstep 7/12 ")
    assert command.losses(workspace / "out") == command.losses(whole)
    last, wanted = (command.records(out, "eval")[-1] for out in (workspace / "out", whole))
    assert last == wanted


def test_a_finished_run_says_so_and_writes_nothing_twice(whole: Path, workspace: Path) -> None:
    out = at(whole, workspace, 12)
    told = command.jaxpp("train", "run.yaml", *command.EIGHT, cwd=workspace).stdout.splitlines()
    assert (told[0], told[-1]) == (
        "resumed from step 12",
        "step 12 is done already; raise train.num_steps above 12 to go on",
    )
    assert (out / "metrics.jsonl").read_text() == (whole / "metrics.jsonl").read_text()


@pytest.mark.parametrize(
    "settings",
    [("cpu_devices=8", "plan.mesh=fsdp:4 tensor:2"), ("plan.mesh=data:1", "plan.microbatches=4")],
    ids=["eight-devices", "one-device-four-microbatches"],
)
def test_it_resumes_on_another_layout(settings: tuple[str, ...], whole: Path, workspace: Path) -> None:
    out = at(whole, workspace, 8)
    told = command.jaxpp("train", "run.yaml", *settings, cwd=workspace).stdout
    assert "resumed from step 8" in told and 'changed since: plan.mesh: "data:2 fsdp:2 tensor:2" -> ' in told
    found, wanted = command.losses(out), command.losses(whole)
    assert found == pytest.approx(wanted, rel=1e-5)
    assert {step: found[step] for step in range(1, 9)} == {step: wanted[step] for step in range(1, 9)}


def test_an_unfinished_checkpoint_is_passed_over(whole: Path, workspace: Path) -> None:
    out = at(whole, workspace, 12)
    (out / "checkpoints" / "12" / "files.json").unlink()
    told = command.jaxpp("train", "run.yaml", *command.EIGHT, cwd=workspace).stdout
    assert "ignored unfinished checkpoint 12\nresumed from step 8\n" in told
    assert command.losses(out) == command.losses(whole) and command.steps(out) == [4, 8, 12]


def test_going_back_to_an_older_step_loses_nothing(whole: Path, workspace: Path) -> None:
    out = at(whole, workspace, 12)
    before = command.contents(out / "checkpoints")
    back = ("train", "run.yaml", "checkpoint.step=4", "checkpoint.keep=9", *command.EIGHT)
    told = command.jaxpp(*back, "train.num_steps=6", cwd=workspace).stdout
    assert "resumed from step 4\n" in told and f"the steps beyond 4 now lie in {out}/checkpoints/aside-1" in told
    assert command.steps(out) == [4, 6] and list(command.losses(out)) == [1, 2, 3, 4, 5, 6]
    aside = command.contents(out / "checkpoints" / "aside-1")
    assert aside.pop("metrics.jsonl") == command.contents(whole)["metrics.jsonl"]
    assert aside == {k: v for k, v in before.items() if k.split("/")[0] in ("8", "12")}
    # The same command, started again after a kill say, goes on instead of going back again.
    told = command.jaxpp(*back, cwd=workspace).stdout
    assert "resumed from step 6\n" in told and "aside" not in told
    assert command.losses(out) == command.losses(whole) and command.steps(out) == [4, 6, 8, 12]
    # And what was set aside is still a checkpoint.
    assert runs.find_checkpoint(out / "checkpoints" / "aside-1").step == 12


def test_a_signal_saves_and_ends_well(workspace: Path) -> None:
    out, step = workspace / "out", 0
    for number in (signal.SIGTERM, signal.SIGINT):
        process = command.start("train", "run.yaml", "train.num_steps=1000000", cwd=workspace)
        command.wait_for(lambda: len(command.records(out)) > step + 3, process)  # noqa: B023 (called at once)
        process.send_signal(number)
        told, err = process.communicate()
        assert (process.returncode, err) == (0, "")
        assert (f"resumed from step {step}\n" in told) == (step > 0)
        step = max(command.losses(out))
        assert told.endswith(f"stopped by a signal at step {step}; saved, run the same command to go on\n")
        assert command.steps(out)[-1] == step


def test_a_run_that_diverges_keeps_the_last_good_checkpoint(whole: Path, workspace: Path) -> None:
    out = at(whole, workspace, 8)
    wrong = ("optimizer.schedule=constant", "train.evaluate_every=0")
    done = command.jaxpp("train", "run.yaml", "optimizer.learning_rate=1e30", *wrong, cwd=workspace, code=1)
    assert re.fullmatch(
        r"jaxpp: step 10: loss \S+, gradient norm \S+; training stopped, the checkpoint of step 8 is from before\n",
        done.stderr,
    )
    # An update that overflows leaves a loss that still looks well: such weights are not saved either.
    wrong = ("optimizer.learning_rate=1e39", "checkpoint.every=1", "checkpoint.keep=1", *wrong)
    done = command.jaxpp("train", "run.yaml", *wrong, cwd=workspace, code=1)
    told = done.stderr.splitlines()[-1]
    assert told.startswith("jaxpp: step 9: a weight is not finite after the update; training stopped, the ")
    assert "resumed from step 8\n" in done.stdout and command.steps(out) == [4, 8]


def test_evaluation_does_not_depend_on_how_often_it_is_done(whole: Path, workspace: Path) -> None:
    out = at(whole, workspace, 8)
    often = ("train.evaluate_every=1", "train.log_every=5", "data.held_out=0.2")
    command.jaxpp("train", "run.yaml", *often, *command.EIGHT, cwd=workspace)
    found = command.records(out, "eval")
    assert [record["step"] for record in found] == [5, 9, 10, 11, 12]
    wanted = {record["step"]: record for record in command.records(whole, "eval")}
    assert [found[0], found[2], found[4]] == [wanted[5], wanted[10], wanted[12]]
    assert [record["step"] for record in command.records(out)] == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12]
