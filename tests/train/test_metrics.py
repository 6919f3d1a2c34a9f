"""The line of a step, the rates behind it, and the files and the terminal they go to."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from jaxpp.train.console import Console
from jaxpp.train.metrics import MetricsLog, Rates, evaluation_line, forget_after, peak_flops_per_s, train_line

RATES = Rates(tokens_per_step=4096, flops_per_token=6_000_000_000, num_devices=8, peak_flops_per_s=989e12)
RECORD = {
    "step": 7, "loss": 3.14159, "lr": 3e-4, "grad_norm": 0.5, "seconds": 0.25, **RATES.at(0.25),
    "memory_bytes": 3 * 2**29, "memory_of": "device",
}  # fmt: skip


def test_rates_of_known_devices() -> None:
    found = RATES.at(0.5)
    assert found["tokens_per_s"] == 8192
    assert found["model_flops_per_s"] == 8192 * 6e9
    assert found["mfu"] == pytest.approx(8192 * 6e9 / (8 * 989e12))


@pytest.mark.parametrize(
    "kind, tera",
    [
        ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA L40S", 362), ("NVIDIA L4", 121),
        ("TPU v5p", 459), ("TPU v5 lite", 197), ("TPU v4", 275),
    ],
)  # fmt: skip
def test_the_longest_name_that_fits_gives_the_peak(kind: str, tera: int) -> None:
    assert peak_flops_per_s(SimpleNamespace(device_kind=kind)) == tera * 1e12


def test_an_unknown_device_has_no_peak() -> None:
    assert peak_flops_per_s(jax.devices()[0]) is None
    found = Rates(4096, 10, 8, None).at(0.5)
    assert found["mfu"] is None and found["tokens_per_s"] == 8192
    assert "  MFU n/a  " in train_line({**RECORD, **found}, 10)


def test_the_line_of_a_step_is_greppable() -> None:
    line = train_line(RECORD, 100)
    assert "\n" not in line
    fields = dict(field.rsplit(" ", 1) for field in line.removesuffix(" GiB (device)").split("  "))
    assert fields == {
        "step": "7/100", "loss": "3.1416", "lr": "3.00e-04", "grad_norm": "0.500", "s/step": "0.250",
        "tokens/s": "16,384", "TFLOP/s": "98.304", "MFU": "1.2%", "memory": "1.50",
    }  # fmt: skip


def test_the_line_of_an_evaluation() -> None:
    record = {"step": 7, "loss": 2.5, "bits_per_byte": 1.25, "tokens": 2048}
    assert evaluation_line(record) == "eval 7  loss 2.5000  bits/byte 1.2500  tokens 2,048"
    assert "  bits/byte n/a  " in evaluation_line({**record, "bits_per_byte": None})


def test_what_a_killed_run_wrote_beyond_its_checkpoint_is_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"kind": kind, "step": step}) for step in (1, 2, 3) for kind in ("train", "eval")]
    path.write_text("\n".join(lines) + '\n{"kind": "train", "st')
    forget_after(path, 2)
    assert path.read_text().splitlines() == lines[:4]
    forget_after(path, 0)
    assert path.read_text() == ""
    forget_after(tmp_path / "none.jsonl", 2)
    assert [one.name for one in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_records_go_to_jsonl_and_tensorboard(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, 0)
    log.write("train", RECORD)
    log.write("eval", {"step": 7, "loss": 2.5, "bits_per_byte": None})
    # Each line is in the file at once: a killed process loses none.
    found = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    log.close()
    assert found == [{"kind": "train", **RECORD}, {"kind": "eval", "step": 7, "loss": 2.5, "bits_per_byte": None}]
    (events,) = (tmp_path / "tensorboard").iterdir()
    written = events.read_bytes()
    assert b"train/loss" in written and b"eval/loss" in written and b"eval/bits_per_byte" not in written
    MetricsLog(tmp_path, 6).close()
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def lines_of_a_console(active: bool = True) -> None:
    with Console(num_steps=3, start=0, active=active) as console:
        for step in (1, 2, 3):
            console.line(f"step {step}  [loss] 1.0  " + "x" * 200)
            console.advance(step)


def test_lines_are_plain_where_they_are_piped(capsys: pytest.CaptureFixture[str]) -> None:
    lines_of_a_console()
    assert capsys.readouterr().out.splitlines() == [f"step {k}  [loss] 1.0  " + "x" * 200 for k in (1, 2, 3)]
    lines_of_a_console(active=False)
    assert capsys.readouterr().out == ""


def read_all(descriptor: int, pieces: list[bytes]) -> None:
    with contextlib.suppress(OSError):  # what a terminal says when its other end is closed
        while piece := os.read(descriptor, 4096):
            pieces.append(piece)


def test_the_bar_on_a_terminal_leaves_the_lines_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = os.openpty()
    monkeypatch.setenv("TERM", "xterm")
    with os.fdopen(theirs, "w") as terminal, monkeypatch.context() as patch:
        pieces: list[bytes] = []
        reader = threading.Thread(target=read_all, args=(ours, pieces))
        reader.start()
        patch.setattr(sys, "stdout", terminal)
        lines_of_a_console()
    reader.join()
    os.close(ours)
    seen = b"".join(pieces).decode()
    assert "\x1b[" in seen and "training" in seen
    # A terminal that meets "erase line" shows only what comes after it.
    shown = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", re.sub(r".*\x1b\[2K", "", line)) for line in seen.split("\n")]
    assert [line.strip("\r") for line in shown if "step" in line] == [
        f"step {k}  [loss] 1.0  " + "x" * 200 for k in (1, 2, 3)
    ]
