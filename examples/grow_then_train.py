"""Train a small model, grow it, train on, and count what that saves: `python examples/grow_then_train.py --out study`.

A decoder learns Python from Python's own standard library. It is grown in several ways, each trained on, and beside
them the same large model is trained from scratch. Three questions are answered, in a table, `study.json` and a picture:

- what does the loss do in the first 64 steps after growth, by operator, with the optimizer's state and without it?
- at what share of its floating-point operations does a grown model reach the final loss of the one from scratch?
- and what is left of that when the small model's own training counts too?

Every loss is of the same held-out documents. `--quick` shows the same in a minute, on a model too small to mean much.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxpp import dims
from jaxpp.data import Data, DataConfig, open_data
from jaxpp.grow import Request, enlarge
from jaxpp.grow.settings import settings_of
from jaxpp.models import DecoderConfig
from jaxpp.train import OptimizerConfig
from jaxpp.train.optimizer import make_optimizer

CHUNK = 32  # steps that are compiled as one
WATCHED = (0, 1, 2, 4, 8, 16, 32, 64)  # steps after growth whose loss is told


@dataclass(frozen=True)
class Study:
    """Sizes of the study; the grown models are twice as wide, or twice as deep, as the small one."""

    small: DecoderConfig = DecoderConfig(
        vocab_size=512, num_layers=4, embed_dim=64, num_heads=4, num_kv_heads=2, max_positions=128, tied=True
    )
    data: DataConfig = DataConfig(seq_len=128, batch_size=8, vocab_size=512)
    held_out_rows: int = 32
    source_steps: int = 960
    scratch_steps: int = 512
    grown_steps: int = 256  # of the arms that are trained until they reach the loss of the one from scratch
    rate: float = 8e-3  # of the small model, and of what grows from it
    scratch_rate: float = 4e-3


QUICK = Study(
    small=DecoderConfig(
        vocab_size=257, num_layers=2, embed_dim=32, num_heads=4, num_kv_heads=2, max_positions=64, tied=True
    ),
    data=DataConfig(seq_len=64, batch_size=8, tokenizer="bytes", max_documents=60),
    source_steps=192, scratch_steps=128, grown_steps=64,
)  # fmt: skip


@dataclass(frozen=True)
class Arm:
    """One way to grow.

    Args:
        wishes: fields of `jaxpp.grow.Request`.
        carried: the optimizer's moments grow too, and each weight has the rate that follows from its growth; else both
            begin anew, at the plain rate.
        to_the_end: trained for `Study.grown_steps`, not only for the steps that are watched.
    """

    wishes: Mapping[str, Any]
    carried: bool = True
    to_the_end: bool = False


ARMS: Mapping[str, Arm] = {
    "hypercloning": Arm(dict(width=2, noise_db=15.0), to_the_end=True),
    "hypercloning, new optimizer": Arm(dict(width=2, noise_db=15.0), carried=False),
    "hypercloning, diagonal": Arm(dict(width=2, noise_db=15.0, variant="diagonal")),
    "lemon": Arm(dict(width=2, operator="lemon"), to_the_end=True),
    "net2net": Arm(dict(width=2, operator="net2net", heads="twice")),
    "aki": Arm(dict(width=2, operator="aki", heads="twice")),
    "identity": Arm(dict(depth="twice", depth_op="identity")),
    "stack": Arm(dict(depth="twice", depth_op="stack")),
}


@dataclass(frozen=True)
class Curve:
    """A run: its held-out loss after so many steps, in nats per token, and what a step costs."""

    losses: Mapping[int, float]
    flops_per_step: float
    facts: Mapping[str, Any] = field(default_factory=dict)

    def steps_to(self, loss: float) -> float | None:
        """Return the step at which the loss is first as low as this, between evaluations on a straight line."""
        steps = sorted(self.losses)
        for before, after in zip(steps, steps[1:], strict=False):
            if self.losses[after] <= loss:
                high, low = self.losses[before], self.losses[after]
                return before + (after - before) * min(1.0, max(0.0, (high - loss) / (high - low)))
        return None


class Trainer:
    """Trains models on consecutive batches, many steps in one call, and evaluates them on rows that stay the same."""

    def __init__(self, study: Study, data: Data):
        """Open the held-out rows, drawn from all over the held-out documents."""
        self.study, self.data, self.compiled = study, data, {}
        rows = [batch for batch in data.held_out_batches(1)]
        chosen = np.linspace(0, len(rows) - 1, study.held_out_rows).astype(int)
        self.held_out = jax.tree.map(lambda *row: np.concatenate(row), *(dict(rows[i]) for i in chosen))

    def run(
        self, model: Any, optimizer: OptimizerConfig, num_steps: int, *, first: int = 0, moments: Any = None
    ) -> tuple[Any, Any, Curve]:
        """Train on the batches from `first` on; return the model, its optimizer state and its curve."""
        graph, params = nnx.split(model)
        key = repr((model.config, optimizer))
        chunk = self.compiled.setdefault(key, self.chunk(graph, optimizer))
        moments = make_optimizer(optimizer).init(params) if moments is None else moments
        losses = {}
        for start in range(0, num_steps, CHUNK):
            after = np.arange(start, start + CHUNK) + 1
            told = (after % 16 == 0) | np.isin(after, WATCHED)
            stacked = self.batches(first + start)
            params, moments, found = chunk(params, moments, stacked, told, self.held_out)
            losses |= {int(step): float(loss) for step, loss in zip([start, *after], found, strict=True) if loss > 0}
        tokens = self.study.data.batch_size * self.study.data.seq_len
        flops = dims.flops_per_token(params, self.study.data.seq_len) * tokens
        return nnx.merge(graph, params), moments, Curve(losses, flops)

    def batches(self, first: int) -> Any:
        """Stack the batches of one chunk."""
        with self.data.train(start_step=first, steps=CHUNK) as loader:
            return jax.tree.map(lambda *batch: np.stack(batch), *map(dict, loader))

    def chunk(self, graph: Any, config: OptimizerConfig) -> Any:
        """Return a jitted function that trains for `CHUNK` steps; the loss is 0 where it is not asked for."""
        optimizer = make_optimizer(config)

        def mean_loss(params: Any, batch: Any) -> jax.Array:
            total, weight = nnx.merge(graph, params).loss(batch)
            return total / weight

        @jax.jit
        def train(params: Any, moments: Any, batches: Any, told: jax.Array, held_out: Any) -> Any:
            def step(carry: Any, given: Any) -> Any:
                params, moments = carry
                batch, is_told = given
                updates, moments = optimizer.update(jax.grad(mean_loss)(params, batch), moments, params)
                params = optax.apply_updates(params, updates)
                loss = jax.lax.cond(is_told, lambda: mean_loss(params, held_out), lambda: jnp.float32(0))
                return (params, moments), loss

            before = mean_loss(params, held_out)
            (params, moments), losses = jax.lax.scan(step, (params, moments), (batches, told))
            return params, moments, jnp.concatenate([before[None], losses])

        return train
