"""Regions of arrays: one slice with start and stop for each axis, and who holds which."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxpp.mesh import Device

Region = tuple[slice, ...]


def size(region: Region) -> tuple[int, ...]:
    """Return the shape of a region."""
    return tuple(cut.stop - cut.start for cut in region)


def common(first: Region, second: Region) -> Region | None:
    """Return where two regions overlap, None if nowhere."""
    both = tuple(slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(first, second, strict=True))
    return None if any(cut.start >= cut.stop for cut in both) else both


def inside(region: Region, outer: Region) -> Region:
    """Return a region as counted from where an outer one begins.

    Example:
        >>> inside((slice(5, 7),), (slice(4, 8),))
        (slice(1, 3, None),)
    """
    return tuple(slice(a.start - b.start, a.stop - b.start) for a, b in zip(region, outer, strict=True))


def distinct(shape: Sequence[int], held: Mapping[Device, Any]) -> list[tuple[Region, list[Device]]]:
    """Return each distinct region of an array once, with the devices that hold it.

    Args:
        shape: of the array.
        held: device to index, as ``Sharding.devices_indices_map`` gives.
    """
    found: dict[tuple[tuple[int, ...], ...], list[Device]] = {}  # Python 3.11 cannot hash a slice
    for device, index in held.items():
        bounds = tuple(cut.indices(length)[:2] for cut, length in zip(index, shape, strict=True))
        found.setdefault(bounds, []).append(device)
    return [(tuple(slice(*bound) for bound in bounds), devices) for bounds, devices in found.items()]
