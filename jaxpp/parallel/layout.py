"""Layouts: schemes composed over a mesh; turns arrows into shardings and refuses what would not work.

Everything is checked on shapes alone, before any compile. Knows no model and no parameter names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpp import dims as arrows
from jaxpp import tree
from jaxpp.parallel.rules import DimRules, Rules, Scheme

Place = Literal["weights", "compute", "moments", "inside", "residual", "cache"]


@dataclass(frozen=True)
class Layout:
    """A mesh and the rules that hold on it.

    Args:
        mesh: the devices.
        rules: the sum of the schemes' rules.
        dims: dims of the user's own model, beside ``jaxpp.dims.DIMS``.
    """

    mesh: Mesh
    rules: Rules
    dims: tuple[str, ...] = ()

    def within(self, mesh: Any) -> Layout:
        """Return this layout as it holds inside a ``shard_map``: without the axes that are manual in its mesh.

        Args:
            mesh: the abstract mesh in force there.
        """

        def left(rules: DimRules) -> DimRules:
            return {dim: tuple(a for a in axes if a not in mesh.manual_axes) for dim, axes in rules.items()}

        return Layout(mesh, Rules(*(left(getattr(self.rules, f.name)) for f in fields(self.rules))), self.dims)

    def unsplit(self, dim: str) -> Layout:
        """Return this layout with weights and moments whole along `dim`."""

        def left(rules: DimRules) -> DimRules:
            return {name: axes for name, axes in rules.items() if name != dim}

        rules = replace(self.rules, weights=left(self.rules.weights), moments=left(self.rules.moments))
        return replace(self, rules=rules)

    def shared(self, dim: str, size: int) -> Layout:
        """Return this layout with `dim` whole in weights and blocks, if it has fewer elements than parts.

        What decoding caches stays split: each element is then kept by ``parts / size`` devices.

        Args:
            dim: ``"kv_heads"``, of which a model with grouped queries has few.
            size: its elements; where they do not divide the parts, this layout is returned, and refuses them.
        """
        parts = self.num_shards(dim, "weights")
        if size >= parts or parts % size:
            return self

        def left(rules: DimRules) -> DimRules:
            return {name: axes for name, axes in rules.items() if name != dim}

        kept = {f.name: left(getattr(self.rules, f.name)) for f in fields(self.rules)}
        return replace(self, rules=Rules(**{**kept, "cache": self.rules.cache}))

    def cached_by_batch(self) -> Layout:
        """Return this layout with keys and values split by row over all axes that split them, instead of by head.

        Cost: in each layer an all-to-all of the queries there and one of the result back, of ``tokens x heads x
            head_dim / n`` per device; new keys and values move likewise where their heads are split.

        Source: Pope et al., Efficiently Scaling Transformer Inference, 2022, section 3.3.
        """
        dims = ("batch", "kv_heads", "heads")
        axes = tuple(dict.fromkeys(axis for dim in dims for axis in self.rules.cache.get(dim, ())))
        return replace(self, rules=replace(self.rules, cache={"batch": axes}))

    def axes(self, dim: str, place: Place) -> tuple[str, ...]:
        """Return the mesh axes that split `dim` in `place`; axes of size 1 count as none."""
        named = getattr(self.rules, place).get(dim, ())
        return tuple(axis for axis in named if self.mesh.shape.get(axis, 1) > 1)

    def num_shards(self, dim: str, place: Place) -> int:
        """Return into how many parts `dim` is split in `place`."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes(dim, place))

    def spec(self, dims: Sequence[str], place: Place) -> PartitionSpec:
        """Return the ``PartitionSpec`` of an array with these dims."""
        entries = [self.axes(dim, place) for dim in dims]
        return PartitionSpec(*(axes[0] if len(axes) == 1 else (axes or None) for axes in entries))

    def problems(self, dims: Sequence[str], shape: Sequence[int], place: Place) -> list[str]:
        """List what forbids this array in this place: a dim that does not divide, an axis used twice."""
        found, owner = [], {}
        for dim, size in zip(dims, shape, strict=True):
            parts = self.num_shards(dim, place)
            if size % parts:
                over = " ".join(f"{axis}={self.mesh.shape[axis]}" for axis in self.axes(dim, place))
                rows = f"; model.vocab_rows={-(-size // parts) * parts} fills the table up" if dim == "vocab" else ""
                found.append(f"{dim} {size} does not split over {over}; {_nearest(size, parts)}{rows}")
            for axis in self.axes(dim, place):
                if axis in owner:
                    found.append(f"dims {owner[axis]} and {dim} are both split over axis {axis}; one weight, one dim")
                owner[axis] = dim
        return found

    def sharding(self, dims: Sequence[str], shape: Sequence[int], place: Place, path: str = "array") -> NamedSharding:
        """Return the sharding of an array, refusing one that would not divide.

        Raises:
            ValueError: as `problems` lists, with `path` in front.
        """
        found = self.problems(dims, shape, place)
        if found:
            raise ValueError(f"{path}: {'; '.join(found)}")
        return NamedSharding(self.mesh, self.spec(dims, place))

    def replicated(self) -> NamedSharding:
        """Return the sharding of an array that every device holds whole."""
        return NamedSharding(self.mesh, PartitionSpec())

    def check(self, params: Any) -> None:
        """Refuse, in one message, all weights of a state that this layout cannot hold.

        Raises:
            ValueError: lists each distinct problem with the first path that has it.
        """
        first: dict[str, str] = {}
        for path, arrow in arrows.arrows(params, self.dims).items():
            shape = tree.named_nodes(params)[path].shape
            for place in ("weights", "compute", "moments"):
                for problem in self.problems(arrow.dims, shape, place):
                    first.setdefault(problem, path)
        if first:
            raise ValueError("; ".join(f"{path}: {problem}" for problem, path in first.items()))

    def check_batch(self, batch_size: int, seq_len: int, microbatches: int = 1) -> None:
        """Refuse a batch that does not split over the axes that share it.

        Raises:
            ValueError: the number of microbatches is not positive, or batch or sequence do not divide.
        """
        if microbatches < 1:
            raise ValueError(f"plan.microbatches = {microbatches}: 1 or more are needed")
        if batch_size < 1:
            raise ValueError(f"data.batch_size = {batch_size}: 1 or more are needed")
        parts = self.num_shards("batch", "residual") * microbatches
        if batch_size % parts:
            raise ValueError(
                f"data.batch_size {batch_size} does not split into {microbatches} microbatches over "
                f"{parts // microbatches} batch shards; {_nearest(batch_size, parts)}"
            )
        if seq_len % self.num_shards("seq", "residual"):
            raise ValueError(f"data.seq_len: {'; '.join(self.problems(['seq'], [seq_len], 'residual'))}")

    def param_shardings(self, params: Any, place: Place = "weights") -> Any:
        """Return a state like `params` with a ``NamedSharding`` for each weight."""

        def one(path: str, node: Any) -> NamedSharding:
            arrow = arrows.of(node, path, self.dims)
            return self.sharding(arrow.dims, node.shape, place, path)

        return tree.map_named(one, params)

    def moment_shardings(self, state: Any, params: Any) -> Any:
        """Return a tree like an optax state over `params` with a ``NamedSharding`` for each leaf.

        Moments follow the arrow that optax copied onto them; counters and factored moments are replicated.
        """
        known = arrows.moment_arrows(state, params, self.dims)

        def one(path: str, node: Any) -> NamedSharding:
            arrow = known[path]
            return self.sharding(arrow.dims, node.shape, "moments", path) if arrow else self.replicated()

        return tree.map_named(one, state)

    def batch_sharding(self, ndim: int = 2) -> NamedSharding:
        """Return the sharding of an input array ``[batch, seq, ...]`` as the loader hands it over."""
        return NamedSharding(self.mesh, self.spec(("batch", *["" for _ in range(ndim - 1)]), "residual"))


