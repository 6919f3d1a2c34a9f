"""``jaxpp schedule``: words, files, and what is printed."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from jaxpp import schedule_commands
from jaxpp.quantities import parse_bytes, show_time
from jaxpp.schedule.costs_file import write_costs
from jaxpp.schedule.layer_costs import LayerCosts, ModelCosts, Transfer

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


@pytest.mark.parametrize("text, num_bytes", [("4GiB", 2**32), ("4 gb", 4 * 10**9), ("1.5KiB", 1536), ("7", 7)])
def test_bytes_as_people_write_them(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "4XB", "0", "1.2.3MB", "nan"])
def test_what_is_no_number_of_bytes(text: str) -> None:
    with pytest.raises(ValueError, match="is no number of bytes"):
        parse_bytes(text)


def test_times_have_the_unit_that_suits() -> None:
    assert [show_time(time) for time in (12.0, 0.5, 3e-5, 0.0, 4e-8)] == ["12 s", "500 ms", "30 us", "0 s", "0.04 us"]
