"""States of stages and the state of the whole model, one made from the other bit for bit.

A checkpoint holds the whole model's state, whatever pipeline wrote it. Leaves are matched by path, which is the same in
both; a leaf of another length in its first axis is a run of layers. So weights and optimizer moments go the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxpp import tree
from jaxpp.pipeline.cut import CutModel, cut_leaf
from jaxpp.pipeline.pipeline import Pipeline
from jaxpp.pipeline.transfer import fetch


def split_state(cut: CutModel, whole: Any, parts: Sequence[Any]) -> tuple[Any, ...]:
    """Cut a state of the whole model.

    Args:
        cut: the model's cut.
        whole: weights or an optax state of the whole model.
        parts: for each stage the same as shapes, e.g. ``[s.params for s in cut.stages]``, `Trainer.abstract_optimizer`.

    Returns:
        Trees like `parts`, with arrays where `whole` has them.

    Raises:
        ValueError: a leaf that the whole has not, or whose shape is not a run of layers of the whole's.
    """
    leaves, found = tree.named_leaves(whole), []
    for start, count, part in zip(cut.starts, cut.cuts, parts, strict=True):
        own = {path: _cut(path, leaves, leaf, start, count) for path, leaf in tree.named_leaves(part).items()}
        found.append(tree.fill(part, own))
    return tuple(found)


def _cut(path: str, leaves: dict[str, Any], wanted: Any, start: int, count: int) -> Any:
    if path not in leaves:
        raise ValueError(f"{path}: a stage has it, the whole model has not")
    value = leaves[path]
    if tuple(value.shape) == tuple(wanted.shape):
        return value
    piece = cut_leaf(value, start, count) if value.ndim else value
    if tuple(piece.shape) != tuple(wanted.shape):
        raise ValueError(f"{path}: layers {start} to {start + count - 1} of {value.shape} are not {wanted.shape}")
    return piece


def fetch_states(pipeline: Pipeline, parts: Sequence[Any]) -> tuple[Any, ...]:
    """Return the states of all stages as host arrays, on every process; all processes make the same call.

    Cost: each process but the owner of a stage is sent all of that stage.
    """
    found = []
    for stage, part in enumerate(parts):
        leaves, structure = jax.tree.flatten(part)
        held = fetch(leaves, pipeline.executor.owner(stage), pipeline.places)
        found.append(jax.tree.unflatten(structure, held))
    return tuple(found)


def join_states(whole: Any, parts: Sequence[Any]) -> Any:
    """Put states of stages together, on the host.

    Args:
        whole: the state of the whole model as shapes.
        parts: for each stage its state, all of it on this process (see `fetch_states`); of a shared weight the
            owner's counts.

    Raises:
        ValueError: a leaf that no stage has, or pieces that do not make the whole.
    """
    shapes = tree.named_leaves(whole)
    named = [{path: np.asarray(leaf) for path, leaf in tree.named_leaves(part).items()} for part in parts]
    return tree.fill(whole, _join(named, shapes, np.concatenate))


def _join(parts: Sequence[Mapping[str, Any]], shapes: Mapping[str, Any], join: Callable[..., Any]) -> dict[str, Any]:
    whole = {}
    for path, wanted in shapes.items():
        pieces = [part[path] for part in parts if path in part]
        if pieces and pieces[0].shape == wanted.shape:
            whole[path] = pieces[0]
        elif sum(piece.shape[0] for piece in pieces if piece.ndim) == (wanted.shape or (0,))[0]:
            whole[path] = join(pieces)
        else:
            found = ", ".join(str(tuple(piece.shape)) for piece in pieces) or "nothing"
            raise ValueError(f"{path}: the stages have {found}, which does not make {tuple(wanted.shape)}")
    return whole
