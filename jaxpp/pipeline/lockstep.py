"""One program for all ranks that walks a table: each tick every rank of axis ``stage`` runs the operation that is due.

A ``scan`` over the table's ticks inside a ``shard_map`` that is manual over ``stage`` alone. In a tick a rank runs one
of the pieces of its own layers: F, and D, or B and W as `jaxpp.pipeline.split` cuts them, which repeat nothing. Then,
outside of anything that depends on the rank, what was made is permuted to both neighbours; who gets what is read off
the table. What F leaves for B and W, and B for W, waits in as many slots as the table holds microbatches at once. The
embedding runs before, for all microbatches, and its backward pass after. The loss runs in the ticks in which a
microbatch leaves the last stage, on every rank (the others would wait for it), and the last rank's result counts.

Collectives of other axes stand inside of what depends on the rank. That is right as long as each of their groups lies
within one rank, for its devices agree; a ``collective-permute``, in which all devices take part, would hang there.
Nothing is differentiated through the loop or the permutes: gradients are taken within one stage.

Source: Qi, Wan, Huang, Lin, Zero Bubble Pipeline Parallelism, 2024 (ZB-H1, ZB-H2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from jaxpp import tree
from jaxpp.parallel import Execution, Layout, PipelineConfig, executing
from jaxpp.pipeline.skeleton import BLOCKS, Entry, Skeleton, weights_used
from jaxpp.pipeline.slots import Pieces, Values, get, pieces_of, put, put_some
from jaxpp.pipeline.spmd import AXIS, check_rows, dealt_out, put_back
from jaxpp.pipeline.stage import Stage
from jaxpp.pipeline.ticks import NOTHING, Ticks
from jaxpp.pipeline.traced import trace
from jaxpp.schedule import Kind, Schedule
from jaxpp.schedule.table import BACKWARD, LAST

_Changed = tuple[Values, list[jax.Array], jax.Array]
_Losses = tuple[Any, jax.Array, jax.Array, jax.Array]


def check(schedule: Schedule, layout: Layout, num_layers: int) -> None:
    """Refuse a table that cannot run in lock step, or layers that do not split over its ranks.

    Raises:
        ValueError: with what would do.
    """
    ranks = layout.mesh.shape.get(AXIS, 1)
    if schedule.num_ranks != ranks:
        raise ValueError(f"schedule {schedule.name} has {schedule.num_ranks} ranks, mesh axis {AXIS} has {ranks}")
    alone = all(len(cell) == 1 for order in schedule.orders for cell in order)
    if schedule.placement != (tuple(range(ranks)),) or not alone or "R" in schedule.kinds:
        raise ValueError(
            f"schedule {schedule.name} does not run in one program, where rank s runs stage s, one operation at a time "
            "and none to recompute (plan.remat does): gpipe 1f1b zb-h1 zb-h2 do; executor mpmd runs every schedule"
        )
    if num_layers % ranks:
        fits = [n for n in range(1, num_layers + 1) if num_layers % n == 0]
        raise ValueError(f"{num_layers} layers do not split into {ranks} stages; {', '.join(map(str, fits))} do")


def summed_gradients(
    skeleton: Skeleton, params: Any, batch: Mapping[str, jax.Array], layout: Layout, schedule: Schedule
) -> tuple[jax.Array, jax.Array, Any]:
    """Run a table over a batch, forward and backward.

    Args:
        skeleton: the model; its ``prepare`` casts leaves, or leaves them as they are.
        params: ``nnx.State`` of its weights; blocks are stacked ``[layers, ...]`` and split over ``stage``.
        batch: arrays ``[batch, seq]``.
        layout: on a mesh with axis ``stage``.
        schedule: the table.

    Returns:
        The sums over the batch of the losses and of their weights, and the gradients of the first, fp32, like `params`.

    Raises:
        ValueError: as `check` and `jaxpp.pipeline.spmd.check_rows`.

    Cost: time: for each tick the longest operation in it, and `microbatches` times the loss. Memory on each rank:
        slots x what is kept of a microbatch, the embedded batch, and the summed gradients. Over ``stage``: two permutes
        of ``batch / microbatches x seq x embed`` a tick; per step one gather of the embedded batch and one reduction of
        its gradient, and an all-reduce of the gradients of the head.
    """
    weights = _Weights.of(skeleton, params)
    check(schedule, layout, weights.num_layers)
    count = schedule.num_microbatches
    config = PipelineConfig(microbatches=count)
    for leaf in batch.values():
        check_rows(config, layout, len(leaf))
    x, pull = jax.vjp(lambda outside: Entry(skeleton)(outside, batch), weights.entry)

    def local(blocks: Any, shared: Any, head: Any, flow: jax.Array, dealt: dict[str, jax.Array]) -> tuple[Any, ...]:
        one = jax.ShapeDtypeStruct(flow.shape[1:], flow.dtype)
        index = jax.lax.axis_index(AXIS)
        rank = _Rank(skeleton, layout, Ticks(schedule), (blocks, shared), head, dealt, one, index)
        end = jax.lax.scan(lambda carry, row: (rank.tick(carry, row), None), rank.start(flow), rank.rows())[0]
        return rank.results(end)

    whole = PartitionSpec()
    run = jax.shard_map(
        local, mesh=layout.mesh, axis_names={AXIS}, check_vma=False,
        in_specs=(PartitionSpec(AXIS), whole, whole, whole, whole),
        out_specs=(whole, whole, PartitionSpec(AXIS), whole, whole, PartitionSpec(AXIS)),
    )  # fmt: skip
    dealt = {name: dealt_out(leaf, count, layout) for name, leaf in batch.items()}
    total, weight, *grads, flow = run(weights.blocks, weights.shared, weights.head, dealt_out(x, count, layout), dealt)
    grads.append(pull(put_back(flow[0], layout).astype(x.dtype))[0])
    return total, weight, weights.summed(params, grads)


@dataclass(frozen=True)
class _Weights:
    """The weights ready for use, by where they are used: states with some of the paths each."""

    blocks: Any
    shared: Any  # outside of the blocks, and used by every stage
    head: Any
    entry: Any

    @classmethod
    def of(cls, skeleton: Skeleton, params: Any) -> _Weights:
        with executing(Execution()):  # the two tokens of its batch do not split over a mesh
            entry, shared, head = weights_used(skeleton, 3, list(tree.named_nodes(params)))
        flat = nnx.to_flat_state(skeleton.prepare(params))
        named = [(tree.path_name(tuple(map(jax.tree_util.DictKey, path))), path, node) for path, node in flat]
        blocks = [(path, node) for _, path, node in named if path[0] == BLOCKS]
        parts = [[(path, node) for name, path, node in named if name in used] for used in (shared, head, entry)]
        return cls(*map(nnx.from_flat_state, (blocks, *parts)))

    @property
    def num_layers(self) -> int:
        return jax.tree.leaves(self.blocks)[0].shape[0]

    @staticmethod
    def summed(params: Any, grads: Iterable[Any]) -> Any:
        """Return the gradients, from those of each use, as a tree like the stored weights."""
        sums: dict[str, jax.Array] = {}
        for part in grads:
            for path, leaf in tree.named_leaves(part).items():
                sums[path] = sums[path] + leaf.astype(jnp.float32) if path in sums else leaf.astype(jnp.float32)
        return tree.map_named(
            lambda path, node: sums[path] if path in sums else jnp.zeros(node.shape, jnp.float32), params
        )


class _Carry(NamedTuple):
    """What a rank takes from tick to tick; slots have a leading axis, microbatch j in ``j % slots``."""

    slots: Values
    sums: list[jax.Array]  # gradients of its own layers and of shared weights
    activations: jax.Array  # that have arrived
    gradients: jax.Array
    flow: jax.Array  # [microbatches, rows, seq, embed]: what enters the first stage, then the gradient of that
    head_sums: Any
    loss: jax.Array
    weight: jax.Array


@dataclass(frozen=True, eq=False)
class _Rank:
    """One rank, inside of the ``shard_map``.

    Args:
        skeleton: the model.
        layout: of the whole mesh.
        ticks: the table.
        weights: blocks of this rank, and what every stage shares.
        head: weights of the head.
        dealt: arrays ``[microbatches, rows, seq]``.
        x: shape of what enters a stage.
        index: which rank it is.
    """

    skeleton: Skeleton
    layout: Layout
    ticks: Ticks
    weights: tuple[Any, Any]
    head: Any
    dealt: dict[str, jax.Array]
    x: jax.ShapeDtypeStruct
    index: jax.Array

    @property
    def is_last(self) -> jax.Array:
        return self.index == self.ticks.schedule.num_ranks - 1

    def microbatch(self, j: jax.Array) -> dict[str, Any]:
        """Return a microbatch, and with it the number of this rank's first layer."""
        own = {name: leaf[j] for name, leaf in self.dealt.items()}
        return {"own": own, "first_layer": self.index * jax.tree.leaves(self.weights[0])[0].shape[0]}

    @cached_property
    def pieces(self) -> Pieces:
        def stage(weights: tuple[Any, Any], x: jax.Array, microbatch: Any, key: None) -> jax.Array:
            given = nnx.from_flat_state([item for part in weights for item in nnx.to_flat_state(part)])
            return self.skeleton.model(given).run(x, microbatch["own"], microbatch["first_layer"])

        weights = jax.tree.map(_shape, self.weights)
        microbatch = jax.eval_shape(self.microbatch, jax.ShapeDtypeStruct((), jnp.int32))
        return pieces_of(trace(Stage(stage, weights), False, weights, self.x, microbatch, None), self.ticks)

    @property
    def kinds(self) -> list[Kind]:
        return list(self.pieces.run)

    def rows(self) -> dict[str, jax.Array]:
        """Return what happens in each tick, as arrays ``[ticks]`` or ``[ticks, ranks]``."""
        ticks = self.ticks
        rows = {
            "kind": ticks.kinds(self.kinds), "microbatch": ticks.microbatches(), "activations": ticks.activations(),
            "gradients": ticks.gradients(), "loss": ticks.losses(), "end": ticks.ends(),
        }  # fmt: skip
        return {name: jnp.asarray(row, jnp.int32) for name, row in rows.items()}

    def start(self, flow: jax.Array) -> _Carry:
        """Return what a rank begins with."""
        traced = self.pieces.traced
        microbatch = jax.eval_shape(self.microbatch, jax.ShapeDtypeStruct((), jnp.int32))
        given = (*jax.tree.leaves(self.weights), *jax.tree.leaves(microbatch), self.x, self.x)
        places = (*traced.params, *traced.batch, *traced.x, *traced.cotangents)
        shapes = dict(zip(places, map(_shape, given), strict=True))
        nothing = jnp.zeros((), jnp.float32)
        return _Carry(
            slots=self.pieces.empty(shapes),
            sums=jax.tree.leaves(self._zeros(self.weights)),
            activations=jnp.zeros((self.ticks.activation_slots, *self.x.shape), self.x.dtype),
            gradients=jnp.zeros((self.ticks.gradient_slots, *self.x.shape), self.x.dtype),
            flow=flow, head_sums=self._zeros(self.head), loss=nothing, weight=nothing,
        )  # fmt: skip

    def _zeros(self, weights: Any) -> Any:
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), weights)
        within = self.layout.within(jax.sharding.get_abstract_mesh())
        return jax.lax.with_sharding_constraint(
            zeros, jax.tree.map(lambda w: within.param_shardings(w, "moments"), weights, is_leaf=_is_state)
        )

    def tick(self, carry: _Carry, row: dict[str, jax.Array]) -> _Carry:
        """Run what is due, hand it over, and take what arrives."""
        mine = {name: column[self.index] for name, column in row.items() if column.ndim}
        made = jnp.zeros(self.x.shape, self.x.dtype)
        for number, kind in enumerate(self.kinds, 1):
            operate = partial(self._operate, kind, carry, mine["microbatch"])
            changed = _where(mine["kind"] == number, operate, (carry.slots, carry.sums, made))
            carry, made = carry._replace(slots=changed[0], sums=changed[1]), changed[2]
        ranks = self.ticks.schedule.num_ranks
        ahead = jax.lax.ppermute(made, AXIS, [(i, i + 1) for i in range(ranks - 1)])
        back = jax.lax.ppermute(made, AXIS, [(i + 1, i) for i in range(ranks - 1)])
        # The same on every rank, so that the loss may communicate as it likes.
        lose = partial(self._lose, made, row["loss"])
        sums = (carry.head_sums, carry.loss, carry.weight, jnp.zeros_like(made))
        head_sums, loss, weight, gradient = _where(row["loss"] != NOTHING, lose, sums)
        return carry._replace(
            activations=put_some(carry.activations, mine["activations"], ahead),
            gradients=put_some(carry.gradients, mine["gradients"], jnp.where(self.is_last, gradient, back)),
            flow=put_some(carry.flow, row["end"], made),
            head_sums=head_sums, loss=loss, weight=weight,
        )  # fmt: skip

    def _operate(self, kind: Kind, carry: _Carry, j: jax.Array, changed: _Changed, i: jax.Array) -> _Changed:
        """Run one operation; return the slots and sums after it, and what it sends."""
        slots, sums, sent = changed
        traced, j = self.pieces.traced, j + i
        known: Values = dict(zip(traced.params, jax.tree.leaves(self.weights), strict=True))
        known.update(zip(traced.batch, jax.tree.leaves(self.microbatch(j)), strict=True))
        known.update({number: get(waiting, j) for number, waiting in slots.items()})
        if kind == "F":
            x = jnp.where(self.index == 0, get(carry.flow, j), get(carry.activations, j))
            known[traced.x[0]] = _in_round(x, i)
        elif kind in BACKWARD:
            known[traced.cotangents[0]] = _in_round(get(carry.gradients, j), i)
        made, left = self.pieces.operate(kind, known)
        slots = {**slots, **{number: put(slots[number], j, value) for number, value in left.items()}}
        if kind != "W":
            sent = made.pop(0)
        if kind in LAST:
            sums = [total + own.astype(total.dtype) for total, own in zip(sums, made, strict=True)]
        return slots, sums, sent

    def _lose(self, y: jax.Array, j: jax.Array, sums: _Losses, i: jax.Array) -> _Losses:
        """Add the loss of a microbatch, its weight and the gradients of the head; return also the gradient of `y`."""
        own = self.microbatch(j + i)["own"]

        def loss(head: Any, y: jax.Array) -> tuple[jax.Array, jax.Array]:
            total, weight = self.skeleton.model(head).loss_from(y, own)
            return total.astype(jnp.float32), weight.astype(jnp.float32)

        (total, weight), (grads, gradient) = jax.value_and_grad(loss, (0, 1), has_aux=True)(self.head, _in_round(y, i))
        head_sums = jax.tree.map(lambda total, own: total + own.astype(total.dtype), sums[0], grads)
        return head_sums, sums[1] + total, sums[2] + weight, gradient

    def results(self, carry: _Carry) -> tuple[Any, ...]:
        """Return loss, weight, gradients of blocks, shared weights and head, and of what entered the first stage."""
        blocks, shared = jax.tree.unflatten(jax.tree.structure(self.weights), carry.sums)
        loss, weight, head = self._only(self.is_last, (carry.loss, carry.weight, carry.head_sums))
        return loss, weight, blocks, jax.lax.psum(shared, AXIS), head, carry.flow[None]

    def _only(self, right: jax.Array, values: Any) -> Any:
        """Return one rank's values on every rank."""
        return jax.lax.psum(jax.tree.map(lambda leaf: jnp.where(right, leaf, 0), values), AXIS)


def _where(predicate: jax.Array, run: Callable[[Any, jax.Array], Any], values: Any) -> Any:
    """Return ``run(values, 0)`` where the predicate holds, else `values`, in place.

    A loop of one round or none: XLA copies whatever passes through a branch, but not what a loop carries.
    """
    return jax.lax.fori_loop(0, predicate.astype(jnp.int32), lambda i, values: run(values, i), values)


def _in_round(value: jax.Array, i: jax.Array) -> jax.Array:
    """Bind a value to its round: else XLA takes what depends on no round out of the loop and does it in any case."""
    return jax.lax.optimization_barrier((value, i))[0]


def _is_state(node: Any) -> bool:
    return isinstance(node, nnx.State)


def _shape(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
