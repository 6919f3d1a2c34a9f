"""Safetensors files, read by memory maps: 8 bytes of length, a JSON header, then the tensors.

Knows directories of the Hugging Face Hub: one ``model.safetensors``, or several with an index. Nothing is read but
headers until a tensor is asked for, and then only the pages that are touched.

Source: the format as described in the README of huggingface/safetensors.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpp.convert.tensors import TensorInfo

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES: Mapping[str, np.dtype] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype("<u1"),
    "U16": np.dtype("<u2"),
    "U32": np.dtype("<u4"),
    "U64": np.dtype("<u8"),
    "I8": np.dtype("<i1"),
    "I16": np.dtype("<i2"),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(jnp.bfloat16),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
    "F8_E4M3": np.dtype(jnp.float8_e4m3fn),
    "F8_E5M2": np.dtype(jnp.float8_e5m2),
}
_IGNORED_FILES = ("consolidated",)  # Meta's and Mistral's own layout, beside the Hugging Face one
_MAX_HEADER_BYTES = 100 * 2**20
_FIRST_BYTES = {
    b"PK": "a zip archive, as torch.save writes; load it with transformers and save_pretrained() writes safetensors",
    b"\x80": "a pickle, as torch.save writes; load it with transformers and save_pretrained() writes safetensors",
    b"version https://git-lfs": "a Git LFS pointer, not the file itself; `git lfs pull` in its repository fetches it",
    b"GGUF": "a GGUF file; rename it to end in .gguf",
    b"<": "an HTML or XML page, as a failed download leaves; download it again",
    b"\x1f\x8b": "a gzip archive; unpack it first",
    b"\x89HDF": "an HDF5 file; export it to safetensors first",
}


@dataclass(frozen=True)
class _Place:
    """Where a tensor lies: `start` counts bytes from the beginning of the file."""

    info: TensorInfo
    start: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.info.shape) * self.info.dtype.itemsize


class SafetensorsFiles:
    """The tensors of some safetensors files; made by `open_safetensors`."""

    def __init__(self, places: Mapping[str, _Place]) -> None:
        """Hold the places; files are opened when a tensor is read."""
        self._places = dict(places)

    def names(self) -> Mapping[str, TensorInfo]:
        """Return what is known of each tensor, by name, in the order of the files."""
        return {name: place.info for name, place in self._places.items()}

    def read(self, name: str) -> np.ndarray:
        """Return a read-only view of one tensor; its pages count as this process's until the array is freed."""
        place = self._places[name]
        if not place.num_bytes:
            return np.empty(place.info.shape, place.info.dtype)
        # A map of its own for each tensor: it ends with the array, and the pages touched no longer count as resident.
        skipped = place.start % mmap.ALLOCATIONGRANULARITY
        with open(place.info.file, "rb") as file:
            mapped = mmap.mmap(
                file.fileno(), place.num_bytes + skipped, access=mmap.ACCESS_READ, offset=place.start - skipped
            )
        if jax.process_count() == 1 and hasattr(mmap, "MADV_WILLNEED"):
            mapped.madvise(mmap.MADV_WILLNEED)  # one of several processes may want little of it
        return np.frombuffer(mapped, np.uint8, offset=skipped).view(place.info.dtype).reshape(place.info.shape)

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(place.num_bytes for place in self._places.values())


def open_safetensors(path: str | os.PathLike[str]) -> SafetensorsFiles:
    """Open a checkpoint; only headers are read.

    Args:
        path: a ``.safetensors`` file, or a directory with an index, with ``model.safetensors`` or with one
            ``.safetensors`` file of any name.

    Raises:
        ValueError: there is none, a file is another format, cut, damaged or unreadable, or the index names a file or
            a tensor that is not there.
    """
    path = Path(path)
    try:
        if path.is_dir():
            return SafetensorsFiles(_open_directory(path))
        if not path.exists():
            raise ValueError(f"no checkpoint at {path}: neither a directory nor a file")
        return SafetensorsFiles(_read_header(path))
    except OSError as error:
        raise ValueError(
            f"cannot read {error.filename or path}: {error.strerror or error}; give this user the right to read it"
        ) from error


def _open_directory(directory: Path) -> dict[str, _Place]:
    index = directory / INDEX
    if index.exists():
        return _open_indexed(index)
    files = sorted(directory.glob("*.safetensors"))
    files = [file for file in files if file.stem not in _IGNORED_FILES] or files
    if directory / SINGLE in files:
        return _read_header(directory / SINGLE)
    if not files:
        raise ValueError(_nothing_in(directory))
    if len(files) > 1 or "-of-" in files[0].stem:
        listed = ", ".join(file.name for file in files[:4]) + (f" and {len(files) - 4} more" if len(files) > 4 else "")
        raise ValueError(f"{directory} holds {listed}, but no {INDEX} that says what lies where; copy it too")
    return _read_header(files[0])


