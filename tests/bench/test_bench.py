"""The benchmark compares like with like: both steps compute the same, and the GPU table comes out at a toy size."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import jax
import pytest

from tests.bench import gpu, measure, pipelines

TOY = {"num_layers": 2, "embed_dim": 32, "num_heads": 4, "vocab_size": 64}


@pytest.fixture
def quick_compiles() -> Iterator[None]:
    """Compile with few optimisations: what is compared here are values, and most of the time would be LLVM's."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.usefixtures("quick_compiles")
@pytest.mark.parametrize(
    ("mesh", "remat"), [pytest.param("data:1", "none", marks=pytest.mark.slow), ("data:2 fsdp:2 tensor:2", "full")]
)
def test_the_plain_step_and_ours_agree(mesh: str, remat: str) -> None:
    case = measure.Case(mesh=mesh, remat=remat, model=TOY, batch_size=8, seq_len=16)
    assert measure.check_agreement(case, *measure.pair(case), num_steps=3) < 1e-5


def test_disagreement_is_noticed() -> None:
    one, two = ({"loss": 4.0, "grad_norm": norm} for norm in (1.0, 1.001))
    case = measure.Case(model=TOY)
    with pytest.raises(AssertionError, match=r"differ by 1\.0e-03"):
        measure.check_agreement(case, lambda _: one, lambda _: two)


@pytest.mark.slow
def test_the_gpu_table_has_its_three_rows_at_a_toy_size() -> None:
    command = [sys.executable, gpu.__file__, "--tiny"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    words = [line.split() for line in done.stdout.splitlines()]
    rows = {line[0]: line for line in words if line and line[0] in gpu.POLICIES}
    assert list(rows) == list(gpu.POLICIES)
    for row in rows.values():
        assert float(row[1].replace(",", "")) > 0, row  # tokens/s, so no word of a problem


def test_a_row_that_fails_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu.cells("none", {"problem": "out of memory"})[-1] == "out of memory"
    monkeypatch.setattr(sys, "executable", "false")
    assert gpu.ask("tiny", "none", 10) == {"problem": "exit code 1"}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_pipeline_table_has_a_row_at_a_toy_size(capsys: pytest.CaptureFixture[str]) -> None:
    pipelines.main(["--toy", "--only", "zb-h1"])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    row = next(row for row in rows if row and row[0] == "zb-h1")
    simulated, measured, ratio, ceiling, share, bound = map(float, row[1:7])
    assert min(simulated, measured, ceiling) > 0 and 0 < bound < 1, row
    assert ratio == pytest.approx(measured / simulated, rel=0.2) and share == pytest.approx(ceiling / measured, rel=0.2)


def test_pipelines_that_disagree_are_noticed() -> None:
    one, other = ([{"loss": loss, "squares": 1.0}] for loss in (1.0, 1.001))
    with pytest.raises(AssertionError, match=r"gpipe: loss of ours 1\.0, of torch's 1\.001"):
        pipelines.check_agreement("gpipe", one, other)
    pipelines.check_agreement("gpipe", one, one)
