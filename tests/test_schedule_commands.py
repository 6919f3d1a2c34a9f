"""``jaxpp schedule``: words, files, and what is printed."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from jaxpp import schedule_commands
from jaxpp.quantities import parse_bytes, show_time
from jaxpp.schedule.costs_file import read_costs, write_costs
from jaxpp.schedule.layer_costs import LayerCosts, ModelCosts, Transfer
from jaxpp.train import Run
from jaxpp.train import profile as profiles
from tests import command

SMALL = ("--ranks", "4", "--microbatches", "8")


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    schedule_commands.add_parser(parser.add_subparsers(dest="name", required=True))
    arguments = parser.parse_args(["schedule", *words])
    assert arguments.name == "schedule" and not hasattr(arguments, "path")
    return arguments.function(arguments)


@pytest.fixture
def costs(tmp_path: Path) -> str:
    layer = LayerCosts(2e-3, 2e-3, 2e-3, activation_bytes=2**20, weight_bytes=2**18, repeat=8)
    path = tmp_path / "costs.yaml"
    write_costs(path, ModelCosts((layer,), head=LayerCosts(1e-3, 1e-3, 1e-3), transfer=Transfer(1000, 1e9)))
    return str(path)


def test_draw_prints(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "90")
    assert run("draw", "hanayo", *SMALL, "--waves", "2") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "hanayo waves=2: 4 ranks, 16 stages, 8 microbatches; makespan 28.5, bubble 15.8 %"
    assert len([line for line in lines if line.startswith("rank ")]) == 4
    assert 60 < max(map(len, lines)) <= 90 and "\x1b" not in "".join(lines)


@pytest.mark.parametrize("suffix, start", [("png", b"\x89PNG"), ("svg", b"<svg"), ("json", b"{"), ("txt", b"1f1b: 4")])
def test_draw_writes(suffix: str, start: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / f"t.{suffix}"
    assert run("draw", "1f1b", *SMALL, "--out", str(path)) == 0
    assert path.read_bytes().startswith(start)
    assert capsys.readouterr().out.splitlines()[-1] == f"written to {path}"


def test_draw_with_costs_is_in_seconds(costs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("draw", "zb-v", *SMALL, "--costs", costs, "--out", str(tmp_path / "t.json")) == 0
    title = json.loads((tmp_path / "t.json").read_text())["otherData"]["title"]
    assert title in capsys.readouterr().out and " ms, bubble" in title


def test_draw_with_cuts(costs: str, capsys: pytest.CaptureFixture[str]) -> None:
    # Stages of 4 ms forward (the last 5) and twice that backward; then of 10, 2, 2 and 3, the first of which decides.
    for cuts, makespan in (("2,2,2,2", "156 ms"), ("5+1+1+1", "261 ms")):
        assert run("draw", "gpipe", *SMALL, "--costs", costs, "--cuts", cuts) == 0
        assert f"makespan {makespan}," in capsys.readouterr().out


def test_options_of_a_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("draw", "merak", *SMALL, "--option", "variant=pre-recompute") == 0
    assert "makespan 41," in capsys.readouterr().out
    assert run("draw", "interleaved", *SMALL, "--chunks", "3") == 0
    assert "12 stages, 8 microbatches; makespan 27," in capsys.readouterr().out
    assert (
        run("draw", "hanayo", "--ranks", "4", "--microbatches", "4", "--option", "waves=1", "--option", "order=hand")
        == 0
    )
    assert "hanayo waves=1 order=hand: 4 ranks, 8 stages" in capsys.readouterr().out


def test_compare_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("compare", "--ranks", "8", "--microbatches", "16") == 0
    text = capsys.readouterr().out
    assert text.startswith("8 ranks, 16 microbatches\n\nschedule ")
    assert "\nbest: zb-v: the shortest step, 4.9 % before dualpipe\n" in text


def test_compare_within_memory(costs: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("compare", *SMALL, "--costs", costs, "--memory", "10MiB") == 0
    text = capsys.readouterr().out
    assert "gpipe " in text.partition("not possible:")[2] and "over 10.0 MiB" in text
    assert "best: zb-v: the shortest step of those that fit" in text


@pytest.mark.parametrize(
    "words, message",
    [
        (("draw", "hanao", *SMALL), 'unknown schedule "hanao"; did you mean "hanayo"?'),
        (("draw", "zb-v", "--ranks", "4", "--microbatches", "6"), "7 or more are needed"),
        (("draw", "1f1b", *SMALL, "--waves", "2"), 'unknown option "waves"'),
        (("draw", "1f1b", *SMALL, "--option", "waves"), '--option "waves" is no key=value; write --option waves=2'),
        (("draw", "1f1b", *SMALL, "--cuts", "2,2,2,2"), "--cuts needs --costs"),
        (("draw", "1f1b", *SMALL, "--out", "t.pdf"), ".svg, .png, .txt, .json are"),
        (("draw", "1f1b", *SMALL, "--costs", "none.yaml"), "none.yaml: no such file"),
        (("compare", *SMALL, "--memory", "4GiB"), "needs costs in bytes: give a costs file"),
        (("compare", *SMALL, "--memory", "much"), '"much" is no number of bytes; write e.g. 4GiB'),
    ],
)
def test_mistakes_are_one_line(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError) as raised:
        run(*words)
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_cuts_that_are_no_numbers(costs: str) -> None:
    with pytest.raises(ValueError, match='--cuts "2,x": whole numbers of layers are needed'):
        run("draw", "gpipe", *SMALL, "--costs", costs, "--cuts", "2,x")


MEASURED = ModelCosts(
    (LayerCosts(2e-3, 3e-3, 1e-3, 2.5e-3, 3.5e-3, 2**20, 2**18, repeat=4),),
    LayerCosts(1e-5, 0.0, 2e-5, 1e-5, 3e-5, 0, 2**16), LayerCosts(1e-3, 1e-3, 1e-3, 1e-3, 2e-3, 2**12, 2**16),
    Transfer(2**15, 2.0**30, 1e-5),
    measured={"device": "2 x cpu", "mesh": "stage:2", "microbatch": "4 rows x 32 tokens", "compute_dtype": "float32",
              "remat": "none", "transfer": "from rank 0 to rank 1"},
)  # fmt: skip
PIPED = ("plan.mesh=stage:2 data:4", "plan.pipeline.microbatches=4")


def profile(path: Path, *words: str) -> int:
    parser = argparse.ArgumentParser()
    schedule_commands.add_parser(parser.add_subparsers(dest="name", required=True))
    arguments, arguments.overrides = parser.parse_known_args(["schedule", "profile", str(path), *words])
    return arguments.function(arguments)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Run, int]]:
    """What is to be measured; it is not."""
    found: list[tuple[Run, int]] = []
    monkeypatch.setattr(profiles, "profile", lambda *arguments: (found.append(arguments), MEASURED)[1])
    return found


def test_profile_prints_and_writes(tmp_path: Path, asked: list, capsys: pytest.CaptureFixture[str]) -> None:
    run_yaml, out = command.write_run(tmp_path), tmp_path / "costs.yaml"
    out.write_text("of another day")
    assert profile(run_yaml, "cpu_devices=8", *PIPED, "--out", str(out), "--repeats", "3") == 0
    (run, repeats), *others = asked
    assert (run.plan.mesh, run.model.num_layers, repeats, others) == ("stage:2 data:4", 1, 3, [])
    assert capsys.readouterr().out.splitlines() == [
        "2 x cpu, mesh stage:2; for one microbatch of 4 rows x 32 tokens, float32, remat none",
        "",
        "                 forward  input gradient  weight gradient   fused  recompute  activations   weights",
        "layer, one of 4     2 ms            3 ms             1 ms  3.5 ms     2.5 ms     1.00 MiB   256 KiB",
        "embedding          10 us             0 s            20 us   30 us      10 us          0 B  64.0 KiB",
        "head and loss       1 ms            1 ms             1 ms    2 ms       1 ms     4.00 KiB  64.0 KiB",
        "",
        "F : B : W = 1 : 1.50 : 0.50 of a layer",
        "transfer of 32.0 KiB: 40.5 us (latency 10 us, then 1.00 GiB/s) from rank 0 to rank 1",
        "one stage on each of 2 ranks: plan.pipeline.cuts=[2, 2] balances them",
        f"written to {out}; jaxpp schedule compare --ranks 2 --microbatches 4 --costs {out} reads it",
    ]
    written = read_costs(out)
    assert (written.layers, written.transfer) == (MEASURED.layers, MEASURED.transfer)
    assert written.measured["command"].startswith("jaxpp schedule profile ")
    assert run_compare(out, 4) == 0


def run_compare(costs: Path, microbatches: int) -> int:
    return run("compare", "--ranks", "2", "--microbatches", str(microbatches), "--costs", str(costs))


@pytest.mark.parametrize("out, message", [("nowhere/costs.yaml", "there is no directory"), (".", "is a directory")])
def test_a_file_that_cannot_be_written_is_found_before_anything_is_measured(
    out: str, message: str, tmp_path: Path, asked: list
) -> None:
    run_yaml = command.write_run(tmp_path)
    with pytest.raises(ValueError) as raised:
        profile(run_yaml, "cpu_devices=8", "--out", str(tmp_path / out))
    assert message in str(raised.value) and "\n" not in str(raised.value) and not asked


def test_profile_refuses_a_setting_that_is_none(tmp_path: Path, asked: list) -> None:
    with pytest.raises(ValueError, match="nonsense"):
        profile(command.write_run(tmp_path), "plan.nonsense=1")
    assert not asked


def test_profile_refuses_a_run_that_cannot_work_on_the_command_line(tmp_path: Path) -> None:
    command.write_run(tmp_path)
    words = ("schedule", "profile", "run.yaml", "plan.mesh=stage:3", "--out", "c.yaml")
    error = command.jaxpp(*words, cwd=tmp_path, code=2).stderr
    assert error.startswith("jaxpp: ") and error.count("\n") == 1 and "stage:3" in error
    assert not (tmp_path / "c.yaml").exists()


SMALL_RUN = ("model.num_layers=2", "--repeats", "1", "--out", "c.yaml")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_profile_then_compare_on_the_command_line(tmp_path: Path) -> None:
    command.write_run(tmp_path)
    told = command.jaxpp("schedule", "profile", "run.yaml", "plan.mesh=data:1", *SMALL_RUN, cwd=tmp_path).stdout
    assert told.endswith("compare --ranks R --microbatches M --costs c.yaml reads it\n")
    words = ("schedule", "compare", "--ranks", "2", "--microbatches", "4", "--costs", "c.yaml")
    assert "best: " in command.jaxpp(*words, cwd=tmp_path).stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mesh", ["stage:2", "data:2"])
def test_profile_in_two_processes(mesh: str, tmp_path: Path) -> None:
    # On the second mesh both have a device of the only rank: they have to run its operations equally often.
    command.write_run(tmp_path)
    launch = ("launch", "--processes", "2", "--devices-per-process", "1", "--")
    words = ("schedule", "profile", "run.yaml", f"plan.mesh={mesh}", *SMALL_RUN)
    told = command.jaxpp(*launch, *words, cwd=tmp_path).stdout
    assert told.count("written to c.yaml") == 1, "only process 0 is heard"
    costs = read_costs(tmp_path / "c.yaml")
    assert costs.measured["device"] == "2 x cpu" and costs.transfer.seconds > 0
    assert costs.measured["command"] == f"jaxpp schedule profile run.yaml plan.mesh={mesh} model.num_layers=2"


@pytest.mark.parametrize("text, num_bytes", [("4GiB", 2**32), ("4 gb", 4 * 10**9), ("1.5KiB", 1536), ("7", 7)])
def test_bytes_as_people_write_them(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "4XB", "0", "1.2.3MB", "nan"])
def test_what_is_no_number_of_bytes(text: str) -> None:
    with pytest.raises(ValueError, match="is no number of bytes"):
        parse_bytes(text)


def test_times_have_the_unit_that_suits() -> None:
    assert [show_time(time) for time in (12.0, 0.5, 3e-5, 0.0, 4e-8)] == ["12 s", "500 ms", "30 us", "0 s", "0.04 us"]
