"""States of stages on their places and the state of the whole model on the whole mesh, one made from the other.

A checkpoint holds the whole model's state, whatever pipeline wrote it. Leaves are matched by path, which is the same in
both; a leaf of a stage that is shorter in its first axis is a run of layers. So weights, gradients and moments of the
optimizer go the same way, bit for bit, whatever the cuts. All processes make the same calls.

Words: on the whole mesh a stacked leaf is split over axis ``stage`` in equal runs of layers, one for each rank (its
*share*), or not at all; every rank holds all of a leaf that is not stacked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxpp import tree
from jaxpp.pipeline.cut import CutModel
from jaxpp.pipeline.pipeline import Pipeline
from jaxpp.pipeline.place import Place
from jaxpp.pipeline.transfer import absent, copies, move

AXIS = "stage"
Leaves = dict[str, Any]


def assemble(pipeline: Pipeline, cut: CutModel, wanted: Any, parts: Sequence[Any]) -> Any:
    """Put states of stages together.

    Args:
        pipeline: that the stages run on.
        cut: the model's cut.
        wanted: the whole's state as shapes with shardings on the whole mesh.
        parts: for each stage its state, on its owner's devices; of a shared weight the owner's counts.

    Returns:
        Arrays like `wanted`. A stage's leaf that lies where the whole's has to lie is used as it is: what uses up the
        one uses up the other.

    Raises:
        ValueError: a leaf that no stage has, or pieces that do not make the whole.

    Cost: a rank is sent the layers of its share that another rank owns, and all leaves that are not stacked.
    """
    goals, own = tree.named_leaves(wanted), [tree.named_leaves(part) for part in parts]
    stacked = {path for path, goal in goals.items() if _is_stacked(path, goal, own)}
    shares = []
    for rank, place in enumerate(pipeline.places):
        share = _stacked_share(pipeline, cut, rank, {path: goals[path] for path in stacked}, own)
        for stage, leaves in enumerate(own):
            rest = {path: leaf for path, leaf in leaves.items() if path in goals.keys() - stacked - share.keys()}
            share.update(_moved(rest, pipeline.executor.owner(stage), place))
        shares.append(share)
    return tree.fill(wanted, {path: _on_whole_mesh(goals[path], path, shares, pipeline.places) for path in goals})


def deal(pipeline: Pipeline, cut: CutModel, whole: Any, parts: Sequence[Any]) -> tuple[Any, ...]:
    """Cut a state of the whole model into states of stages.

    Args:
        pipeline: that the stages will run on.
        cut: the model's cut.
        whole: weights or an optax state, on the whole mesh; used up where a stage's leaf lies where it lies already.
        parts: for each stage the same as shapes, e.g. ``[s.params for s in cut.stages]``, `Trainer.abstract_optimizer`.

    Returns:
        Trees like `parts`, on the places of the stages' owners.

    Raises:
        ValueError: a leaf that the whole has not, or whose shape is not a run of layers of the whole's.

    Cost: a rank is sent the layers of its stages that lie on another.
    """
    leaves, found = tree.named_leaves(whole), []
    taken: set[tuple[str, int]] = set()
    for stage, part in enumerate(parts):
        shapes, owner = tree.named_leaves(part), pipeline.executor.owner(stage)
        stacked = {path for path, shape in shapes.items() if _is_run(path, shape, leaves, cut.cuts[stage])}
        rank = pipeline.places.index(owner)
        own = {path: _on_place(leaves[path], owner, rank) for path in shapes.keys() - stacked}
        again = sorted(path for path in own if (path, rank) in taken)
        if again and owner.is_local:  # two stages on one rank: what an update of one donates is not the other's
            own.update(zip(again, copies([own[path] for path in again]), strict=True))
        taken.update((path, rank) for path in own)
        own.update(_run_of_layers(pipeline, cut, stage, {path: leaves[path] for path in sorted(stacked)}))
        found.append(tree.fill(part, own))
    return tuple(found)


def _is_stacked(path: str, goal: Any, own: Sequence[Leaves]) -> bool:
    pieces = [leaves[path] for leaves in own if path in leaves]
    if pieces and pieces[0].shape == goal.shape:
        return False
    if len(pieces) == len(own) and goal.ndim and sum(piece.shape[0] for piece in pieces) == goal.shape[0]:
        return True
    found = ", ".join(str(tuple(piece.shape)) for piece in pieces) or "nothing"
    raise ValueError(f"{path}: the stages have {found}, which does not make {tuple(goal.shape)}")


def _is_run(path: str, shape: Any, leaves: Mapping[str, Any], num_layers: int) -> bool:
    if path not in leaves:
        raise ValueError(f"{path}: a stage has it, the whole model has not")
    whole = tuple(leaves[path].shape)
    if whole == tuple(shape.shape):
        return False
    if whole[1:] == tuple(shape.shape[1:]) and shape.shape[0] == num_layers:
        return True
    raise ValueError(f"{path}: {num_layers} layers of {whole} are not {tuple(shape.shape)}")


def _share(sharding: NamedSharding, num_layers: int, rank: int) -> tuple[int, int]:
    """Return the layers, first and one past the last, that a rank holds of a stacked leaf on the whole mesh."""
    if AXIS not in _axes(sharding.spec[0] if sharding.spec else None):
        return 0, num_layers
    size = num_layers // sharding.mesh.shape[AXIS]
    return rank * size, (rank + 1) * size


def _axes(entry: Any) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _inside(sharding: NamedSharding, place: Place) -> NamedSharding:
    """Return the sharding of a rank's share: that of the whole without axis ``stage``."""
    entries = [tuple(axis for axis in _axes(entry) if axis != AXIS) for entry in sharding.spec]
    return place.sharding(PartitionSpec(*(axes[0] if len(axes) == 1 else (axes or None) for axes in entries)))


