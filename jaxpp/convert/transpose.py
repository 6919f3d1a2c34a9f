"""Copies between arrays whose axes lie in another order, at the speed of memory.

File weights are ``[out, in]`` and ours ``[in, out]``, so a load is a transposition. NumPy's own copy of a transposed
view misses the cache at each element; copied block by block through a small packed buffer it is 5 to 10 times as fast.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np

_RUN = 512  # elements written side by side in the target
_READ = 256  # elements read side by side in the source
_PAD_BYTES = 64  # a row of the packed buffer must not be a power of two: the cache would hold few of them
_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_BFLOAT16 = np.dtype(jnp.bfloat16)

Pair = tuple[np.ndarray, np.ndarray]


def copy_into(target: np.ndarray, source: np.ndarray) -> None:
    """Copy `source` into `target`, converting its dtype.

    Args:
        target: writable view of any strides.
        source: view of the same shape and any strides.
    """
    target, source = _merged(*_same_bits(target, source))
    fast = int(np.argmin([abs(stride) or math.inf for stride in source.strides])) if source.ndim else 0
    if source.ndim < 2 or (fast == source.ndim - 1 and target.dtype == source.dtype):
        _convert(target, source)
        return
    shape = _block_shape(source.shape, fast)
    order = [axis for axis in range(source.ndim) if axis != fast] + [fast]
    back = np.argsort(order)
    rows = math.prod(shape) // shape[fast]
    packed = np.empty((rows, shape[fast] + _PAD_BYTES // target.itemsize), target.dtype)
    for block in _blocks(source.shape, shape):
        read = source[block].transpose(order)
        # The same buffer for every block: it stays in the cache.
        left = packed[: math.prod(read.shape[:-1]), : read.shape[-1]]
        left = left.reshape(read.shape) if read.ndim > 2 else left
        _convert(left, read)
        target[block] = left.transpose(back)


def pieces(target: np.ndarray, source: np.ndarray, max_bytes: int) -> Iterator[Pair]:
    """Cut a copy into smaller ones for several threads, along the axis that is slowest in the source.

    Args:
        target: as of `copy_into`.
        source: as of `copy_into`.
        max_bytes: about how much of `source` a piece shall hold.
    """
    if source.nbytes <= max_bytes or not source.ndim:
        yield target, source
        return
    axis = int(np.argmax([abs(s) if n > 1 else 0 for s, n in zip(source.strides, source.shape, strict=True)]))
    size = source.shape[axis]
    length = max(1, size * max_bytes // source.nbytes)
    length = min(size, -(-length // _RUN) * _RUN if length > _RUN // 2 else length)
    for start in range(0, size, length):
        cut = (slice(None),) * axis + (slice(start, start + length),)
        yield target[cut], source[cut]


def _same_bits(target: np.ndarray, source: np.ndarray) -> Pair:
    # As integers: NumPy copies types it does not know (bfloat16) one element at a time, and holds the lock.
    if target.dtype != source.dtype or target.itemsize not in _BITS:
        return target, source
    bits = _BITS[target.itemsize]
    return target.view(bits), source.view(bits)


def _merged(target: np.ndarray, source: np.ndarray) -> Pair:
    """Drop axes of size 1 and join neighbours that lie side by side in both arrays."""
    axes: list[list[int]] = []  # size, target stride, source stride
    for size, wide, narrow in zip(target.shape, target.strides, source.strides, strict=True):
        if axes and axes[-1][1] == wide * size and axes[-1][2] == narrow * size:
            axes[-1] = [axes[-1][0] * size, wide, narrow]
        elif size != 1:
            axes.append([size, wide, narrow])
    shape = [size for size, _, _ in axes]
    as_strided = np.lib.stride_tricks.as_strided
    return (
        as_strided(target, shape, [wide for _, wide, _ in axes]),
        as_strided(source, shape, [narrow for _, _, narrow in axes], writeable=False),
    )


def _block_shape(shape: tuple[int, ...], fast: int) -> list[int]:
    block = [1] * len(shape)
    block[fast] = min(shape[fast], _READ)
    left = _RUN
    for axis in reversed(range(len(shape))):
        if axis != fast:
            block[axis] = min(shape[axis], max(1, left))
            left //= block[axis]
    return block


def _blocks(shape: tuple[int, ...], block: list[int]) -> Iterator[tuple[slice, ...]]:
    cuts = [
        [slice(start, min(start + length, size)) for start in range(0, size, length)]
        for size, length in zip(shape, block, strict=True)
    ]
    return itertools.product(*cuts)


def _convert(target: np.ndarray, source: np.ndarray) -> None:
    if source.dtype == _BFLOAT16 and target.dtype == np.float32:
        bits = target.view(np.uint32)  # a bfloat16 is the upper half of a float32
        np.copyto(bits, source.view(np.uint16))
        np.left_shift(bits, 16, out=bits)
    else:
        np.copyto(target, source, casting="unsafe")
