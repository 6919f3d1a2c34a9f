"""Quantise the weights of a model, one by one: never is there a second copy of more than one.

quantize(jaxpp.load("org/model"), "int8")          after loading
jaxpp.load("org/model", quantize="int4")           while loading: the whole model is never there
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import jax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jaxpp import dims, tree
from jaxpp.compress.grid import Grid, blocks_along, pack, round_to_grid
from jaxpp.compress.quantized import QuantizedPart, QuantizedWeight
from jaxpp.names import unknown

SMALL = 1024  # elements of a matrix that is left as it is

GROUPED = "float16"  # dtype of the scales and offsets of groups, which are many; those of GGUF files are kept exactly

Model = TypeVar("Model")


@dataclass(frozen=True)
class Kind:
    """What a kind of quantised weights is by default."""

    grid: Grid
    group: int


KINDS: Mapping[str, Kind] = {
    "int8": Kind(Grid(8), 0),
    "int4": Kind(Grid(4, offset=True), 32),
}

TABLES = Kind(Grid(8), 0)  # of what has dim vocab: errors there are not averaged over layers


@dataclass(frozen=True)
class Quantization:
    """How to quantise a model.

    int8 has one scale for each written element; int4 has one scale and one offset, float16, for each group of 32
    elements that are read. Token embeddings and heads are int8, with one scale for each token, in both. What reads
    nothing or writes nothing (norms, biases), routers, learned positions and matrices under 1,024 elements stay.

    Args:
        kind: ``"int8"`` or ``"int4"``.
        group: neighbours along what a weight reads that share a scale; 0: all of them; None: as the kind has it.
        clip: search each group's range for a part of it that makes the squared error smaller. On SmolLM2-135M it makes
            perplexity worse.

    Raises:
        ValueError: an unknown kind; the nearest is named.
    """

    kind: str
    group: int | None = None
    clip: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(unknown("quantize: unknown kind", self.kind, KINDS))
        if self.group is not None and self.group < 0:
            raise ValueError(f"quantize: group {self.group}: 0 or more is needed")

    def form(self, node: nnx.Variable) -> tuple[Grid, int] | None:
        """Return the grid of a weight and the elements of a group; None where it stays as it is."""
        arrow, shape = _arrow_of(node), node.shape
        _, reads, writes = arrow.sizes(shape)
        is_matrix = bool(arrow.reads and arrow.writes) and "positions" not in arrow.reads
        if not is_matrix or reads * writes < SMALL or node.get_metadata().get("wide"):
            return None
        kind = TABLES if "vocab" in arrow.dims else KINDS[self.kind]
        group = kind.group if self.group is None or kind is TABLES else self.group
        stored = GROUPED if group else kind.grid.stored
        return replace(kind.grid, clip=self.clip, stored=stored), group

    def check(self, params: Any) -> None:
        """Refuse weights that do not hold whole groups, on each device, before any is read.

        Args:
            params: ``nnx.State`` of Params, concrete or abstract, with shardings.

        Raises:
            ValueError: names the first weight, and the groups that all weights hold.
        """
        nodes = tree.named_nodes(params)
        forms = {path: form for path, node in nodes.items() if (form := self.form(node))}
        for path, (grid, group) in forms.items():
            if not (problem := _problem(nodes[path], grid, group)):
                continue
            own = [path for path, (_, group) in forms.items() if group]
            most = max((_arrow_of(nodes[path]).sizes(nodes[path].shape)[1] for path in own), default=0)
            fit = [g for g in range(2, most + 1) if not any(_problem(nodes[p], forms[p][0], g) for p in own)]
            would = f"groups of {', '.join(map(str, fit[-8:]))} would" if fit else "no groups would; group 0 has none"
            raise ValueError(f"quantize: {path}: {problem}; {would}")

    def apply(self, node: nnx.Param) -> QuantizedWeight | None:
        """Return the quantised weight, laid out like `node`; None where it stays as it is.

        Cost: over the axes that split what is read, where no groups are, an all-reduce of the written elements.
        """
        form = self.form(node)
        if form is None:
            return None
        (grid, group), arrow, value = form, _arrow_of(node), node.get_value()
        counts = _counts(arrow, value.shape, group)
        assert counts is not None
        packed = len(arrow.stacked + arrow.reads) - 1 if grid.bits == 4 else None
        keeps = [i for i, dim in enumerate(arrow.dims) if group or dim not in _shares(arrow)]
        places = _places(value.sharding, value.ndim, keeps, grid.offset)
        parts = _compiled(grid, counts, packed, tuple(counts[i] for i in keeps), places)(value)
        text: dict[str, Any] = {"dims": str(_kept(arrow, keeps))}
        meta: dict[str, Any] = {key: one for key, one in node.get_metadata().items() if key in ("dims", "also")}
        return QuantizedWeight(
            QuantizedPart(parts[0], **meta), QuantizedPart(parts[1], **text),
            None if parts[2] is None else QuantizedPart(parts[2], **text),
            dtype=value.dtype.name, bits=grid.bits, grouped=group > 0,
        )  # fmt: skip


def quantize(model: Model, kind: str, *, group: int | None = None, clip: bool = False) -> Model:
    """Quantise a model's weights in place; each weight is freed as soon as it is quantised.

    Args:
        model: a decoder, sharded in any way.
        kind: ``"int8"`` or ``"int4"``.
        group: as `Quantization` takes it.
        clip: as `Quantization` takes it.

    Returns:
        The same model. It runs forward only, and is not saved.

    Raises:
        ValueError: an unknown kind, groups that do not come out even, a model that is quantised already.
    """
    how = Quantization(kind, group, clip)
    refuse_quantized(model, "quantise the model")
    params = nnx.split(model, nnx.Param, ...)[1]
    how.check(params)
    for path, node in tree.named_nodes(params).items():
        value = node.get_value()
        if (weight := how.apply(node)) is not None:
            install(model, path, jax.block_until_ready(weight))
            value.delete()
    return model


def install(model: Any, path: str, weight: Any) -> None:
    """Put a quantised weight, or the value of a Param, at a path of a model."""
    *words, last = path.split("/")
    for word in words:
        model = model[int(word)] if word.isdigit() else getattr(model, word)
    if isinstance(weight, QuantizedWeight):
        setattr(model, last, weight)
    else:
        getattr(model, last).set_value(weight)


def refuse_quantized(model: Any, what: str) -> None:
    """Refuse to do something to a model that is quantised.

    Raises:
        ValueError: it is; `what` says what would have been done.
    """
    if tree.named_nodes(nnx.state(model, QuantizedPart)):
        raise ValueError(f"cannot {what}: its weights are quantised already; load it again without quantize")


def _arrow_of(node: nnx.Variable) -> dims.Arrow:
    text = node.get_metadata()["dims"]
    return dims.of(node, dims=tuple(dims.parse_words(text)))


def _shares(arrow: dims.Arrow) -> tuple[str, ...]:
    """Return the dims whose elements share a scale: what a product sums over; of a table, what a token's row holds."""
    return arrow.writes if arrow.is_lookup() else arrow.reads


