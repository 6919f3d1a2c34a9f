"""Layouts for serving, as plain data: which mesh axes split what, for one phase.

Weights are stored ``[embed / x, heads / yz]`` and ``[embed / x, mlp / yz]`` on a mesh ``x y z`` (1D: x = 1) and used in
one of three ways: where they lie (*stationary*: activations move), gathered over some axes just before use (*gathered*:
tokens are split over those axes instead), or whole on every device (*replicas*). The cache of keys and values is split
by heads, by batch, by both (*mixed*), or by sequence. Knows no bytes and no seconds.

Source: Pope, Douglas, Chowdhery et al., Efficiently Scaling Transformer Inference, 2022, sections 3.2 and 3.3.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from jaxpp.dims import Arrow
from jaxpp.mesh import MeshSpec
from jaxpp.partition.sizes import ModelSizes

Scheme = Literal["1D", "2D", "gathered", "replicas"]
KvSplit = Literal["heads", "batch", "mixed", "sequence"]
DimRules = Mapping[str, tuple[str, ...]]

X, Y, Z = "tensor_x", "tensor_y", "tensor_z"


@dataclass(frozen=True)
class Layout:
    """Where weights, activations and cache of one phase lie.

    Args:
        scheme: how weights meet activations.
        kv: how the cache is split.
        axes: size of each mesh axis: ``data``, and the three of the tensor group.
        weights: dim to axes, of weights as stored.
        compute: of weights in use; an axis that is here no more is gathered.
        tokens: axes of the tensor group that split the tokens instead.
        cache: dim (``batch``, ``kv_heads``, ``seq``) to axes, of keys and values.
    """

    scheme: Scheme
    kv: KvSplit
    axes: Mapping[str, int]
    weights: DimRules
    compute: DimRules
    tokens: tuple[str, ...]
    cache: DimRules

    def over(self, axes: tuple[str, ...]) -> int:
        """Return the product of the sizes of axes."""
        return math.prod(self.axes[axis] for axis in axes)

    def shards(self, arrow: Arrow, place: Literal["weights", "compute"]) -> int:
        """Return into how many parts a weight is split; scales and biases of the residual stream are not."""
        rules = getattr(self, place)
        dims = arrow.dims if arrow.reads else [dim for dim in arrow.dims if dim != "embed"]
        return math.prod(self.over(rules.get(dim, ())) for dim in dims)

    @property
    def num_devices(self) -> int:
        """Devices of the whole mesh."""
        return math.prod(self.axes.values())

    @property
    def data(self) -> int:
        """Groups of devices that hold all weights and their own share of the batch."""
        return self.axes["data"]

    @property
    def group(self) -> int:
        """Devices of one such group."""
        return self.num_devices // self.data

    @property
    def gather(self) -> int:
        """Devices over which weights are gathered and tokens are split; 1: none."""
        return self.over(self.tokens)

    @property
    def x(self) -> int:
        """Parts of ``embed`` in products: partial sums are added over so many devices."""
        return self.over(self.compute.get("embed", ()))

    @property
    def m(self) -> int:
        """Parts of ``heads`` and ``mlp`` in products."""
        return self.over(self.compute.get("mlp", ()))

    @property
    def p(self) -> int:
        """Parts of ``kv_heads`` in products."""
        return self.over(self.compute.get("kv_heads", ()))

    def cache_parts(self, dim: str) -> int:
        """Return into how many parts the cache of one group is split along a dim."""
        return self.over(tuple(axis for axis in self.cache.get(dim, ()) if axis != "data"))

    @property
    def copies(self) -> int:
        """How many devices of a group hold the same keys and values."""
        return self.group // math.prod(self.cache_parts(dim) for dim in ("batch", "kv_heads", "seq"))

    @property
    def storage(self) -> tuple[int, ...]:
        """What two layouts have in common that read the same stored weights."""
        return (self.data, *(self.over(self.weights.get(dim, ())) for dim in ("embed", "mlp", "kv_heads")))

    @property
    def name(self) -> str:
        """Name the scheme with its sizes, e.g. ``2D 2x4``, ``gathered 4 of 8``."""
        if self.scheme == "gathered":
            return f"gathered {self.gather} of {self.group}"
        return f"2D {self.x}x{self.m}" if self.scheme == "2D" else self.scheme


@dataclass(frozen=True)
class ServingMesh:
    """A mesh for serving: groups of devices, and how the tensor group factors where that is fixed.

    Args:
        data: groups.
        group: devices of each.
        fixed: sizes of ``tensor_x tensor_y tensor_z``; None: to be chosen.
    """

    data: int
    group: int
    fixed: tuple[int, int, int] | None = None

    @classmethod
    def parse(cls, text: str) -> ServingMesh:
        """Read a mesh spec.

        Raises:
            ValueError: an axis that serving does not use, an open size, a tensor group across slices.
        """
        spec = MeshSpec.parse(text)
        other = [axis for axis in spec.axes if axis not in ("data", "tensor", X, Y, Z)]
        if other or not spec.axes:
            raise ValueError(f'mesh "{text}": serving splits over data and tensor (or {X} {Y} {Z}), e.g. "tensor:8"')
        if -1 in spec.ici.values():
            raise ValueError(f'mesh "{text}": no devices are counted here; write the size in place of -1')
        if any(axis != "data" for axis in spec.dcn):
            raise ValueError(f'mesh "{text}": only data may lie across slices; a tensor group needs the fast links')
        named = [spec.size(axis) for axis in (X, Y, Z)]
        if "tensor" in spec.axes and math.prod(named) > 1:
            raise ValueError(f'mesh "{text}": either tensor, which is factored for you, or {X} {Y} {Z}')
        fixed = (named[0], named[1], named[2]) if "tensor" not in spec.axes and math.prod(named) > 1 else None
        return cls(spec.size("data"), spec.size("tensor") * math.prod(named), fixed)

    def times(self, factor: int) -> ServingMesh:
        """Return the mesh with so many times the devices in each group, factored freely."""
        return ServingMesh(self.data, self.group * factor)

    def __str__(self) -> str:
        if self.fixed is None:
            tensor = f"tensor:{self.group}" if self.group > 1 or self.data == 1 else ""
        else:
            tensor = " ".join(f"{axis}:{size}" for axis, size in zip((X, Y, Z), self.fixed, strict=True) if size > 1)
        return " ".join(filter(None, (f"data:{self.data}" if self.data > 1 else "", tensor)))


def layouts(sizes: ModelSizes, mesh: ServingMesh) -> tuple[list[Layout], dict[str, str]]:
    """List the layouts that a model has on a mesh, the plainest first.

    Returns:
        The layouts; and for storages ``XxYZ`` that do not divide the model, why.
    """
    found, refused = [], {}
    for x in _divisors(mesh.group) if mesh.fixed is None else [mesh.fixed[0]]:
        yz = mesh.group // x
        if mesh.group == 1:
            break
        stored, summed = _problem(sizes, x, yz, 1), _problem(sizes, x, yz, x)
        if stored or (x > 1 and summed):
            refused[f"{x}x{yz}"] = stored or summed
        if not stored and not (x > 1 and summed):
            found += _stationary(sizes, mesh, x, yz)
        if not stored:
            found += _gathered(sizes, mesh, x, yz)
    found.sort(key=lambda layout: ("1D", "2D", "gathered").index(layout.scheme))
    whole = {"data": mesh.data * mesh.group, X: 1, Y: 1, Z: 1}
    return [*found, Layout("replicas", "batch", whole, {}, {}, (), {"batch": ("data",)})], refused


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _problem(sizes: ModelSizes, x: int, yz: int, sums: int) -> str:
    """Say which dim does not divide: stored over x or yz, and where sums of products are scattered over `sums` too."""
    wanted = [("embed", sizes.embed, x * yz if sums > 1 else x), ("heads", sizes.heads, yz)]
    wanted += [("mlp", branch.width, yz * sums) for branch in sizes.branches]
    return next((f"{dim} {size} does not split over {parts}" for dim, size, parts in wanted if size % parts), "")


def _rules(axes: Mapping[str, int], kv_heads: int) -> dict[str, tuple[str, ...]]:
    """Return the storage: embed over x; heads, mlp and vocab over yz; kv_heads over as much of yz as divides them."""
    kv = next(over for over in ((Y, Z), (Y,), ()) if kv_heads % math.prod(axes[axis] for axis in over) == 0)
    rules = {"embed": (X,), "heads": (Y, Z), "mlp": (Y, Z), "vocab": (Y, Z), "kv_heads": kv}
    return {dim: tuple(axis for axis in over if axes[axis] > 1) for dim, over in rules.items()}


def _stationary(sizes: ModelSizes, mesh: ServingMesh, x: int, yz: int) -> Iterator[Layout]:
    y = math.gcd(sizes.kv_heads, yz)
    axes = {"data": mesh.data, X: x, Y: y, Z: yz // y}
    rules = _rules(axes, sizes.kv_heads)
    own = sizes.kv_heads % mesh.group == 0 or sizes.kv_heads == sizes.heads  # a padded head is one's own too
    heads = (Y, Z, X) if own else (Y,)
    mixed = y > 1 and x * (yz // y) > 1
    caches: dict[KvSplit, DimRules] = {
        "heads": {"batch": ("data",), "kv_heads": heads},
        **({"mixed": {"batch": ("data", X, Z), "kv_heads": (Y,)}} if mixed else {}),
        "batch": {"batch": ("data", X, Y, Z)},
        "sequence": {"batch": ("data",), "seq": (X, Y, Z)},
    }
    for kv, cache in caches.items():
        yield Layout("2D" if x > 1 else "1D", kv, axes, rules, rules, (), cache)


def _gathered(sizes: ModelSizes, mesh: ServingMesh, x: int, yz: int) -> Iterator[Layout]:
    for rest in _divisors(yz) if mesh.fixed is None else sorted({yz, *mesh.fixed[1:], 1}):
        if rest == mesh.group:
            continue
        partly = rest not in (1, yz)
        y = rest if partly else math.gcd(sizes.kv_heads, yz)
        axes = {"data": mesh.data, X: x, Y: y, Z: yz // y}
        tokens = tuple(a for a in ((X, Z) if partly else (X,) if rest == yz else (X, Y, Z)) if axes[a] > 1)
        rules = _rules(axes, sizes.kv_heads)
        compute = {dim: tuple(axis for axis in over if axis not in tokens) for dim, over in rules.items()}
        caches: dict[KvSplit, DimRules] = {
            **({"mixed": {"batch": ("data", X, Z), "kv_heads": (Y,)}} if compute["kv_heads"] == (Y,) else {}),
            "batch": {"batch": ("data", X, Y, Z)},
            "sequence": {"batch": ("data",), "seq": (X, Y, Z)},
        }
        for kv, cache in caches.items():
            yield Layout("gathered", kv, axes, rules, compute, tokens, cache)
