"""Weights from files onto shards: the bits of the dumb way, on every layout, each slice read once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxpp.convert.part import Part
from jaxpp.convert.places import check
from jaxpp.convert.safetensors import SafetensorsFiles, open_safetensors
from jaxpp.convert.stream import load_onto, num_bytes_to_read
from jaxpp.convert.tensors import RenamedFiles, TensorInfo
from tests.bench import loading
from tests.convert import toy


@pytest.fixture(params=[np.float32, toy.bfloat16, np.float16], ids=["float32", "bfloat16", "float16"])
def dtype(request: pytest.FixtureRequest) -> Any:
    return request.param


def saved(directory: Path, tensors: Mapping[str, np.ndarray]) -> SafetensorsFiles:
    save_file(dict(tensors), directory / "model.safetensors")
    return open_safetensors(directory)


class Held:
    """Tensors in memory that remember what was read."""

    def __init__(self, tensors: Mapping[str, np.ndarray]) -> None:
        self.tensors, self.reads = dict(tensors), []

    def names(self) -> Mapping[str, TensorInfo]:
        return {name: TensorInfo(array.shape, array.dtype, "memory") for name, array in self.tensors.items()}

    def read(self, name: str) -> np.ndarray:
        self.reads.append(name)
        return self.tensors[name]

    @property
    def total_bytes(self) -> int:
        return sum(array.nbytes for array in self.tensors.values())


@pytest.mark.parametrize("layout", toy.LAYOUTS)
def test_every_form_on_every_layout(layout: str, dtype: Any, tmp_path: Path) -> None:
    tensors = toy.file_tensors(dtype)
    like = toy.abstract(layout, dtype)
    loaded = load_onto(saved(tmp_path, tensors), toy.PARTS, like)
    wanted, targets = toy.weights(tensors), toy.leaves(like)
    for path, array in toy.leaves(loaded).items():
        assert toy.same_bits(array, wanted[path]), path
        assert array.sharding == targets[path].sharding, path
        for shard in array.addressable_shards:
            assert toy.same_bits(shard.data, wanted[path][shard.index]), (path, shard.device)


def test_the_state_keeps_its_arrows(tmp_path: Path) -> None:
    loaded = load_onto(saved(tmp_path, toy.file_tensors()), toy.PARTS, toy.abstract())
    assert loaded["blocks"]["query"].get_metadata()["dims"] == "layers | embed -> heads head_dim"


@pytest.mark.parametrize("layout", toy.LAYOUTS)
def test_each_slice_is_read_once(layout: str) -> None:
    files, counted = Held(toy.file_tensors()), []
    loaded = load_onto(files, toy.PARTS, toy.abstract(layout), progress=counted.append)
    assert sorted(files.reads) == sorted(files.tensors), "each tensor once, fused ones too"
    shards = {
        (path, tuple(map(str, shard.index))): shard.data.nbytes
        for path, array in toy.leaves(loaded).items()
        for shard in array.addressable_shards
    }
    assert sum(counted) == sum(shards.values()) == num_bytes_to_read(files, toy.PARTS, toy.abstract(layout))
    assert sum(counted) == files.total_bytes


def test_the_first_form_that_is_all_there_is_read() -> None:
    tensors = toy.file_tensors()
    for layer in range(toy.LAYERS):
        tensors[f"model.layers.{layer}.q.weight"] = np.full((16, 16), layer, np.float32)
    loaded = load_onto(Held(tensors), toy.PARTS, toy.abstract())
    query = toy.leaves(loaded)["blocks/query"]
    assert [float(query[i].min()) for i in range(toy.LAYERS)] == [0, 1, 2]
    del tensors["model.layers.1.q.weight"]
    with pytest.raises(ValueError, match=r"2 tensors unexpected: model.layers.0.q.weight \(16, 16\); model.layers.2.q"):
        load_onto(Held(tensors), toy.PARTS, toy.abstract())


@pytest.mark.parametrize("read", [np.float32, np.float16, toy.bfloat16, jnp.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("held", [np.float32, np.float16, toy.bfloat16], ids=str)
def test_a_dtype_is_converted_as_numpy_does(read: Any, held: Any) -> None:
    draw = np.random.default_rng(0)
    tensors = {
        name: draw.standard_normal(array.shape, np.float32).astype(read) for name, array in toy.file_tensors().items()
    }
    loaded = toy.leaves(load_onto(Held(tensors), toy.PARTS, toy.abstract("fsdp:8", held)))
    for path, wanted in toy.weights(tensors).items():
        assert toy.same_bits(loaded[path], wanted.astype(held)), path


def test_loaded_arrays_may_be_donated() -> None:
    """On a CPU the array is the host buffer; replicas must not share it, and donation must not write into it."""
    tensors = toy.file_tensors(seed=1)
    loaded = toy.leaves(load_onto(Held(tensors), toy.PARTS, toy.abstract("tensor:2 data:4")))
    wanted = toy.weights(tensors)
    step = jax.jit(lambda x: -x, donate_argnums=0)
    for path, array in loaded.items():
        pointers = [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]
        assert len(set(pointers)) == len(pointers), path
        assert toy.same_bits(step(step(array)), wanted[path]), path


class TestMisfits:
    """Everything that is wrong is told at once, and nothing is read before."""

    def refused(self, tensors: Mapping[str, np.ndarray], **options: Any) -> str:
        files = Held(tensors)
        with pytest.raises(ValueError) as raised:
            load_onto(files, toy.PARTS, toy.abstract(), **options)
        assert not files.reads and "\n" not in str(raised.value)
        return str(raised.value)

    def test_missing(self) -> None:
        tensors = toy.file_tensors()
        tensors["model.layers.1.out.weight"] = tensors.pop("model.layers.1.o.weight")
        del tensors["lm_head.weight"]
        text = self.refused(tensors)
        assert "2 tensors missing: " in text and "; lm_head.weight (40, 16) for head/kernel." in text
        assert "model.layers.1.o.weight (16, 16) for blocks/out (there is model.layers.1.out.weight)" in text
        assert "1 tensor unexpected: model.layers.1.out.weight (16, 16)" in text

    def test_shapes(self) -> None:
        tensors = toy.file_tensors()
        tensors["model.layers.2.c_attn.weight"] = tensors["model.layers.2.c_attn.weight"].T.copy()
        tensors["model.norm.weight"] = np.zeros(17, np.float32)
        tensors["lm_head.weight"] = np.zeros((20, 32), np.float32)
        text = self.refused(tensors)
        assert "3 tensors of another shape or type" in text
        assert "model.layers.2.c_attn.weight found (48, 16), needed (16, 48) (it is transposed)" in text
        assert "model.norm.weight found (17,), needed (16,)" in text
        assert "lm_head.weight found (20, 32), needed (40, 16) (as many elements, in another shape)" in text

    def test_quantised(self) -> None:
        tensors = toy.file_tensors()
        tensors["lm_head.weight"] = np.zeros((40, 16), np.int8)
        assert "lm_head.weight holds int8, needed floats: it is quantised" in self.refused(tensors)

    def test_long_lists_are_cut(self) -> None:
        tensors = {k: v for k, v in toy.file_tensors().items() if ".up." not in k}
        text = self.refused(tensors)
        assert "12 tensors missing" in text and text.count(".up.weight") == 8 and "; and 4 more" in text

    def test_all_kinds_in_one_message(self) -> None:
        tensors = toy.file_tensors()
        del tensors["lm_head.weight"]
        tensors["model.norm.weight"] = np.zeros(17, np.float32)
        tensors["model.layers.3.norm.weight"] = np.zeros(16, np.float32)
        text = self.refused(tensors)
        assert "1 tensor missing" in text and "1 tensor of another shape" in text
        assert "1 tensor unexpected: model.layers.3.norm.weight (16,)" in text

    def test_buffers_are_ignored_with_a_note(self) -> None:
        tensors = {**toy.file_tensors(), "model.layers.0.rotary_emb.inv_freq": np.zeros(4, np.float32)}
        assert "rotary_emb.inv_freq" in self.refused(tensors)
        told: list[str] = []
        files = Held(tensors)
        load_onto(files, toy.PARTS, toy.abstract(), ignored=(r"rotary_emb\.inv_freq$",), notes=told.append)
        assert told == ["not read, as the model computes them itself: model.layers.0.rotary_emb.inv_freq"]
        assert "model.layers.0.rotary_emb.inv_freq" not in files.reads
        assert check(files, toy.PARTS, toy.abstract(), (r"inv_freq",)) == ["model.layers.0.rotary_emb.inv_freq"]

    def test_parts_of_another_model(self) -> None:
        files, like = Held(toy.file_tensors()), toy.abstract()
        with pytest.raises(ValueError, match="no part says where these weights lie in a file: norm/scale"):
            load_onto(files, {k: v for k, v in toy.PARTS.items() if k != "norm/scale"}, like)
        with pytest.raises(ValueError, match="parts name weights that the model does not have: other/scale"):
            load_onto(files, {**toy.PARTS, "other/scale": (Part("x", "embed"),)}, like)

    def test_no_sharding(self) -> None:
        like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), toy.abstract())
        with pytest.raises(ValueError, match="no sharding= given to the ShapeDtypeStruct of blocks/experts/down"):
            load_onto(Held(toy.file_tensors()), toy.PARTS, like)


def test_renamed_files() -> None:
    tensors = toy.file_tensors()
    prefixed = {f"language_model.{name}": array for name, array in tensors.items()}
    files = RenamedFiles(Held(prefixed), [(r"^language_model\.", "")])
    assert files.total_bytes == sum(array.nbytes for array in tensors.values())
    loaded = toy.leaves(load_onto(files, toy.PARTS, toy.abstract("fsdp:8")))
    for path, wanted in toy.weights(tensors).items():
        assert toy.same_bits(loaded[path], wanted)
    with pytest.raises(ValueError, match="tensors a.x and b.x are both read as x; keep one of them"):
        RenamedFiles(Held({"a.x": np.zeros(1), "b.x": np.zeros(1)}), [(r"^\w\.", "")])


@pytest.mark.timeout(120)
@pytest.mark.parametrize("processes, most", [(1, 1.25), (2, 0.8)])
def test_peak_memory(processes: int, most: float, tmp_path: Path) -> None:
    """The shards of a process and one tensor (here a sixth), not the file beside them; see `tests/bench/loading.py`."""
    dims = loading.sizes(num_layers=5, scale=11)
    total = loading.write(tmp_path, dims, "bfloat16")
    answers = loading.load(tmp_path, dims, "bfloat16", processes)
    assert total > 150e6 and sum(answer["read"] for answer in answers) == total
    for answer in answers:
        growth = (answer["peak"] - answer["before"]) / total
        assert 0.9 / processes < growth < most, answers
