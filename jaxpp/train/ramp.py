"""Masked structural growth: new units and layers come in while the model trains, from no effect to their own.

The mask ``c`` rises from 0 to 1. Where the method multiplies activations of new units by it, here the weights that
write or read them are multiplied, as their arrows say, so that no model knows of masks. With D units of the stream
before and D' after, and ``eta(c) = sqrt((D + c (D' - D)) / D')``:

- new units of ``mlp`` and ``heads``: what reads them, times c. Nothing but new queries reads new ``kv_heads``;
- new units of ``embed``: what writes them, times c; scales of norms times eta, as their means are over D' units, of
  which D + c (D' - D) count. Then ``eta x / sqrt(sum x^2 / D' + e D / D')`` is ``x / sqrt(sum x^2 / D + e)`` at c = 0:
  the model's epsilon is the old one times D / D'. What a norm of queries and keys normalises is multiplied by eta, for
  it has the same epsilon; so is a table that the model multiplies by sqrt(D'), and then the last norm has no eta where
  the head is that table;
- new ``layers``: what ends their branches, times c.

At c = 0 the model computes the old one's function, at c = 1 its weights are their own.

Source: Yao, Zhang, Li, Wang, Masked Structural Growth for 2x Faster Language Model Pre-training, 2024, section 3.
    There norms weigh squares by c, where here the stream of new units holds c already; and a new layer is
    ``c block(x) + (1 - c) x``, where here each of its branches is ``x + c branch(x)``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpp import dims, tree
from jaxpp.names import unknown
from jaxpp.nn import Norm

GROWING = ("embed", "mlp", "heads", "kv_heads", "layers")
MASKED = ("embed", "mlp", "heads")  # where they are read; embed where it is written


@dataclass(frozen=True)
class RampConfig:
    """Which units and layers are new, and over which steps they come in."""

    dims: dict[str, int] = field(default_factory=dict)  # size before: embed, mlp, heads, kv_heads, layers
    num_steps: int = 0  # updates over which the mask rises from 0 to 1; 0: nothing is masked
    start: int = 0  # updates done when it begins to rise

    def __post_init__(self) -> None:
        for dim, size in self.dims.items():
            if dim not in GROWING:
                raise ValueError(unknown("train.ramp.dims: unknown dim", dim, GROWING))
            if size < 1:
                raise ValueError(f"train.ramp.dims: {dim}: {size}: the size before is needed, 1 or more")
        for name in ("num_steps", "start"):
            if getattr(self, name) < 0:
                raise ValueError(f"train.ramp.{name} = {getattr(self, name)}: 0 or more are needed")
        if self.num_steps and not self.dims:
            raise ValueError("train.ramp.num_steps without train.ramp.dims: say how large each dim was, embed: 256")


@dataclass(frozen=True)
class Share:
    """What the mask does to one weight: ``W f + (f - 1) offset``, f = eta^root, and c times that where it is new.

    Args:
        new: for each masked axis the index from which it is new.
        root: 1 where eta goes on the weight, 0 where it does not.
        offset: what the model adds to the weight (1 for norms that scale by ``1 + scale``).
    """

    new: tuple[tuple[int, int], ...] = ()
    root: int = 0
    offset: float = 0.0


@dataclass(frozen=True, eq=False)
class Ramp:
    """The masks of one model.

    Args:
        config: dims and steps.
        shares: of each weight, by path.
        width: units of the residual stream before and after.
    """

    config: RampConfig
    shares: Mapping[str, Share]
    width: tuple[int, int]

    def at(self, step: Any) -> jax.Array:
        """Return the mask of the update after `step` updates, a number from 0 to 1."""
        return jnp.clip((step - self.config.start) / self.config.num_steps, 0.0, 1.0).astype(jnp.float32)


def ramped(params: Any, ramp: Ramp, c: Any) -> Any:
    """Put the masks on the weights.

    Args:
        params: ``nnx.State`` of all weights.
        ramp: from `make_ramp`, for this model.
        c: the mask, from 0 to 1, a number or an fp32 scalar.

    Returns:
        The weights to compute with; those given, bit for bit, at c = 1.

    Cost: one multiplication per masked weight; no collective, every shard masks its own.
    """
    before, after = ramp.width
    c = jnp.asarray(c, jnp.float32)
    eta = jnp.sqrt((before + c * (after - before)) / after)

    def one(path: str, node: Any) -> Any:
        value, share = node.get_value(), ramp.shares.get(path, Share())
        if not share.new and not share.root:
            return value
        wide = jnp.promote_types(value.dtype, jnp.float32)
        factor = (eta if share.root else jnp.ones_like(eta)).astype(wide)
        for axis, first in share.new:
            is_new = jax.lax.broadcasted_iota(jnp.int32, value.shape, axis) >= first
            factor = jnp.where(is_new, factor * c, factor)
        masked = value.astype(wide) * factor
        return (masked + (factor - 1) * share.offset if share.offset else masked).astype(value.dtype)

    return tree.map_named(one, params)


def make_ramp(config: RampConfig, model: nnx.Module, own: Sequence[str] = ()) -> Ramp | None:
    """Read the masks off a model.

    Args:
        config: dims and steps.
        model: the grown model, concrete or as ``nnx.eval_shape`` gives it.
        own: names of dims beside `jaxpp.dims.DIMS`.

    Returns:
        The masks; None where there is no ramp.

    Raises:
        ValueError: a dim that the model lacks, has in two sizes or smaller than before; heads that left their group; a
            norm that no factor can keep: layer norms over ``embed``, norms over all heads.
    """
    if not config.num_steps:
        return None
    params = nnx.split(model, nnx.Param, ...)[1]
    arrows, nodes = dims.arrows(params, own), tree.named_nodes(params)
    held = {dim for arrow in arrows.values() for dim in arrow.dims} & {"embed", "heads", "kv_heads"}
    sizes = {dim: _size(dim, arrows, nodes) for dim in GROWING if dim in held | config.dims.keys()}
    for dim, old in config.dims.items():
        if old > sizes[dim]:
            raise ValueError(f"train.ramp.dims: {dim}: {old} before, but the model has {sizes[dim]}; models only grow")
    grown = {dim: old for dim, old in config.dims.items() if old < sizes[dim]}
    norms = {_name(path): norm for path, norm in nnx.iter_modules(model) if isinstance(norm, Norm)}
    _check_heads(grown, sizes)
    _check_norms(grown, norms, arrows)
    inner = frozenset(path for path in norms if arrows[f"{path}/scale"].writes != ("embed",))
    reader = _Reader(grown, norms, inner, _scaled_table(model, arrows), _is_tied(nodes))
    shares = {path: reader.share(path, arrow) for path, arrow in arrows.items()}
    width = sizes.get("embed", 1)
    return Ramp(config, shares, (grown.get("embed", width), width))


def _name(path: tuple[Any, ...]) -> str:
    return "/".join(map(str, path))


def _size(dim: str, arrows: Mapping[str, dims.Arrow], nodes: Mapping[str, Any]) -> int:
    """Return the size of a dim, the same in all weights."""
    found = {nodes[path].shape[arrow.dims.index(dim)]: path for path, arrow in arrows.items() if dim in arrow.dims}
    if not found:
        known = sorted({word for arrow in arrows.values() for word in arrow.dims})
        raise ValueError(unknown("train.ramp.dims: no weight has dim", dim, known, "dims of this model"))
    if len(found) > 1:
        sizes = " and ".join(f"{size} ({path})" for size, path in sorted(found.items()))
        raise ValueError(f"train.ramp.dims: {dim} has the sizes {sizes}; one is needed to tell which units are new")
    return next(iter(found))


def _check_heads(grown: Mapping[str, int], sizes: Mapping[str, int]) -> None:
    """Refuse heads that, kept in the first places, would read another key than before."""
    if "kv_heads" not in sizes or not grown.keys() & {"heads", "kv_heads"}:
        return
    heads, kv_heads = sizes["heads"], sizes["kv_heads"]
    old, old_kv = grown.get("heads", heads), grown.get("kv_heads", kv_heads)
    if old * kv_heads != heads * old_kv and not old_kv == kv_heads == 1:
        raise ValueError(
            f"train.ramp.dims: {old} heads on {old_kv} kv heads became {heads} on {kv_heads}: old heads would read "
            f"other keys; {old // old_kv} heads for each key are needed, {old // old_kv * kv_heads} on {kv_heads}"
        )


def _check_norms(grown: Mapping[str, int], norms: Mapping[str, Norm], arrows: Mapping[str, dims.Arrow]) -> None:
    for path, norm in norms.items():
        writes = arrows[f"{path}/scale"].writes
        if "embed" in writes and "embed" in grown and norm.kind == "layer":
            raise ValueError(
                f"train.ramp.dims: embed cannot come in behind layer norms ({path}): their mean over all units is not "
                "the mean over the old ones, and no factor on a weight mends it; lemon widens such a model"
            )
        if turned := {"heads", "kv_heads"} & grown.keys() & set(writes):
            raise ValueError(
                f"train.ramp.dims: {min(turned)} cannot come in behind a norm over all heads ({path}): its mean would "
                "count the new ones from the start"
            )


def _scaled_table(model: Any, arrows: Mapping[str, dims.Arrow]) -> str:
    """Return the path of the table that the model multiplies by the root of its width; empty where there is none."""
    scales = getattr(getattr(model, "config", None), "embed_scale", False)
    return next((path for path, arrow in arrows.items() if arrow.reads == ("vocab",)), "") if scales else ""


def _is_tied(nodes: Mapping[str, Any]) -> bool:
    return any("also" in node.get_metadata() for node in nodes.values())


@dataclass(frozen=True, eq=False)
class _Reader:
    """Reads the share of a weight off its arrow, and off the norms beside it.

    Args:
        grown: sizes before of the dims that grow.
        norms: by path.
        inner: paths of those that are not over the residual stream, such as of queries and keys.
        table: that the model multiplies by the root of its width, if any.
        tied: whether the head is the table.
    """

    grown: Mapping[str, int]
    norms: Mapping[str, Norm]
    inner: frozenset[str]
    table: str
    tied: bool

    def share(self, path: str, arrow: dims.Arrow) -> Share:
        parent, _, name = path.rpartition("/")
        if (norm := self.norms.get(parent)) is not None:
            return self._of_norm(parent, norm, name == "scale", arrow)
        read = range(len(arrow.stacked), len(arrow.stacked) + len(arrow.reads))
        masked = [(axis, dim) for axis, dim in enumerate(arrow.dims) if (dim == "embed") != (axis in read)]
        new = [(axis, self.grown[dim]) for axis, dim in masked if dim in MASKED and dim in self.grown]
        ends = arrow.writes == ("embed",) and not any(_is_post(one) for one in self.norms)
        shrinks = "embed" in self.grown and (f"{parent}_norm" in self.inner or path == self.table)
        return Share(self._new_layers(arrow, ends) + tuple(new), int(shrinks))

    def _of_norm(self, parent: str, norm: Norm, is_scale: bool, arrow: dims.Arrow) -> Share:
        if parent in self.inner:
            return Share()
        last = "layers" not in arrow.stacked and self.tied and bool(self.table)
        root = int("embed" in self.grown and is_scale and not last)
        offset = 1.0 if is_scale and norm.scaling == "offset" else 0.0
        return Share(self._new_layers(arrow, _is_post(parent)), root, offset)

    def _new_layers(self, arrow: dims.Arrow, ends: bool) -> tuple[tuple[int, int], ...]:
        grows = ends and arrow.stacked[:1] == ("layers",) and "layers" in self.grown
        return ((0, self.grown["layers"]),) if grows else ()


def _is_post(norm: str) -> bool:
    """Say whether a norm ends a branch."""
    return norm.endswith("post_norm")
