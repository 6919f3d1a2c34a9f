"""``costs.yaml``: what the layers of a model cost on some device, written by a profile or by hand.

::

    measured: {device: "8 x H100", command: "how it was measured"}
    layers:                                  # of one microbatch, in the order of the model
      - {repeat: 32, forward_s: 0.0021, input_gradient_s: 0.0022, weight_gradient_s: 0.0020,
         activation_bytes: 150994944, weight_bytes: 404750336}
    embedding: {forward_s: 0.0001, input_gradient_s: 0.0, weight_gradient_s: 0.0002, weight_bytes: 262144000}
    head: {forward_s: 0.0014, input_gradient_s: 0.0014, weight_gradient_s: 0.0014, weight_bytes: 262144000}
    transfer: {latency_s: 0.00001, bytes_per_s: 4.0e+10, bytes: 33554432}
    state_per_weight: 4.0                    # weights, gradients and the optimizer's state over weights
"""

from __future__ import annotations

from pathlib import Path

from jaxpp import config
from jaxpp.schedule.layer_costs import ModelCosts


def read_costs(path: str | Path) -> ModelCosts:
    """Read and check a costs file.

    Raises:
        ValueError: it is missing, or holds what is no costs; the message names the file and the key.
    """
    values = config.read(path)
    try:
        return config.build(ModelCosts, values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def write_costs(path: str | Path, costs: ModelCosts) -> None:
    """Write a costs file that `read_costs` gives back."""
    Path(path).write_text(config.dump(costs), encoding="utf-8")
