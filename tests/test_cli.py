"""The command line itself: words, settings, exit codes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from jaxpp import cli, commands, runs
from tests import command


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    command.write_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "settings",
    [
        ["train.num_steps=20", "plan.mesh=data:2 tensor:4"],
        ["--train.num_steps=20", "--plan.mesh", "data:2 tensor:4"],
    ],
)
def test_the_printed_config_is_the_run(
    settings: list[str], workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = command.contents(workspace)
    assert cli.main(["train", "run.yaml", *settings, "--print_config"]) == 0
    text = capsys.readouterr().out
    run = runs.read_run("run.yaml", settings)
    assert (run.train.num_steps, run.plan.mesh) == (20, "data:2 tensor:4")
    assert runs.build_run(yaml.safe_load(text)) == run
    (workspace / "again.yaml").write_text(text)
    assert cli.main(["train", "again.yaml", "--print_config"]) == 0
    assert capsys.readouterr().out == text
    (workspace / "again.yaml").unlink()
    assert command.contents(workspace) == before
    # All that can be set stands in it, the defaults too.
    printed = yaml.safe_load(text)
    assert printed["train"]["seed"] == 0 and printed["checkpoint"]["keep"] == 3 and printed["plan"]["remat"] == "none"
    assert printed["model"]["rope_base"] == 10_000 and printed["data"]["max_documents"] is None


def test_inspect_prints_every_weight(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", "run.yaml", "cpu_devices=8", "plan.mesh=fsdp:4 tensor:2"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"blocks/attention/query/kernel +layers \| embed -> heads head_dim +1x32x2x16 ", text)
    assert "mesh   fsdp:4 tensor:2 = 8 x cpu" in text
    assert command.contents(workspace).keys() == {"run.yaml", "corpus", *(f"corpus/{i}.txt" for i in range(12))}


def test_doctor_says_how_it_is(workspace: Path) -> None:
    process = command.start("doctor", cwd=workspace)
    told, err = process.communicate()
    assert process.returncode in (0, 1) and "Traceback" not in err
    assert re.search(r"jax\b", told) and "Python" in told or "python" in told


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0
    for name in ("train", "inspect", "convert", "eval", "generate", "verify", "launch", "doctor"):
        assert re.search(rf"^ +{name} +[A-Z]", text, re.MULTILINE), name


@pytest.mark.parametrize(
    "words, message",
    [
        ([], "the following arguments are required: COMMAND"),
        (["trian", "run.yaml"], "invalid choice: 'trian'"),
        (["train"], "the following arguments are required: RUN.yaml"),
        (["doctor", "now"], "doctor does not take now"),
        (["launch", "--processes", "2"], "launch needs a command, e.g. jaxpp launch --processes 2 -- train RUN.yaml"),
        (["launch", "--processes", "two", "--", "doctor"], "argument --processes: invalid int value: 'two'"),
    ],
)
def test_words_that_make_no_command(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    "error, code, line",
    [
        (ValueError("3 of 4\n  do not fit"), 2, "jaxpp: 3 of 4 do not fit\n"),
        (OSError(28, "No space left on device"), 1, "jaxpp: [Errno 28] No space left on device\n"),
        (ConnectionError("process(es) 1 of 2 did not reach the coordinator"), 1, "jaxpp: process(es) 1 of 2 did not"),
        (KeyboardInterrupt(), 130, "jaxpp: interrupted\n"),
    ],
)
def test_exit_codes(
    error: BaseException, code: int, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(_: object) -> int:
        raise error

    monkeypatch.setattr(commands, "doctor", refuse)
    assert cli.main(["doctor"]) == code
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(line) and err.count("\n") == 1


def test_the_traceback_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> int:
        raise ValueError("no")

    monkeypatch.setattr(commands, "doctor", refuse)
    monkeypatch.setenv("JAXPP_TRACEBACK", "1")
    with pytest.raises(ValueError, match="no"):
        cli.main(["doctor"])


def test_a_bug_of_ours_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> int:
        raise KeyError("ours")

    monkeypatch.setattr(commands, "doctor", fail)
    with pytest.raises(KeyError):
        cli.main(["doctor"])


def test_what_a_launcher_has_set_stands(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["inspect", "run.yaml", "cpu_devices=4", "plan.mesh=data:8"]
    assert cli.main(words) == 2  # this process has eight devices
    monkeypatch.setenv("JAXPP_COORDINATOR_ADDRESS", "127.0.0.1:1234")
    monkeypatch.setenv("JAXPP_NUM_PROCESSES", "1")
    monkeypatch.setenv("JAXPP_PROCESS_ID", "0")
    assert cli.main(words) == 0
