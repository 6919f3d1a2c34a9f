"""The growth study runs, and shows what it says: no jump where growth is exact, a bump where the optimizer is new."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import command

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

EXAMPLE = command.ROOT / "examples" / "grow_then_train.py"
EXACT = ("not grown", "hypercloning", "hypercloning, new optimizer", "hypercloning, diagonal", "lemon", "identity")
INEXACT = ("aki", "ligo, new optimizer", "stack")


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any], Path]:
    out = tmp_path_factory.mktemp("study")
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--quick", "--out", str(out)], env=command.environment(), text=True,
        capture_output=True, check=True,
    )  # fmt: skip
    (run,) = json.loads((out / "study.json").read_text())["runs"]
    return done.stdout, run, out


def test_the_table_has_a_row_for_each_arm(study: tuple[str, dict[str, Any], Path]) -> None:
    printed, run, out = study
    assert set(run["arms"]) == {*EXACT, *INEXACT}
    first = printed[printed.index("held-out loss") :].partition("\n\n")[0].splitlines()[1:]
    assert [line[:28].strip() for line in first] == list(run["arms"])
    assert (out / "grow_then_train.png").stat().st_size > 10_000


def test_exact_growth_begins_at_the_loss_of_the_small_model(study: tuple[str, dict[str, Any], Path]) -> None:
    _, run, _ = study
    before = run["source"]["losses"]["128"]
    for name, arm in run["arms"].items():
        assert arm["exact"] == (name in EXACT)
        if arm["exact"]:
            assert arm["losses"]["0"] == pytest.approx(before, abs=1e-4), name
        else:
            assert arm["losses"]["0"] != pytest.approx(before, abs=1e-3), name


def test_a_carried_optimizer_spares_the_bump(study: tuple[str, dict[str, Any], Path]) -> None:
    carried, anew, small = (
        study[1]["arms"][name]["losses"] for name in ("hypercloning", "hypercloning, new optimizer", "not grown")
    )
    assert carried["16"] < anew["16"]
    assert carried["1"] < carried["0"] + 0.01 < anew["1"]
    assert carried["16"] == pytest.approx(small["16"], abs=0.02)


def test_operations_are_counted_three_ways(study: tuple[str, dict[str, Any], Path]) -> None:
    arms, source = study[1]["arms"], study[1]["source"]
    whole = 128 * study[1]["scratch"]["flops_per_step"]
    shares = arms["hypercloning"]["shares"]
    assert shares["with source"] - shares["target only"] == pytest.approx(128 * source["flops_per_step"] / whole)
    assert shares["with source and operator"] == shares["with source"]
    assert arms["ligo, new optimizer"]["operator_flops"] == 16 * study[1]["scratch"]["flops_per_step"]


def test_a_number_of_steps_that_is_not_compiled_whole_is_refused(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--source-steps", "100", "--out", str(tmp_path)], env=command.environment(),
        text=True, capture_output=True,
    )  # fmt: skip
    assert done.returncode == 2 and "--source-steps 100: a multiple of 32 steps is needed" in done.stderr
