"""Growth preserves the function: to 1e-12 in fp64, to 2e-6 in fp32, on models of every family."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxpp.grow.width import net2net
from tests.grow import exactness

ROOT = Path(__file__).resolve().parents[2]
FP64, FP32 = 1e-12, 2e-6  # of the largest logit
UNEVEN_HEADS = ("one group more", "some more in each group", "all uneven")
IN_FP32 = (("llama", "cloned, noisy"), ("gemma2", "lemon to 2D + r"), ("neox", "all uneven"))


def measured(which: str, parts: int = 2) -> dict[tuple[str, str], dict]:
    """Run `exactness` in processes that compute in fp64, each on one device."""
    flags = "--xla_backend_optimization_level=0"
    environment = os.environ | dict(JAX_ENABLE_X64="1", JAX_PLATFORMS="cpu", XLA_FLAGS=flags, PYTHONPATH=str(ROOT))
    running = []
    for part in range(parts):
        command = [sys.executable, "-m", "tests.grow.exactness", which, str(part), str(parts)]
        running.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True))
    printed = [process.communicate()[0] for process in running]
    assert not any(process.returncode for process in running)
    lines = [json.loads(line) for text in printed for line in text.splitlines()]
    return {(line.pop("model"), line.pop("operator")): line for line in lines}


@pytest.fixture(scope="module")
def few() -> dict[tuple[str, str], dict]:
    return measured("few")


@pytest.fixture(scope="module")
def every() -> dict[tuple[str, str], dict]:
    return measured("all")


def refusal(model: str, operator: str) -> str:
    """Return what the refusal of an operator says, empty where it takes the model."""
    config = exactness.models()[model]
    if operator in UNEVEN_HEADS and config.qk_norm == "full":
        return "the norm of queries and keys is over all heads"
    if operator.startswith("upcycled"):
        dense = "experts are gated" if config.mlp == "plain" else ""
        return "experts already; a dense one is needed" if config.moe.num_experts else dense
    return ""


def check(model: str, operator: str, found: dict, bound: float) -> None:
    if wanted := refusal(model, operator):
        assert wanted in found["refused"]
    else:
        assert found["gap"] == ""
        assert 1 < found["largest"] < 10, "a difference is measured against logits that are neither flat nor saturated"
        assert found["difference"] <= bound


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("model", "operator"), exactness.cases())
def test_growth_preserves_the_function(few, model, operator):
    check(model, operator, few[model, operator], FP64)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("model", "operator"), exactness.all_cases())
def test_every_operator_preserves_the_function_of_every_model(every, model, operator):
    check(model, operator, every[model, operator], FP64)


@pytest.mark.parametrize(("model", "operator"), IN_FP32)
def test_in_fp32_what_is_left_is_rounding(model, operator):
    check(model, operator, exactness.measure(model, exactness.OPERATORS[operator], np.float32), FP32)


def test_unequally_many_copies_are_not_exact_and_say_so():
    found = exactness.measure("llama", lambda config: (net2net(config, width=2),), np.float32)
    assert "unequally many copies" in found["gap"]
    assert found["difference"] > 1e-2
