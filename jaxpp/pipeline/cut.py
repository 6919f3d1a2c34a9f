"""A language model cut into stages along dim ``layers``: embedding on the first, head and loss on the last.

Which weights outside of the blocks a stage needs is read off traces of the model, not off names. One that several
stages need (a tied embedding) is owned by the first of them; the others hold a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from flax import nnx

from jaxpp import tree
from jaxpp.pipeline.cuts import Cuts, check_cuts
from jaxpp.pipeline.pipeline import Use
from jaxpp.pipeline.skeleton import BLOCKS, Entry, Part, Prepare, Skeleton, as_is, skeleton_of, weights_used
from jaxpp.pipeline.stage import Stage


@dataclass(frozen=True, eq=False)
class CutModel:
    """A model as stages.

    Args:
        skeleton: the model.
        cuts: layers of each stage.
        needs: for each stage the paths of the weights outside of the blocks that it uses.
    """

    skeleton: Skeleton
    cuts: Cuts
    needs: tuple[frozenset[str], ...]

    @property
    def starts(self) -> tuple[int, ...]:
        """The first layer of each stage."""
        return tuple(sum(self.cuts[:stage]) for stage in range(len(self.cuts)))

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """The stages, with the shapes of their weights."""
        last, found = len(self.cuts) - 1, []
        for stage, params in enumerate(self.split(self.skeleton.params)):
            entry = None if stage else Entry(self.skeleton)
            found.append(Stage(Part(self.skeleton, self.starts[stage], stage == last), params, entry))
        return tuple(found)

    @property
    def tied(self) -> tuple[tuple[Use, ...], ...]:
        """Groups of uses of one weight."""
        uses: dict[str, list[Use]] = {}
        for stage, paths in enumerate(self.needs):
            for path in sorted(paths):
                uses.setdefault(path, []).append((stage, path))
        return tuple(tuple(group) for group in uses.values() if len(group) > 1)

    def split(self, params: Any) -> tuple[Any, ...]:
        """Cut a state of all weights (arrays or shapes) into one state per stage, bit for bit."""
        flat = nnx.to_flat_state(params)
        found = []
        for stage, (start, count) in enumerate(zip(self.starts, self.cuts, strict=True)):
            own = []
            for path, node in flat:
                if path[0] == BLOCKS:
                    own.append((path, node.replace(cut_leaf(node.get_value(), start, count))))
                elif tree.path_name(tuple(map(jax.tree_util.DictKey, path))) in self.needs[stage]:
                    own.append((path, node))
            found.append(nnx.from_flat_state(own))
        return tuple(found)


def cut_leaf(value: Any, start: int, count: int) -> Any:
    """Return the layers from `start` on of a stacked array, or the shape of that."""
    if isinstance(value, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((count, *value.shape[1:]), value.dtype)
    return value[start : start + count]


def cut_model(model: Any, cuts: Sequence[int], prepare: Prepare = as_is) -> CutModel:
    """Cut a model into stages.

    Args:
        model: with stacked ``blocks``, ``embed``, ``run``, ``loss_from`` (`jaxpp.model.Model`); concrete, or shapes
            alone as ``nnx.eval_shape`` gives it.
        cuts: the number of layers of each stage (`jaxpp.pipeline.cuts`).
        prepare: what is done to weights before they are used.

    Returns:
        The stages, and how to cut a state of weights; weights are not part of it.

    Raises:
        ValueError: cuts that do not add up, no such model, or one with variables that are not weights.
    """
    skeleton = skeleton_of(model, prepare)
    named = tree.named_nodes(skeleton.params)
    stacked = {path: node.shape[0] for path, node in named.items() if path.split("/")[0] == BLOCKS}
    if len(set(stacked.values())) != 1:
        raise ValueError(f"the blocks of {type(model).__name__} are not stacked over one number of layers: {stacked}")
    known = check_cuts(cuts, next(iter(stacked.values())), len(cuts))
    return CutModel(skeleton, known, weights_used(skeleton, len(known), list(named)))
