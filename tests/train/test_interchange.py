"""A checkpoint does not know the pipeline that wrote it: any plan goes on from it to the bit, and it is exported."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from flax import nnx

from jaxpp import runs, tree
from jaxpp.checkpoint import Checkpoints
from jaxpp.conversion import convert, load
from jaxpp.train.loop import Trainer
from jaxpp.train.session import open_session
from tests import command

SETTINGS = (
    "cpu_devices=8", "model.num_layers=8", "data.held_out=0", "checkpoint.save=sync", "train.num_steps=2",
)  # fmt: skip
PIPELINE = ("plan.mesh=stage:2 data:2 tensor:2", "plan.pipeline={schedule: 1f1b, microbatches: 4, cuts: [3, 5]}")
OTHERS = [
    ("plan.mesh=fsdp:8",),
    ("plan.mesh=stage:2 data:2 tensor:2", "plan.pipeline={schedule: zb-v, microbatches: 4}"),
    ("plan.mesh=stage:4 data:2", "plan.pipeline={schedule: interleaved, microbatches: 4, chunks: 2}"),
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of 1F1B, three layers on one rank and five on the other."""
    directory = tmp_path_factory.mktemp("trained")
    command.write_run(directory)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        Trainer(runs.read_run("run.yaml", [*SETTINGS, *PIPELINE])).fit()
    return directory


def saved(directory: Path) -> dict[str, np.ndarray]:
    with Checkpoints(directory / "out" / "checkpoints", writable=False) as checkpoints:
        return checkpoints.restore_numpy(2)


@pytest.mark.parametrize("plan", [PIPELINE, *OTHERS], ids=lambda plan: " ".join(plan))
def test_any_plan_goes_on_from_it_to_the_bit(
    plan: tuple[str, ...], trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(trained)
    session = open_session(runs.read_run("run.yaml", [*SETTINGS, *plan]))
    found, wanted = tree.named_leaves(session.program.to_save(session.state)), saved(trained)
    assert session.start == 2 and found.keys() == wanted.keys()
    for path, value in wanted.items():
        np.testing.assert_array_equal(np.asarray(found[path]), value, err_msg=path)
    session.loader.close()
    session.checkpoints.close()


def test_it_is_exported(trained: Path) -> None:
    convert(trained / "out", trained / "hf", "hf")
    found = tree.named_leaves(nnx.state(load(trained / "hf"), nnx.Param))
    for path, value in saved(trained).items():
        if path.startswith("params/"):
            np.testing.assert_array_equal(np.asarray(found[path.removeprefix("params/")]), value, err_msg=path)