@partial(jax.jit, static_argnums=(1, 2, 3))
def _cut(values: list[jax.Array], first: int, end: int, goals: tuple[NamedSharding, ...]) -> list[jax.Array]:
    return jax.lax.with_sharding_constraint([value[first:end] for value in values], list(goals))


@partial(jax.jit, static_argnums=1)
def _join(pieces: list[list[jax.Array]], goals: tuple[NamedSharding, ...]) -> list[jax.Array]:
    return jax.lax.with_sharding_constraint([jnp.concatenate(each) for each in zip(*pieces, strict=True)], list(goals))


def _goals(values: Leaves) -> tuple[NamedSharding, ...]:
    """Return the shardings of stacked leaves on a place; they hold for any number of layers."""
    return tuple(value.sharding for value in values.values())


def _stand_ins(values: Leaves, num_layers: int) -> Leaves:
    shapes = [jax.ShapeDtypeStruct((num_layers, *x.shape[1:]), x.dtype, sharding=x.sharding) for x in values.values()]
    return dict(zip(values, absent(shapes), strict=True))


def _layers(values: Leaves, place: Place, first: int, end: int) -> Leaves:
    """Return some layers of stacked leaves on a place."""
    if not values or (first, end) == (0, next(iter(values.values())).shape[0]):
        return values
    if not place.is_local:
        return _stand_ins(values, end - first)
    return dict(zip(values, _cut([*values.values()], first, end, _goals(values)), strict=True))


def _moved(values: Leaves, source: Place, place: Place) -> Leaves:
    return values if source is place or not values else dict(zip(values, move([*values.values()], place), strict=True))


def _joined(pieces: list[Leaves], place: Place) -> Leaves:
    if len(pieces) == 1:
        return pieces[0]
    if not place.is_local:
        return _stand_ins(pieces[0], sum(next(iter(piece.values())).shape[0] for piece in pieces))
    joined = _join([[*piece.values()] for piece in pieces], _goals(pieces[0]))
    return dict(zip(pieces[0], joined, strict=True))


def _gathered(found: list[tuple[Leaves, Place, int, int]], place: Place) -> Leaves:
    """Bring runs of layers, each given by leaves, place, first layer and end, together on a place."""
    return _joined([_moved(_layers(values, at, a, b), at, place) for values, at, a, b in found], place)


def _stacked_share(pipeline: Pipeline, cut: CutModel, rank: int, goals: Leaves, own: Sequence[Leaves]) -> Leaves:
    """Bring together, on a rank, the layers that it holds on the whole mesh."""
    if not goals:
        return {}
    num_layers, some = sum(cut.cuts), next(iter(goals.values()))
    low, high = _share(some.sharding, num_layers, rank)
    found = []
    for stage, (start, count) in enumerate(zip(cut.starts, cut.cuts, strict=True)):
        first, end = max(low, start) - start, min(high, start + count) - start
        if first < end:
            leaves = {path: own[stage][path] for path in sorted(goals)}
            found.append((leaves, pipeline.executor.owner(stage), first, end))
    return _gathered(found, pipeline.places[rank])


def _run_of_layers(pipeline: Pipeline, cut: CutModel, stage: int, leaves: Leaves) -> Leaves:
    """Bring together, on a stage's owner, its layers of the whole's stacked leaves."""
    if not leaves:
        return {}
    start, end = cut.starts[stage], cut.starts[stage] + cut.cuts[stage]
    some, owner, num_layers = next(iter(leaves.values())), pipeline.executor.owner(stage), sum(cut.cuts)
    at_home = pipeline.places.index(owner)
    ranks = range(len(pipeline.places)) if _share(some.sharding, num_layers, at_home) != (0, num_layers) else [at_home]
    found = []
    for rank in ranks:
        low, high = _share(some.sharding, num_layers, rank)
        first, last = max(low, start) - low, min(high, end) - low
        if first < last:
            place = pipeline.places[rank]
            found.append(({path: _on_place(leaf, place, rank) for path, leaf in leaves.items()}, place, first, last))
    return _gathered(found, owner)


def _on_place(leaf: jax.Array, place: Place, rank: int) -> jax.Array:
    """Return what a rank holds of a leaf on the whole mesh, as an array on its place, without a copy."""
    sharding = leaf.sharding
    assert isinstance(sharding, NamedSharding)
    shape = tuple(leaf.shape)
    if leaf.ndim:
        low, high = _share(sharding, shape[0], rank)
        shape = (high - low, *shape[1:])
    inside, held = _inside(sharding, place), {shard.device: shard.data for shard in leaf.addressable_shards}
    return _array(shape, leaf.dtype, inside, [held[device] for device in _local_devices(place)])


def _on_whole_mesh(goal: Any, path: str, shares: Sequence[Leaves], places: Sequence[Place]) -> jax.Array:
    """Return the array on the whole mesh whose shares are given for each rank."""
    held: dict[Any, jax.Array] = {}
    for share, place in zip(shares, places, strict=True):
        if place.is_local:
            held.update({shard.device: shard.data for shard in share[path].addressable_shards})
    own = [device for device in goal.sharding.mesh.devices.flat if device.process_index == jax.process_index()]
    return _array(tuple(goal.shape), goal.dtype, goal.sharding, [held[device] for device in own])


def _local_devices(place: Place) -> list[Any]:
    return [device for device in place.mesh.devices.flat if device.process_index == jax.process_index()]


def _array(shape: tuple[int, ...], dtype: Any, sharding: NamedSharding, pieces: list[jax.Array]) -> jax.Array:
    make: Any = jax.make_array_from_single_device_arrays
    return make(shape, sharding, pieces, dtype=jnp.dtype(dtype))
