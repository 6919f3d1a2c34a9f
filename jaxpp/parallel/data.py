"""Data parallelism: every replica holds all weights and takes its share of the batch."""

from __future__ import annotations

from dataclasses import dataclass

from jaxpp.parallel.rules import Rules


@dataclass(frozen=True)
class Data:
    """Split the batch over axis ``data``; weights are replicated.

    Cost: one all-reduce of every gradient over ``data`` per microbatch, ``2 (n-1)/n`` times the bytes of the weights.
        The forward pass has no collective but the scalar loss.
    """

    name: str = "data"
    axis: str = "data"
    needs: tuple[str, ...] = ()

    def rules(self) -> Rules:
        """Batch to ``data``, for all activations."""
        batch = {"batch": ("data",)}
        return Rules(inside=batch, residual=batch, cache=batch)
