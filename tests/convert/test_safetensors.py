"""Safetensors files: what another tool wrote is read to the bit, and what is wrong is told in one line."""

from __future__ import annotations

import gc
import json
import os
import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxpp.convert.safetensors import open_safetensors
from tests.convert import toy

DTYPES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": jnp.bfloat16, "F8_E4M3": jnp.float8_e4m3fn,
    "F8_E5M2": jnp.float8_e5m2, "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8, "U8": np.uint8,
    "U16": np.uint16, "U32": np.uint32, "U64": np.uint64, "BOOL": np.bool_,
}  # fmt: skip


def raw(entries: dict[str, Any], data: bytes) -> bytes:
    """Write the format by hand."""
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + data


def two(directory: Path) -> tuple[dict[str, np.ndarray], Path]:
    """Write the toy into two files with an index."""
    tensors = toy.file_tensors(toy.bfloat16)
    names = list(tensors)
    files = {"a.safetensors": names[:9], "b.safetensors": names[9:]}
    for file, members in files.items():
        save_file({name: tensors[name] for name in members}, directory / file)
    index = directory / "model.safetensors.index.json"
    weight_map = {name: file for file, members in files.items() for name in members}
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return tensors, index


def refused(path: Path) -> str:
    with pytest.raises(ValueError) as raised:
        open_safetensors(path)
    assert "\n" not in str(raised.value) and str(path) in str(raised.value)
    return str(raised.value)


