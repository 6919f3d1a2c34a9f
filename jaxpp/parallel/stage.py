"""Pipeline parallelism as a layout: each rank of axis ``stage`` holds an equal share of the layers."""

from __future__ import annotations

from dataclasses import dataclass

from jaxpp.parallel.rules import Rules


@dataclass(frozen=True)
class Stage:
    """Split stacked blocks along ``layers`` over axis ``stage``; outside of the blocks the batch is split over it.

    Blocks run as a pipeline (`jaxpp.pipeline.spmd`); embedding and head, which every rank holds, run on a share of the
    batch each, so no rank repeats another's work.

    Cost: per microbatch and boundary one permute of ``batch x seq x embed`` forward and one backward; per step one
        gather of the embedded batch over ``stage``, one reduction of the last hidden states, and their transposes; the
        gradients of embedding and head are reduced over ``stage`` as over ``data``.

    Source: Huang et al., GPipe, 2019, section 2.2.
    """

    name: str = "stage"
    axis: str = "stage"
    needs: tuple[str, ...] = ()

    def rules(self) -> Rules:
        """Weights' and moments' ``layers`` to ``stage``, and the batch of activations outside of the pipeline."""
        layers, batch = {"layers": ("stage",)}, {"batch": ("stage",)}
        return Rules(weights=layers, moments=layers, inside=batch, residual=batch)
