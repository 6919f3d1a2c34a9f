"""Learned linear growth: each new weight is a linear map of the old ones, and a short training learns the map.

``W'_l = B (sum_k alpha_lk W_k) A^T``: the depth is mixed first, then rows and columns are mapped. A and B hold the
identity where old units stand among the new; only their other rows and alpha are learned, the old weights stay as they
are. Letters: L layers, E experts, R what is read, W what is written, P and Q the same after.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jaxpp import dims, tree
from jaxpp.dims import Arrow
from jaxpp.grow.step import Step, is_norm, scale_offset
from jaxpp.grow.target import check_families, check_sizes
from jaxpp.model import Batch
from jaxpp.models import DecoderConfig
from jaxpp.parallel import Execution, Layout, executing
from jaxpp.pretrained import abstract_params

GAP = "a learned map divides nothing over copies"
_ALPHA_NOISE = 0.03
_product = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)  # else accelerators round the old weights

Learned = Mapping[str, Any]
"""``"maps"``: name to learned rows, ``[(layers,) new - old, old]``; ``"alpha"``: path to ``[new layers, layers]``."""


def learn(
    model: Any,
    target: DecoderConfig,
    batches: Iterable[Batch],
    *,
    num_steps: int = 100,
    learning_rate: float = 2e-4,
    seed: int = 0,
    layout: Layout | None = None,
    progress: Callable[[int, float], None] | None = None,
) -> Step:
    """Learn how a model becomes a larger one; stream, heads, mlp and depth may grow.

    One map is shared by all that reads or writes the stream. Each layer has maps of its own for queries, keys, values
    (the attention's output reads by the values') and the mlp; each weight has its own alpha, where the depth grows.

    Args:
        model: the small decoder.
        target: config to reach.
        batches: tokens and targets ``[batch, seq]``; one for each step.
        num_steps: updates of the map.
        learning_rate: of Adam.
        seed: of the map at the start.
        layout: of the large model; None: that of `model`, if it was loaded onto a mesh.
        progress: called with the number of updates done and the mean loss in nats before each.

    Returns:
        A step that makes the weights one at a time. It does not preserve the function; moments restart at zero.

    Raises:
        ValueError: models that differ in more than these sizes; fewer batches than steps.

    Cost: memory: all of the large model and its activations, as in training without its optimizer, and the maps with
        two moments, which are about as large as the large model's blocks; split over all devices where they divide.

    Source: Wang, Panda, Hennigen, Greengard, Karlinsky, Feris, Cox, Wang, Kim, Learning to Grow Pretrained Models for
        Efficient Transformer Training (LiGO), 2023, section 3.
    """
    config, target = model.config, _checked(model.config, target)
    execution = model.loaded.execution if model.loaded and layout is None else Execution(layout)
    forms, maps = _forms(config, target), _maps(config, target)
    training = _Training(target, forms, execution, optax.adam(learning_rate))
    learned, moments = training.begin(partial(_draw, maps, forms, seed))
    held = tree.named_leaves(nnx.split(model, nnx.Param, ...)[1])
    for done, batch in enumerate(_exactly(batches, num_steps)):
        learned, moments, loss = training.step(learned, moments, held, training.place(batch))
        if progress:
            progress(done, float(loss))
    found = training.gathered(learned)
    words = {name: f"{one.old} -> {one.new}" for name, one in maps.items()}
    if target.num_layers > config.num_layers:
        words["layers"] = f"{config.num_layers} -> {target.num_layers}"
    return Step("ligo", config, target, {path: _Grown(form, found) for path, form in forms.items()}, words, GAP)


def _checked(config: DecoderConfig, target: DecoderConfig) -> DecoderConfig:
    """Refuse what no map reaches; return the target with the source's rows that fill tables up."""
    check_families(config, target)
    check_sizes(config, target)
    for name in ("head_dim", "vocab_size"):
        if getattr(config, name) != (new := getattr(target, name)):
            operator = name.removesuffix("_size")
            raise ValueError(f"ligo: {name} {new} is not {getattr(config, name)}; grow it by the operator {operator}")
    groups = [one.num_heads // one.num_kv_heads for one in (config, target)]
    if groups[1] < groups[0]:
        least = groups[0] * target.num_kv_heads
        raise ValueError(
            f"ligo: {target.num_heads} heads on {target.num_kv_heads} kv heads are groups of {groups[1]}, and the old "
            f"ones of {groups[0]}; {least} heads or more are needed"
        )
    target = replace(target, vocab_rows=config.vocab_rows)
    fixed = ("num_experts", "experts_per_token", "normalize", "shared_gate")
    if wrong := [name for name in fixed if getattr(config.moe, name) != getattr(target.moe, name)]:
        raise ValueError(f"ligo: moe.{wrong[0]} {getattr(target.moe, wrong[0])} is not {getattr(config.moe, wrong[0])}")
    return target


@dataclass(frozen=True, eq=False)
class _Map:
    """A matrix ``[new, old]``: the identity at the places of the old units, learned elsewhere.

    Args:
        old: units before.
        place: ``[old]`` integers, where each stands after.
        new: units after.
        num_layers: layers that each have one of their own; 0: one for all.
    """

    old: int
    place: np.ndarray
    new: int
    num_layers: int

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        """Return rows that are means with random weights."""
        shape = (*([self.num_layers] if self.num_layers else []), self.new - self.old, self.old)
        rows = rng.uniform(size=shape).astype(np.float32)
        return rows / rows.sum(-1, keepdims=True)

    def matrix(self, rows: jax.Array) -> jax.Array:
        """Return ``[(layers,) new, old]``."""
        identity = jnp.broadcast_to(jnp.eye(self.old, dtype=rows.dtype), (*rows.shape[:-2], self.old, self.old))
        others = np.setdiff1d(np.arange(self.new), self.place)
        order = np.argsort(np.concatenate([self.place, others]))
        return jnp.concatenate([identity, rows], -2)[..., order, :]


@dataclass(frozen=True, eq=False)
class _Form:
    """How one weight is made of its source.

    Args:
        path: of the weight, the same in both models.
        arrow: its dims.
        shape: after.
        reads: map of what it reads; None: as it is.
        writes: map of what it writes.
        groups: for a weight that reads all heads by the map of the values: queries of each before and after.
        mixed: whether the depth grows.
        offset: what the model adds to the weight.
    """

    path: str
    arrow: Arrow
    shape: tuple[int, ...]
    reads: tuple[str, _Map] | None
    writes: tuple[str, _Map] | None
    groups: tuple[int, int] | None
    mixed: bool
    offset: float

    def weight(self, x: jax.Array, learned: Learned) -> jax.Array:
        """Return the new weight, at least fp32."""
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32)) + self.offset
        num_layers = x.shape[0] if "layers" in self.arrow.stacked else 1
        stacked, reads, writes = self.arrow.sizes(x.shape)
        y_LERW = wide.reshape(num_layers, stacked // num_layers, reads, writes)
        if self.mixed:
            y_LERW = _product("lk,kerw->lerw", learned["alpha"][self.path].astype(y_LERW.dtype), y_LERW)
        if self.reads:
            y_LERW = self._applied(self.reads, learned, y_LERW, "lerw,lpr->lepw")
        if self.writes:
            y_LERW = self._applied(self.writes, learned, y_LERW, "lerw,lqw->lerq")
        return y_LERW.reshape(self.shape) - self.offset

    def _applied(self, named: tuple[str, _Map], learned: Learned, y: jax.Array, product: str) -> jax.Array:
        name, one = named
        rows = learned["maps"].get(name)
        matrix = jnp.eye(one.old) if rows is None else one.matrix(rows)
        if self.groups and named is self.reads:
            matrix = _over_groups(matrix, *self.groups, self.shape)
        product = product if matrix.ndim == 3 else product.replace(",l", ",")
        return _product(product, y, matrix.astype(y.dtype))


def _over_groups(matrix: jax.Array, old: int, new: int, shape: tuple[int, ...]) -> jax.Array:
    """Turn the map of values, over kv heads, into one over all heads: query g of a group reads as query ``g % old``.

    Args:
        matrix: ``[(layers,) new kv_heads x head_dim, kv_heads x head_dim]``.
        old: queries of a group before.
        new: queries of a group after.
        shape: of the attention's output weight after, ``[layers, heads, head_dim, embed]``.
    """
    head_dim, kv_heads = shape[2], shape[1] // new
    same = jnp.asarray(np.arange(new)[:, None] % old == np.arange(old), matrix.dtype)
    wide = matrix.reshape(*matrix.shape[:-2], kv_heads, head_dim, -1, head_dim)
    spread = _product("...pdke,gh->...pgdkhe", wide, same)
    return spread.reshape(*matrix.shape[:-2], kv_heads * new * head_dim, -1)


def _maps(config: DecoderConfig, target: DecoderConfig) -> dict[str, _Map]:
    """Return the maps by name, of what grows and of what it is read through."""
    layers, head_dim = target.num_layers, config.head_dim
    group, wide = (one.num_heads // one.num_kv_heads for one in (config, target))
    units = np.arange(config.num_heads)
    kv_place = np.arange(config.num_kv_heads * head_dim)
    place = ((units // group * wide + units % group)[:, None] * head_dim + np.arange(head_dim)).reshape(-1)
    kv = _Map(kv_place.size, kv_place, target.num_kv_heads * head_dim, layers)
    found = {
        "embed": _Map(config.embed_dim, np.arange(config.embed_dim), target.embed_dim, 0),
        "query": _Map(place.size, place, target.num_heads * head_dim, layers),
        "key": kv,
        "value": kv,
    }
    for name, old, new in _mlp_sizes(config, target):
        found[name] = _Map(old, np.arange(old), new, layers)
    return found


def _mlp_sizes(config: DecoderConfig, target: DecoderConfig) -> Iterator[tuple[str, int, int]]:
    """Yield name, old and new width of the mlp or of each expert, and of a shared expert."""
    if not config.moe.num_experts:
        yield "mlp", config.mlp_dim, target.mlp_dim
        return
    yield "mlp", config.moe.mlp_dim or config.mlp_dim, target.moe.mlp_dim or target.mlp_dim
    yield "shared mlp", config.moe.shared_mlp_dim, target.moe.shared_mlp_dim


def _forms(config: DecoderConfig, target: DecoderConfig, maps: Mapping[str, _Map]) -> dict[str, _Form]:
    """Return how each weight is made, by path."""
    before, found = tree.named_nodes(abstract_params(config)), {}
    groups = tuple(one.num_heads // one.num_kv_heads for one in (config, target))
    for path, node in tree.named_nodes(abstract_params(target)).items():
        arrow = dims.of(node, path)
        names = _name_of(arrow.reads, path), _name_of(arrow.writes, path)
        reads, writes = ((name, maps[name]) if name else None for name in names)
        if arrow.reads == ("heads", "head_dim") and target.num_heads == config.num_heads:
            reads = None
        grows = [named if named and named[1].new > named[1].old else None for named in (reads, writes)]
        through = groups if arrow.reads == ("heads", "head_dim") and reads else None
        found[path] = _Form(
            path, arrow, tuple(node.shape), reads if through else grows[0], grows[1], through,
            "layers" in arrow.stacked and target.num_layers > config.num_layers,
            scale_offset(config) if is_norm(path) and path.endswith("/scale") else 0.0,
        )  # fmt: skip
        assert len(before[path].shape) == len(node.shape)
    return found