class TestReading:
    @pytest.mark.parametrize("code", DTYPES)
    def test_every_dtype(self, code: str, tmp_path: Path) -> None:
        data = bytes(range(0, 96)) if code != "BOOL" else bytes(i % 2 for i in range(96))
        dtype = np.dtype(DTYPES[code])
        shape = (2, 96 // dtype.itemsize // 2)
        entries = {"x": {"dtype": code, "shape": shape, "data_offsets": [0, 96]}}
        (tmp_path / "x.safetensors").write_bytes(raw(entries, data))
        files = open_safetensors(tmp_path / "x.safetensors")
        assert files.names()["x"].dtype == dtype and files.names()["x"].shape == shape
        assert toy.same_bits(files.read("x"), np.frombuffer(data, dtype).reshape(shape))

    @pytest.mark.parametrize("where", ["model.safetensors", "anything.safetensors"])
    @pytest.mark.parametrize("by", ["file", "directory"])
    def test_one_file(self, where: str, by: str, tmp_path: Path) -> None:
        tensors = {**toy.file_tensors(), "scalar": np.array(3.5), "none": np.zeros((0, 4), np.float32)}
        save_file(tensors, tmp_path / where)
        files = open_safetensors(tmp_path / where if by == "file" else tmp_path)
        assert set(files.names()) == set(tensors)
        assert all(toy.same_bits(files.read(name), array) for name, array in tensors.items())
        assert files.total_bytes == sum(array.nbytes for array in tensors.values())

    def test_an_index(self, tmp_path: Path) -> None:
        tensors, _ = two(tmp_path)
        files = open_safetensors(tmp_path)
        assert all(toy.same_bits(files.read(name), array) for name, array in tensors.items())
        assert {info.file for info in files.names().values()} == {
            str(tmp_path / "a.safetensors"), str(tmp_path / "b.safetensors"),
        }  # fmt: skip

    def test_another_layout_of_the_same_model_beside(self, tmp_path: Path) -> None:
        save_file({"x": np.zeros(3)}, tmp_path / "model-x.safetensors")
        save_file({"layers.0.attention.wq": np.zeros(3)}, tmp_path / "consolidated.safetensors")
        assert list(open_safetensors(tmp_path).names()) == ["x"]

    def test_a_view_is_read_only_and_maps_the_file(self, tmp_path: Path) -> None:
        path = tmp_path / "x.safetensors"
        save_file({"pad": np.zeros(5000, np.uint8), "x": np.arange(2**18, dtype=np.int32)}, path)
        array = open_safetensors(path).read("x")
        assert not array.flags.writeable and str(path) in Path("/proc/self/maps").read_text()
        del array
        gc.collect()
        assert str(path) not in Path("/proc/self/maps").read_text(), "the map ends with the array"


class TestRefusals:
    def test_absent(self, tmp_path: Path) -> None:
        assert "neither a directory nor a file" in refused(tmp_path / "nowhere")

    def test_empty_directory(self, tmp_path: Path) -> None:
        assert "holds no .safetensors file; give the directory" in refused(tmp_path)

    def test_pickle_only(self, tmp_path: Path) -> None:
        (tmp_path / "pytorch_model.bin").write_bytes(b"PK\x03\x04")
        text = refused(tmp_path)
        assert "pytorch_model.bin, a pickle that we do not run" in text and "save_pretrained() writes" in text

    def test_gguf_only(self, tmp_path: Path) -> None:
        (tmp_path / "x.gguf").write_bytes(b"GGUF")
        assert f"give its own path, {tmp_path / 'x.gguf'}" in refused(tmp_path)

    @pytest.mark.parametrize(
        "start, what",
        [
            (b"PK\x03\x04" + bytes(60), "a zip archive, as torch.save writes"),
            (b"\x80\x02}q\x00(" + bytes(60), "a pickle"),
            (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "a Git LFS pointer"),
            (b"<!DOCTYPE html><html><body>Not found</body></html>", "an HTML or XML page"),
            (b"GGUF\x03\x00\x00\x00" + bytes(60), "a GGUF file"),
            (b"\x1f\x8b\x08" + bytes(60), "a gzip archive"),
            (b"\x89HDF\r\n\x1a\n" + bytes(60), "an HDF5 file"),
            (b"", "is empty"),
            (b"1234567890" * 9, "does not begin with the length of a JSON header"),
        ],
    )
    def test_another_format(self, start: bytes, what: str, tmp_path: Path) -> None:
        path = tmp_path / "model.safetensors"
        path.write_bytes(start)
        assert what in refused(path)

    def test_cut(self, tmp_path: Path) -> None:
        path = tmp_path / "model.safetensors"
        save_file(toy.file_tensors(), path)
        whole = path.read_bytes()
        for size in (len(whole) - 1, len(whole) // 2):
            path.write_bytes(whole[:size])
            assert f"is cut: {size} bytes found, {len(whole)} needed" in refused(path)
        path.write_bytes(whole[:100])
        assert "is cut: 100 bytes found" in refused(path)

    @pytest.mark.parametrize(
        "entries, what",
        [
            ({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, r"needs 8 bytes, but its offsets are 0"),
            ({"x": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}, r"its offsets are -4 to 0"),
            ({"x": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}, r"tensor x is of type F4; known: BOOL U8"),
            ({"x": {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}}, r"is cut: \d+ bytes found, \d+ needed"),
            (
                {name: {"dtype": "F32", "shape": [2], "data_offsets": [i, i + 8]} for i, name in ((0, "x"), (4, "y"))},
                r"tensors x and y overlap",
            ),
            ({"x": {"dtype": "F32"}}, r"header of \d+ bytes is damaged"),
            ({"x": 3}, r"header of \d+ bytes is damaged"),
        ],
    )
    def test_a_damaged_header(self, entries: dict[str, Any], what: str, tmp_path: Path) -> None:
        path = tmp_path / "model.safetensors"
        path.write_bytes(raw(entries, bytes(16)))
        assert re.search(what, refused(path))

    def test_no_json(self, tmp_path: Path) -> None:
        path = tmp_path / "model.safetensors"
        path.write_bytes((20).to_bytes(8, "little") + b"{" + b"x" * 40)
        assert "header of 20 bytes is damaged" in refused(path)

    def test_index_names_a_missing_file(self, tmp_path: Path) -> None:
        _, index = two(tmp_path)
        (tmp_path / "b.safetensors").unlink()
        assert f"{index} names 1 of 2 files that are not there: b.safetensors" in refused(tmp_path)

    def test_index_names_a_missing_tensor(self, tmp_path: Path) -> None:
        tensors, index = two(tmp_path)
        save_file({name: array for name, array in list(tensors.items())[10:]}, tmp_path / "b.safetensors")
        text = refused(tmp_path)
        assert f"{index} names 1 tensors that are not in their file: {list(tensors)[9]} in b.safetensors" in text

    def test_stale_index_beside_a_new_single_file(self, tmp_path: Path) -> None:
        tensors, index = two(tmp_path)
        (tmp_path / "a.safetensors").unlink()
        save_file(tensors, tmp_path / "model.safetensors")
        assert "the index is stale; remove it" in refused(tmp_path)
        index.unlink()
        (tmp_path / "b.safetensors").unlink()
        assert set(open_safetensors(tmp_path).names()) == set(tensors)

    @pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": 3}'])
    def test_no_index(self, text: str, tmp_path: Path) -> None:
        _, index = two(tmp_path)
        index.write_text(text)
        assert 'is no index: needed JSON with "weight_map"' in refused(tmp_path)

    def test_index_that_leaves_its_directory(self, tmp_path: Path) -> None:
        _, index = two(tmp_path)
        index.write_text(json.dumps({"weight_map": {"x": "../other/model.safetensors"}}))
        assert "which is not a file beside it" in refused(tmp_path)

    def test_several_files_without_an_index(self, tmp_path: Path) -> None:
        _, index = two(tmp_path)
        index.unlink()
        assert "holds a.safetensors, b.safetensors, but no model.safetensors.index.json" in refused(tmp_path)

    def test_one_of_several_alone(self, tmp_path: Path) -> None:
        save_file({"x": np.zeros(3)}, tmp_path / "model-00001-of-00002.safetensors")
        assert "but no model.safetensors.index.json that says what lies where" in refused(tmp_path)

    def test_unreadable(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = tmp_path / "model.safetensors"
        save_file({"x": np.zeros(3)}, path)

        def denied(*_: Any, **__: Any) -> None:  # as root reads every file, the refusal is played
            raise PermissionError(13, "Permission denied", str(path))

        path.chmod(0)
        if os.access(path, os.R_OK):
            monkeypatch.setattr(Path, "open", denied)
        assert f"cannot read {path}: Permission denied; give this user the right to read it" in refused(path)
