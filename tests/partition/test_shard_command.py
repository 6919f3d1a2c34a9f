"""``jaxpp shard``: what is printed for a checkpoint, in 120 columns, and what is refused."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Literal

import pytest

from jaxpp import pretrained, shard_commands
from jaxpp.models.decoder_config import DecoderConfig
from jaxpp.models.llama import LLAMA
from jaxpp.models.mistral import MIXTRAL
from jaxpp.partition.rank import rank_layouts
from tests import formats


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return formats.write(tmp_path_factory.mktemp("hf") / "llama")


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    shard_commands.add_parser(parser.add_subparsers(dest="name", required=True))
    arguments = parser.parse_args(["shard", *words])
    arguments.overrides = []
    return arguments.function(arguments)


def test_it_prints_both_phases_the_choice_and_the_reason_and_reads_no_weight(
    directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pretrained.Published, "read", lambda *_: pytest.fail("weights were read"))
    assert run(str(directory), "--mesh", "tensor:2", "--batch", "4", "--context", "32", "--prompt", "8") == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{directory}\n")
    for line in ("prefill: 32 tokens a step", "decode: 4 tokens a step", "choice"):
        assert line in out
    rows = [line for line in out.splitlines() if line.startswith("> ")]
    assert len(rows) == 2 and re.search(r"\n  weights   .* for each device", out)


@pytest.mark.parametrize("objective", ["latency", "cost"])
@pytest.mark.parametrize(
    "preset, mesh, batch", [("llama-3.1-8b", "tensor:8", 64), ("llama-3.1-70b", "data:2 tensor:4", 8),
                            ("mixtral-8x7b", "tensor:8", 64), ("smollm2-135m", "tensor:8", 64),
                            ("mixtral-8x22b", "tensor_x:8 tensor_y:16", 1)],
)  # fmt: skip
def test_tables_fit_into_120_columns(preset: str, mesh: str, batch: int, objective: Literal["latency", "cost"]) -> None:
    presets = {**LLAMA.presets, **MIXTRAL.presets}
    ranking = rank_layouts(
        DecoderConfig(**presets[preset]), mesh, batch=batch, context=8192, prompt=1024, objective=objective
    )
    lines = str(ranking).splitlines()
    assert max(map(len, lines)) <= 120
    heads = [line for line in lines if line.startswith("layout ")]
    assert len(heads) == 2 and all(line.split()[-2:] == ["batch", "context"] for line in heads)


def test_the_table_shows_the_numbers_of_the_candidates() -> None:
    ranking = rank_layouts(
        DecoderConfig(**LLAMA.presets["llama-3.1-8b"]), "tensor:8", batch=64, context=8192, prompt=1024
    )
    row = next(line for line in str(ranking).splitlines() if line.startswith("> 1D"))
    cells = row.split()
    one = ranking.choice.decode
    assert cells[1:5] == ["1D", "1x8", "heads", f"{one.total_s * 1e3:.3g}"]
    assert cells[-2:] == [str(one.max_batch), f"{one.max_context / 1e3:.3g}k"] and "8.00G" in cells


def test_a_layout_that_does_not_fit_is_shown_and_named_in_the_reason() -> None:
    ranking = rank_layouts(
        DecoderConfig(**LLAMA.presets["llama-3.1-70b"]), "tensor:8", batch=64, context=8192, prompt=1024
    )
    text = " ".join(str(ranking).split())
    assert "does not fit" in text and re.search(r"replicas would take 1.15 s but needs 152.\d of 118.2 GiB", text)


def test_errors_come_before_anything_else_is_done(directory: Path) -> None:
    load = ("--batch", "4", "--context", "32")
    with pytest.raises(ValueError, match="max_positions"):
        run(str(directory), "--mesh", "tensor:2", "--batch", "4", "--context", "100000")
    with pytest.raises(ValueError, match='unknown device "h20"'):
        run(str(directory), "--mesh", "tensor:2", *load, "--device", "h20")
    with pytest.raises(ValueError, match="serving splits over data and tensor"):
        run(str(directory), "--mesh", "stage:2", *load)
