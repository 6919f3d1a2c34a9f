"""GGUF files: names, layouts and settings come back as the checkpoint that was converted had them."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxpp.convert.gguf
from jaxpp.convert.gguf import is_gguf, open_gguf
from jaxpp.convert.places import check
from jaxpp.models.published import read_config
from tests.convert.gguf_files import (
    CASES,
    EXPERTS,
    HEAD_DIM,
    HEADS,
    MIXTRAL,
    MLP,
    MOE,
    PHI3,
    SIZES,
    WIDTH,
    converted,
    drawn,
    llama_file,
    llama_shapes,
    metadata_of,
    permuted,
    write,
)


@pytest.mark.parametrize("case", CASES)
def test_a_converted_checkpoint_comes_back(case: str, tmp_path: Path) -> None:
    architecture, _, shapes, attributes = CASES[case]
    tensors = drawn(shapes)
    path = write(tmp_path / "tiny.gguf", architecture, metadata_of(case), converted(architecture, tensors))
    checkpoint = open_gguf(path)
    assert set(checkpoint.tensors.names()) == set(tensors)
    for name, expected in tensors.items():
        info, array = checkpoint.tensors.names()[name], checkpoint.tensors.read(name)
        assert info.shape == array.shape == expected.shape and info.dtype == array.dtype == np.float32, name
        assert array.flags.c_contiguous
        offset = architecture.startswith("gemma") and name.endswith("norm.weight")
        np.testing.assert_allclose(array, expected, atol=3e-7 if offset else 0, rtol=0, err_msg=name)
    assert checkpoint.attributes.items() >= attributes.items()
    assert checkpoint.tensors.total_bytes == sum(array.nbytes for array in tensors.values())


@pytest.mark.parametrize("case", CASES)
def test_its_family_knows_all_of_it(case: str, tmp_path: Path) -> None:
    architecture, _, shapes, _ = CASES[case]
    tensors = converted(architecture, drawn(shapes))
    checkpoint = open_gguf(write(tmp_path / "tiny.gguf", architecture, metadata_of(case), tensors))
    family, config = read_config(checkpoint.attributes)
    model = nnx.eval_shape(lambda: config.build(nnx.Rngs(0)))
    assert check(checkpoint.tensors, family.tensors(config), nnx.split(model, nnx.Param, ...)[1]) == []


def inverse_factors(factor: float, dim: int, base: float) -> np.ndarray:
    """Return Llama 3's divisors of frequencies, one after the other as the rule is written."""
    divisors = []
    for k in range(dim // 2):
        wavelength = 2 * math.pi * base ** (2 * k / dim)
        smooth = (8192 / wavelength - 1) / 3
        middle = 1 / ((1 - smooth) / factor + smooth)
        divisors.append(1.0 if wavelength < 8192 / 4 else factor if wavelength > 8192 else middle)
    return np.array(divisors, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_found_in_its_factors(factor: float, tmp_path: Path) -> None:
    divisors = inverse_factors(factor, HEAD_DIM, 50_000.0)
    checkpoint = open_gguf(llama_file(tmp_path / "a.gguf", extra={"rope_freqs.weight": divisors}))
    assert checkpoint.attributes["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert "rope_freqs.weight" not in checkpoint.tensors.names()
    divisors[2] *= 1.5
    with pytest.raises(ValueError, match="rope_freqs.weight is not Llama 3's rule"):
        open_gguf(llama_file(tmp_path / "b.gguf", extra={"rope_freqs.weight": divisors}))


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"rope.scaling.factor": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 2.0}, None),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        ),
    ],
)
def test_rotary_scaling(metadata: dict[str, Any], expected: dict[str, Any] | None, tmp_path: Path) -> None:
    assert open_gguf(llama_file(tmp_path / "a.gguf", metadata)).attributes["rope_scaling"] == expected


def test_longrope_tables(tmp_path: Path) -> None:
    short, long = np.array([1.0, 1.5, 2.25, 4.1], np.float32), np.array([1.0, 3.0, 9.0, 27.5], np.float32)
    tensors = {"rope_factors_short.weight": short, "rope_factors_long.weight": long}
    metadata = {**SIZES, "rope.scaling.original_context_length": 32, "rope.scaling.attn_factor": 1.19}
    tensors |= converted("phi3", drawn(PHI3))
    attributes = open_gguf(write(tmp_path / "a.gguf", "phi3", metadata, tensors)).attributes
    assert attributes["original_max_position_embeddings"] == 32
    assert attributes["rope_scaling"] == {
        "rope_type": "longrope",
        "short_factor": [1.0, 1.5, 2.25, 4.1],
        "long_factor": [1.0, 3.0, 9.0, 27.5],
        "attention_factor": 1.19,
        "original_max_position_embeddings": 32,
    }


