"""A region of a sharded array on the first process's host, whoever holds it.

A shard is sliced where it lies; what other processes hold is sent in pieces of a fixed size, so that no device ever
holds more than such a piece besides its own shards, however the array is sharded.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax
import numpy as np

from jaxpp.convert.regions import Region, common, distinct, inside, size

_PIECE_BYTES = 16 * 2**20


def shards_of(array: jax.Array, region: Region) -> Iterator[tuple[Region, np.ndarray]]:
    """Yield the slices that make up a region of an array, each once, with its place inside the region.

    Args:
        array: any sharding, over any processes.
        region: a slice with start and stop for each axis.

    Yields:
        On the first process the values; on others arrays of the right shape whose values mean nothing. All processes
        must exhaust the same calls in the same order.

    Cost: on the wire, what the first process does not hold itself, to all processes.
    """
    own = {shard.device.id: shard.data for shard in array.addressable_shards}
    for index, devices in distinct(array.shape, array.sharding.devices_indices_map(array.shape)):
        if (both := common(index, region)) is None:
            continue
        holder = min(devices, key=lambda device: (device.process_index, device.id))
        values = _on_host(own[holder.id], inside(both, index)) if holder.id in own else None
        if holder.process_index != 0:
            values = _sent(values, holder.process_index, size(both), np.dtype(array.dtype))
        elif values is None:
            values = np.broadcast_to(np.zeros((), array.dtype), size(both))
        yield inside(both, region), values


def agree(ok: bool) -> bool:
    """Return, in all processes, whether the first one is content; nobody returns before all have called."""
    if jax.process_count() == 1:
        return ok
    from jax.experimental import multihost_utils

    return bool(multihost_utils.broadcast_one_to_all(np.int32(ok)))


def _on_host(shard: jax.Array, region: Region) -> np.ndarray:
    if next(iter(shard.devices())).platform == "cpu":
        return np.asarray(shard)[region]  # a view: nothing is copied
    starts = [cut.start for cut in region]
    return np.asarray(jax.lax.dynamic_slice(shard, starts, size(region)))


def _sent(values: np.ndarray | None, holder: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Send an array from one process to all, as integers: a sum with zeros keeps every bit of an integer."""
    from jax.experimental import multihost_utils

    whole = np.empty(shape, dtype)
    if values is not None:
        whole[...] = values
    flat = whole.reshape(-1).view(np.uint8)
    piece = np.zeros(min(_PIECE_BYTES, 1 << max(2, (flat.size - 1).bit_length())), np.uint8)
    for start in range(0, flat.size, piece.size):
        part = flat[start : start + piece.size]
        piece[: part.size] = part
        sent = multihost_utils.broadcast_one_to_all(piece.view(np.uint32), is_source=jax.process_index() == holder)
        part[...] = np.asarray(sent).view(np.uint8)[: part.size]
    return whole
