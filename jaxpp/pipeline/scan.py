"""A loop of a backward pass as two: one for the gradient that flows on, one for what only weights need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core

from jaxpp.pipeline.line import CALLS, REMATS, Atom, Numbers, Step, evaluate, missing, needed, record, written


class _Body:
    """A loop's body as steps, with its values sorted by role."""

    def __init__(self, step: Step, numbers: Numbers):
        parameters = step.equation.params
        body = parameters["jaxpr"]  # closed or not, as the version of JAX has it
        closed = body if isinstance(body, core.ClosedJaxpr) else core.ClosedJaxpr(body, ())
        consts, carries = _roles(step.equation, closed.jaxpr)
        inner = numbers.new(len(closed.jaxpr.invars))
        self.steps, out = record(closed, inner, numbers, {**CALLS, **REMATS})
        self.options = {name: parameters[name] for name in ("length", "reverse", "unroll")}
        self.consts = dict(zip(inner[:consts], step.inputs[:consts], strict=True))
        self.starts = dict(zip(inner[consts : consts + carries], step.inputs[consts : consts + carries], strict=True))
        self.slices = dict(zip(inner[consts + carries :], step.inputs[consts + carries :], strict=True))
        self.ends: dict[int, Atom] = dict(zip(self.starts, out[:carries], strict=True))
        self.results = dict(zip(self.starts, step.outputs[:carries], strict=True))
        self.pieces: dict[int, Atom] = dict(zip(step.outputs[carries:], out[carries:], strict=True))

    def behind(self, outputs: set[int]) -> tuple[list[Step], list[int]]:
        """Return the steps and the carries that some of the loop's outputs come from."""
        carries = {carry for carry, result in self.results.items() if result in outputs}
        ys = [self.pieces[output] for output in outputs if output in self.pieces]
        while True:
            steps = needed(self.steps, [*ys, *(self.ends[carry] for carry in carries)])
            read = set(missing(steps, [*ys, *(self.ends[carry] for carry in carries)]))
            more = read.intersection(self.starts) - carries
            if not more:
                return steps, [carry for carry in self.starts if carry in carries]
            carries |= more

    def loop(self, steps: Sequence[Step], carries: Sequence[int], ys: dict[int, Atom], extra: dict[int, int]) -> Step:
        """Return a loop over some steps, carries and outputs; `extra`: numbers of the body to stacked values."""
        slices = {**self.slices, **extra}
        ends = [self.ends[carry] for carry in carries]
        read = missing(steps, [*ends, *ys.values()])
        consts, sliced = ([n for n in read if n in known] for known in (self.consts, slices))
        inputs = [self.consts[n] for n in consts] + [self.starts[n] for n in carries] + [slices[n] for n in sliced]
        outputs = [self.results[carry] for carry in carries] + list(ys)
        run = self._runner(steps, consts, carries, sliced, ends, list(ys.values()))
        return Step(run, tuple(inputs), tuple(outputs))

    def _runner(
        self, steps: Sequence[Step], consts: Sequence[int], carries: Sequence[int], sliced: Sequence[int],
        ends: Sequence[Atom], ys: Sequence[Atom],
    ) -> Callable[[Sequence[Any]], Sequence[Any]]:  # fmt: skip
        def run(values: Sequence[Any]) -> Sequence[Any]:
            known = dict(zip(consts, values, strict=False))
            starts = tuple(values[len(consts) : len(consts) + len(carries)])

            def body(carry: Any, own: Any) -> tuple[Any, Any]:
                names = {**known, **dict(zip(carries, carry, strict=True)), **dict(zip(sliced, own, strict=True))}
                out = evaluate(steps, names, [*ends, *ys])
                return tuple(out[: len(ends)]), tuple(out[len(ends) :])

            stacked = tuple(values[len(consts) + len(carries) :])
            carry, pieces = jax.lax.scan(body, starts, stacked, **self.options)
            return [*carry, *pieces]

        return run


def _roles(equation: Any, body: Any) -> tuple[int, int]:
    """Count constants and carries by their ranks, whatever the version of JAX calls them: slices lose an axis."""
    sliced = sum(outer.aval.ndim != inner.aval.ndim for outer, inner in zip(equation.invars, body.invars, strict=True))
    stacked = sum(
        outer.aval.ndim != inner.aval.ndim for outer, inner in zip(equation.outvars, body.outvars, strict=True)
    )
    carries = len(body.outvars) - stacked
    return len(body.invars) - carries - sliced, carries


def split_scan(step: Step, now: set[int], later: set[int], numbers: Numbers) -> tuple[Step, Step]:
    """Split a loop in two, of which the second repeats nothing of the first.

    What the second reads of the first is stacked over the rounds: an output more of the first loop.

    Args:
        step: a `scan`.
        now: outputs that the first loop gives.
        later: outputs that the second gives.
        numbers: of the line.
    """
    body = _Body(step, numbers)
    first, carries = body.behind(now)
    steps, others = body.behind(later)
    own = written(first)
    rest = [one for one in steps if not own.intersection(one.outputs)]
    others = [carry for carry in others if carry not in carries]
    ys = {output: atom for output, atom in body.pieces.items() if output in later}
    read = missing(rest, [*(body.ends[carry] for carry in others), *ys.values()])
    crossing = [number for number in read if number in own or number in carries]
    stacked = dict(zip(crossing, numbers.new(len(crossing)), strict=True))
    given: dict[int, Atom] = {output: atom for output, atom in body.pieces.items() if output in now}
    given.update({outside: inside for inside, outside in stacked.items()})
    return body.loop(first, carries, given, {}), body.loop(rest, others, ys, stacked)
