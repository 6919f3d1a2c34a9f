"""What a wider residual stream asks of single weights: tables, norms, and the last norm before a tied head."""

from __future__ import annotations

from typing import Any

from jaxpp import dims, tree
from jaxpp.grow.spread import Spread
from jaxpp.grow.step import is_norm, scale_offset
from jaxpp.models import DecoderConfig
from jaxpp.pretrained import abstract_params


def stream_changes(config: DecoderConfig, spread: Spread) -> dict[str, dict[str, Any]]:
    """Return the fields of `ByDims` that are special, by path, where dim ``embed`` grows by a spread.

    With D units before, D' after and k whole copies of each (the rest is tail):

    - an embedding that the model multiplies by sqrt(width) gets ``sqrt(D / D')``;
    - scales of norms get ``sqrt(k D / D')``, which is 1 without a tail; so do the kernels before a norm of queries and
      keys, as it shares the epsilon;
    - the last norm gets ``1 / k``, and what undoes the embedding's factor, where the head is the embedding table.
    """
    copies = int(spread.counts.max())
    whole = (copies * spread.old / spread.new) ** 0.5 if spread.has_tail else 1.0
    table = (spread.old / spread.new) ** 0.5 if config.embed_scale else 1.0
    last = 1 / (copies * table) if config.tied else 1.0
    tail = "mean" if config.norm == "layer" else "zero"
    offset = scale_offset(config)
    found: dict[str, dict[str, Any]] = {}
    for path, node in tree.named_nodes(abstract_params(config)).items():
        arrow, outer = dims.of(node, path), last if path.startswith("final_norm/") else 1.0
        if path == "tokens/table":
            found[path] = dict(factor=table, tail=tail)
        elif arrow.writes == ("embed",) and is_norm(path):
            scale = path.endswith("scale")
            found[path] = dict(factor=whole * outer, offset=offset, tail="factor") if scale else dict(factor=outer)
        elif arrow.writes == ("embed",):
            found[path] = dict(tail=tail)
        elif config.qk_norm != "none" and path.split("/")[-2] in ("query", "key"):
            found[path] = dict(factor=whole)
    return found


def stream_config(config: DecoderConfig, spread: Spread) -> dict[str, Any]:
    """Return the fields of the config that change with the stream's width: the epsilon less by ``k D / D'``."""
    whole = int(spread.counts.max()) * spread.old / spread.new if spread.has_tail else 1.0
    return dict(embed_dim=spread.new, norm_epsilon=config.norm_epsilon * whole, head_dim=config.head_dim)