def _nothing_in(directory: Path) -> str:
    torch = [f.name for f in directory.iterdir() if f.suffix in (".bin", ".pt", ".pth") and "training" not in f.name]
    if torch:
        return (
            f"{directory} holds no .safetensors file but {sorted(torch)[0]}, a pickle that we do not run; "
            "load it with transformers, and save_pretrained() writes safetensors"
        )
    ggufs = sorted(f.name for f in directory.glob("*.gguf"))
    hint = f"; for a GGUF file give its own path, {directory / ggufs[0]}" if ggufs else ""
    return f"{directory} holds no .safetensors file{hint or '; give the directory that holds model.safetensors'}"


def _open_indexed(index: Path) -> dict[str, _Place]:
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        files = list(dict.fromkeys(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f'{index} is no index: needed JSON with "weight_map"; copy it again') from None
    outside = [file for file in files if Path(file).name != file]
    if outside:
        raise ValueError(f"{index} names {outside[0]!r}, which is not a file beside it")
    missing = [file for file in files if not (index.parent / file).exists()]
    if missing and (index.parent / SINGLE).exists() and SINGLE not in files:
        raise ValueError(
            f"{index} names {missing[0]}, which is not there, and {SINGLE} lies beside: the index is stale; remove it"
        )
    if missing:
        raise ValueError(f"{index} names {len(missing)} of {len(files)} files that are not there: {_cut(missing)}")
    headers = {file: _read_header(index.parent / file) for file in files}
    astray = [f"{name} in {file}" for name, file in weight_map.items() if name not in headers[file]]
    if astray:
        raise ValueError(f"{index} names {len(astray)} tensors that are not in their file: {_cut(astray)}")
    return {name: place for file in files for name, place in headers[file].items() if weight_map.get(name) == file}


def _cut(words: list[str], most: int = 4) -> str:
    return ", ".join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")


def _read_header(path: Path) -> dict[str, _Place]:
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(64)
        length = int.from_bytes(start[:8], "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES) or start[8:9] != b"{":
            raise ValueError(_what_it_is(path, start, length, size))
        file.seek(8)
        text = file.read(length)
    try:
        entries = json.loads(text)
        entries.pop("__metadata__", None)
        places = {name: _place(path, name, entry, 8 + length) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, ValueError) and str(error).startswith(str(path)):
            raise
        raise ValueError(f"{path}: its header of {length} bytes is damaged; copy or download it again") from None
    return _checked(path, places, size)


def _what_it_is(path: Path, start: bytes, length: int, size: int) -> str:
    if start[8:9] == b"{" and size - 8 < length <= _MAX_HEADER_BYTES:
        return f"{path} is cut: {size} bytes found, {length + 8} needed for its header alone; copy it again"
    for first, what in _FIRST_BYTES.items():
        if start.lstrip().startswith(first):
            return f"{path} is no safetensors file but {what}"
    if not size:
        return f"{path} is empty; copy or download it again"
    return f"{path} is no safetensors file: it does not begin with the length of a JSON header; download it again"


def _place(path: Path, name: str, entry: Mapping[str, Any], data: int) -> _Place:
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"{path}: tensor {name} is of type {entry['dtype']}; known: {' '.join(DTYPES)}")
    shape = tuple(int(size) for size in entry["shape"])
    start, end = entry["data_offsets"]
    place = _Place(TensorInfo(shape, DTYPES[entry["dtype"]], str(path)), data + int(start))
    if start < 0 or end - start != place.num_bytes or min(shape, default=0) < 0:
        raise ValueError(
            f"{path}: tensor {name} of type {entry['dtype']} and shape {shape} needs {place.num_bytes} bytes, but its "
            f"offsets are {start} to {end}; the file is damaged, download it again"
        )
    return place


def _checked(path: Path, places: Mapping[str, _Place], size: int) -> dict[str, _Place]:
    ordered = dict(sorted(places.items(), key=lambda item: (item[1].start, item[1].num_bytes)))
    before, end = "", 0
    for name, place in ordered.items():
        if place.start < end:
            raise ValueError(f"{path}: tensors {before} and {name} overlap; the file is damaged, download it again")
        before, end = name, place.start + place.num_bytes
    if end > size:
        raise ValueError(f"{path} is cut: {size} bytes found, {end} needed; copy or download it again")
    return ordered
