"""Directories that are built once, whole or not at all, by whichever process comes first."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import numpy as np

T = TypeVar("T")

FORMAT_VERSION = 1
"""Part of every key: raise it when what is stored changes."""


def cache_key(**ingredients: object) -> str:
    """Return a name for what these JSON-able ingredients produce."""
    text = json.dumps({"format": FORMAT_VERSION, **ingredients}, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def cached(directory: Path, build: Callable[[Path], None], read: Callable[[Path], T | None]) -> T:
    """Return what `read` finds in a directory, after `build` has filled it if need be.

    The directory is built under a temporary name and renamed when complete, one process at a
    time; the others wait and then read what the first one built.

    Args:
        directory: where the result lies.
        build: fills an empty directory.
        read: returns the content, or None if it is missing or damaged.

    Raises:
        ValueError: the directory cannot be written.
    """
    found = read(directory)
    if found is not None:
        return found
    try:
        with _locked(directory):
            found = read(directory)
            return _rebuilt(directory, build, read) if found is None else found
    except OSError as error:
        raise ValueError(
            f"the data cache {directory.parent} cannot be written: {error.strerror}; "
            "set data.cache_dir to a directory with free space that you own"
        ) from error


def _rebuilt(directory: Path, build: Callable[[Path], None], read: Callable[[Path], T | None]) -> T:
    unfinished = directory.with_name(directory.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)  # left by a process that was killed
    unfinished.mkdir()
    try:
        build(unfinished)
        shutil.rmtree(directory, ignore_errors=True)
        os.replace(unfinished, directory)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    result = read(directory)
    assert result is not None, f"{directory} does not read back what was just built"
    return result


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    directory.parent.mkdir(parents=True, exist_ok=True)
    # The lock file stays: removing it would let a third process lock a new file of that name.
    with open(directory.with_name(directory.name + ".lock"), "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class NpyWriter:
    """Append to a one-dimensional .npy file whose length is known only at the end."""

    def __init__(self, path: Path, dtype: type) -> None:
        """Open an empty file."""
        self.length = 0  # elements
        self._dtype = np.dtype(dtype)
        self._file = path.open("wb")
        self._write_header()

    def append(self, values: np.ndarray) -> None:
        """Add values at the end."""
        self._file.write(values.astype(self._dtype).tobytes())
        self.length += len(values)

    def __enter__(self) -> NpyWriter:
        """Return the writer itself."""
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Write the final length and close the file."""
        with self._file:
            start = self._file.tell() - self.length * self._dtype.itemsize
            self._file.seek(0)
            self._write_header()
            # numpy pads headers so that the first axis can grow to any length in place.
            assert self._file.tell() == start, "the header of a .npy file changed its size"

    def _write_header(self) -> None:
        description = np.lib.format.dtype_to_descr(self._dtype)
        header = {"descr": description, "fortran_order": False, "shape": (self.length,)}
        np.lib.format.write_array_header_1_0(self._file, header)
