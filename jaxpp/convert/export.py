"""Weights out to safetensors files, tensor by tensor, made as they are written if need be.

Nothing half-written looks complete: files are written under temporary names, and take their own, with the index last,
once all are whole.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import jax
import numpy as np

from jaxpp import tree
from jaxpp.convert.gather import agree, shards_of
from jaxpp.convert.places import Parts, Weight, listed, together, weights
from jaxpp.convert.regions import Region, size
from jaxpp.convert.safetensors import DTYPES, INDEX, SINGLE
from jaxpp.convert.transpose import copy_into

Make = Callable[[Sequence[str]], Mapping[str, jax.Array]]
"""Paths of weights to the weights."""

_CODES = {dtype: code for code, dtype in DTYPES.items()}
_PARTIAL = ".partial"
_ALIGNMENT = 8  # bytes; the data begin at a multiple
_COPIERS = min(4, os.cpu_count() or 1)  # threads that turn tensors round and write them


@dataclass(frozen=True)
class _Tensor:
    """A tensor to be written, and the regions of our weights that fill it."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    filled_by: tuple[tuple[Weight, Region], ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class _Place:
    """Where a tensor begins in a file."""

    file: BinaryIO
    start: int


def write_safetensors(
    directory: str | os.PathLike[str],
    parts: Parts,
    params: Any,
    *,
    make: Make | None = None,
    dtype: Any = None,
    max_file_bytes: float = 5e9,
    metadata: Mapping[str, str] | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[str]:
    """Write the weights of a model as ``model.safetensors``, or as several files with an index.

    With several processes all must call, on a directory that the first one sees; only that one writes.

    Args:
        directory: made if missing. Weights that lie there are replaced when the new ones are whole; if the write
            fails, they are as they were.
        parts: path of each weight to where it lies; the first form is written.
        params: ``nnx.State`` of arrays with arrows, on any shardings; or abstract, where `make` makes them.
        make: makes some weights, given their paths; called for all in turn, in groups that share tensors.
        dtype: of all tensors; None: each weight's own.
        max_file_bytes: tensors are spread over files of at most this size; a larger tensor has a file of its own.
        metadata: texts of each file's header; ``{"format": "pt"}`` if None, which transformers asks for.
        progress: called with the bytes written since the last call.

    Returns:
        The names of the files, the index among them.

    Raises:
        ValueError: the parts do not fit the weights, a tensor would have a hole, or the dtype is unknown.
        OSError: the directory cannot be written, or has too little room, which is tried before a weight is made.

    Cost: host memory: one tensor of the files, and one slice of a weight on its way there; with `make`, the weights of
        one group; on the wire, what the first process does not hold itself.
    """
    if not max_file_bytes > 0:
        raise ValueError(f"max_file_bytes = {max_file_bytes}: more than 0 are needed, e.g. 5e9")
    tensors, leaves = _tensors(parts, params, dtype), tree.named_leaves(params)
    files, target = _spread(tensors, max_file_bytes), Path(directory)
    make = make or (lambda paths: {path: leaves[path] for path in paths})
    error = _write(target, files, together(weights(parts, params)), make, metadata or {"format": "pt"}, progress)
    if jax.process_index() == 0 and error is None:
        error = _put_in_place(target, files)
    ok = agree(error is None)
    if error is not None:
        _clean(target, files)
        raise OSError(f"{target} was not written: {error.strerror or error}") from error
    if not ok:
        raise OSError(f"{target} was not written by the first process; its message says why")
    return [*files, INDEX] if len(files) > 1 else list(files)


def _write(
    target: Path,
    files: Mapping[str, Sequence[_Tensor]],
    groups: Iterable[Sequence[Weight]],
    make: Make,
    metadata: Mapping[str, str],
    progress: Callable[[int], None] | None,
) -> OSError | None:
    """Write all files under temporary names, group by group; only the first process does, from what all send."""
    with contextlib.ExitStack() as stack:
        places, error = dict[str, _Place](), None
        flusher = stack.enter_context(ThreadPoolExecutor(1))
        several = jax.process_count() > 1  # what they send each other has one order
        copiers = stack.enter_context(ThreadPoolExecutor(1 if several else _COPIERS))
        if jax.process_index() == 0:
            try:
                places = _open_files(target, files, metadata, stack)
            except OSError as found:
                error = found
        tensors = {tensor.name: tensor for members in files.values() for tensor in members}
        for group in groups:
            if not agree(error is None):
                return error
            made = make([weight.path for weight in group])
            names = list(dict.fromkeys(name for weight in group for name, _ in weight.tensors()))
            written = partial(_copy, tensors, places, made)
            for name, found in zip(names, copiers.map(written, names), strict=True):
                error = error or found
                if progress and places and not error:
                    progress(tensors[name].num_bytes)
            if error:  # the others are told before the next group
                places = {}
            for file in _files(places[name] for name in names if name in places):
                flusher.submit(_begin_flush, file)  # while the next group is made
        try:
            for file in _files(places.values()):
                file.flush()
                os.fsync(file.fileno())
        except OSError as found:
            error = found
    return error


def _files(places: Iterable[_Place]) -> list[BinaryIO]:
    return list({id(place.file): place.file for place in places}.values())


def _begin_flush(file: BinaryIO) -> None:
    with contextlib.suppress(OSError, ValueError):  # closed; what fails is told by the flush at the end
        os.fdatasync(file.fileno()) if hasattr(os, "fdatasync") else None


def _open_files(
    target: Path, files: Mapping[str, Sequence[_Tensor]], metadata: Mapping[str, str], stack: contextlib.ExitStack
) -> dict[str, _Place]:
    """Make the files at their full size, headers written, and say where each tensor goes."""
    target.mkdir(parents=True, exist_ok=True)
    places = {}
    for name, members in files.items():
        file = stack.enter_context((target / (name + _PARTIAL)).open("wb"))
        start = file.write(_header(members, metadata))
        for tensor in members:
            places[tensor.name] = _Place(file, start)
            start += tensor.num_bytes
        file.flush()
        _reserve(file.fileno(), start)
    return places


def _reserve(descriptor: int, num_bytes: int) -> None:
    """Ask for room on the disk, where its file system lets one ask.

    Raises:
        OSError: there is too little.
    """
    if not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise


def _copy(
    tensors: Mapping[str, _Tensor], places: Mapping[str, _Place], made: Mapping[str, jax.Array], name: str
) -> OSError | None:
    """Turn one tensor round and write it; return what went wrong."""
    whole = _assembled(tensors[name], made)
    try:
        _put(whole, places.get(name))
    except OSError as error:
        return error
    return None


def _put(whole: np.ndarray, place: _Place | None) -> None:
    if place is None:
        return
    data, at = whole.reshape(-1).view(np.uint8).data, place.start
    while data:
        written = os.pwrite(place.file.fileno(), data, at)
        data, at = data[written:], at + written


def _clean(directory: Path, files: Iterable[str]) -> None:
    for name in files:
        with contextlib.suppress(OSError):
            (directory / (name + _PARTIAL)).unlink(missing_ok=True)


def _tensors(parts: Parts, params: Any, dtype: Any) -> list[_Tensor]:
    """List the tensors to write, in the order of their names with numbers counted: layer by layer."""
    nodes = tree.named_leaves(params)
    filled: dict[str, list[tuple[Weight, Region]]] = {}
    for weight in weights(parts, params):
        for name, region in weight.tensors():
            filled.setdefault(name, []).append((weight, region))
    tensors = []
    for name in sorted(filled, key=_natural):
        shapes = {weight.file_shape for weight, _ in filled[name]}
        dtypes = {np.dtype(dtype or nodes[weight.path].dtype) for weight, _ in filled[name]}
        _check_whole(name, filled[name], shapes, dtypes)
        tensors.append(_Tensor(name, shapes.pop(), dtypes.pop(), tuple(filled[name])))
    return tensors


def _natural(name: str) -> list[tuple[bool, int, str]]:
    return [(word.isdigit(), int(word) if word.isdigit() else 0, word) for word in re.split(r"(\d+)", name)]


def _check_whole(
    name: str, filled: Sequence[tuple[Weight, Region]], shapes: set[tuple[int, ...]], dtypes: set[np.dtype]
) -> None:
    paths = listed([weight.path for weight, _ in filled])
    if len(shapes) > 1:
        raise ValueError(f"tensor {name} of {paths} would have the shapes {sorted(shapes)}; their parts must agree")
    if len(dtypes) > 1:
        names = sorted(dtype.name for dtype in dtypes)
        raise ValueError(f"tensor {name} of {paths} would be of {' and '.join(names)}; give dtype= to write one")
    if (found := next(iter(dtypes))) not in _CODES:
        raise ValueError(f"tensor {name}: safetensors has no type {found}; give dtype=, e.g. bfloat16")
    needed = math.prod(next(iter(shapes)))
    count = sum(math.prod(size(region)) for _, region in filled)
    if count != needed:
        raise ValueError(f"tensor {name} has {needed} elements, but {paths} fill {count}: each must be filled once")


def _spread(tensors: Sequence[_Tensor], max_bytes: float) -> dict[str, list[_Tensor]]:
    groups: list[list[_Tensor]] = [[]]
    room = max_bytes
    for tensor in tensors:
        if groups[-1] and tensor.num_bytes > room:
            groups.append([])
            room = max_bytes
        groups[-1].append(tensor)
        room -= tensor.num_bytes
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{i:05}-of-{len(groups):05}.safetensors": group for i, group in enumerate(groups, 1)}


def _header(tensors: Sequence[_Tensor], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    start = 0
    for tensor in tensors:
        offsets = [start, start + tensor.num_bytes]
        entries[tensor.name] = {"dtype": _CODES[tensor.dtype], "shape": tensor.shape, "data_offsets": offsets}
        start += tensor.num_bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _assembled(tensor: _Tensor, arrays: Mapping[str, jax.Array]) -> np.ndarray:
    whole = np.empty(tensor.shape if jax.process_index() == 0 else 0, tensor.dtype)
    for weight, region in tensor.filled_by:
        for place, values in shards_of(arrays[weight.path], region):
            if whole.size:
                copy_into(weight.view(whole)[place], values)
    return whole


def _put_in_place(directory: Path, files: Mapping[str, Sequence[_Tensor]]) -> OSError | None:
    """Give the files their names: the old index goes first and the new one comes last, so no mixture looks whole."""
    try:
        (directory / INDEX).unlink(missing_ok=True)
        for name in files:
            (directory / (name + _PARTIAL)).replace(directory / name)
        for old in _old_weights(directory, files):
            old.unlink()
        if len(files) > 1:
            partial = directory / (INDEX + _PARTIAL)
            partial.write_text(_index(files))
            partial.replace(directory / INDEX)
    except OSError as error:
        return error
    return None


def _old_weights(directory: Path, files: Mapping[str, Any]) -> Iterator[Path]:
    for path in sorted(directory.glob("model*.safetensors")):
        if path.name not in files and re.fullmatch(r"model(-\d{5}-of-\d{5})?\.safetensors", path.name):
            yield path


def _index(files: Mapping[str, Sequence[_Tensor]]) -> str:
    total = sum(tensor.num_bytes for tensors in files.values() for tensor in tensors)
    weight_map = {tensor.name: name for name, tensors in files.items() for tensor in tensors}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n"
