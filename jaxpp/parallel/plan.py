"""A plan: mesh, schemes, remat, precision, as plain config.

People write plans, the planner writes plans; the trainer, the server and the planner's report read them. A plan is
saved with each checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax

from jaxpp.mesh import Device, MeshSpec, make_mesh
from jaxpp.names import unknown
from jaxpp.parallel.execution import Execution
from jaxpp.parallel.layout import Layout, compose
from jaxpp.parallel.pipelining import PipelineConfig
from jaxpp.parallel.schemes import SCHEMES


@dataclass(frozen=True)
class Plan:
    """How a model is laid out and run on a mesh."""

    mesh: str = "data:-1"  # axis:size ..., one size may be -1; dcn.axis:size across slices
    schemes: tuple[
        str, ...
    ] = ()  # of data zero1 fsdp tensor sequence expert stage; empty: the scheme of each axis's name
    microbatches: int = 1  # gradient accumulation: parts that a global batch is run in
    remat: str = "none"  # what the backward pass recomputes: none, full, dots, block
    layers: Literal["scan", "unroll"] = "scan"  # one compiled block, or one per layer
    compute_dtype: Literal["float32", "bfloat16"] = "float32"  # of activations and of weights in use
    attention: str = "auto"  # kernel: auto, xla, cudnn (GPU), splash (TPU)
    pipeline: PipelineConfig = PipelineConfig()  # how the ranks of axis stage work together
    rules: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # own rules: dim to mesh axes
    dims: tuple[str, ...] = ()  # dims of your own model, beside the known ones

    def __post_init__(self) -> None:
        for name in self.schemes:
            if name not in SCHEMES:
                raise ValueError(unknown("plan.schemes: unknown scheme", name, SCHEMES))
        if self.microbatches < 1:
            raise ValueError(f"plan.microbatches = {self.microbatches}: 1 or more are needed")
        MeshSpec.parse(self.mesh)

    def scheme_names(self) -> tuple[str, ...]:
        """Return the schemes, by default one for each mesh axis that bears a scheme's name."""
        return self.schemes or tuple(axis for axis in MeshSpec.parse(self.mesh).axes if axis in SCHEMES)

    def layout(self, devices: Sequence[Device] | None = None) -> Layout:
        """Build the layout on `devices` (all of them if None).

        Raises:
            ValueError: sizes that do not fit the devices, or schemes that do not compose.
        """
        mesh = make_mesh(self.mesh, devices)
        return compose(mesh, [SCHEMES[name] for name in self.scheme_names()], self.rules, self.dims)

    def execution(self, layout: Layout) -> Execution:
        """Return what holds while a model is traced under this plan."""
        return Execution(layout, self.remat, self.layers, self.attention, self.pipeline)

    def dtype(self) -> Any:
        """Return the dtype to compute in."""
        return jax.numpy.dtype(self.compute_dtype)
