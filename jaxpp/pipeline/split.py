"""The pieces of a stage: forward, fused backward, and the backward pass split into input and weight gradient.

The split repeats nothing: B holds every step that the gradient of x comes from, W the steps that only the weights'
gradients come from, and B hands W the values that W reads of it. What is computed from weights alone (a cast, a
transposition) is not kept between operations but computed anew in each.

Source: Qi, Wan, Huang, Lin, Zero Bubble Pipeline Parallelism, 2023, section 2 (what B and W are).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jaxpp.pipeline.line import Atom, Step, missing, needed, written
from jaxpp.pipeline.scan import split_scan
from jaxpp.pipeline.traced import Backward, Traced


@dataclass(frozen=True)
class Piece:
    """Steps that run as one operation.

    Args:
        steps: in order.
        outputs: what they return.
        kept: numbers that they return besides, for operations to come.
    """

    steps: tuple[Step, ...]
    outputs: tuple[Atom, ...]
    kept: tuple[int, ...] = ()

    @property
    def inputs(self) -> tuple[int, ...]:
        """The numbers that it takes."""
        return tuple(missing(self.steps, (*self.outputs, *self.kept)))


def forward(traced: Traced, later: Iterable[Piece]) -> Piece:
    """Return the forward pass, which keeps what later pieces take of it."""
    own = written(traced.forward)
    kept = tuple(dict.fromkeys(number for piece in later for number in piece.inputs if number in own))
    return Piece(tuple(needed(traced.forward, (*traced.y, *kept))), traced.y, kept)


def fused(traced: Traced) -> Piece:
    """Return the whole backward pass: gradients of x, then of the weights."""
    backward = traced.fused
    outputs = (*backward.flow, *backward.weights)
    return _piece(traced, backward, needed(backward.steps, outputs), outputs)


def split(traced: Traced) -> tuple[Piece, Piece]:
    """Return B, which keeps what W takes of it, and W."""
    backward = traced.inlined
    chain, rest = _divide(traced, backward)
    weights = _piece(traced, backward, rest, backward.weights)
    own = written(chain)
    kept = [number for number in weights.inputs if number in own]
    return _piece(traced, backward, chain, backward.flow, kept), weights


def _divide(traced: Traced, backward: Backward) -> tuple[list[Step], list[Step]]:
    wanted = {atom for atom in (*backward.chain, *backward.flow) if isinstance(atom, int)}
    asked = {atom for atom in backward.weights if isinstance(atom, int)}
    chain: list[Step] = []
    rest: list[Step] = []
    for step in reversed(backward.steps):
        hit = wanted.intersection(step.outputs)
        others = asked.intersection(step.outputs) - hit
        if hit and others and step.equation is not None and step.equation.primitive.name == "scan":
            now, later = split_scan(step, hit, others, traced.numbers)
            chain.append(now)
            rest.append(later)
            asked.update(later.reads)
        elif hit:
            chain.append(step)
        elif others:
            rest.append(step)
            asked.update(step.reads)
        if hit:
            wanted.update(chain[-1].reads)
    return chain[::-1], rest[::-1]


def _piece(
    traced: Traced, backward: Backward, steps: Sequence[Step], outputs: Sequence[Atom], kept: Sequence[int] = ()
) -> Piece:
    """Add to steps what they read that comes from weights alone."""
    cheap = traced.of_weights(backward.steps)
    makers = [step for step in (*traced.forward, *backward.steps) if cheap.intersection(step.outputs)]
    own = written(steps)
    wanted = [n for n in missing(steps, (*outputs, *kept)) if n in cheap]
    first = [step for step in needed(makers, wanted) if not own.intersection(step.outputs)]
    return Piece((*first, *steps), tuple(outputs), tuple(kept))
