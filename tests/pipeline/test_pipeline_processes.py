"""Ranks in processes of their own give what one process gives."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.pipeline import functions
from tests.test_launch import start

PROGRAM = """
import os
os.environ["NPROC"] = "16"  # threads of the CPU backend: a collective needs one while a transfer may hold another
os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0"
from jaxpp import runtime
runtime.initialize()
import json
import jax, numpy as np
from jaxpp import pipeline, schedule
from tests.pipeline import functions

def here(tree):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]

told = {}
for name, mesh, ranks in CASES:
    table = schedule.build(name, ranks, 4)
    known, data = functions.stages(table.num_stages), functions.batch(16)
    found = pipeline.run(known, table, data, mesh, key=functions.KEY)
    loss, gradients = functions.plain(known, data, 4, functions.KEY)
    np.testing.assert_allclose(np.asarray(found.loss), loss, rtol=1e-6)
    checked = 0
    for ours, wanted in zip(found.gradients, gradients):
        if all(leaf.is_fully_addressable for leaf in jax.tree.leaves(ours)):
            functions.alike(here(ours), here(wanted))
            checked += 1
    assert checked == table.num_stages // runtime.process_count()
    told[name] = functions.train(name, ranks, mesh)
with open(f"told{rank}", "w") as file:
    json.dump(told, file)
"""


def run_in_processes(directory: Path, num: int, devices: int, cases: list[tuple[str, str, int]]) -> None:
    process = start(directory, f"CASES = {cases!r}\n" + PROGRAM, num, devices)
    _, err = process.communicate()
    assert process.returncode == 0, err
    for name, mesh, ranks in cases:
        alone = functions.train(name, ranks, None)
        for rank in range(num):
            told = json.loads((directory / f"told{rank}").read_text())[name]
            for found, wanted in zip(told, alone, strict=True):
                assert found == pytest.approx(wanted, rel=2e-6), f"{name} on {mesh}, process {rank}"


@pytest.mark.slow
def test_two_processes(tmp_path: Path) -> None:
    run_in_processes(tmp_path, 2, 1, [("zb-v", "stage:2", 2)])


@pytest.mark.slow
def test_two_processes_with_collectives_inside(tmp_path: Path) -> None:
    cases = [(name, "stage:2 data:2", 2) for name in ("interleaved", "zb-v", "hanayo")]
    run_in_processes(tmp_path, 2, 2, cases)


@pytest.mark.slow
def test_four_processes(tmp_path: Path) -> None:
    run_in_processes(tmp_path, 4, 1, [(name, "stage:4", 4) for name in ("1f1b", "zb-h1", "chimera", "gpipe")])
