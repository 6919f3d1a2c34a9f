"""What a model is made of, as the partitioner needs it: every weight with its arrow, the mlps, what a token sees.

Sizes come from the arrows of the abstract weights, so a mixture of experts, a tied head, grouped queries and a plain
mlp differ in what they hold and not in how they are read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from flax import nnx

from jaxpp import dims, tree
from jaxpp.dims import Arrow


@dataclass(frozen=True)
class Weight:
    """One weight of one layer, or one that stands outside of the layers.

    Args:
        path: in the tree.
        arrow: without dim ``layers``.
        shape: without dim ``layers``.
        layers: how often it occurs, once in each layer; 0: outside of them.
        head: whether it makes the logits.
    """

    path: str
    arrow: Arrow
    shape: tuple[int, ...]
    layers: int
    head: bool

    @property
    def size(self) -> int:
        """Number of entries."""
        return math.prod(self.shape)

    @property
    def multiplies(self) -> bool:
        """Whether it is a factor of products; a table that only is looked up is not, nor is a bias or a scale."""
        return self.head or (bool(self.arrow.reads) and not self.arrow.is_lookup())

    @property
    def each_expert(self) -> bool:
        """Whether there is one for each expert."""
        return "experts" in self.arrow.stacked


@dataclass(frozen=True)
class Branch:
    """One mlp of a layer: a dense one, all experts, or the shared expert.

    Args:
        width: of its hidden units; of each expert's.
        num_inputs: weights ``embed -> mlp``, 2 where it is gated.
        visits: experts that each token visits; 1 where there are none.
        routed: whether there are experts.
    """

    width: int
    num_inputs: int
    visits: int
    routed: bool


@dataclass(frozen=True)
class ModelSizes:
    """A decoder in numbers.

    Args:
        weights: all of them.
        num_layers: blocks.
        embed: width of the residual stream.
        heads: of queries.
        kv_heads: of keys and values.
        head_dim: of a head.
        vocab: rows of the embedding table.
        branches: the mlps of one layer.
        experts: of one layer; 0: none.
        visits: experts that a token visits.
        windows: for each layer the tokens that one token sees at most; 0: all before it.
        parallel: whether attention and mlp read the same input.
        norms: mean squares (and means) of the residual stream that one layer takes of each token.
        qk_sums: those that attention takes over all heads.
        max_positions: longest context.
    """

    weights: tuple[Weight, ...]
    num_layers: int
    embed: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    branches: tuple[Branch, ...]
    experts: int
    visits: int
    windows: tuple[int, ...]
    parallel: bool
    norms: int
    qk_sums: int
    max_positions: int

    @cached_property
    def num_parameters(self) -> int:
        """Number of weights, each layer's counted."""
        return sum(weight.size * max(weight.layers, 1) for weight in self.weights)

    def keys(self, context: int) -> int:
        """Return the tokens that the caches of all layers hold of one sequence, windows applied."""
        return sum(min(context, window or context) for window in self.windows)


def model_sizes(config: Any) -> ModelSizes:
    """Read a model's sizes; nothing is drawn or loaded.

    Args:
        config: of a decoder (`jaxpp.models.decoder_config.DecoderConfig`).

    Raises:
        ValueError: the model is no decoder.
    """
    if not hasattr(config, "num_kv_heads"):
        raise ValueError(f"{type(config).__name__} is no decoder; the partitioner knows decoders alone")
    params = nnx.split(nnx.eval_shape(lambda: config.build(nnx.Rngs(0))), nnx.Param, ...)[1]
    weights = tuple(_weight(path, node) for path, node in tree.named_nodes(params).items())
    sizes = {dim: size for weight in weights for dim, size in zip(weight.arrow.dims, weight.shape, strict=True)}
    visits = config.moe.experts_per_token if "experts" in sizes else 1
    two_pass = 2 if config.norm == "layer" else 1
    return ModelSizes(
        weights, max(weight.layers for weight in weights), sizes["embed"], sizes["heads"], sizes["kv_heads"],
        sizes["head_dim"], sizes["vocab"], _branches(weights, visits), sizes.get("experts", 0), visits,
        _windows(config), config.parallel, two_pass * (4 if config.norm_place == "both" else 2),
        2 if config.qk_norm == "full" else 0, config.max_positions,
    )  # fmt: skip


def _weight(path: str, node: Any) -> Weight:
    arrow, shape, also = dims.of(node, path), tuple(node.shape), node.get_metadata().get("also", "")
    stacked = arrow.stacked[:1] == ("layers",)
    head = arrow.writes == ("vocab",) or (bool(also) and dims.parse(also).writes == ("vocab",))
    if stacked:
        return Weight(path, arrow.unstack(), shape[1:], shape[0], head)
    return Weight(path, arrow, shape, 0, head)


def _branches(weights: tuple[Weight, ...], visits: int) -> tuple[Branch, ...]:
    """Group the weights ``embed -> mlp`` by whether each expert has its own, and by width."""
    found: dict[tuple[bool, int], int] = {}
    for weight in weights:
        if weight.arrow.reads == ("embed",) and weight.arrow.writes == ("mlp",):
            kind = (weight.each_expert, weight.shape[-1])
            found[kind] = found.get(kind, 0) + 1
    return tuple(
        Branch(width, count, visits if routed else 1, routed) for (routed, width), count in found.items()
    )  # fmt: skip


def _windows(config: Any) -> tuple[int, ...]:
    layers = config.layers()
    if layers is None:
        return (config.window,) * config.num_layers
    return tuple(config.window if layer.window else 0 for layer in layers)