def _nearest(size: int, parts: int) -> str:
    low, high = size // parts * parts, (size // parts + 1) * parts
    divisors = [k for k in range(1, size + 1) if size % k == 0]
    shown = divisors if len(divisors) <= 8 else [d for d in divisors if d <= 4 * parts][-8:]
    sizes = f"sizes {low} or {high}" if low else f"size {high}"
    return f"{sizes} would, or a split by {', '.join(map(str, shown))}"


def compose(mesh: Mesh, schemes: Sequence[Scheme], extra: DimRules | None = None, dims: Sequence[str] = ()) -> Layout:
    """Compose schemes into a layout, in any order that is legal.

    Args:
        mesh: the devices.
        schemes: parallel methods; their order sets the order of axes on a shared dim.
        extra: rules of your own for weights and activations, dim to axes, added to the schemes'.
        dims: dims of your own.

    Raises:
        ValueError: a scheme twice, one whose axis the mesh lacks or whose companion is missing, an axis that no scheme
            uses, an own rule that names an unknown dim or axis.
    """
    names = [scheme.name for scheme in schemes]
    for scheme in schemes:
        _check_scheme(scheme, names, mesh)
    own = {dim: (axes,) if isinstance(axes, str) else tuple(axes) for dim, axes in (extra or {}).items()}
    _check_own(own, mesh, (*arrows.DIMS, *dims))
    used = {scheme.axis for scheme in schemes} | {axis for axes in own.values() for axis in axes}
    idle = [f"{axis}:{size}" for axis, size in mesh.shape.items() if size > 1 and axis not in used]
    if idle:
        raise ValueError(
            f"mesh axis {idle[0]} is used by no scheme of {', '.join(names) or 'none'}: its devices would all compute "
            "the same; add a scheme that uses it or drop the axis"
        )
    total = sum((scheme.rules() for scheme in schemes), Rules())
    return Layout(mesh, total + Rules(own, own, own, own, {}, own), tuple(dims))


def _check_scheme(scheme: Scheme, names: Sequence[str], mesh: Mesh) -> None:
    if names.count(scheme.name) > 1:
        raise ValueError(f"scheme {scheme.name} stands twice in {', '.join(names)}; once is enough")
    if scheme.axis not in mesh.shape:
        axes = " ".join(f"{axis}:{size}" for axis, size in mesh.shape.items())
        raise ValueError(
            f'scheme {scheme.name} needs mesh axis "{scheme.axis}", but the mesh is "{axes}"; '
            f'add "{scheme.axis}:N" to the mesh or drop the scheme'
        )
    for need in scheme.needs:
        if need not in names:
            raise ValueError(f"scheme {scheme.name} builds on scheme {need}; add {need} to the schemes")


def _check_own(own: Mapping[str, Sequence[str]], mesh: Mesh, known: Sequence[str]) -> None:
    for dim, axes in own.items():
        if dim not in known:
            raise ValueError(f'plan.rules: unknown dim "{dim}"; known: {" ".join(known)}; add yours to plan.dims')
        for axis in axes:
            if axis not in mesh.shape:
                raise ValueError(f'plan.rules.{dim}: the mesh has no axis "{axis}"; it has {" ".join(mesh.shape)}')


def bytes_per_device(leaf: Any) -> int:
    """Count the bytes of a sharded (abstract) array that one device holds."""
    shape = leaf.sharding.shard_shape(tuple(leaf.shape)) if getattr(leaf, "sharding", None) else leaf.shape
    return math.prod(shape) * jax.numpy.dtype(leaf.dtype).itemsize