def _counts(arrow: dims.Arrow, shape: tuple[int, ...], group: int) -> tuple[int, ...] | None:
    """Return how many scales lie along each axis; None where groups do not come out even."""
    named = dict(zip(arrow.dims, shape, strict=True))
    along = blocks_along([named[dim] for dim in _shares(arrow)], group)
    if along is None:
        return None
    blocks = dict(zip(_shares(arrow), along, strict=True))
    return tuple(blocks.get(dim, size) for dim, size in named.items())


def _problem(node: Any, grid: Grid, group: int) -> str:
    """Say why a weight cannot hold groups of this size; empty if it can."""
    arrow, shape = _arrow_of(node), node.shape
    counts = _counts(arrow, shape, group)
    if counts is None:
        reads = " x ".join(f"{dim} {n}" for dim, n in zip(arrow.dims, shape, strict=True) if dim in _shares(arrow))
        return f"groups of {group} do not come out even along what it reads, {reads}"
    parts = _num_shards(getattr(node.get_value(), "sharding", None), len(shape))
    last = len(arrow.stacked + arrow.reads) - 1
    for i, (dim, size, count, shards) in enumerate(zip(arrow.dims, shape, counts, parts, strict=True)):
        if group and count % shards:
            return f"{dim} {size} is split into {shards} shards, which hold no whole groups of {group}"
        if grid.bits == 4 and i == last and size % (2 * shards):
            return f"{dim} {size} in {shards} shards: two 4-bit integers share a byte, an even number each is needed"
    return ""


def _num_shards(sharding: Any, ndim: int) -> list[int]:
    if not isinstance(sharding, NamedSharding):
        return [1] * ndim
    return [math.prod(sharding.mesh.shape[axis] for axis in axes) for axes in _entries(sharding, ndim)]


def _entries(sharding: NamedSharding, ndim: int) -> list[tuple[str, ...]]:
    entries = [*sharding.spec, *[None] * (ndim - len(sharding.spec))]
    return [() if one is None else (one,) if isinstance(one, str) else tuple(one) for one in entries]


def _places(sharding: Any, ndim: int, keeps: list[int], offset: bool) -> Any:
    """Return the shardings of integers, scales and offsets; None where they stay on one device."""
    if not isinstance(sharding, NamedSharding):
        return None
    entries = _entries(sharding, ndim)
    scales = NamedSharding(sharding.mesh, PartitionSpec(*(entries[i] or None for i in keeps)))
    return sharding, scales, scales if offset else None


def _kept(arrow: dims.Arrow, keeps: list[int]) -> dims.Arrow:
    """Return an arrow with some of its dims alone."""
    left = {arrow.dims[i] for i in keeps}
    groups = (arrow.stacked, arrow.reads, arrow.writes)
    return dims.Arrow(*(tuple(dim for dim in one if dim in left) for one in groups))


@functools.lru_cache(maxsize=64)
def _compiled(
    grid: Grid, counts: tuple[int, ...], packed: int | None, shape: tuple[int, ...], places: Any
) -> Callable[[jax.Array], tuple[jax.Array, jax.Array, jax.Array | None]]:
    def run(weight: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        values, scales, offsets = round_to_grid(weight, counts, grid)
        values = values if packed is None else pack(values, packed)
        return values, scales.reshape(shape), None if offsets is None else offsets.reshape(shape)

    return jax.jit(run) if places is None else jax.jit(run, out_shardings=places)
