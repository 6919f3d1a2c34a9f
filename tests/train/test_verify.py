"""`jaxpp verify`: which plans are tried, and whether a wrong one is found."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from jaxpp.data import CorpusConfig, DataConfig
from jaxpp.models import DecoderConfig
from jaxpp.train.config import Run
from jaxpp.train.program import Program
from jaxpp.train.verify import largest_difference, legal_plans, verify

MODEL = DecoderConfig(vocab_size=260, num_layers=1, embed_dim=16, num_heads=2, num_kv_heads=2, mlp_dim=32)


@pytest.fixture
def run(tmp_path) -> Run:
    for i in range(4):
        (tmp_path / f"{i}.txt").write_text(f"the {i} quick brown foxes jump over lazy dogs. " * 20)
    corpus = CorpusConfig(source=str(tmp_path / "*.txt"))
    data = DataConfig((corpus,), 16, 2, "bytes", held_out=0.0, cache_dir=str(tmp_path / "cache"))
    return Run(MODEL, data=data)


def with_batch(run: Run, batch_size: int) -> Run:
    return dataclasses.replace(run, data=dataclasses.replace(run.data, batch_size=batch_size))


def test_legal_plans_of_two_kv_heads_on_eight_devices(run):
    found = [(plan.mesh, plan.schemes) for plan in legal_plans(with_batch(run, 8), 8)]
    expected = {
        ("data:8", ("data",)),
        ("data:8", ("data", "zero1")),
        ("fsdp:8", ("fsdp",)),
        ("data:2 fsdp:4", ("data", "fsdp")),
        ("data:2 fsdp:4", ("data", "fsdp", "zero1")),
        ("data:4 fsdp:2", ("data", "fsdp")),
        ("data:4 fsdp:2", ("data", "fsdp", "zero1")),
        ("fsdp:4 tensor:2", ("fsdp", "tensor")),
        ("fsdp:4 tensor:2", ("fsdp", "tensor", "sequence")),
    }
    for mesh, schemes in (
        ("data:4 tensor:2", ("data", "tensor")),
        ("data:2 fsdp:2 tensor:2", ("data", "fsdp", "tensor")),
    ):
        for added in ((), ("zero1",), ("sequence",), ("zero1", "sequence")):
            expected.add((mesh, (*schemes, *added)))
    assert set(found) == expected and len(found) == len(expected)


def test_a_batch_of_two_rows_leaves_fewer_plans(run):
    meshes = {plan.mesh for plan in legal_plans(run, 8)}
    assert meshes == set()  # two rows over at most tensor:2: eight devices are too many
    assert {plan.mesh for plan in legal_plans(run, 4)} == {"data:2 tensor:2", "fsdp:2 tensor:2"}


def test_legal_plans_agree_with_one_device(run):
    odd = dataclasses.replace(run, data=dataclasses.replace(run.data, seq_len=15))  # leaves scheme sequence out
    lines: list[str] = []
    assert verify(odd, lines.append, jax.devices()[:4])
    assert lines[1].startswith("data:1 ") and lines[1].split()[-5:] == ["<=", "1e-05", "<=", "2e-05", "allowed"]
    rows = lines[2:5]
    assert [line.split()[:2] for line in rows] == [["data:2", "tensor:2"]] * 2 + [["fsdp:2", "tensor:2"]]
    assert all(line.endswith(" ok") for line in rows)
    skipped = {line.partition(" skipped: ")[0].strip() for line in lines[5:-1]}
    assert skipped == {"data:4", "data:2 fsdp:2", "fsdp:4", "tensor:4"}
    assert any("kv_heads 2 does not split over tensor=4" in line for line in lines)
    assert lines[-1].startswith("all 3 plans agree with one device (float32")
    assert lines[-1].endswith("4 meshes skipped")


def test_a_wrong_gradient_is_found(run, monkeypatch):
    right = Program.gradients

    def wrong(program, state, batch):
        grads, *rest = right(program, state, batch)
        if "sequence" in program.plan.schemes:
            grads["final_norm"]["scale"] = grads["final_norm"]["scale"].replace(
                grads["final_norm"]["scale"][...] * 1.001
            )
        return grads, *rest

    monkeypatch.setattr(Program, "gradients", wrong)
    lines: list[str] = []
    assert not verify(
        with_batch(run, 1), lines.append, jax.devices()[:2]
    )  # one row: tensor:2 with and without sequence
    differs = [line for line in lines[2:-1] if line.endswith("DIFFERS")]
    assert len(differs) == 1 and "tensor sequence" in differs[0] and "1.0e-03" in differs[0]
    assert lines[-1].startswith("1 of 2 plans DIFFER from one device")


def test_a_weight_that_is_not_a_number_differs():
    wanted = {"a": np.array([1.0, 2.0]), "b": np.zeros(2)}
    assert largest_difference({"a": np.array([1.0, 2.5]), "b": np.zeros(2)}, wanted) == 0.25
    assert not largest_difference({"a": np.array([1.0, np.nan]), "b": np.zeros(2)}, wanted) <= 1e9
    assert largest_difference({"a": wanted["a"], "b": np.ones(2)}, wanted) > 1


def test_a_vocabulary_that_does_not_fit_is_refused_before_any_compile(run):
    small = dataclasses.replace(run, model=dataclasses.replace(MODEL, vocab_size=64))
    with pytest.raises(ValueError, match="model.vocab_size is 64"):
        verify(small, lambda line: None, jax.devices()[:2])
