"""Mesh specs: ``"data:2 fsdp:2 tensor:2"`` to a ``jax.sharding.Mesh``.

Knows the axis words, their aliases and how slices (the slow network, ``dcn.``) nest round chips. Does not know what is
sharded over an axis: that is `jaxpp.parallel`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from jaxpp.names import unknown

Device: TypeAlias = Any  # jax.Device, which type checkers do not take as a type

AXES = ("stage", "data", "fsdp", "expert", "context", "tensor", "tensor_x", "tensor_y", "tensor_z")
ALIASES = {
    "pp": "stage", "pipeline": "stage", "dp": "data", "ep": "expert", "cp": "context", "sp": "context",
    "tp": "tensor", "mp": "tensor", "model": "tensor",
}  # fmt: skip


@dataclass(frozen=True)
class MeshSpec:
    """Sizes of the mesh axes, inside a slice (`ici`) and across slices (`dcn`).

    Args:
        ici: axis to size within one slice; one size may be -1, for "the rest".
        dcn: axis to number of slices along it; empty for one slice.

    Raises:
        ValueError: an unknown axis, a size below 1 that is not -1, more than one -1.
    """

    ici: Mapping[str, int]
    dcn: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for axis, size in (*self.ici.items(), *self.dcn.items()):
            if axis not in AXES:
                raise ValueError(unknown("unknown mesh axis", axis, (*AXES, *ALIASES), "axes and aliases"))
            if size < 1 and size != -1:
                raise ValueError(f"mesh axis {axis}:{size}: a size is 1 or more, or -1 for the rest")
        if list(self.ici.values()).count(-1) > 1:
            raise ValueError(f'mesh "{self}": only one axis may be -1')
        if -1 in self.dcn.values():
            raise ValueError(f'mesh "{self}": a dcn size is the number of slices; it cannot be -1')

    @classmethod
    def parse(cls, text: str) -> MeshSpec:
        """Parse ``"data:2 fsdp:-1 tensor:2"``, with ``dcn.data:4`` for an axis across slices.

        Example:
            >>> str(MeshSpec.parse("dp:2 tp:4 dcn.dp:2"))
            'data:2 tensor:4 dcn.data:2'
        """
        ici: dict[str, int] = {}
        dcn: dict[str, int] = {}
        for token in text.replace(",", " ").split():
            name, _, size = token.partition(":")
            target = dcn if name.startswith("dcn.") else ici
            axis = ALIASES.get(name.removeprefix("dcn."), name.removeprefix("dcn."))
            if not re.fullmatch("-?[0-9]+", size):
                raise ValueError(f'mesh "{text}": "{token}" is not axis:size, e.g. "data:2 fsdp:-1"')
            if axis in target:
                raise ValueError(f'mesh "{text}": axis {axis} stands twice')
            target[axis] = int(size)
        return cls(ici, dcn)

    def __str__(self) -> str:
        tokens = [f"{axis}:{size}" for axis, size in self.ici.items()]
        return " ".join(tokens + [f"dcn.{axis}:{size}" for axis, size in self.dcn.items()])

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes in canonical order, slowest network first."""
        return tuple(axis for axis in AXES if axis in self.ici or axis in self.dcn)

    def resolve(self, num_devices: int) -> MeshSpec:
        """Replace -1 by what `num_devices` leaves, and check the product.

        Raises:
            ValueError: the sizes do not multiply to `num_devices`; the nearest sizes that do are named.
        """
        known = math.prod(size for size in self.ici.values() if size != -1) * math.prod(self.dcn.values())
        free = [axis for axis, size in self.ici.items() if size == -1]
        if not free and known == num_devices:
            return self
        if free and num_devices % known == 0:
            return MeshSpec({**self.ici, free[0]: num_devices // known}, self.dcn)
        raise ValueError(_wrong_count(self, known, num_devices))

    def size(self, axis: str) -> int:
        """Return the whole size of an axis, slices included."""
        return self.ici.get(axis, 1) * self.dcn.get(axis, 1)


def _wrong_count(spec: MeshSpec, known: int, num_devices: int) -> str:
    if known > num_devices or -1 in spec.ici.values():
        needs = f"needs {'a multiple of ' if -1 in spec.ici.values() else ''}{known} devices"
    else:
        needs = f"makes {known} devices"
    fixes = []
    for axis in spec.ici:
        others = known // spec.ici[axis] if spec.ici[axis] != -1 else known
        if num_devices % others == 0:
            fixes.append(str(MeshSpec({**spec.ici, axis: num_devices // others}, spec.dcn)))
    fix = f'; "{fixes[0]}" does' if fixes else f'; "data:{num_devices}" does'
    if jax.default_backend() == "cpu":
        fix += f", or set cpu_devices={known}"
    return f'mesh "{spec}" {needs}, but there are {num_devices}{fix}'


def _granules(devices: Sequence[Device], num_slices: int) -> list[list[Device]]:
    """Group devices into slices: by slice index, else by process, else in blocks (fake CPU devices)."""
    for attribute in ("slice_index", "process_index"):
        keys = [getattr(device, attribute, 0) for device in devices]
        if len(set(keys)) == num_slices:
            return [[d for d, k in zip(devices, keys, strict=True) if k == key] for key in sorted(set(keys))]
    if len({device.process_index for device in devices}) == 1 and devices[0].platform == "cpu":
        return [list(block) for block in np.array(devices, dtype=object).reshape(num_slices, -1)]
    found = len({getattr(device, "slice_index", device.process_index) for device in devices})
    raise ValueError(f"the mesh asks for {num_slices} slices (dcn), but the devices lie in {found}")


def _hybrid(spec: MeshSpec, devices: Sequence[Device]) -> np.ndarray:
    ici = [spec.ici.get(axis, 1) for axis in spec.axes]
    dcn = [spec.dcn.get(axis, 1) for axis in spec.axes]
    granules = _granules(devices, math.prod(dcn))
    by_slice = hasattr(devices[0], "slice_index") and devices[0].platform != "cpu"
    if by_slice and len({device.slice_index for device in devices}) == len(granules):
        return mesh_utils.create_hybrid_device_mesh(ici, dcn, devices)
    if len({device.process_index for device in devices}) == len(granules):
        return mesh_utils.create_hybrid_device_mesh(ici, dcn, devices, process_is_granule=True)
    blocks = np.array([np.array(granule, dtype=object).reshape(ici) for granule in granules], dtype=object)
    outer = np.moveaxis(blocks.reshape(*dcn, *ici), range(len(dcn)), range(0, 2 * len(dcn), 2))
    return outer.reshape([i * d for i, d in zip(ici, dcn, strict=True)])


def make_mesh(spec: str | MeshSpec, devices: Sequence[Device] | None = None) -> Mesh:
    """Build a mesh from its spec.

    Args:
        spec: ``"data:2 fsdp:2 tensor:2"`` or a `MeshSpec`; ``dcn.`` sizes multiply an axis across slices.
        devices: the devices to use; all of them if None.

    Returns:
        A ``jax.sharding.Mesh`` whose axes are automatic (the compiler places the collectives).

    Raises:
        ValueError: a spec that does not parse, or sizes that do not multiply to the number of devices.
    """
    devices = list(devices) if devices is not None else jax.devices()
    spec = (MeshSpec.parse(spec) if isinstance(spec, str) else spec).resolve(len(devices))
    sizes = tuple(spec.size(axis) for axis in spec.axes)
    if spec.dcn:
        array = _hybrid(spec, devices)
    elif devices[0].platform == "cpu":
        array = np.array(devices, dtype=object).reshape(sizes)
    else:
        array = mesh_utils.create_device_mesh(sizes, devices)
    return Mesh(array, spec.axes, axis_types=(AxisType.Auto,) * len(spec.axes))
