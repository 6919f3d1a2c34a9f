"""Weights from files straight onto their shards.

Each process reads the slices that its own devices hold, once, and writes them into the buffers that become the shards:
on a CPU these are the arrays themselves. No tensor is ever whole anywhere but in the map of its file.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxpp import tree
from jaxpp.convert.places import Parts, Weight, check, listed, together, weights
from jaxpp.convert.regions import Region, distinct, inside, size
from jaxpp.convert.tensors import TensorFiles
from jaxpp.convert.transpose import copy_into, pieces
from jaxpp.mesh import Device

_PIECE_BYTES = 4 * 2**20  # of a tensor, copied by one thread at a time
_IN_FLIGHT_BYTES = 32 * 2**20  # of tensors that are read at a time, or one larger one
_ALIGNMENT = 64  # bytes; XLA takes a host buffer over without a copy if it begins at a multiple


@dataclass
class _Shard:
    """A slice of a weight, the devices that hold it, and the buffer to fill."""

    weight: Weight
    index: Region
    devices: list[Device]
    buffer: np.ndarray


def load_onto(
    files: TensorFiles,
    parts: Parts,
    like: Any,
    *,
    ignored: Sequence[str] = (),
    progress: Callable[[int], None] | None = None,
    notes: Callable[[str], None] | None = None,
) -> Any:
    """Read the weights of a model onto the shardings of `like`.

    Args:
        files: the tensors of a checkpoint.
        parts: path of each weight to the forms in which it may lie in the files; the first that is all there is read.
        like: ``nnx.State`` of Params whose values are ``jax.ShapeDtypeStruct`` with a ``sharding``, and that carry
            their arrows. Its dtypes need not be the files'.
        ignored: patterns of tensors that may be there and are not read.
        progress: called with the bytes read since the last call, as tensors complete.
        notes: called with a line about what was left out.

    Returns:
        The structure of `like` with arrays on exactly its shardings. With several processes all must call; each reads
        only what its own devices hold.

    Raises:
        ValueError: the files do not fit, as `jaxpp.convert.places.check` lists; nothing was read then.

    Cost: host memory: the process's shards (on a CPU, these are the arrays) and one tensor of the files, the largest,
        or 32 MiB; off the CPU, the shards of the weights that share a tensor, in place of all.
    """
    passed = check(files, parts, like, ignored)
    if passed and notes:
        notes(f"not read, as the model computes them itself: {listed(passed)}")
    leaves = tree.named_leaves(like)
    loose = [path for path, leaf in leaves.items() if getattr(leaf, "sharding", None) is None]
    if loose:
        raise ValueError(f"no sharding= given to the ShapeDtypeStruct of {listed(loose)}")
    reader = _Reader(files, progress or (lambda num_bytes: None))
    loaded: dict[str, jax.Array] = {}
    with ThreadPoolExecutor(_num_threads()) as pool:
        for group in together(weights(parts, like, files.names())):
            shards = {weight.path: _shards(weight, leaves[weight.path]) for weight in group}
            reader.read(pool, [shard for found in shards.values() for shard in found])
            loaded |= {path: _assemble(leaves[path], found) for path, found in shards.items()}
    return tree.fill(like, loaded)


def num_bytes_to_read(files: TensorFiles, parts: Parts, like: Any) -> int:
    """Count the bytes that `load_onto` will read in this process, each slice once."""
    infos, leaves, total = files.names(), tree.named_leaves(like), 0
    for weight in weights(parts, like, infos):
        for index, _ in _slices(leaves[weight.path]):
            for name, region in weight.tensors(index):
                total += math.prod(size(region)) * infos[name].dtype.itemsize
    return total


def _num_threads() -> int:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(2 * usable, 16)  # twice: some wait for the disk, or for the kernel to hand out memory


def _slices(leaf: Any) -> list[tuple[Region, list[Device]]]:
    shape = tuple(leaf.shape)
    return distinct(shape, leaf.sharding.addressable_devices_indices_map(shape))


def _shards(weight: Weight, leaf: Any) -> list[_Shard]:
    return [
        _Shard(weight, index, devices, _empty(size(index), np.dtype(leaf.dtype))) for index, devices in _slices(leaf)
    ]


def _empty(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    num_bytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + num_bytes].view(dtype).reshape(shape)


class _Reader:
    """Reads tensors in turn and copies them in several threads, with no more in flight than the largest tensor."""

    def __init__(self, files: TensorFiles, progress: Callable[[int], None]) -> None:
        self._files, self._progress = files, progress
        self._held = {name: math.prod(info.shape) * info.dtype.itemsize for name, info in files.names().items()}
        # The next ones come from the disk while one is copied.
        self._most = max(_IN_FLIGHT_BYTES, *self._held.values())
        self._flight: deque[tuple[int, int, list[Future[None]]]] = deque()  # bytes held, bytes read, copies

    def read(self, pool: ThreadPoolExecutor, shards: Sequence[_Shard]) -> None:
        """Fill the buffers of the shards."""
        wanted: dict[str, list[tuple[_Shard, Region]]] = {}
        for shard in shards:
            for name, region in shard.weight.tensors(shard.index):
                wanted.setdefault(name, []).append((shard, region))
        for name, uses in wanted.items():
            while self._flight and sum(flight[0] for flight in self._flight) + self._held[name] > self._most:
                self._land()
            self._flight.append((self._held[name], *self._copy(pool, name, uses)))
        while self._flight:
            self._land()

    def _copy(
        self, pool: ThreadPoolExecutor, name: str, uses: Sequence[tuple[_Shard, Region]]
    ) -> tuple[int, list[Future[None]]]:
        array, copies, num_bytes = self._files.read(name), [], 0
        for shard, region in uses:
            target = shard.buffer[inside(region, shard.index)]
            source = shard.weight.view(array)[inside(region, _whole(shard.weight, region))]
            num_bytes += source.nbytes
            copies += [pool.submit(copy_into, *piece) for piece in pieces(target, source, _PIECE_BYTES)]
        return num_bytes, copies

    def _land(self) -> None:
        _, num_bytes, copies = self._flight.popleft()
        for copy in copies:
            copy.result()
        self._progress(num_bytes)


def _whole(weight: Weight, region: Region) -> Region:
    """Return the region that the tensor of `region` holds: one index of each spelled dim, all of the others."""
    pairs = zip(weight.arrow.dims, weight.shape, region, strict=True)
    return tuple(cut if dim in weight.spelled else slice(0, length) for dim, length, cut in pairs)


def _assemble(leaf: Any, shards: Sequence[_Shard]) -> jax.Array:
    arrays = []
    for shard in shards:
        first = jax.device_put(shard.buffer, shard.devices[0])
        # Others copy the first: two CPU devices must not share a buffer, and a link is faster than the host.
        arrays += [first, *(jax.device_put(first, device) for device in shard.devices[1:])]
    if next(iter(leaf.sharding.device_set)).platform != "cpu":
        jax.block_until_ready(arrays)  # the host buffers of the next weights are not made before these are free
    return jax.make_array_from_single_device_arrays(tuple(leaf.shape), leaf.sharding, arrays, dtype=leaf.dtype)
