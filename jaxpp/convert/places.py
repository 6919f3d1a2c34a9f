"""Which tensors make up which weight: `Part`s filled in with the shapes of a model, and held against the files.

Everything is checked on names, shapes and dtypes alone, before a byte of a weight is read.
"""

from __future__ import annotations

import difflib
import itertools
import math
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxpp import dims, tree
from jaxpp.convert.part import Part
from jaxpp.convert.regions import Region
from jaxpp.convert.tensors import TensorFiles, TensorInfo

Parts = Mapping[str, tuple[Part, ...]]
"""Path of a weight to the forms in which it may lie in files; the first is the one written."""

SPELLED = {"layers": "{layer}", "experts": "{expert}"}  # stacked dims that a tensor's name may spell out
_MOST_LISTED = 8
_ALL = (slice(None),) * 32


@dataclass(frozen=True)
class Weight:
    """A weight of the model and the part of the files that holds it.

    Args:
        path: its name in the state.
        part: where it lies.
        arrow: its dims.
        shape: its shape.
    """

    path: str
    part: Part
    arrow: dims.Arrow
    shape: tuple[int, ...]

    @property
    def spelled(self) -> tuple[str, ...]:
        """Stacked dims of which each index has a tensor of its own."""
        return tuple(dim for dim in self.arrow.stacked if SPELLED.get(dim, "\n") in self.part.tensor)

    @property
    def sizes(self) -> dict[str, int]:
        """Size of each dim."""
        return dict(zip(self.arrow.dims, self.shape, strict=True))

    @property
    def file_shape(self) -> tuple[int, ...]:
        """Shape of each of its tensors in the files."""
        return self.part.shape(self.sizes)

    def tensors(self, region: Region | None = None) -> Iterator[tuple[str, Region]]:
        """Yield the name of each tensor and the region of the weight that it fills.

        Args:
            region: only those that this region of the weight needs.
        """
        bounds = [cut.indices(length)[:2] for cut, length in zip(region or _ALL, self.shape, strict=False)]
        fixed = [axis for axis, dim in enumerate(self.arrow.dims) if dim in self.spelled]
        for numbers in itertools.product(*(range(*bounds[axis]) for axis in fixed)):
            filled = [slice(*bound) for bound in bounds]
            for axis, number in zip(fixed, numbers, strict=True):
                filled[axis] = slice(number, number + 1)
            words = {self.arrow.dims[axis]: number for axis, number in zip(fixed, numbers, strict=True)}
            yield self.part.name(words.get("layers", 0), words.get("experts", 0)), tuple(filled)

    def view(self, array: np.ndarray) -> np.ndarray:
        """Return the view of a tensor that holds this weight, with axes of size 1 for the spelled dims."""
        order = [dim for dim in self.arrow.dims if dim not in self.spelled]
        found = self.part.view(array, order, self.sizes)
        return np.expand_dims(found, [axis for axis, dim in enumerate(self.arrow.dims) if dim in self.spelled])


def weights(parts: Parts, state: Any, files: Collection[str] = ()) -> list[Weight]:
    """Return each weight of a state with the first of its forms whose tensors are all there.

    Args:
        parts: where the weights may lie.
        state: ``nnx.State`` of Params with arrows, concrete or abstract.
        files: the names of the tensors there are; none: the first form is taken.

    Raises:
        ValueError: a weight has no part, or a part is of no weight.
    """
    nodes = tree.named_nodes(state)
    if without := sorted(set(nodes) - set(parts)):
        raise ValueError(f"no part says where these weights lie in a file: {listed(without)}")
    if left := sorted(set(parts) - set(nodes)):
        raise ValueError(f"parts name weights that the model does not have: {listed(left)}")
    return [_best(path, node, parts[path], files) for path, node in nodes.items()]


