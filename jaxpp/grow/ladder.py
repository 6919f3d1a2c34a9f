"""The last layers on the ladder: the weights stay, and what their branches read is one branch older."""

from __future__ import annotations

from dataclasses import replace

from jaxpp.grow.step import Step, by_dims
from jaxpp.models import DecoderConfig


def ladder(config: DecoderConfig, *, num_layers: int) -> Step:
    """Put the last layers on the ladder (`jaxpp.nn.ladder`). Does not preserve the function: train it on a little.

    Args:
        config: of the model.
        num_layers: how many, the last of them.

    Raises:
        ValueError: more layers than there are, no more than are on the ladder already, or a model with parallel blocks.

    Source: Zhang et al., Ladder-residual: parallelism-aware architecture for accelerating large model inference with
        communication overlapping, 2025, section 4.3 (the last 16 of 32 layers).
    """
    if num_layers <= config.ladder_layers:
        raise ValueError(
            f"ladder {num_layers}: {config.ladder_layers + 1} to {config.num_layers} are needed, as "
            f"{config.ladder_layers} of the {config.num_layers} layers are on the ladder"
        )
    target = replace(config, ladder_layers=num_layers)
    return by_dims("ladder", config, target, {}, gap=f"{num_layers} layers read the stream one branch earlier")
