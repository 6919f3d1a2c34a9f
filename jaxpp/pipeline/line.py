"""Traced programs as lines of steps: what to cut a backward pass at, and how to run the pieces.

A line is a jaxpr with numbered values instead of variables and with its inner calls written out, so that several
traces share one numbering and any subset of steps can be run by itself. Public JAX only: `jax.make_jaxpr` gives the
jaxpr, ``primitive.bind`` runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jax.extend import core

CALLS = {
    "jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
}  # fmt: skip
"""Primitives that only call a jaxpr, and the parameter that holds it."""
REMATS = {"remat2": "jaxpr", "remat": "jaxpr", "checkpoint": "jaxpr"}
"""The same for recomputation; written out, it is no longer kept apart from the first computation."""


@dataclass(frozen=True, eq=False)
class Constant:
    """A value that is known when the line is recorded."""

    value: Any


Atom = int | Constant
"""What a step reads: a numbered value or a constant."""


class Step(NamedTuple):
    """One application of a primitive.

    Args:
        run: from input values to output values, in order.
        inputs: what it reads.
        outputs: the numbers of what it writes.
        equation: where it was read from; None for a piece of a loop.
    """

    run: Callable[[Sequence[Any]], Sequence[Any]]
    inputs: tuple[Atom, ...]
    outputs: tuple[int, ...]
    equation: Any = None

    @property
    def reads(self) -> list[int]:
        """The numbered values that it reads."""
        return [atom for atom in self.inputs if isinstance(atom, int)]


class Numbers:
    """Gives out numbers for values."""

    def __init__(self) -> None:
        """Start at 0."""
        self.count = 0

    def new(self, how_many: int) -> tuple[int, ...]:
        """Return the next numbers."""
        self.count += how_many
        return tuple(range(self.count - how_many, self.count))


def _bind(equation: Any) -> Callable[[Sequence[Any]], Sequence[Any]]:
    def run(values: Sequence[Any]) -> Sequence[Any]:
        bound = equation.primitive.get_bind_params(equation.params)
        functions, parameters = bound if isinstance(bound, tuple) else ((), bound)  # JAX has had both forms
        with equation.ctx.manager:
            result = equation.primitive.bind(*functions, *values, **parameters)
        return result if equation.primitive.multiple_results else (result,)

    return run


def record(
    closed: Any, inputs: Sequence[Atom], numbers: Numbers, through: Mapping[str, str] = CALLS
) -> tuple[list[Step], list[Atom]]:
    """Write a closed jaxpr out as steps.

    Args:
        closed: as `jax.make_jaxpr` returns it.
        inputs: one atom for each of its inputs.
        numbers: of the line that the steps belong to.
        through: calls to write out, with the parameter that holds their jaxpr.

    Returns:
        The steps in order, and one atom for each output.
    """
    steps: list[Step] = []

    def visit(jaxpr: Any, consts: Sequence[Any], arguments: Sequence[Atom]) -> list[Atom]:
        known: dict[Any, Atom] = dict(zip(jaxpr.constvars, map(Constant, consts), strict=True))
        known.update(zip(jaxpr.invars, arguments, strict=True))

        def read(variable: Any) -> Atom:
            return Constant(variable.val) if isinstance(variable, core.Literal) else known[variable]

        for equation in jaxpr.eqns:
            values = tuple(map(read, equation.invars))
            if equation.primitive.name in through:
                inner = equation.params[through[equation.primitive.name]]
                body, own = (inner.jaxpr, inner.consts) if isinstance(inner, core.ClosedJaxpr) else (inner, ())
                known.update(zip(equation.outvars, visit(body, own, values), strict=True))
                continue
            outputs = numbers.new(len(equation.outvars))
            steps.append(Step(_bind(equation), values, outputs, equation))
            known.update(zip(equation.outvars, outputs, strict=True))
        return [read(variable) for variable in jaxpr.outvars]

    return steps, visit(closed.jaxpr, closed.consts, inputs)


def evaluate(steps: Iterable[Step], values: dict[int, Any], outputs: Sequence[Atom]) -> list[Any]:
    """Run steps.

    Args:
        steps: in order.
        values: of the numbers that they read but do not write.
        outputs: what to return.
    """
    values = dict(values)

    def read(atom: Atom) -> Any:
        return values[atom] if isinstance(atom, int) else atom.value

    for step in steps:
        values.update(zip(step.outputs, step.run([read(atom) for atom in step.inputs]), strict=True))
    return [read(atom) for atom in outputs]


def needed(steps: Sequence[Step], outputs: Iterable[Atom]) -> list[Step]:
    """Return the steps that the outputs come from, in order; a step that prints or the like counts too."""
    wanted = {atom for atom in outputs if isinstance(atom, int)}
    kept = []
    for step in reversed(steps):
        if wanted.intersection(step.outputs) or (step.equation is not None and step.equation.effects):
            kept.append(step)
            wanted.update(step.reads)
    return kept[::-1]


def written(steps: Iterable[Step]) -> set[int]:
    """Return the numbers that steps write."""
    return {number for step in steps for number in step.outputs}


def missing(steps: Sequence[Step], outputs: Iterable[Atom]) -> list[int]:
    """Return, in order and once each, the numbers that steps and outputs read but the steps do not write."""
    own = written(steps)
    reads = [number for step in steps for number in step.reads]
    reads += [atom for atom in outputs if isinstance(atom, int)]
    return [number for number in dict.fromkeys(reads) if number not in own]
