"""What `jaxpp inspect` says of a checkpoint, of any format, without reading its weights."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from jaxpp import cli
from jaxpp.conversion import convert
from jaxpp.convert.safetensors import SafetensorsFiles
from jaxpp.describe import describe
from jaxpp.pretrained import open_checkpoint
from tests import command, formats
from tests.golden import reading

SAID = {
    "llama31": "rope base 500000, rope llama3 x8",
    "llama_mqa": "4 heads of 16 on 1 kv head, ",
    "gemma2": "rms norm before and after each part, .*window 8 in 2 of 4 layers, .*soft cap 5, logit soft cap 10",
    "gemma3": "gelu_tanh, .*window 8 in 7 of 8 layers, qk norm of each head, .*scaled embedding",
    "gpt2": "tied, plain mlp .*layer norm before each part, learned positions, qkv bias, .*, mlp bias",
    "gpt_neox": "4 of 16 dims rotate, .*parallel residual",
    "olmo2": "rms norm after each part, .*qk norm over all heads",
    "phi3_longrope": "rope longrope",
    "qwen2_moe": "6 experts of .*, 2 of them per token, shared expert of 64",
    "smollm3": "rope in 3 of 4 layers",
}


@pytest.mark.parametrize("case", SAID)
def test_what_sets_a_model_apart(case: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(reading.write(case, tmp_path))
    text = describe(checkpoint)
    assert re.search(SAID[case], text), text
    assert f"hf, {checkpoint.texts and reading.load(case).config['model_type']}" in text
    count = sum(x.size for x in reading.weights(case).values())
    assert f"weights {count:,} parameters" in re.sub(" +", " ", text)
    assert re.search(r"\ntokenizer +none\n", text)


def test_every_format_without_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = formats.write(tmp_path / "in", dtype="bfloat16")
    convert(source, tmp_path / "ours", "orbax")

    def refuse(*_: object) -> None:
        raise AssertionError("a weight was read")

    monkeypatch.setattr(SafetensorsFiles, "read", refuse)
    monkeypatch.setattr("jaxpp.checkpoint.Checkpoints.restore", refuse)
    monkeypatch.setattr("jaxpp.convert.gguf.GgufTensors.read", refuse)
    tables = []
    for path, format in ((source, "hf, llama"), (tmp_path / "ours", "orbax")):
        assert cli.main(["inspect", str(path), "--mesh", "fsdp:4 tensor:2"]) == 0
        out, err = capsys.readouterr()
        assert re.search(rf"^checkpoint  {path} \({format}\)\n", out) and err == ""
        assert re.search(r"weights +95,552 parameters, 187 KiB \(bfloat16 100%\)", out)
        assert re.search(r"264 rows, ends at \S+ <\|endoftext\|>, with a chat template", out)
        assert re.search(r"mlp/up/kernel +layers \| embed -> mlp +2x64x96 bf16 +embed/fsdp mlp/tensor +3.00 KiB", out)
        tables.append(out.partition("\n\n")[2])
    assert tables[0] == tables[1]
    assert cli.main(["inspect", str(formats.smollm2()), "--mesh", "fsdp:8"]) == 0
    assert "134,515,008 parameters, 513 MiB" in capsys.readouterr().out


def test_notes_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors |= {f"model.layers.{i}.rotary_emb.inv_freq": np.ones(8, np.float32) for i in range(2)}

    assert cli.main(["inspect", str(formats.write(tmp_path, change=change))]) == 0
    out, err = capsys.readouterr()
    assert err == ("note: not read, as the model computes it itself: model.layers.0.rotary_emb.inv_freq and 1 more\n")
    assert "not read" not in out


def test_a_mesh_that_the_weights_do_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = formats.write(tmp_path)
    assert cli.main(["inspect", str(path), "--mesh", "tensor:8"]) == 2
    assert re.fullmatch(
        r"jaxpp: [^\n]*heads [24] does not split over tensor=8; [^\n]*\n", capsys.readouterr().err.replace("kv_", "")
    )


def test_a_run_and_its_checkpoint(tmp_path: Path) -> None:
    """What was trained here is shown as the run it is; its weights alone, converted, as a checkpoint."""
    command.write_run(tmp_path)
    command.jaxpp("train", "run.yaml", "train.num_steps=1", cwd=tmp_path)
    told = command.jaxpp("inspect", "out", cwd=tmp_path).stdout
    assert "256 tokens" in told
    command.jaxpp("convert", "out", "copy", "--to", "orbax", "--cpu_devices", "2", "--mesh", "fsdp:2", cwd=tmp_path)
    assert "(orbax)" in command.jaxpp("inspect", "copy", cwd=tmp_path).stdout
