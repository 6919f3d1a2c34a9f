from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.golden import reading
from tests.golden.recipes import RECIPES

MAX_BYTES = 8 * 2**20
FILES = {"config.json", "config_v4.json", "golden.npz", "tensors.json"}


def _entries(name: str, file: str = "tensors.json") -> dict[str, dict]:
    return json.loads((reading.FAMILIES / name / file).read_text())


def test_the_golden_files_stay_small() -> None:
    size = sum(path.stat().st_size for path in Path(reading.__file__).parent.rglob("*") if path.suffix != ".pyc")
    assert size < MAX_BYTES


def test_every_recipe_was_made_and_nothing_else() -> None:
    assert set(reading.cases()) == set(RECIPES)
    for name in reading.cases():
        extra = {"tensors_fused.json"} if name in reading.fused_cases() else set()
        assert {path.name for path in (reading.FAMILIES / name).iterdir()} == FILES | extra
    assert reading.fused_cases() == ["mixtral", "qwen2_moe", "qwen3_moe"]


@pytest.mark.parametrize("name", reading.cases())
def test_a_case_is_whole(name: str) -> None:
    golden = reading.load(name)
    arrays, vocab = golden.arrays, golden.config["vocab_size"]
    assert golden.config["model_type"] == golden.config_v4["model_type"] == RECIPES[name].model_type
    assert golden.config["transformers_version"].startswith("5.")
    assert golden.config_v4["transformers_version"].startswith("4.")
    assert arrays["tokens"].shape == (2, 24) and arrays["logits"].shape == (2, 24, vocab)
    assert arrays["padded_tokens"].shape == arrays["padding"].shape == (3, 12)
    assert arrays["padded_logits"].shape == (arrays["padding"].sum(), vocab)
    assert arrays["greedy_prompt"].shape == (8,) and arrays["greedy_new"].shape == (16,)
    assert ("long_logits" in arrays) == RECIPES[name].long
    assert ("logits_bf16" in arrays) == ("logits_bf16_weights" in arrays) == RECIPES[name].bf16
    for key, value in arrays.items():
        assert value.dtype == (np.float32 if "logits" in key else np.int32), key
        assert np.isfinite(value).all(), key
    assert 1.2 < arrays["logits"].std() < 2.8


@pytest.mark.parametrize("name", reading.cases())
def test_weights_are_drawn_as_they_were(name: str) -> None:
    drawn = reading.weights(name)
    assert {key: list(value.shape) for key, value in drawn.items()} == {
        key: entry["shape"] for key, entry in _entries(name).items()
    }
    assert reading.checksum(drawn) == json.loads(reading.CHECKSUMS.read_text())[name]


def test_a_checksum_sees_values_and_names() -> None:
    drawn = {"a": np.zeros(2, np.float32)}
    assert reading.checksum(drawn) != reading.checksum({"b": drawn["a"]})
    assert reading.checksum(drawn) != reading.checksum({"a": np.array([0, 1e-30], np.float32)})


@pytest.mark.parametrize("name", reading.fused_cases())
def test_fused_experts_hold_the_plain_ones(name: str) -> None:
    plain, fused = reading.weights(name), reading.weights(name, fused=True)
    entries = _entries(name, "tensors_fused.json")
    assert {key: list(value.shape) for key, value in fused.items()} == {
        key: entry["shape"] for key, entry in entries.items()
    }
    assert sum(value.size for value in fused.values()) == sum(value.size for value in plain.values())
    stacked = [key for key, entry in entries.items() if "stack" in entry]
    assert stacked and all(".experts." in key for key in stacked)
    gate, _ = entries["model.layers.0.mlp.experts.gate_up_proj"]["stack"][1]
    rows = len(plain[gate])
    np.testing.assert_array_equal(fused["model.layers.0.mlp.experts.gate_up_proj"][1, :rows], plain[gate])


def test_a_directory_holds_config_and_tensors(tmp_path: Path) -> None:
    folder = reading.write("llama_gqa", tmp_path / "new")
    assert folder == tmp_path / "new"
    assert json.loads((folder / "config.json").read_text()) == reading.load("llama_gqa").config
    written = load_file(folder / "model.safetensors")
    drawn = reading.weights("llama_gqa")
    assert written.keys() == drawn.keys()
    for key, value in drawn.items():
        np.testing.assert_array_equal(written[key], value)


def test_bfloat16_is_rounded_and_named(tmp_path: Path) -> None:
    folder = reading.write("gemma2", tmp_path, spelling="v4", dtype="bfloat16")
    assert json.loads((folder / "config.json").read_text())["torch_dtype"] == "bfloat16"
    drawn = reading.weights("gemma2")
    for key, value in load_file(folder / "model.safetensors").items():
        assert value.dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(value, drawn[key].astype(ml_dtypes.bfloat16))


def test_several_files_have_an_index(tmp_path: Path) -> None:
    folder = reading.write("mixtral", tmp_path, files=3)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert not (folder / "model.safetensors").exists()
    found = {}
    for file in sorted(folder.glob("model-*.safetensors")):
        tensors = load_file(file)
        assert {name for name, place in index["weight_map"].items() if place == file.name} == set(tensors)
        found |= tensors
    drawn = reading.weights("mixtral")
    assert len(set(index["weight_map"].values())) == 3 and found.keys() == drawn.keys()
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in drawn.values())


def test_early_configurations_use_the_older_names() -> None:
    linear = reading.early(reading.load("llama_linear").config_v4)
    assert linear["rope_scaling"] == {"type": "linear", "factor": 4.0}
    neox = reading.early(reading.load("gpt_neox").config_v4)
    assert neox["rotary_pct"] == 0.25 and "rope_theta" not in neox and "partial_rotary_factor" not in neox
    assert reading.early(reading.load("gemma").config_v4)["hidden_act"] == "gelu"
    assert "layer_types" not in reading.early(reading.load("gemma3").config_v4)