def _best(path: str, node: Any, forms: Sequence[Part], files: Collection[str]) -> Weight:
    # The arrow was checked when the model was laid out, with the user's own dims.
    arrow = dims.parse(node.get_metadata()["dims"], node.get_metadata()["dims"].replace("->", " ").split())
    candidates = [Weight(path, part, arrow, tuple(node.shape)) for part in forms]
    if not files or len(candidates) == 1:
        return candidates[0]
    return min(candidates, key=lambda weight: sum(name not in files for name, _ in weight.tensors()))


def together(chosen: Sequence[Weight]) -> Iterator[list[Weight]]:
    """Yield the weights that lie in the same tensors together, so that each tensor is read or written once."""
    owner: dict[str, list[Weight]] = {}
    found: list[list[Weight]] = []
    for weight in chosen:
        names = [name for name, _ in weight.tensors()]
        group = next((owner[name] for name in names if name in owner), None)
        if group is None:
            group = []
            found.append(group)
        group.append(weight)
        owner |= dict.fromkeys(names, group)
    yield from found


def check(files: TensorFiles, parts: Parts, like: Any, ignored: Sequence[str] = ()) -> list[str]:
    """Refuse files that do not hold exactly the weights of a model, with all that is wrong in one message.

    Args:
        files: the tensors there are.
        parts: where each weight may lie; of several forms the first whose tensors are all there counts.
        like: abstract ``nnx.State`` of the weights.
        ignored: patterns (``re.search``) of tensors that may be there and are not read.

    Returns:
        The tensors that `ignored` covers.

    Raises:
        ValueError: tensors are missing, of another shape, of integers, or there and used by no weight.
    """
    infos = files.names()
    chosen = weights(parts, like, infos)
    wanted = {name: weight for weight in chosen for name, _ in weight.tensors()}
    left = [name for name in infos if name not in wanted]
    passed = {name: None for name in left if any(re.search(pattern, name) for pattern in ignored)}
    unexpected = [name for name in left if name not in passed]
    missing = [name for name in wanted if name not in infos]
    shapes = [problem for name, weight in wanted.items() if name in infos for problem in _misfit(name, infos, weight)]
    groups = [
        _group("missing", [_missing(name, wanted[name], unexpected) for name in missing[:_MOST_LISTED]], len(missing)),
        _group("of another shape or type", shapes[:_MOST_LISTED], len(shapes)),
        _group("unexpected", [f"{n} {infos[n].shape}" for n in unexpected[:_MOST_LISTED]], len(unexpected)),
    ]
    if any(groups):
        raise ValueError(f"{_where(infos)} and its model do not fit: {'. '.join(filter(None, groups))}")
    return list(passed)


def _where(infos: Mapping[str, TensorInfo]) -> str:
    files = sorted({info.file for info in infos.values()}) or ["the checkpoint"]
    return files[0] if len(files) == 1 else os.path.dirname(files[0])


def listed(words: Sequence[str]) -> str:
    """Join the first few words and count the rest."""
    more = len(words) - _MOST_LISTED
    return ", ".join(words[:_MOST_LISTED]) + (f" and {more} more" if more > 0 else "")


def _group(what: str, shown: list[str], count: int) -> str:
    if not count:
        return ""
    more = f"; and {count - len(shown)} more" if count > len(shown) else ""
    return f"{count} {'tensor' if count == 1 else 'tensors'} {what}: {'; '.join(shown)}{more}"


def _missing(name: str, weight: Weight, unexpected: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, unexpected, n=1)
    return f"{name} {weight.file_shape} for {weight.path}" + (f" (there is {near[0]})" if near else "")


def _misfit(name: str, infos: Mapping[str, TensorInfo], weight: Weight) -> Iterator[str]:
    found, needed = infos[name].shape, weight.file_shape
    if found != needed:
        if found == needed[::-1]:
            hint = " (it is transposed)"
        elif math.prod(found) == math.prod(needed):
            hint = " (as many elements, in another shape)"
        else:
            hint = ""
        yield f"{name} found {found}, needed {needed}{hint}"
    elif not jnp.issubdtype(infos[name].dtype, jnp.floating):
        yield f"{name} holds {infos[name].dtype}, needed floats: it is quantised, give the unquantised checkpoint"