def quantised(kind: gguf.GGMLQuantizationType, shape: tuple[int, ...]) -> tuple[np.ndarray, Any]:
    return gguf.quantize(np.random.default_rng(1).standard_normal(shape).astype(np.float32), kind), kind


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_dequantised_in_blocks_and_once(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, code = quantised(gguf.GGMLQuantizationType[kind], (MLP, WIDTH))
    checkpoint = open_gguf(llama_file(tmp_path / "a.gguf", extra={"blk.1.ffn_up.weight": (data, code)}))
    monkeypatch.setattr(jaxpp.convert.gguf, "_BLOCK_ELEMENTS", 3 * WIDTH)
    expected, calls, dequantize = gguf.dequantize(data, code), [], gguf.dequantize
    monkeypatch.setattr(gguf, "dequantize", lambda rows, kind: (calls.append(len(rows)), dequantize(rows, kind))[1])
    for _ in range(3):
        np.testing.assert_array_equal(checkpoint.tensors.read("model.layers.1.mlp.up_proj.weight"), expected)
    assert calls == [3] * 21 + [1]


def test_one_expert_is_dequantised_alone(tmp_path: Path) -> None:
    data, code = quantised(gguf.GGMLQuantizationType.Q8_0, (EXPERTS, MLP, WIDTH))
    tensors: dict[str, Any] = {**converted("llama", drawn(MIXTRAL)), "blk.0.ffn_up_exps.weight": (data, code)}
    files = open_gguf(write(tmp_path / "a.gguf", "llama", {**SIZES, **MOE}, tensors)).tensors
    for expert in range(EXPERTS):
        array = files.read(f"model.layers.0.block_sparse_moe.experts.{expert}.w3.weight")
        np.testing.assert_array_equal(array, gguf.dequantize(data, code)[expert])


def test_memory_stays_near_one_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, code = quantised(gguf.GGMLQuantizationType.Q4_1, (32768, WIDTH))
    tensors = {**converted("llama", drawn(llama_shapes())), "token_embd.weight": (data, code)}
    files = open_gguf(write(tmp_path / "a.gguf", "llama", SIZES, tensors)).tensors
    monkeypatch.setattr(jaxpp.convert.gguf, "_BLOCK_ELEMENTS", 1 << 14)
    tracemalloc.start()
    size = files.read("model.embed_tokens.weight").nbytes
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert size == 32768 * WIDTH * 4 and peak < 1.3 * size


@pytest.mark.parametrize("dtype", [np.float16, jnp.bfloat16])
def test_half_precision_stays(dtype: Any, tmp_path: Path) -> None:
    array = drawn({"": (HEADS * HEAD_DIM, WIDTH)})[""].astype(dtype)
    kind = gguf.GGMLQuantizationType.F16 if dtype is np.float16 else gguf.GGMLQuantizationType.BF16
    stored = permuted(array, HEADS) if dtype is np.float16 else permuted(array, HEADS).view(np.uint8)
    files = open_gguf(llama_file(tmp_path / "a.gguf", extra={"blk.0.attn_q.weight": (stored, kind)})).tensors
    read = files.read("model.layers.0.self_attn.q_proj.weight")
    assert read.dtype == files.names()["model.layers.0.self_attn.q_proj.weight"].dtype == dtype
    np.testing.assert_array_equal(read, array)


def test_all_parts_of_a_split_file(tmp_path: Path) -> None:
    tensors = drawn(llama_shapes())
    write(tmp_path / "m.gguf", "llama", SIZES, converted("llama", tensors), split_max_tensors=9)
    parts = sorted(tmp_path.glob("m-*.gguf"))
    assert len(parts) > 1
    for part in parts:
        files = open_gguf(part).tensors
        assert set(files.names()) == set(tensors)
        np.testing.assert_array_equal(files.read("model.norm.weight"), tensors["model.norm.weight"])
    parts[1].unlink()
    with pytest.raises(ValueError, match=rf"1 of its {len(parts)} parts are missing beside it: {parts[1].name}"):
        open_gguf(parts[0])


def cut(path: Path, keep: Callable[[int], int]) -> Path:
    data = path.read_bytes()
    path.write_bytes(data[: keep(len(data))])
    return path


def one_line(path: Path, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        open_gguf(path)
    assert "\n" not in str(error.value)


def test_wrong_files_are_refused_in_one_line(tmp_path: Path) -> None:
    one_line(tmp_path / "none.gguf", "there is no such file")
    other = tmp_path / "other.gguf"
    other.write_bytes(b"PK\x03\x04 a zip file")
    assert not is_gguf(other) and not is_gguf(tmp_path)
    one_line(other, "does not begin with the letters GGUF")
    for keep in (lambda size: 6, lambda size: 200, lambda size: size // 2, lambda size: size - 40):
        one_line(cut(llama_file(tmp_path / "cut.gguf"), keep), "cut.gguf is truncated, damaged")
    one_line(write(tmp_path / "b.gguf", "mamba", {}, {}), 'b.gguf: unsupported architecture "mamba"; .*llama qwen2')
    one_line(llama_file(tmp_path / "c.gguf", {"logit_scale": 0.5}), "logit_scale = 0.5.*accept=logit_scale")
    assert open_gguf(tmp_path / "c.gguf", accept=["logit_scale"]).attributes["hidden_size"] == WIDTH
    extra = {"blk.0.attn_sinks.weight": np.zeros(HEADS, np.float32)}
    one_line(
        llama_file(tmp_path / "d.gguf", extra=extra), "1 tensors are none of a llama model: blk.0.attn_sinks.weight"
    )
    extra = {"blk.0.ffn_up.weight": np.zeros((MLP, WIDTH), np.int32)}
    one_line(llama_file(tmp_path / "e.gguf", extra=extra), "quantisation I32 of blk.0.ffn_up.weight is not supported")
    one_line(llama_file(tmp_path / "f.gguf", {"rope.scaling.type": "longrope"}), "rope.scaling.type 'longrope' is not")
    one_line(
        llama_file(tmp_path / "g.gguf", {"rope.dimension_count": 4, "attention.key_length": 8}), "rope.dimension_count"
    )
    sizes = {key: value for key, value in SIZES.items() if key != "attention.head_count"}
    tensors = converted("llama", drawn(llama_shapes()))
    one_line(write(tmp_path / "h.gguf", "llama", sizes, tensors), 'has no "attention.head_count"')
    moe = converted("llama", drawn(MIXTRAL))
    one_line(
        write(tmp_path / "i.gguf", "llama", {**SIZES, "expert_count": 2, "expert_used_count": 1}, moe),
        "3 experts; .* 2",
    )
