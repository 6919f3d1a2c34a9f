"""From sums over a batch to gradients of the mean loss."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxpp.pipeline.pipeline import Pipeline, Sums
from jaxpp.pipeline.transfer import absent


def _divide(sums: list[Any], weight: jax.Array, dtypes: tuple[Any, ...]) -> list[Any]:
    scale = 1.0 / jnp.maximum(weight, 1e-8)
    return [(total * scale).astype(dtype) for total, dtype in zip(sums, dtypes, strict=True)]


_IN_PLACE = jax.jit(_divide, static_argnums=2, donate_argnums=0)
_NARROWED = jax.jit(_divide, static_argnums=2)  # of other dtypes, which cannot take the place of the sums


def mean_gradients(pipeline: Pipeline, sums: Sums) -> list[list[Any]]:
    """Return for each stage the leaves of the gradient of the mean loss, in its weights' dtypes; uses up the sums.

    A leaf that is another's weight is None.
    """
    found = []
    for index, stage in enumerate(pipeline.executor.stages):
        place, rank = pipeline.executor.owner(index), pipeline.executor.schedule.placement[0][index]
        leaves = jax.tree.leaves(stage.params)
        own = [i for i, total in enumerate(sums.gradients[index]) if total is not None]
        totals, dtypes = [sums.gradients[index][i] for i in own], tuple(leaves[i].dtype for i in own)
        if place.is_local:
            divide = _IN_PLACE if all(dtype == jnp.float32 for dtype in dtypes) else _NARROWED
            means = divide(totals, sums.weight[rank], dtypes)
        else:
            kinds = [jax.ShapeDtypeStruct(t.shape, d, sharding=t.sharding) for t, d in zip(totals, dtypes, strict=True)]
            means = absent(kinds)
        by_place = dict(zip(own, means, strict=True))
        found.append([by_place.get(i) for i in range(len(leaves))])
    return found
