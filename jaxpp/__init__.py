"""jaxpp: train, grow and shard language models on JAX meshes, from one annotation per weight."""

from jaxpp import grow
from jaxpp.conversion import load, save
from jaxpp.dims import Arrow, param
from jaxpp.mesh import MeshSpec, make_mesh
from jaxpp.parallel import Layout, Plan
from jaxpp.train import OptimizerConfig, Run, Trainer, TrainState, make_train_step

__version__ = "0.1.0"

__all__ = [
    "Arrow", "Layout", "MeshSpec", "OptimizerConfig", "Plan", "Run", "TrainState", "Trainer", "grow", "load",
    "make_mesh", "make_train_step", "param", "save",
]  # fmt: skip
