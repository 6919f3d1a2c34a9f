"""Where ranks run: a mesh with an axis `stage`, cut into one submesh per rank over its other axes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxpp import tree
from jaxpp.mesh import Device, make_mesh
from jaxpp.parallel import SCHEMES, Execution, Layout, Plan, compose


@dataclass(frozen=True, eq=False)
class Place:
    """One rank's devices and how models are traced on them.

    Args:
        layout: on the submesh.
        execution: holds while a stage is traced.
        memo: operations that are traced and compiled for this place.
    """

    layout: Layout
    execution: Execution
    memo: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def mesh(self) -> Mesh:
        """The submesh."""
        return self.layout.mesh

    @cached_property
    def processes(self) -> frozenset[int]:
        """The processes that have its devices."""
        return frozenset(device.process_index for device in self.mesh.devices.flat)

    @cached_property
    def is_local(self) -> bool:
        """Whether this process has some of its devices."""
        return jax.process_index() in self.processes

    def sharding(self, spec: PartitionSpec) -> NamedSharding:
        """Return a sharding on this place."""
        return NamedSharding(self.mesh, spec)

    def batch_spec(self, shape: Sequence[int]) -> PartitionSpec:
        """Return how an array ``[batch, ...]`` is split here; not at all if it does not divide."""
        parts = self.layout.num_shards("batch", "residual")
        return self.layout.spec(("batch",), "residual") if shape and shape[0] % parts == 0 else PartitionSpec()

    def weight_shardings(self, params: Any, what: Any = "weights") -> Any:
        """Return shardings of weights (or of their ``moments``): by their arrows, whole where they have none."""
        known = [leaf for leaf in jax.tree.leaves(params, is_leaf=tree.is_variable) if tree.is_variable(leaf)]
        if known and all("dims" in node.get_metadata() for node in known):
            return self.layout.param_shardings(params, what)
        return jax.tree.map(lambda _: self.layout.replicated(), params)

    def put(self, value: Any, sharding: NamedSharding) -> jax.Array:
        """Lay a host array out here; every process passes the same."""
        value = np.asarray(value)
        value = value.astype(jax.dtypes.canonicalize_dtype(value.dtype))
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index], dtype=value.dtype)


def make_places(mesh: str | Plan | Mesh, ranks: int, devices: Sequence[Device] | None = None) -> tuple[Place, ...]:
    """Cut a mesh into places.

    Args:
        mesh: ``"stage:4"``, ``"stage:2 data:2 tensor:2"``; a plan with such a mesh; or a ``jax.sharding.Mesh`` with an
            axis `stage`.
        ranks: of the schedule.
        devices: to use with a spec or a plan; all of them if None.

    Raises:
        ValueError: the axis `stage` has another size, schemes that do not compose, or ranks that share processes.
    """
    plan = Plan(mesh=mesh) if isinstance(mesh, str) else mesh if isinstance(mesh, Plan) else None
    whole = make_mesh(plan.mesh, devices) if plan is not None else mesh
    assert isinstance(whole, Mesh)
    size = whole.shape.get("stage", 1)
    if size != ranks:
        rest = " ".join(f"{axis}:{size}" for axis, size in whole.shape.items() if axis != "stage")
        raise ValueError(
            f"the schedule has {ranks} ranks, but mesh axis stage has size {size}; "
            f'"{f"stage:{ranks} {rest}".strip()}" has {ranks}'
        )
    places = tuple(_place(part, plan) for part in _submeshes(whole, ranks))
    _check_processes(places)
    return places


def _check_processes(places: Sequence[Place]) -> None:
    """Refuse ranks that share processes: JAX sends between devices of one process, or between separate sets of them."""
    for (i, one), (j, other) in itertools.combinations(enumerate(places), 2):
        both = one.processes & other.processes
        if both and len(one.processes | other.processes) > 1:
            raise ValueError(
                f"ranks {i} and {j} of the pipeline both have devices of process {min(both)} and of others, between "
                "which JAX cannot send; give each rank processes of its own: other axes inside of them, and axis stage "
                "across slices (dcn.stage:N) where the mesh has any"
            )


def _submeshes(whole: Mesh, ranks: int) -> list[Mesh]:
    axes = [axis for axis in whole.axis_names if axis != "stage"]
    if "stage" in whole.axis_names:
        parts = [np.take(whole.devices, rank, axis=whole.axis_names.index("stage")) for rank in range(ranks)]
    else:
        parts = [whole.devices]
    parts = [np.asarray(part, dtype=object) for part in parts]
    if not axes:  # a mesh has at least one axis
        axes, parts = ["data"], [part.reshape(1) for part in parts]
    return [Mesh(part, tuple(axes), axis_types=(AxisType.Auto,) * len(axes)) for part in parts]


def _place(mesh: Mesh, plan: Plan | None) -> Place:
    if plan is None:
        plan = Plan(mesh=" ".join(f"{axis}:{size}" for axis, size in mesh.shape.items()))
    names = [name for name in plan.scheme_names() if name in SCHEMES and name != "stage"]
    layout = compose(mesh, [SCHEMES[name] for name in names], plan.rules, plan.dims)
    return Place(layout, plan.execution(layout))
