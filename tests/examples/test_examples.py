"""Every example runs, and says what is true."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from jaxpp import runs
from jaxpp.train.session import check
from tests import command

EXAMPLES = command.ROOT / "examples"
FACT = r"mesh (.*): loss (\S+) -> (\S+) in 30 steps; up \(16, 64\), per device (\(.*\))\n"


def ran(*words: str) -> tuple[str, ...]:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "own_model.py"), *words], env=command.environment(in_a_hurry=False), text=True,
        capture_output=True, check=True,
    )  # fmt: skip
    found = re.fullmatch(FACT, done.stdout)
    assert found, done.stdout
    return found.groups()


def test_a_model_of_ones_own_trains_on_a_mesh_as_on_one_device() -> None:
    mesh, first, last, local = ran()
    assert mesh == "data:2 fsdp:2 tensor:2" and local == "(8, 32)"
    assert float(last) < 0.2 * float(first)
    # Pure data parallelism keeps every weight whole.
    _, alone_first, alone_last, whole = ran("data:8")
    assert whole == "(16, 64)"
    assert [float(first), float(last)] == pytest.approx([float(alone_first), float(alone_last)], rel=1e-4)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.name)
def test_a_run_file_is_sound_on_eight_devices(path: Path) -> None:
    run = runs.read_run(path)
    assert run.cpu_devices in (0, 8)
    assert check(run).layout.mesh.size == 8
