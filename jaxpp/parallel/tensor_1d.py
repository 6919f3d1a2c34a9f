"""Megatron's tensor parallelism: split heads, mlp and vocabulary over one axis."""

from __future__ import annotations

from dataclasses import dataclass

from jaxpp.parallel.rules import Rules


@dataclass(frozen=True)
class Tensor1D:
    """Split dims ``heads kv_heads mlp vocab`` of weights and activations over axis ``tensor``.

    A weight that *writes* such a dim needs no communication; one that *reads* it leaves partial sums.

    Cost: over ``tensor``, per layer and microbatch, 2 all-reduces of ``batch x seq x embed`` in the forward pass (after
        attention and after the mlp) and 2 in the backward pass; the embedding adds one forward, the head one backward,
        and the loss a few of ``batch x seq``.

    Source: Shoeybi, Patwary, Puri, LeGresley, Casper, Catanzaro, Megatron-LM, 2019, section 3.
    """

    name: str = "tensor"
    axis: str = "tensor"
    needs: tuple[str, ...] = ()

    def rules(self) -> Rules:
        """``heads kv_heads mlp vocab`` to ``tensor`` everywhere."""
        split = {dim: ("tensor",) for dim in ("heads", "kv_heads", "mlp", "vocab")}
        heads = {dim: split[dim] for dim in ("heads", "kv_heads")}
        return Rules(weights=split, compute=split, moments=split, inside=split, cache=heads)
