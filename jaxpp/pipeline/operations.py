"""One stage on one place: a jitted function for each of its operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxpp.pipeline import split
from jaxpp.pipeline.line import Atom, evaluate, needed
from jaxpp.pipeline.place import Place
from jaxpp.pipeline.split import Piece
from jaxpp.pipeline.traced import Traced


class Operation(NamedTuple):
    """A compiled piece.

    Args:
        call: jitted; what it adds to comes first, and is donated where it is the sums of gradients.
        inputs: the numbers of its other arguments.
        kept: the numbers of the last values that it returns.
    """

    call: Callable[..., Any]
    inputs: tuple[int, ...]
    kept: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class StageOperations:
    """The operations of a stage, each compiled when it first runs.

    Args:
        name: of the stage's function, in profiles.
        traced: its steps.
        place: where it runs.
        is_last: whether it returns losses.
        kinds: of backward passes that it will run: ``D``, ``B`` or both.
        x_specs: how each leaf of x is split.
        sums: the summed gradients of its weights, as shapes with shardings.
    """

    name: str
    traced: Traced
    place: Place
    is_last: bool
    kinds: frozenset[str]
    x_specs: tuple[PartitionSpec, ...]
    sums: tuple[jax.ShapeDtypeStruct, ...]

    @cached_property
    def y(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """What it returns, each leaf split as the stage says by a sharding constraint, else along its batch."""
        made = {number: step for step in self.traced.forward for number in step.outputs}

        def one(atom: Atom, leaf: Any) -> jax.ShapeDtypeStruct:
            equation = made[atom].equation if isinstance(atom, int) and atom in made else None
            asked = equation.params.get("sharding") if equation is not None else None
            own = equation is not None and equation.primitive.name == "sharding_constraint"
            spec = asked.spec if own and isinstance(asked, NamedSharding) else self.place.batch_spec(leaf.shape)
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=self.place.sharding(spec))

        return tuple(map(one, self.traced.y, jax.tree.leaves(self.traced.y_shape)))

    @property
    def y_specs(self) -> tuple[PartitionSpec, ...]:
        """How each leaf of y is split."""
        return tuple(leaf.sharding.spec for leaf in self.y)  # type: ignore[union-attr]

    @property
    def flow(self) -> list[NamedSharding]:
        """Shardings of the gradients of x."""
        specs = dict(zip(self.traced.x, self.x_specs, strict=True))
        return [self.place.sharding(specs[number]) for number in self.traced.flowing]

    @cached_property
    def _fused(self) -> Piece:
        return split.fused(self.traced)

    @cached_property
    def _split(self) -> tuple[Piece, Piece]:
        return split.split(self.traced)

    @cached_property
    def _forward(self) -> Piece:
        later = ([self._fused] if "D" in self.kinds else []) + (list(self._split) if "B" in self.kinds else [])
        return split.forward(self.traced, later)

    @cached_property
    def after_forward(self) -> dict[str, frozenset[int]]:
        """For each kind of backward pass, what of a microbatch it takes."""
        found = {}
        if "D" in self.kinds:
            found["D"] = frozenset(self._fused.inputs)
        if "B" in self.kinds:
            found["B"] = frozenset(number for piece in self._split for number in piece.inputs)
        return found

    @cached_property
    def batch_used(self) -> frozenset[int]:
        """Places, among the leaves of a microbatch, of those that some operation takes."""
        taken = {*self._forward.inputs}.union(*self.after_forward.values())
        return frozenset(place for place, number in enumerate(self.traced.batch) if number in taken)

    def _jit(self, kind: str, run: Callable[..., Any], out_shardings: Any, donate: bool = False) -> Callable[..., Any]:
        run.__name__ = f"{self.name}_{kind}"
        return jax.jit(run, donate_argnums=0 if donate else (), out_shardings=out_shardings)

    def _forwards(self, name: str, kept: tuple[int, ...]) -> Operation:
        piece = Piece(tuple(needed(self._forward.steps, (*self.traced.y, *kept))), self.traced.y, kept)
        num_y = len(piece.outputs)

        def run(totals: Any, *values: Any) -> Any:
            out = evaluate(piece.steps, dict(zip(piece.inputs, values, strict=True)), (*piece.outputs, *kept))
            y = [t + v for t, v in zip(totals, out, strict=False)] if self.is_last else out[:num_y]
            return y, out[num_y:]

        whole = self.place.layout.replicated()
        y = [whole] * num_y if self.is_last else [leaf.sharding for leaf in self.y]
        return Operation(self._jit(name, run, (y, None)), piece.inputs, kept)

    @cached_property
    def forward(self) -> Operation:
        """F: ``(totals, *inputs) -> (y, kept)``; the last stage adds its losses to the totals and returns these."""
        given = () if self.is_last else self.traced.y  # returned already
        return self._forwards("forward", tuple(number for number in self._forward.kept if number not in given))

    @cached_property
    def forward_alone(self) -> Operation:
        """F of a microbatch that is recomputed: the same, and nothing is kept."""
        return self._forwards("forward_alone", ())

    @cached_property
    def recompute(self) -> Operation:
        """R: ``(None, *inputs) -> kept``."""
        kept = self._forward.kept
        piece = Piece(tuple(needed(self._forward.steps, kept)), (), kept)

        def run(_: None, *values: Any) -> Any:
            return evaluate(piece.steps, dict(zip(piece.inputs, values, strict=True)), kept)

        return Operation(self._jit("recompute", run, None), piece.inputs, kept)

    @cached_property
    def fused(self) -> Operation:
        """D: ``(sums, *inputs) -> (sums, gradients of x)``."""
        piece, num_flow = self._fused, len(self.traced.flowing)

        def run(sums: Any, *values: Any) -> Any:
            out = evaluate(piece.steps, dict(zip(piece.inputs, values, strict=True)), piece.outputs)
            return _added(sums, out[num_flow:]), out[:num_flow]

        goal = ([leaf.sharding for leaf in self.sums], self.flow)
        return Operation(self._jit("backward", run, goal, donate=True), piece.inputs)

    @cached_property
    def input_gradient(self) -> Operation:
        """B: ``(None, *inputs) -> (gradients of x, kept)``."""
        piece, num_flow = self._split[0], len(self.traced.flowing)

        def run(_: None, *values: Any) -> Any:
            out = evaluate(piece.steps, dict(zip(piece.inputs, values, strict=True)), (*piece.outputs, *piece.kept))
            return out[:num_flow], out[num_flow:]

        return Operation(self._jit("input_gradient", run, (self.flow, None)), piece.inputs, piece.kept)

    @cached_property
    def weight_gradient(self) -> Operation:
        """W: ``(sums, *inputs) -> sums``."""
        piece = self._split[1]

        def run(sums: Any, *values: Any) -> Any:
            return _added(sums, evaluate(piece.steps, dict(zip(piece.inputs, values, strict=True)), piece.outputs))

        goal = [leaf.sharding for leaf in self.sums]
        return Operation(self._jit("weight_gradient", run, goal, donate=True), piece.inputs)

    @cached_property
    def zeros(self) -> Callable[[], list[jax.Array]]:
        """Jitted: sums to begin with."""
        goal = [leaf.sharding for leaf in self.sums]
        return jax.jit(lambda: [jnp.zeros(leaf.shape, leaf.dtype) for leaf in self.sums], out_shardings=goal)


def _added(sums: Sequence[jax.Array], gradients: Sequence[jax.Array]) -> list[jax.Array]:
    return [total + gradient.astype(total.dtype) for total, gradient in zip(sums, gradients, strict=True)]
