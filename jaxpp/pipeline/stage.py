"""What a stage of a pipeline is: a pure function and its weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxpp import tree

StageFunction = Callable[[Any, Any, Any, Any], Any]
"""``function(params, x, microbatch, key) -> y``."""


@dataclass(frozen=True)
class Stage:
    """One piece of a model.

    ``y = function(params, x, microbatch, key)``: `x` is what the stage before returned (None on the first), any pytree;
    `microbatch` is this part of the batch, the same for every stage; `key` is a PRNG key for this step, microbatch and
    stage (None where the run was given none). The last stage returns ``(sum of losses, sum of weights)``. Shapes may
    differ from stage to stage.

    Args:
        function: pure, traced once.
        params: its weights, any pytree of floating arrays (or their shapes).
        entry: of the first stage alone: ``x = entry(params, microbatch)`` runs before `function`. Where the backward
            pass is split, `function`'s share of it is divided as in any other stage, and that of `entry` counts as
            weight gradient.
    """

    function: StageFunction
    params: Any
    entry: Callable[[Any, Any], Any] | None = None


def as_stages(stages: Sequence[Any]) -> tuple[Stage, ...]:
    """Return stages, given as such or as pairs ``(function, params)``.

    Raises:
        ValueError: an entry that is not on the first stage, or weights that are not floating.
    """
    known = tuple(one if isinstance(one, Stage) else Stage(*one) for one in stages)
    for index, stage in enumerate(known):
        if stage.entry is not None and index:
            raise ValueError(f"stage {index} has an entry; only stage 0 reads the microbatch without an x")
        for path, leaf in tree.named_leaves(stage.params).items():
            if not jnp.issubdtype(leaf.dtype, jnp.floating):
                raise ValueError(
                    f"stage {index}: weight {path} is {leaf.dtype}; floating weights alone are trained, "
                    "close over the others or put them into the batch"
                )
    return known


def stage_key(key: jax.Array, step: Any, microbatch: Any, stage: Any) -> jax.Array:
    """Return the key that a stage gets for a microbatch, from the run's key; it depends on nothing of the schedule."""
    for number in (step, microbatch, stage):
        key = jax.random.fold_in(key, number)
    return key
