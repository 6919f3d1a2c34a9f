from __future__ import annotations

import importlib.metadata
import socket
import time
import tomllib
from pathlib import Path

import pytest

from jaxpp import doctor
from jaxpp.doctor import Finding

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.timeout(120)
def test_this_machine_can_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    findings = doctor.examine()
    assert doctor.exit_code(findings) == 0, doctor.render(findings)
    assert {"jax", "devices", "coordinator", "cross-host transfer"} <= {f.name for f in findings}


def test_ranges_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ours = [f"{n}>={low}" + (f",<{high}" if high else "") for n, (low, high, _) in doctor.PACKAGES.items()]
    assert sorted(ours) == sorted(project["dependencies"])


@pytest.mark.parametrize(("version", "status"), [("0.9.2", "fail"), ("0.10.0", "ok"), ("0.13.0", "fail")])
def test_jax_version(version: str, status: str) -> None:
    assert doctor.packages(lambda _: version)[0].status == status


def test_missing_package_names_the_fix() -> None:
    def version_of(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    found = {f.name: f for f in doctor.packages(version_of)}
    assert found["jax"].status == "fail" and found["rich"].status == "warn"
    assert found["jax"].fix == 'pip install "jax>=0.10,<0.13"'


@pytest.mark.timeout(120)
def test_unknown_xla_flag_is_found_without_aborting() -> None:
    import os

    finding = doctor.xla_flags({**os.environ, "XLA_FLAGS": "--xla_no_such_flag=1"})
    assert finding.status == "fail" and "xla_no_such_flag" in finding.value


def test_coordinator_reachability() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert doctor.reach(address, 2).status == "ok"
    closed = doctor.reach(address, 0.5)
    assert closed.status == "fail" and address in closed.value and "firewall" in closed.fix


def test_gpus_hidden_from_slurm() -> None:
    slurm = {"SLURM_GPUS_ON_NODE": "8", "SLURM_STEP_TASKS_PER_NODE": "1"}
    assert doctor.gpu_visibility(slurm).status == "ok"
    assert doctor.gpu_visibility(slurm | {"CUDA_VISIBLE_DEVICES": ""}).status == "fail"


def test_hanging_transfer_is_a_failure() -> None:
    assert doctor.transfer(lambda: time.sleep(5), "a:1", 0.1).status == "fail"
    assert doctor.transfer(lambda: None, "a:1", 5).status == "ok"


def test_table_is_aligned_and_narrow() -> None:
    text = doctor.render([Finding("a", "ok", "v"), Finding("long", "fail", "w " * 99, "do " * 50)])
    assert text.splitlines()[0] == "ok    a     v" and max(map(len, text.splitlines())) <= 100
