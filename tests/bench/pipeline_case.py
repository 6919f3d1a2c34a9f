"""The work that both pipelines do, and how a rank is asked to do it. NumPy alone: both environments have it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

ANSWER = "answer:"  # begins a line that is one
EPSILON = 1e-6  # of the norm
RANKS = 2
CHUNKS = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb-h1": 1}
"""Schedules, and on how many stages per rank they run."""


@dataclass(frozen=True)
class Case:
    """A scale of the input, then residual layers ``h + gelu(norm(h) up) down``; the loss is a sum of squares.

    Args:
        width: of the layers' input and output.
        hidden: of their middle.
        rows: of a microbatch.
        num_layers: of the whole model.
        num_microbatches: in a batch.
    """

    width: int = 512
    hidden: int = 1024
    rows: int = 512
    num_layers: int = 4
    num_microbatches: int = 8

    def layers(self, stage: int, num_stages: int) -> range:
        """Return the layers of a stage."""
        each = self.num_layers // num_stages
        return range(stage * each, (stage + 1) * each)

    def weights(self, layer: int) -> dict[str, np.ndarray]:
        """Return the weights of a layer, ``up [width, hidden]`` and ``down [hidden, width]``."""
        draw = np.random.RandomState(layer + 1)
        shapes = {"up": (self.width, self.hidden), "down": (self.hidden, self.width)}
        return {name: (draw.normal(size=s) * s[0] ** -0.5).astype(np.float32) for name, s in shapes.items()}

    def scale(self) -> np.ndarray:
        """Return the scale of the input ``[width]``."""
        return np.random.RandomState(0).uniform(0.5, 1.5, self.width).astype(np.float32)

    def batch(self) -> dict[str, np.ndarray]:
        """Return the batch, ``x`` and ``target [rows * num_microbatches, width]``."""
        draw = np.random.RandomState(1234)
        return {name: self._normal(draw, self.num_microbatches * self.rows) for name in ("x", "target")}

    def boundary(self) -> np.ndarray:
        """Return numbers in the place of what another rank would send ``[rows, width]``."""
        return self._normal(np.random.RandomState(4321), self.rows)

    def _normal(self, draw: np.random.RandomState, rows: int) -> np.ndarray:
        return draw.normal(size=(rows, self.width)).astype(np.float32)


def serve(questions: dict[str, Callable[..., Any]]) -> None:
    """Answer questions, one JSON object a line, until there are no more; Gloo prints between the answers."""
    for line in sys.stdin:
        asked = json.loads(line)
        print(ANSWER, json.dumps(questions[asked.pop("question")](**asked)), flush=True)
