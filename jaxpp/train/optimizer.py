"""Optimizers and learning-rate schedules by name, through optax.

Which weights decay and which are matrices is read off the arrows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import optax

from jaxpp import dims, tree
from jaxpp.names import unknown
from jaxpp.pipeline import clip_by_norm
from jaxpp.train.rates import at_rates


@dataclass(frozen=True)
class OptimizerConfig:
    """Which optimizer, at what learning rate when."""

    name: str = "adamw"  # adamw, muon, adafactor, sgd
    learning_rate: float = 1e-3  # peak
    schedule: str = "cosine"  # cosine (warmup-cosine), wsd (warmup-stable-decay), constant
    warmup_steps: int = 20  # linear from 0
    schedule_steps: int = 1000  # length of the whole schedule, whatever train.num_steps is
    decay_steps: int = 0  # wsd: steps of the final decay; 0: a fifth of schedule_steps
    final_fraction: float = 0.1  # last learning rate, as a fraction of the peak
    weight_decay: float = 0.1  # on weights that read a dim; none on scales and biases
    b1: float = 0.9  # adamw, muon: decay of the first moment; sgd: momentum
    b2: float = 0.95  # adamw: decay of the second moment
    epsilon: float = 1e-8
    clip_norm: float = 1.0  # global gradient norm; 0: no clipping
    rates: dict[str, float] = field(default_factory=dict)  # path or pattern of weights to a factor on their rate
    # The factor is on what follows from the gradient, not on weight_decay: blocks/mlp/down/kernel: 0.5, "blocks/*": 2.

    def __post_init__(self) -> None:
        _known("optimizer.name", self.name, OPTIMIZERS)
        _known("optimizer.schedule", self.schedule, SCHEDULES)
        if self.schedule_steps < 1 or not 0 <= self.warmup_steps <= self.schedule_steps:
            raise ValueError(
                f"optimizer.warmup_steps {self.warmup_steps} must lie between 0 and "
                f"schedule_steps {self.schedule_steps}"
            )
        if not 0 <= self.decay_steps <= self.schedule_steps - self.warmup_steps:
            raise ValueError(
                f"optimizer.decay_steps {self.decay_steps} must lie between 0 and schedule_steps - warmup_steps "
                f"{self.schedule_steps - self.warmup_steps}"
            )
        for name in ("learning_rate", "weight_decay", "clip_norm"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"optimizer.{name} = {getattr(self, name)}: 0 or more is needed")
        for name in ("b1", "b2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"optimizer.{name} = {getattr(self, name)}: at least 0 and below 1 is needed")
        for path, factor in self.rates.items():
            if not 0 < factor < float("inf"):
                raise ValueError(
                    f"optimizer.rates: {path}: {factor}: a factor above 0 is needed (decay goes on whatever it is, so "
                    "that 0 would not hold a weight still)"
                )


def _known(key: str, name: str, table: Mapping[str, Any]) -> None:
    if name not in table:
        raise ValueError(unknown(f"{key}: unknown", name, table))


def _cosine(config: OptimizerConfig) -> optax.Schedule:
    end = config.learning_rate * config.final_fraction
    length = max(config.schedule_steps, config.warmup_steps + 1)
    return optax.warmup_cosine_decay_schedule(0.0, config.learning_rate, config.warmup_steps, length, end)


def _wsd(config: OptimizerConfig) -> optax.Schedule:
    decay = config.decay_steps or max(1, min(config.schedule_steps // 5, config.schedule_steps - config.warmup_steps))
    stable = config.schedule_steps - decay
    pieces = [
        optax.linear_schedule(0.0, config.learning_rate, max(1, config.warmup_steps)),
        optax.constant_schedule(config.learning_rate),
        optax.linear_schedule(config.learning_rate, config.learning_rate * config.final_fraction, decay),
    ]
    return optax.join_schedules(pieces, [config.warmup_steps, stable])


def _constant(config: OptimizerConfig) -> optax.Schedule:
    warm = optax.linear_schedule(0.0, config.learning_rate, max(1, config.warmup_steps))
    return optax.join_schedules([warm, optax.constant_schedule(config.learning_rate)], [config.warmup_steps])


SCHEDULES: dict[str, Callable[[OptimizerConfig], optax.Schedule]] = {
    "cosine": _cosine, "wsd": _wsd, "constant": _constant,
}  # fmt: skip


def make_schedule(config: OptimizerConfig) -> optax.Schedule:
    """Return the learning rate as a function of the number of updates done before; the first update is not at 0."""
    schedule = SCHEDULES[config.schedule](config)
    return lambda count: schedule(count + 1)


def decays(state: Any) -> Any:
    """Return a tree like `state`: True for weights that read a dim (matrices, tables), not for scales and biases."""

    def one(path: str, node: Any) -> bool:
        text = node.get_metadata()["dims"]
        return bool(dims.parse(text, tuple(dims.parse_words(text))).reads)

    return tree.map_named(one, state)


def matrices(state: Any) -> Any:
    """Return a tree like `state` with Muon's view of each weight: reads x writes is the matrix.

    None for scales, biases and lookup tables, and for whatever writes ``vocab`` (the head): those take Adam, with
    Nesterov momentum as the matrices have.

    Source: Jordan et al., Muon: an optimizer for hidden layers in neural networks, 2024.
    """

    def one(path: str, node: Any) -> Any:
        text = node.get_metadata()["dims"]
        arrow = dims.parse(text, tuple(dims.parse_words(text)))
        if not arrow.reads or not arrow.writes or arrow.is_lookup() or "vocab" in arrow.writes:
            return None
        first, count = len(arrow.stacked), len(arrow.reads)
        axes = tuple(range(first, first + count)), tuple(range(first + count, len(arrow.dims)))
        return optax.contrib.MuonDimensionNumbers(reduction_axis=axes[0], output_axis=axes[1])

    return tree.map_named(one, state)


def _adamw(config: OptimizerConfig, rate: optax.Schedule) -> optax.GradientTransformation:
    return optax.adamw(rate, config.b1, config.b2, config.epsilon, weight_decay=config.weight_decay, mask=decays)


def _muon(config: OptimizerConfig, rate: optax.Schedule) -> optax.GradientTransformation:
    direction = optax.contrib.muon(
        1.0, beta=0.95, eps=config.epsilon, adam_b1=config.b1, adam_b2=config.b2,
        muon_weight_dimension_numbers=matrices, consistent_rms=0.2,
    )  # fmt: skip
    # Decay comes after: optax masks it on Muon's matrices only, and would decay scales and biases through AdamW.
    decay = optax.add_decayed_weights(config.weight_decay, mask=decays)
    return optax.chain(direction, optax.scale(-1.0), decay, optax.scale_by_learning_rate(rate))


def _adafactor(config: OptimizerConfig, rate: optax.Schedule) -> optax.GradientTransformation:
    return optax.chain(
        optax.scale_by_factored_rms(),
        optax.clip_by_block_rms(1.0),
        optax.add_decayed_weights(config.weight_decay, mask=decays),
        optax.scale_by_learning_rate(rate),
    )


def _sgd(config: OptimizerConfig, rate: optax.Schedule) -> optax.GradientTransformation:
    decay = optax.add_decayed_weights(config.weight_decay, mask=decays)
    return optax.chain(decay, optax.sgd(rate, momentum=config.b1 or None))


OPTIMIZERS: dict[str, Callable[[OptimizerConfig, optax.Schedule], optax.GradientTransformation]] = {
    "adamw": _adamw, "muon": _muon, "adafactor": _adafactor, "sgd": _sgd,
}  # fmt: skip


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """Build the optimizer: clip by global norm, then the named rule at the scheduled rate, times the factors."""
    rule = OPTIMIZERS[config.name](config, make_schedule(config))
    rule = at_rates(rule, config.rates) if config.rates else rule
    return optax.chain(clip_by_norm(config.clip_norm), rule) if config.clip_norm else rule


def global_norm(grads: Any) -> jax.Array:
    """Return the square root of the sum of squares over all leaves, in fp32."""
    return optax.tree.norm(jax.tree.map(lambda g: g.astype("float32"), grads))
