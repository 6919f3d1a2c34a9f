"""Run a function on each device's own shard: the doors for what the compiler cannot split by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxpp.parallel.execution import active_layout
from jaxpp.parallel.layout import Layout, Place


def per_shard(
    function: Callable[..., Any],
    arguments: Sequence[jax.Array],
    dims: Sequence[str],
    results: str | tuple[str, ...],
    place: Place = "inside",
) -> Any:
    """Apply `function` to every device's shards of the arguments, as they are laid out in a place.

    The function must not mix elements along a split dim: every shard is on its own.

    Args:
        function: takes and returns local shards.
        arguments: arrays.
        dims: the dims of each, e.g. ``"batch seq heads head_dim"``.
        results: the dims of the result, or of each of several.
        place: where they lie, by default inside a block.

    Raises:
        ValueError: a dim does not divide over its axes.

    Cost: none, if the arguments are laid out so already.
    """
    layout = active_layout()
    if layout is None:
        return function(*arguments)
    for x, names in zip(arguments, dims, strict=True):
        layout.sharding(names.split(), x.shape, place, f"activation {names}")

    def spec(names: str) -> PartitionSpec:
        return layout.spec(names.split(), place)

    shard = jax.shard_map(
        function,
        mesh=layout.mesh,
        axis_names=_automatic(layout),
        in_specs=tuple(map(spec, dims)),
        out_specs=spec(results) if isinstance(results, str) else tuple(map(spec, results)),
        check_vma=False,  # kernels do not say how their results vary; differentiation happens outside
    )
    return shard(*arguments)


def with_collectives(
    function: Callable[..., Any], arguments: Sequence[jax.Array], specs: Sequence[PartitionSpec], results: Any
) -> Any:
    """Apply `function` to every device's shards; it holds its own collectives over the axes of the mesh.

    Unlike `per_shard` it may be differentiated through: what varies over which axis is checked.

    Args:
        function: takes and returns local shards.
        arguments: arrays.
        specs: how each is split.
        results: how each result is split, a tree like what `function` returns.

    Raises:
        ValueError: inside of a pipeline, where JAX cannot differentiate it.

    Cost: that of the function's collectives, and of laying the arguments out as `specs` say.
    """
    layout = active_layout()
    if layout is None:
        return function(*arguments)
    if manual := jax.sharding.get_abstract_mesh().manual_axes:
        raise ValueError(
            f"a mixture of experts does not run inside of a pipeline over axis {manual[0]}; drop {manual[0]} from the "
            "mesh, and use expert, fsdp or tensor"
        )
    return jax.shard_map(function, mesh=layout.mesh, in_specs=tuple(specs), out_specs=results)(*arguments)


def _automatic(layout: Layout) -> set[str]:
    """Return the axes of the mesh that no ``shard_map`` around has made manual."""
    return set(layout.mesh.axis_names) - set(jax.sharding.get_abstract_mesh().manual_axes)
