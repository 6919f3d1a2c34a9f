"""A batch cut into microbatches, each leaf laid out on the ranks that read it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxpp.pipeline.executor import Executor, Held
from jaxpp.pipeline.operations import StageOperations


def check_batch(executor: Executor, batch: Any) -> int:
    """Return the rows of a microbatch.

    Raises:
        ValueError: leaves of different lengths, or one that the microbatches do not divide.
    """
    lengths = sorted({leaf.shape[0] for leaf in jax.tree.leaves(batch)})
    count = executor.schedule.num_microbatches
    if len(lengths) != 1:
        raise ValueError(
            f"leaves of the batch have {' and '.join(map(str, lengths)) or 'no'} rows; one number is needed"
        )
    size = lengths[0]
    if size % count or not size:
        low, high = size // count * count, (size // count + 1) * count
        divisors = ", ".join(str(k) for k in range(1, size + 1) if size % k == 0)
        sizes = f"sizes {low} or {high} would" if low else f"size {high} would"
        raise ValueError(
            f"a batch of {size} rows does not split into {count} microbatches; {sizes}, or {divisors} of them"
        )
    return size // count


def microbatch_shapes(executor: Executor, batch: Any) -> Any:
    """Return the shapes of one microbatch."""
    rows = check_batch(executor, batch)
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), jax.dtypes.canonicalize_dtype(x.dtype)), batch
    )


def lay_out(
    executor: Executor, operations: Mapping[Held, StageOperations], batch: Any
) -> dict[tuple[int, int], dict[int, jax.Array]]:
    """Put every microbatch onto the ranks that read it.

    Args:
        executor: whose ranks and microbatches.
        operations: tell which leaves a rank reads.
        batch: host arrays ``[batch, ...]``, the same on every process; microbatch j has rows ``j * rows`` and on.

    Returns:
        For each local rank and microbatch, the leaves by their place.
    """
    rows, leaves = check_batch(executor, batch), [np.asarray(leaf) for leaf in jax.tree.leaves(batch)]
    used: dict[int, set[int]] = {}
    for (_, rank), own in operations.items():
        used.setdefault(rank, set()).update(own.batch_used)
    directions = executor.schedule.directions
    parts: dict[tuple[int, int], dict[int, jax.Array]] = {}
    for rank, places in used.items():
        if not (place := executor.places[rank]).is_local:
            continue
        for j in range(executor.schedule.num_microbatches):
            if directions and rank not in executor.schedule.placement[directions[j]]:
                continue
            cut = {i: leaves[i][j * rows : (j + 1) * rows] for i in sorted(places)}
            parts[rank, j] = {i: place.put(x, place.sharding(place.batch_spec(x.shape))) for i, x in cut.items()}
    return parts
