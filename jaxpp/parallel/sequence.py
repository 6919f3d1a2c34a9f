"""Sequence-parallel regions: between tensor-parallel regions, split the sequence."""

from __future__ import annotations

from dataclasses import dataclass

from jaxpp.parallel.rules import Rules


@dataclass(frozen=True)
class Sequence:
    """Split ``seq`` of the residual stream over axis ``tensor``: norms and residual sums work on 1/n of the tokens.

    Cost: each all-reduce of `Tensor1D` becomes a reduce-scatter (leaving a block's inside) and an all-gather (entering
        it), of the same bytes together; the residual stream takes 1/n of the memory. Where the compiler has no
        reduce-scatter it emits all-reduce and slice.

    Source: Korthikanti, Casper, Lym, McAfee, Andersch, Shoeybi, Catanzaro, Reducing Activation Recomputation in Large
        Transformer Models, 2022, section 4.2.
    """

    name: str = "sequence"
    axis: str = "tensor"
    needs: tuple[str, ...] = ("tensor",)

    def rules(self) -> Rules:
        """The residual stream's ``seq`` to ``tensor``."""
        return Rules(residual={"seq": ("tensor",)})
