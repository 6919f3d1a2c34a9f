"""Weights out to safetensors: the bytes that came in, from every layout; nothing half-written looks whole."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from jaxpp.convert.export import write_safetensors
from jaxpp.convert.part import Part
from jaxpp.convert.safetensors import open_safetensors
from jaxpp.convert.stream import load_onto
from tests.convert import toy
from tests.test_launch import start

PROGRAM = """
import json
from pathlib import Path
from jaxpp import runtime
runtime.initialize()
import jax
from jaxpp.convert.export import write_safetensors
from jaxpp.convert.safetensors import open_safetensors
from jaxpp.convert.stream import load_onto, num_bytes_to_read
from tests.convert import toy

for dtype in ("float32", "bfloat16"):
    files, wanted = open_safetensors(Path("in", dtype)), toy.weights(toy.file_tensors(jax.numpy.dtype(dtype)))
    for name in toy.LAYOUTS:
        if name == "data:1": continue
        like, counted = toy.abstract(name, dtype), []
        params = load_onto(files, toy.PARTS, like, progress=counted.append)
        for path, array in toy.leaves(params).items():
            for shard in array.addressable_shards:
                assert toy.same_bits(shard.data, wanted[path][shard.index]), (name, path)
        write_safetensors(Path("out", dtype, name), toy.WRITTEN, params, max_file_bytes=10_000)
        assert Path("out", dtype, name, "model.safetensors.index.json").exists(), "seen by all when any returns"
        shards = [(path, s) for path, array in toy.leaves(params).items() for s in array.addressable_shards]
        held = {(path, str(s.index)): s.data.nbytes for path, s in shards}
        assert sum(counted) == sum(held.values()) == num_bytes_to_read(files, toy.PARTS, like)
        if name == "fsdp:8": assert sum(counted) < 0.6 * files.total_bytes
    if rank == 0: Path("out", dtype, "file").write_text("in the way")
    try:
        write_safetensors(Path("out", dtype, "file"), toy.WRITTEN, params)
    except OSError as error:
        Path(f"{dtype}-{rank}.txt").write_text(str(error))
