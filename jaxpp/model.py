"""The Model protocol: what the trainer, the pipeline, growth and the server ask of a model, whatever its family.

A model is an ``nnx.Module`` whose Params carry arrows. A language model is ``embed -> blocks (stacked) -> head``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import jax
from flax import nnx

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

Batch = Mapping[str, jax.Array]
"""Arrays ``[batch, seq]``: tokens, targets, segments, positions (int32), weights (float32)."""


@runtime_checkable
class Trainable(Protocol):
    """Anything that gives a summed loss on a batch; all that training needs."""

    def loss(self, batch: Any) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """Return the sum of the losses over the batch and the sum of their weights, both fp32 scalars."""
        ...


@runtime_checkable
class Model(Trainable, Protocol):
    """A language model in three parts.

    Attributes:
        blocks: one module with weights stacked over dim ``layers``.
    """

    blocks: nnx.Module

    def embed(self, batch: Batch) -> Float[Array, "batch seq embed"]:
        """Return the residual stream that enters the first block."""
        ...

    def run(
        self, x: Float[Array, "batch seq embed"], batch: Batch, first_layer: Int[Array, ""] | int = 0
    ) -> Float[Array, "batch seq embed"]:
        """Run the blocks that the model holds: all, or in a stage of a pipeline those from `first_layer` on.

        Where one program runs all stages, that number is traced.
        """
        ...

    def loss_from(self, x: Float[Array, "batch seq embed"], batch: Batch) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """Return `loss` from what the last block returned."""
        ...

    def logits(self, x: Float[Array, "batch seq embed"]) -> Float[Array, "batch seq vocab"]:
        """Return the logits of the next token, fp32."""
        ...


@runtime_checkable
class ModelConfig(Protocol):
    """A frozen dataclass that builds a model."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens the model knows."""
        ...

    @property
    def max_positions(self) -> int:
        """Longest sequence the model takes."""
        ...

    def build(self, rngs: nnx.Rngs) -> nnx.Module:
        """Draw a model; called under ``jax.jit`` so that weights are born sharded."""
        ...
