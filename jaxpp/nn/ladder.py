"""Ladder residual: a branch reads the stream as it was one branch earlier, so that its all-reduce may run meanwhile.

Branches are counted through the depth (attention, mlp, attention ...). The standard wiring is
``x_i = x_(i-1) + f_i(norm_i(x_(i-1)))``, the ladder's ``x_i = x_(i-1) + f_i(norm_i(x_(i-2)))``, where x_0 and x_-1 are
the embedding: what is added to is always the newest stream, and only what a branch reads is stale. Split over axis
``tensor``, the products of branch i + 1 do not wait for the all-reduce behind branch i; those of branch i + 2 do.

To use that, a compiler must be kept from undoing it. All-reduces that do not depend on each other are merged by XLA's
combiner, after which both are late. On GPU set
``XLA_FLAGS="--xla_gpu_all_reduce_combine_threshold_bytes=1 --xla_gpu_enable_latency_hiding_scheduler=true"``; on CPU,
where nothing overlaps anyway, ``compile(compiler_options={"xla_disable_hlo_passes": "cpu-all-reduce-combiner"})`` shows
them apart. A loop over layers (``plan.layers = "scan"``) waits for the mlp's all-reduce where an iteration ends, so
that only the attention's is hidden; ``plan.layers = "unroll"`` leaves both free. Decoding runs layers one by one.

Two streams go from layer to layer, so that a model with ladder layers is not cut into pipeline stages, which hand one
on: such a plan is refused.

Cost: as many all-reduces of as many bytes as the standard wiring, two a layer; one more live stream,
    ``batch x seq x embed``; where layers are scanned and some are standard, a copy of the stacked weights each pass.

Source: Zhang et al., Ladder-residual: parallelism-aware architecture for accelerating large model inference with
    communication overlapping, 2025, section 3.
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
    """The residual stream after the last branch, and before it.

    Args:
        newest: ``x_i``.
        before: ``x_(i-1)``; before the first branch it is the embedding too.
    """

    newest: Float[Array, "batch seq embed"]
    before: Float[Array, "batch seq embed"]

    def through(self, branch: Callable[[jax.Array], jax.Array], *, ladder: bool) -> Streams:
        """Add what a branch makes of the stream `before`, on the ladder, or of the `newest`."""
        return Streams(self.newest + branch(self.before if ladder else self.newest), self.newest)
