"""ZeRO: replicas share out what they would otherwise each hold in full."""

from __future__ import annotations

from dataclasses import dataclass

from jaxpp.parallel.rules import Rules


@dataclass(frozen=True)
class Zero1:
    """Split the optimizer state (and the reduced gradients) over axis ``data``, along dim ``embed``.

    Cost: one reduce-scatter of every gradient per microbatch and one all-gather of every updated weight per step over
        ``data``: together ``2 (n-1)/n`` times the bytes of the weights, as plain data parallelism. Where the compiler
        has no reduce-scatter it emits all-reduce and slice. Adam's moments take 1/n of the memory.

    Source: Rajbhandari, Rasley, Ruwase, He, ZeRO, 2020, section 5.1.
    """

    name: str = "zero1"
    axis: str = "data"
    needs: tuple[str, ...] = ("data",)

    def rules(self) -> Rules:
        """Moments' ``embed`` to ``data``."""
        return Rules(moments={"embed": ("data",)})


@dataclass(frozen=True)
class Fsdp:
    """ZeRO-3: split weights, gradients and moments over axis ``fsdp`` along dim ``embed``; gather a block before use.

    With `Data` beside it this is hybrid sharding (HSDP): shards within ``fsdp``, replicas across ``data``.

    Cost: over ``fsdp``, per microbatch, an all-gather of every weight in the forward pass, again in the backward pass
        where the block is recomputed, and one reduce-scatter of every gradient: 2 or 3 times ``(n-1)/n`` the bytes of
        the weights. Where the compiler has no reduce-scatter it emits all-reduce and slice.

    Source: Rajbhandari, Rasley, Ruwase, He, ZeRO, 2020, section 5.3.
    """

    name: str = "fsdp"
    axis: str = "fsdp"
    needs: tuple[str, ...] = ()

    def rules(self) -> Rules:
        """Weights' and moments' ``embed`` to ``fsdp``, and the batch of all activations."""
        batch, embed = {"batch": ("fsdp",)}, {"embed": ("fsdp",)}
        return Rules(weights=embed, moments=embed, inside=batch, residual=batch, cache=batch)
