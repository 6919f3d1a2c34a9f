"""A weight as a linear map of an old one, part of it learned.

``W'_l = B (sum_k alpha_lk W_k) A^T``: the depth is mixed first, then rows and columns are mapped. A and B hold the
identity where old units stand among the new; only their other rows and alpha are learned. Letters: L layers, E experts,
R what is read, W what is written, P and Q the same after.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpp import dims, tree
from jaxpp.dims import Arrow
from jaxpp.grow.step import is_norm, scale_offset
from jaxpp.models import DecoderConfig
from jaxpp.pretrained import abstract_params

ALPHA_NOISE = 0.03
_product = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)  # else accelerators round the old weights

Learned = Mapping[str, Any]
"""``"maps"``: name to learned rows, ``[(layers,) new - old, old]``; ``"alpha"``: path to ``[new layers, layers]``."""


@dataclass(frozen=True, eq=False)
class Map:
    """A matrix ``[new, old]``: the identity at the places of the old units, learned elsewhere.

    Args:
        name: of its rows in `Learned`, where it has any.
        place: ``[old]`` integers, where each old unit stands.
        new: units after.
        num_layers: layers that each have one of their own; 0: one for all.
        groups: of values, read by the attention's output: queries of each key before and after; None: others.
    """

    name: str
    place: np.ndarray
    new: int
    num_layers: int
    groups: tuple[int, int] | None = None

    @property
    def old(self) -> int:
        """Units before."""
        return len(self.place)

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        """Return rows that are means with random weights."""
        shape = (*([self.num_layers] if self.num_layers else []), self.new - self.old, self.old)
        rows = rng.uniform(size=shape).astype(np.float32)
        return rows / rows.sum(-1, keepdims=True)

    def matrix(self, learned: Learned, head_dim: int) -> jax.Array:
        """Return ``[(layers,) new, old]``; with `groups`, over all heads."""
        rows = jnp.asarray(learned["maps"].get(self.name, np.zeros((0, self.old), np.float32)))
        identity = jnp.broadcast_to(jnp.eye(self.old, dtype=rows.dtype), (*rows.shape[:-2], self.old, self.old))
        others = np.setdiff1d(np.arange(self.new), self.place)
        order = np.argsort(np.concatenate([self.place, others]))
        found = jnp.concatenate([identity, rows], -2)[..., order, :]
        return _over_groups(found, *self.groups, head_dim) if self.groups else found


def _over_groups(matrix: jax.Array, old: int, new: int, head_dim: int) -> jax.Array:
    """Turn a map over kv heads into one over all heads: query g of a group reads as query ``g % old`` did."""
    same = jnp.asarray(np.arange(new)[:, None] % old == np.arange(old), matrix.dtype)
    wide = matrix.reshape(*matrix.shape[:-2], -1, head_dim, matrix.shape[-1] // head_dim, head_dim)
    spread = _product("...pdke,gh->...pgdkhe", wide, same)
    return spread.reshape(*matrix.shape[:-2], matrix.shape[-2] * new, matrix.shape[-1] * old)


@dataclass(frozen=True, eq=False)
class Form:
    """How one weight is made of its source.

    Args:
        path: of the weight, the same in both models.
        arrow: its dims.
        shape: after.
        reads: map of what it reads; None: as it is.
        writes: map of what it writes.
        mixed: whether the depth grows.
        offset: what the model adds to the weight.
        head_dim: size of a head.
    """

    path: str
    arrow: Arrow
    shape: tuple[int, ...]
    reads: Map | None
    writes: Map | None
    mixed: bool
    offset: float
    head_dim: int

    def weight(self, x: jax.Array, learned: Learned) -> jax.Array:
        """Return the new weight, at least fp32."""
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32)) + self.offset
        num_layers = x.shape[0] if "layers" in self.arrow.stacked else 1
        stacked, reads, writes = self.arrow.sizes(x.shape)
        y_LERW = wide.reshape(num_layers, stacked // num_layers, reads, writes)
        if self.mixed:
            y_LERW = _product("lk,kerw->lerw", jnp.asarray(learned["alpha"][self.path], y_LERW.dtype), y_LERW)
        for one, product in ((self.reads, "lerw,lpr->lepw"), (self.writes, "lerw,lqw->lerq")):
            if one is not None:
                matrix = one.matrix(learned, self.head_dim).astype(y_LERW.dtype)
                y_LERW = _product(product if matrix.ndim == 3 else product.replace(",l", ","), y_LERW, matrix)
        return y_LERW.reshape(self.shape) - self.offset


@dataclass(frozen=True, eq=False)
class Mapped:
    """A weight made by what was learned; the optimizer starts anew."""

    form: Form
    learned: Learned

    @property
    def source(self) -> str:
        """Path of the weight that it comes from."""
        return self.form.path

    def weight(self, x: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """Return the new weight."""
        return self.form.weight(x, self.learned).astype(dtype)

    def moment(self, x: jax.Array, power: int) -> jax.Array:
        """Return zeros."""
        return jnp.zeros(self.form.shape, x.dtype)

    def rate(self) -> float:
        """Return 1."""
        return 1.0


def maps_of(config: DecoderConfig, target: DecoderConfig) -> dict[str, Map]:
    """Return the maps by name: of the stream, of heads and of the mlp."""
    layers, head_dim, (group, wide) = target.num_layers, config.head_dim, groups_of(config, target)
    units = np.arange(config.num_heads)
    places = (units // group * wide + units % group)[:, None] * head_dim + np.arange(head_dim)
    keys = Map("key", np.arange(config.num_kv_heads * head_dim), target.num_kv_heads * head_dim, layers)
    found = [
        Map("embed", np.arange(config.embed_dim), target.embed_dim, 0),
        Map("query", places.reshape(-1), target.num_heads * head_dim, layers),
        keys,
        replace(keys, name="value"),
    ]
    widths = {"mlp": _mlp_dim, "shared": _shared_dim}
    found += [Map(name, np.arange(width(config)), width(target), layers) for name, width in widths.items()]
    return {one.name: one for one in found}


def groups_of(config: DecoderConfig, target: DecoderConfig) -> tuple[int, int]:
    """Return the queries of each key before and after."""
    return config.num_heads // config.num_kv_heads, target.num_heads // target.num_kv_heads


def _mlp_dim(config: DecoderConfig) -> int:
    return (config.moe.mlp_dim if config.moe.num_experts else 0) or config.mlp_dim


def _shared_dim(config: DecoderConfig) -> int:
    return config.moe.shared_mlp_dim


def forms_of(config: DecoderConfig, target: DecoderConfig, maps: Mapping[str, Map]) -> dict[str, Form]:
    """Return how each weight is made, by path."""
    mixed, found = target.num_layers > config.num_layers, {}
    through = replace(maps["value"], groups=groups_of(config, target)) if target.num_heads > config.num_heads else None
    for path, node in tree.named_nodes(abstract_params(target)).items():
        arrow = dims.of(node, path)
        reads = through if arrow.reads == ("heads", "head_dim") else _map_of(arrow.reads, path, maps)
        found[path] = Form(
            path, arrow, tuple(node.shape), reads, _map_of(arrow.writes, path, maps),
            mixed=mixed and "layers" in arrow.stacked,
            offset=scale_offset(config) if is_norm(path) and path.endswith("/scale") else 0.0,
            head_dim=config.head_dim,
        )  # fmt: skip
    return found


def _map_of(side: tuple[str, ...], path: str, maps: Mapping[str, Map]) -> Map | None:
    """Return the map of what a weight reads or writes; None where that does not grow."""
    names = {
        ("embed",): "embed",
        ("heads", "head_dim"): "query",
        ("kv_heads", "head_dim"): "value" if "/value/" in path else "key",
        ("mlp",): "shared" if "/shared/" in path else "mlp",
    }
    one = maps[names[side]] if side in names else None
    return one if one is not None and one.new > one.old else None


def draw_map(maps: Mapping[str, Map], forms: Mapping[str, Form], old: int, new: int, seed: int) -> dict[str, Any]:
    """Draw the map that training starts from: rows that are means, layers that are the stack again and some noise."""
    rng = np.random.default_rng(seed)

    def alpha() -> np.ndarray:
        mixed = np.eye(old)[np.arange(new) % old] + rng.uniform(0, ALPHA_NOISE, (new, old))
        return (mixed / mixed.sum(-1, keepdims=True)).astype(np.float32)

    rows = {name: one.draw(rng) for name, one in maps.items() if one.new > one.old}
    return {"maps": rows, "alpha": {path: alpha() for path, form in forms.items() if form.mixed}}
