"""What a run is, as plain config: one YAML file, one frozen dataclass per section."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from jaxpp import config
from jaxpp.data.config import DataConfig
from jaxpp.model import ModelConfig
from jaxpp.parallel import Plan
from jaxpp.train.optimizer import OptimizerConfig
from jaxpp.train.ramp import RampConfig


@dataclass(frozen=True)
class CheckpointConfig:
    """When to save, and where to start from."""

    every: int = 100  # steps between checkpoints; the last step is always saved
    keep: int = 3  # newest checkpoints kept
    save: Literal["async", "sync"] = "async"  # write in the background, or wait
    step: int = -1  # step to resume from; -1: the newest, or the start where there is none
    # Going back to an older step moves the newer ones, with metrics.jsonl, to checkpoints/aside-N/: they no longer
    # count, and nothing is deleted. The same command run again, after a kill say, goes on from its own newest step.

    def __post_init__(self) -> None:
        for name in ("every", "keep"):
            if getattr(self, name) < 1:
                raise ValueError(f"checkpoint.{name} = {getattr(self, name)}: 1 or more are needed")


@dataclass(frozen=True)
class TrainConfig:
    """How long to train and what to report."""

    num_steps: int = 1000  # optimizer updates in all, earlier parts of a resumed run included
    seed: int = 0  # of the weights (data has its own)
    log_every: int = 1  # steps between lines
    evaluate_every: int = 200  # steps between evaluations on held-out documents; 0: only at the end
    evaluate_batches: int = 20  # batches per evaluation; 0: all held-out documents
    profile_steps: int = 0  # steps to trace into <directory>/profile, from the third on; 0: none
    ramp: RampConfig = field(default_factory=RampConfig)  # how what a growth added comes in

    def __post_init__(self) -> None:
        for name, least in (("num_steps", 1), ("log_every", 1), ("evaluate_every", 0), ("evaluate_batches", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"train.{name} = {getattr(self, name)}: {least} or more are needed")


@dataclass(frozen=True)
class Run:
    """One training run."""

    model: ModelConfig  # family, preset and overrides
    directory: str = "runs/default"  # all that the run writes; it resumes by itself from here
    init: str = ""  # checkpoint of any format whose weights and tokenizer a new run starts from
    cpu_devices: int = 0  # run on this many made-up CPU devices; 0: on the machine's own devices
    plan: Plan = field(default_factory=Plan)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)


def active_experts(model: ModelConfig) -> int:
    """Return how many of a model's experts each token visits; 0 where it has none."""
    moe = getattr(model, "moe", None)
    return moe.experts_per_token if moe is not None and moe.num_experts else 0


def resolved(run: Run) -> dict[str, Any]:
    """Return a run as plain values, from which `jaxpp.runs.build_run` makes an equal run.

    A model config of a registered family names it in its class attribute ``family``; any other is named by its class.
    """
    cls, values = type(run.model), config.to_dict(run)
    family = getattr(cls, "family", f"{cls.__module__}:{cls.__qualname__}")
    return {**values, "model": {"family": family, **values["model"]}}