runtime.barrier("done")
"""


def loaded(directory: Path, layout: str = "data:1", dtype: Any = np.float32) -> tuple[dict[str, np.ndarray], nnx.State]:
    tensors = toy.file_tensors(dtype)
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors")
    return tensors, load_onto(open_safetensors(directory), toy.PARTS, toy.abstract(layout, dtype))


def read_by_another_tool(directory: Path) -> dict[str, np.ndarray]:
    return {name: array for path in sorted(directory.glob("*.safetensors")) for name, array in load_file(path).items()}


def same(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> bool:
    return set(found) == set(wanted) and all(toy.same_bits(found[name], wanted[name]) for name in wanted)


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize("dtype", [np.float32, toy.bfloat16], ids=str)
@pytest.mark.parametrize("layout", toy.LAYOUTS)
def test_a_round_trip_keeps_every_byte(layout: str, dtype: Any, tmp_path: Path) -> None:
    tensors, params = loaded(tmp_path / "in", layout, dtype)
    assert write_safetensors(tmp_path / "out", toy.WRITTEN, params) == ["model.safetensors"]
    assert same(read_by_another_tool(tmp_path / "out"), tensors)
    again = open_safetensors(tmp_path / "out")
    assert all(toy.same_bits(again.read(name), array) for name, array in tensors.items())


def test_several_files_layer_by_layer(tmp_path: Path) -> None:
    tensors, params = loaded(tmp_path / "in", "fsdp:8")
    counted: list[int] = []
    files = write_safetensors(tmp_path / "out", toy.WRITTEN, params, max_file_bytes=10_000, progress=counted.append)
    total = sum(array.nbytes for array in tensors.values())
    count = len(files) - 1
    assert files[:-1] == [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)] and count > 4
    assert files[-1] == "model.safetensors.index.json" and sorted(os.listdir(tmp_path / "out")) == sorted(files)
    index = json.loads((tmp_path / "out" / files[-1]).read_text())
    assert index["metadata"]["total_size"] == total == sum(counted)
    for name, array in tensors.items():
        assert toy.same_bits(load_file(tmp_path / "out" / index["weight_map"][name])[name], array)
    for file in files[:-1]:
        held = load_file(tmp_path / "out" / file)
        assert sum(array.nbytes for array in held.values()) <= 10_000 or len(held) == 1
        with safe_open(tmp_path / "out" / file, "numpy") as opened:
            assert opened.metadata() == {"format": "pt"}
    order = [name for name in index["weight_map"] if name.startswith("model.layers.")]
    assert [int(name.split(".")[2]) for name in order] == sorted(int(name.split(".")[2]) for name in order)
    assert same({name: open_safetensors(tmp_path / "out").read(name) for name in tensors}, tensors)


def test_layers_are_sorted_by_number(tmp_path: Path) -> None:
    params = nnx.State({"x": nnx.Param(jnp.zeros((12, 1)), dims="layers | -> embed")})
    write_safetensors(tmp_path, {"x": (Part("h.{layer}.x", "embed"),)}, params)
    assert list(open_safetensors(tmp_path).names()) == [f"h.{i}.x" for i in range(12)]


def test_another_dtype(tmp_path: Path) -> None:
    tensors, _ = loaded(tmp_path / "in")
    draw = np.random.default_rng(0)
    tensors = {name: draw.standard_normal(array.shape, np.float32) for name, array in tensors.items()}
    save_file(tensors, tmp_path / "in" / "model.safetensors")
    params = load_onto(open_safetensors(tmp_path / "in"), toy.PARTS, toy.abstract("fsdp:8"))
    write_safetensors(tmp_path / "out", toy.WRITTEN, params, dtype="bfloat16", metadata={"made_by": "a test"})
    wanted = {name: array.astype(toy.bfloat16) for name, array in tensors.items()}
    assert same(read_by_another_tool(tmp_path / "out"), wanted)
    with safe_open(tmp_path / "out" / "model.safetensors", "numpy") as opened:
        assert opened.metadata() == {"made_by": "a test"}


def test_files_are_as_readable_as_others(tmp_path: Path) -> None:
    _, params = loaded(tmp_path / "in")
    before = os.umask(0o022)
    try:
        write_safetensors(tmp_path / "out", toy.WRITTEN, params)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "out" / "model.safetensors").stat().st_mode) == 0o644


class TestReplacing:
    @pytest.mark.parametrize("first, second", [(10_000, 1e9), (1e9, 10_000), (10_000, 20_000)])
    def test_the_new_weights_alone_are_left(self, first: float, second: float, tmp_path: Path) -> None:
        tensors, params = loaded(tmp_path / "in")
        out = tmp_path / "out"
        write_safetensors(out, toy.WRITTEN, params, max_file_bytes=first)
        (out / "config.json").write_text("{}")
        save_file({"x": np.zeros(1)}, out / "adapter.safetensors")
        files = write_safetensors(out, toy.WRITTEN, params, max_file_bytes=second)
        assert sorted(os.listdir(out)) == sorted([*files, "config.json", "adapter.safetensors"])
        (out / "adapter.safetensors").unlink()
        assert same(read_by_another_tool(out), tensors)

    def test_a_failure_leaves_the_old_ones(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        _, params = loaded(tmp_path / "in")
        write_safetensors(tmp_path / "out", toy.WRITTEN, params, max_file_bytes=10_000)
        before = contents(tmp_path / "out")
        synced: list[int] = []

        def full(descriptor: int) -> None:
            synced.append(descriptor)
            if len(synced) == 3:
                raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match=r"out was not written: No space left on device$"):
            write_safetensors(tmp_path / "out", toy.WRITTEN, params, max_file_bytes=10_000)
        assert contents(tmp_path / "out") == before

    def test_a_directory_that_cannot_be_made(self, tmp_path: Path) -> None:
        _, params = loaded(tmp_path / "in")
        (tmp_path / "out").write_text("a file")
        with pytest.raises(OSError, match="out was not written: File exists"):
            write_safetensors(tmp_path / "out", toy.WRITTEN, params)


class TestRefusals:
    def refused(self, directory: Path, parts: dict[str, Any], **options: Any) -> str:
        _, params = loaded(directory / "in")
        with pytest.raises(ValueError) as raised:
            write_safetensors(directory / "out", parts, params, **options)
        assert not (directory / "out").exists() and "\n" not in str(raised.value)
        return str(raised.value)

    def test_a_hole(self, tmp_path: Path) -> None:
        parts = {**toy.WRITTEN, "blocks/value": (Part(f"{toy.LAYER}v.weight", "(kv_heads head_dim) embed"),)}
        text = self.refused(tmp_path, parts)
        assert "tensor model.layers.0.qkv.weight has 512 elements, but blocks/key, blocks/query fill 384" in text

    def test_two_weights_in_one_place(self, tmp_path: Path) -> None:
        parts = {**toy.WRITTEN, "head/kernel": (Part("model.embed_tokens.weight", "vocab embed"),)}
        assert "has 640 elements, but head/kernel, tokens/table fill 1280" in self.refused(tmp_path, parts)

    def test_shapes_that_disagree(self, tmp_path: Path) -> None:
        parts = {**toy.WRITTEN, "norm/scale": (Part("model.embed_tokens.weight", "embed"),)}
        assert "would have the shapes [(16,), (40, 16)]" in self.refused(tmp_path, parts)

    def test_a_dtype_without_a_name(self, tmp_path: Path) -> None:
        text = self.refused(tmp_path, toy.WRITTEN, dtype="complex64")
        assert "safetensors has no type complex64; give dtype=" in text

    def test_no_room(self, tmp_path: Path) -> None:
        assert "max_file_bytes = 0: more than 0 are needed" in self.refused(tmp_path, toy.WRITTEN, max_file_bytes=0)


@pytest.mark.timeout(200)
def test_two_processes(tmp_path: Path) -> None:
    wanted = {}
    for dtype in ("float32", "bfloat16"):
        wanted[dtype] = toy.file_tensors(jnp.dtype(dtype))
        (tmp_path / "in" / dtype).mkdir(parents=True)
        save_file(wanted[dtype], tmp_path / "in" / dtype / "model.safetensors")
    process = start(tmp_path, PROGRAM, 2, 4)
    _, err = process.communicate()
    assert process.returncode == 0, err
    for dtype, tensors in wanted.items():
        written = [path for path in (tmp_path / "out" / dtype).iterdir() if path.is_dir()]
        assert len(written) == len(toy.LAYOUTS) - 1
        assert all(same(read_by_another_tool(directory), tensors) for directory in written)
        first, second = ((tmp_path / f"{dtype}-{rank}.txt").read_text() for rank in range(2))
        assert first.endswith("file was not written: File exists")
        assert second.endswith("file was not written by the first process; its message says why")
