"""Grow a model that lies in memory, on its own mesh, with its optimizer state if there is one."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from jaxpp import dims, tree
from jaxpp.grow.moments import grow_moments
from jaxpp.grow.places import carried_over, make_weight
from jaxpp.grow.request import Request
from jaxpp.grow.step import Growth


def enlarge(model: Any, growth: Growth | None = None, *, opt_state: Any = None, **wishes: Any) -> Any:
    """Return a larger model that computes the same function, on the same mesh.

    Args:
        model: a decoder, as `jaxpp.load` returns it or built from a `DecoderConfig`.
        growth: steps; None: those of `wishes`.
        opt_state: optax state over the model's weights (``nnx.state(model, nnx.Param)``).
        wishes: fields of `jaxpp.grow.Request`: ``width=2, noise_db=15.0``, ``depth=32, depth_op="interpolate"``,
            ``heads=``, ``mlp=``, ``experts=8``, ``target="llama-3.2-1b"``.

    Returns:
        The larger model; with `opt_state`, the pair of it and its optimizer state.

    Raises:
        ValueError: no decoder, or sizes that no operator reaches; see `Request`.

    Example:
        >>> from jaxpp.models import DecoderConfig
        >>> small = DecoderConfig(vocab_size=32, num_layers=1, embed_dim=16, num_heads=2).build(nnx.Rngs(0))
        >>> enlarge(small, width=2).config.embed_dim
        32
    """
    growth = growth or Request(**wishes).growth(getattr(model, "config", None))
    old, leaves = nnx.split(model, nnx.Param, ...)[1], growth.leaves()
    held, arrows = tree.named_leaves(old), dims.arrows(old)
    graph, wanted, other = nnx.split(nnx.eval_shape(lambda: growth.target.build(nnx.Rngs(0))), nnx.Param, ...)

    def make(path: str, node: Any) -> jax.Array:
        leaf = leaves[path]
        x = held[leaf.source]
        place = carried_over(x.sharding, arrows[leaf.source].dims, dims.of(node, path), node.shape)
        return make_weight(leaf, x, x.dtype, place)

    params = tree.map_named(make, wanted)
    bigger: Any = nnx.merge(graph, params, other)
    bigger.loaded = model.loaded
    return bigger if opt_state is None else (bigger, grow_moments(opt_state, params, leaves))
