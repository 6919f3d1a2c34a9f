"""Where a weight lies in a tensor of a file: one notation, read in both directions.

A `Part` turns the array of a file into a NumPy view of one weight by reshape, index and transpose alone, so that
reading a slice of the view touches only that slice of the file, and writing through the view fills the file's tensor.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

_TOKEN = re.compile(r"(?P<dim>[a-z_]+)(?:@(?P<start>\d+)/(?P<total>\d+))?|(?P<index>\d+)/(?P<count>\d+)")


@dataclass(frozen=True)
class _Axis:
    """One axis of a file's tensor after its groups are opened: a dim, a range of a longer one, or one index of many."""

    dim: str | None
    start: int
    total: int | None  # None: the dim's own size

    def size(self, sizes: Mapping[str, int]) -> int:
        return sizes[str(self.dim)] if self.total is None else self.total

    def index(self, sizes: Mapping[str, int]) -> slice | int:
        return self.start if self.dim is None else slice(self.start, self.start + sizes[self.dim])


@dataclass(frozen=True)
class Part:
    """Where one weight (of one layer, of one expert) lies in a file.

    Args:
        tensor: the tensor's name, with ``{layer}`` or ``{expert}`` where each has a tensor of its own.
        axes: the tensor's axes in order, in the dims of the weight's arrow. Brackets join dims into one axis;
            ``1/3`` is index 1 of an axis of 3; ``heads@4/8`` is the dim ``heads`` from index 4 on of an axis of 8.

    Example:
        >>> query = Part("h.{layer}.attn.c_attn.weight", "embed (0/3 heads head_dim)")
        >>> sizes = {"embed": 4, "heads": 2, "head_dim": 2}
        >>> query.shape(sizes)
        (4, 12)
        >>> query.view(np.zeros((4, 12)), ("embed", "heads", "head_dim"), sizes).shape
        (4, 2, 2)
    """

    tensor: str
    axes: str

    @cached_property
    def _groups(self) -> tuple[tuple[_Axis, ...], ...]:
        words = re.findall(r"\([^()]*\)|[^\s()]+", self.axes)
        return tuple(tuple(_axis(token, self.axes) for token in word.strip("()").split()) for word in words)

    def name(self, layer: int = 0, expert: int = 0) -> str:
        """Return the tensor's name for one layer and expert."""
        return self.tensor.replace("{layer}", str(layer)).replace("{expert}", str(expert))

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape of the whole tensor in the file, from the sizes of the weight's dims."""
        return tuple(math.prod(axis.size(sizes) for axis in group) for group in self._groups)

    def view(self, array: np.ndarray, order: Sequence[str], sizes: Mapping[str, int]) -> np.ndarray:
        """Return the weight as a view of the file's tensor; no byte is copied.

        Args:
            array: the tensor, contiguous, of shape ``shape(sizes)``.
            order: the dims of the weight as we store it (its arrow without what the name spells out).
            sizes: size of each dim.
        """
        opened = [axis for group in self._groups for axis in group]
        expanded = array.reshape([axis.size(sizes) for axis in opened])  # splits axes only: always a view
        chosen = expanded[tuple(axis.index(sizes) for axis in opened)]
        left = [axis.dim for axis in opened if axis.dim is not None]
        return chosen.transpose([left.index(dim) for dim in order])


def _axis(token: str, axes: str) -> _Axis:
    match = _TOKEN.fullmatch(token)
    assert match, f"part axes {axes!r}: {token!r} is neither dim, dim@start/total nor index/count"
    if match["dim"] is None:
        return _Axis(None, int(match["index"]), int(match["count"]))
    if match["start"] is None:
        return _Axis(match["dim"], 0, None)
    return _Axis(match["dim"], int(match["start"]), int(match["total"]))
