"""Ladder residual: a branch reads the stream as it was one branch earlier, so that its all-reduce may run meanwhile.

Branches are counted through the depth (attention, mlp, attention ...). The standard wiring is
``x_i = x_(i-1) + f_i(norm_i(x_(i-1)))``, the ladder's ``x_i = x_(i-1) + f_i(norm_i(x_(i-2)))`` with both x_0 and x_-1 the
embedding: what is added to is always the newest stream, and only what a branch reads is stale. Split over axis
``tensor``, the products of branch i + 1 do not wait for the all-reduce behind branch i; those of branch i + 2 do.

To use that, a compiler must be kept from undoing it. Two all-reduces that depend on each other no more are merged by
XLA's combiner, after which both are late: on GPU set
``XLA_FLAGS="--xla_gpu_all_reduce_combine_threshold_bytes=1 --xla_gpu_enable_latency_hiding_scheduler=true"``; on CPU,
where nothing overlaps anyway, ``compile(compiler_options={"xla_disable_hlo_passes": "cpu-all-reduce-combiner"})`` shows
them apart. A loop over layers (``plan.layers = "scan"``) waits for the mlp's all-reduce where an iteration ends, so that
only the attention's is hidden: ``plan.layers = "unroll"`` hides both. Decoding always runs layers one by one.

Cost: as many all-reduces of as many bytes as the standard wiring, two a layer; one more live stream,
    ``batch x seq x embed``; where layers are scanned and some are standard, a copy of the stacked weights in each pass.

Source: Zhang, Mishra, Zhou, Dao and others, Ladder-residual: parallelism-aware architecture for accelerating large model
    inference with communication overlapping, 2025, section 3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax

if TYPE_CHECKING:
    from jaxtyping import Array, Float


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Streams:
    """The residual stream before and after the last branch.

    Args:
        newest: ``x_i``.
        before: ``x_(i-1)``; before the first branch it is the embedding too.
    """

    newest: Float[Array, "batch seq embed"]
    before: Float[Array, "batch seq embed"]

    def through(self, branch: Callable[[jax.Array], jax.Array], *, ladder: bool) -> Streams:
        """Add a branch, which reads the stream `before` on the ladder, and the `newest` otherwise."""
        return Streams(self.newest + branch(self.before if ladder else self.newest), self.newest)
