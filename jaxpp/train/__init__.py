"""One training loop, and its step for people with a loop of their own."""

from jaxpp.train.config import CheckpointConfig, Run, TrainConfig
from jaxpp.train.loop import Diverged, Trainer
from jaxpp.train.optimizer import OptimizerConfig
from jaxpp.train.program import TrainState
from jaxpp.train.programs import make_program, make_train_step

__all__ = [
    "CheckpointConfig", "Diverged", "OptimizerConfig", "Run", "TrainConfig", "TrainState", "Trainer", "make_program",
    "make_train_step",
]  # fmt: skip
