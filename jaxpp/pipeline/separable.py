"""Whether an optimizer may be run stage by stage: it may where each weight's update comes from its own gradient."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxpp import tree
from jaxpp.pipeline.line import CALLS, REMATS, Numbers, record


def check_separable(optimizer: optax.GradientTransformation, params: Any) -> None:
    """Refuse an optimizer that mixes gradients of several weights: run stage by stage, it would give other updates.

    Read off a trace, so nothing is computed. What an optimizer takes as ``grad_norm``, the norm over all stages, is no
    mixture.

    Args:
        optimizer: an optax transformation.
        params: weights as shapes.

    Raises:
        ValueError: a weight whose update depends on the gradient of another; both are named.
    """
    rule, state = optax.with_extra_args_support(optimizer), jax.eval_shape(optimizer.init, params)
    norm = jax.ShapeDtypeStruct((), jnp.float32)
    closed = jax.make_jaxpr(lambda g, s, p, n: rule.update(g, s, p, grad_norm=n)[0])(params, state, params, norm)
    numbers, paths = Numbers(), list(tree.named_leaves(params))
    inputs = numbers.new(len(closed.jaxpr.invars))
    steps, outputs = record(closed, inputs, numbers, {**CALLS, **REMATS})
    behind = {number: frozenset((place,)) for place, number in enumerate(inputs[: len(paths)])}
    for step in steps:
        own = frozenset().union(*(behind.get(number, frozenset()) for number in step.reads))
        behind.update((number, own) for number in step.outputs)
    for place, number in enumerate(outputs):
        others = behind.get(number, frozenset()) - {place} if isinstance(number, int) else ()
        if others:
            raise ValueError(
                f"the optimizer changes {paths[place]} by the gradient of {paths[min(others)]} too, which another "
                "stage may hold; clip with jaxpp.pipeline.clip_by_norm, which takes the norm over all stages, in place "
                "of optax.clip_by_global_norm"
            )
