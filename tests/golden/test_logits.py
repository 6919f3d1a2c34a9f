"""Every family of published checkpoints against the reference: fp32, bf16, padded, greedy, on meshes, and back."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxpp import tree
from jaxpp.conversion import convert, load
from jaxpp.convert.safetensors import open_safetensors
from jaxpp.pretrained import open_checkpoint
from tests.golden import reading

TOLERANCE = 1e-4  # absolute, of fp32 logits; the noise of float32 against float64 is 2e-5
MESHES = ("tensor:2 data:2", "fsdp:4 tensor:2")
WITH_BF16 = [name for name in reading.cases() if "logits_bf16" in reading.load(name).arrays]
LONG = [name for name in reading.cases() if "long_logits" in reading.load(name).arrays]


@pytest.fixture(autouse=True)
def exact_products():
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Write a case as a Hugging Face directory, once per form."""
    root = tmp_path_factory.mktemp("hf")

    @functools.cache
    def write(name: str, **form) -> Path:
        return reading.write(name, root / "-".join([name, *map(str, form.values())]), **form)

    return write


@pytest.fixture(scope="module")
def models(written):
    return functools.cache(lambda name: load(written(name)))


@pytest.mark.parametrize("name", reading.cases())
def test_logits_equal_the_reference(name, models):
    golden = reading.load(name).arrays
    np.testing.assert_allclose(models(name)(golden["tokens"]), golden["logits"], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", LONG)
def test_logits_beyond_the_original_length_equal_the_reference(name, models):
    """B11: stretched positions, where the length of the sequence chooses the rule."""
    golden = reading.load(name).arrays
    np.testing.assert_allclose(models(name)(golden["long_tokens"]), golden["long_logits"], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", reading.cases())
def test_rows_that_are_padded_on_the_left_equal_the_rows_alone(name, models):
    golden = reading.load(name).arrays
    real = golden["padding"].astype(np.int32)
    found = np.asarray(models(name)(golden["padded_tokens"], segment_ids=real))
    np.testing.assert_allclose(found[real == 1], golden["padded_logits"], rtol=0, atol=TOLERANCE)
    assert np.isfinite(found).all()
    shortest = int(np.argmin(real.sum(1)))
    tokens = golden["padded_tokens"][shortest][real[shortest] == 1]
    alone = np.asarray(models(name)(np.pad(tokens, (0, real.shape[1] - len(tokens)))[None]))[0, : len(tokens)]
    if name not in LONG:  # there the padding behind would lengthen the row
        np.testing.assert_allclose(found[shortest][real[shortest] == 1], alone, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", reading.cases())
def test_greedy_continuations_are_identical(name, models):
    golden = reading.load(name).arrays
    prompt, new = golden["greedy_prompt"], golden["greedy_new"]
    tokens = np.concatenate([prompt, new])[None]  # fed whole: each step's argmax must be the reference's next token
    found = np.asarray(models(name)(tokens))[0].argmax(-1)
    assert found[len(prompt) - 1 : -1].tolist() == new.tolist()


@pytest.mark.parametrize("name", WITH_BF16)
def test_bfloat16_checkpoints_are_within_two_percent(name, written):
    golden = reading.load(name).arrays
    model = load(written(name, dtype="bfloat16"))
    assert {str(leaf.dtype) for leaf in tree.named_leaves(jax.tree.map(lambda x: x, model.tokens)).values()} == {
        "bfloat16"
    }
    found = np.asarray(model(golden["tokens"]))
    assert np.abs(found - golden["logits_bf16"]).max() <= 0.02 * np.abs(golden["logits_bf16"]).max()
    wide = load(written(name, dtype="bfloat16"), dtype="float32")
    np.testing.assert_allclose(wide(golden["tokens"]), golden["logits_bf16_weights"], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", reading.cases())
def test_both_spellings_of_the_config_are_one_model(name, written):
    """B1: transformers 4's and 5's."""
    configs = [open_checkpoint(written(name, spelling=spelling)).config for spelling in ("v5", "v4", "early")]
    assert configs[0] == configs[1] == configs[2]


@pytest.mark.parametrize("name", reading.fused_cases())
def test_fused_experts_are_the_same_experts(name, written):
    """B59."""
    golden = reading.load(name).arrays
    model = load(written(name, fused=True))
    np.testing.assert_allclose(model(golden["tokens"]), golden["logits"], rtol=0, atol=TOLERANCE)


def in_turn(*forms: str) -> list[tuple[str, str]]:
    """Give each case one of the forms, in turn; the cases of one family differ little, so each form meets all."""
    return [(name, forms[i % len(forms)]) for i, name in enumerate(reading.cases())]


@pytest.mark.parametrize(("name", "mesh"), in_turn(*MESHES))
def test_meshes_give_the_logits_of_one_device(name, mesh, written):
    golden, config = reading.load(name).arrays, open_checkpoint(written(name)).config
    sizes = {"kv_heads": config.num_kv_heads, "heads": config.num_heads}
    wrong = [f"{dim} {size}" for dim, size in sizes.items() if size % 2 and size > 1]  # one kv head: on both devices
    if wrong:
        with pytest.raises(ValueError, match=f"{wrong[0]} does not split over tensor=2"):
            load(written(name), mesh)
        return
    model = load(written(name), mesh)
    assert model.config.table_rows == -(-config.vocab_size // 2) * 2  # 251 rows are filled up
    np.testing.assert_allclose(model(golden["tokens"]), golden["logits"], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_experts_on_an_axis_of_their_own(name, written):
    """B64: six experts on two devices too; four do not divide them."""
    golden = reading.load(name).arrays
    model = load(written(name), "expert:2 data:2")
    np.testing.assert_allclose(model(golden["tokens"]), golden["logits"], rtol=0, atol=TOLERANCE)
    if name == "qwen2_moe":
        with pytest.raises(ValueError, match="experts 6 does not split over expert=4"):
            load(written(name), "expert:4 data:2")


def tensors(directory: Path) -> dict[str, np.ndarray]:
    files = open_safetensors(directory)
    return {name: np.array(files.read(name)) for name in files.names()}


@pytest.mark.parametrize(("name", "dtype"), in_turn("float32", "bfloat16"))
def test_there_and_back_gives_identical_tensors(name, dtype, written, tmp_path):
    """Hugging Face to orbax to Hugging Face, through two meshes; the config describes the same model."""
    source = written(name, dtype=dtype)
    config = open_checkpoint(source).config
    mesh = "fsdp:4 tensor:2" if config.num_kv_heads % 2 == 0 else "data:2"
    convert(source, tmp_path / "ours", "orbax", mesh=mesh)
    convert(tmp_path / "ours", tmp_path / "back", "hf", mesh="fsdp:2", max_file_bytes=40_000)
    before, after = tensors(source), tensors(tmp_path / "back")
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert after[key].dtype == tensor.dtype and after[key].tobytes() == tensor.tobytes(), key
    kept, written_back = (json.loads((path / "config.json").read_text()) for path in (source, tmp_path / "back"))
    assert {**kept, "dtype": dtype} == {**written_back, "dtype": dtype}
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 1
