"""What a checkpoint in files offers, whatever its format: named tensors, read one at a time."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(frozen=True)
class TensorInfo:
    """What is known of a tensor before it is read.

    Args:
        shape: its shape as it lies in the file.
        dtype: the type that `TensorFiles.read` gives.
        file: path of the file that holds it.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    file: str


class TensorFiles(Protocol):
    """The tensors of a checkpoint, in one file or many."""

    def names(self) -> Mapping[str, TensorInfo]:
        """Return what is known of each tensor, by name, in the order of the files."""
        ...

    def read(self, name: str) -> np.ndarray:
        """Return one tensor, contiguous; what was mapped or decoded for it is freed with the array."""
        ...

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors as they lie in the files."""
        ...


class RenamedFiles:
    """The same tensors under other names.

    Args:
        files: the checkpoint.
        renames: pattern and replacement of ``re.sub``, each applied in turn to every name.

    Raises:
        ValueError: two tensors would get one name.
    """

    def __init__(self, files: TensorFiles, renames: Sequence[tuple[str, str]]) -> None:
        """Rename; nothing is read."""
        self._files = files
        self._old: dict[str, str] = {}
        for old in files.names():
            new = old
            for pattern, replacement in renames:
                new = re.sub(pattern, replacement, new)
            if new in self._old:
                raise ValueError(f"tensors {self._old[new]} and {old} are both read as {new}; keep one of them")
            self._old[new] = old

    def names(self) -> Mapping[str, TensorInfo]:
        """Return what is known of each tensor, by its new name."""
        infos = self._files.names()
        return {new: infos[old] for new, old in self._old.items()}

    def read(self, name: str) -> np.ndarray:
        """Return one tensor by its new name."""
        return self._files.read(self._old[name])

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors as they lie in the files."""
        return self._files.total_bytes
