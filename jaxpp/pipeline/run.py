"""Loss and gradients of a list of functions by a schedule: the whole of a pipeline in one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxpp.parallel import Plan
from jaxpp.pipeline.mean import mean_gradients
from jaxpp.pipeline.pipeline import Use, make_pipeline
from jaxpp.pipeline.place import Place
from jaxpp.pipeline.stage import as_stages
from jaxpp.pipeline.transfer import move
from jaxpp.schedule import Schedule


@dataclass(frozen=True)
class Result:
    """What a batch gave.

    Args:
        loss: mean loss: the sum of losses over the sum of weights, fp32.
        weight: the sum of weights, fp32.
        gradients: of the mean loss, one tree for each stage, like its weights and on its devices; every use of a tied
            weight has the gradient of all of them.
        peak_activations: for each rank, the most activations (one stage, one microbatch) held at once.
    """

    loss: jax.Array
    weight: jax.Array
    gradients: tuple[Any, ...]
    peak_activations: tuple[int, ...]


def run(
    stages: Sequence[Any],
    schedule: Schedule,
    batch: Any,
    mesh: str | Plan | Mesh | Sequence[Place] | None = None,
    *,
    key: jax.Array | None = None,
    tied: Sequence[Sequence[Use]] = (),
) -> Result:
    """Run stages by a schedule and return the loss and the gradients of one batch.

    Each stage is ``y = function(params, x, microbatch, key)``; see `Stage`. The first gets x = None, the last returns
    (sum of losses, sum of weights).

    Args:
        stages: `Stage`s or pairs ``(function, params)``, one for each stage of the schedule.
        schedule: from `jaxpp.schedule.build`.
        batch: tree of arrays ``[batch, ...]``, cut into the schedule's microbatches.
        mesh: with an axis ``stage`` as long as the schedule has ranks, e.g. ``"stage:2 data:2"``; None: one device for
            each rank.
        key: PRNG key; stage s gets ``stage_key(key, 0, microbatch, s)``.
        tied: groups of uses ``(stage, path)`` of one weight, e.g. ``[((0, "table"), (3, "table"))]``.

    Returns:
        Loss, weight, gradients and peak activations: those of ``jax.grad`` of the stages one after another.

    Raises:
        ValueError: numbers that do not fit together; what would do is named.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxpp.schedule import build
        >>> first = lambda w, x, batch, key: batch * w
        >>> last = lambda w, x, batch, key: (jnp.sum(x * w), jnp.float32(x.size))
        >>> stages = [(first, jnp.float32(2)), (last, jnp.float32(3))]
        >>> result = run(stages, build("1f1b", ranks=2, microbatches=2), jnp.ones(4))
        >>> float(result.loss), [float(g) for g in result.gradients]
        (6.0, [3.0, 2.0])
    """
    known = as_stages(stages)
    pipeline = make_pipeline(known, schedule, mesh, tied)
    sums = pipeline.sums(pipeline.lay_out([stage.params for stage in known], share=True), batch, key)
    means = mean_gradients(pipeline, sums)
    for (stage, leaf), (owner, at) in pipeline.borrowed.items():
        means[stage][leaf] = move([means[owner][at]], pipeline.executor.owner(stage))[0]
    gradients = tuple(
        jax.tree.unflatten(jax.tree.structure(stage.params), own) for stage, own in zip(known, means, strict=True)
    )
    here = pipeline.here
    loss, weight = sums.loss[here], sums.weight[here]
    return Result(loss / jnp.maximum(weight, 1e-8), weight, gradients, sums.peak_activations)
