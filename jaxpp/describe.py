"""What a checkpoint holds, from its config and headers alone: for `jaxpp inspect`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxpp import dims, tree
from jaxpp.conversion import layout_of, like
from jaxpp.data import Tokenizer
from jaxpp.models import DecoderConfig
from jaxpp.models.canonical import spread
from jaxpp.parallel import Layout, bytes_per_device
from jaxpp.pretrained import Checkpoint
from jaxpp.quantities import show_bytes
from jaxpp.train.report import SHORT_DTYPES, columns, split_words


def describe(checkpoint: Checkpoint, mesh: str = "data:1") -> str:
    """Describe a checkpoint: its model, its tokenizer, each weight and how a mesh would split it. Reads no weight.

    Args:
        checkpoint: opened.
        mesh: where its weights would go.

    Raises:
        ValueError: the mesh cannot hold a weight.
    """
    layout = layout_of(checkpoint, mesh)
    params = like(checkpoint, layout)
    return "\n\n".join(["\n".join(columns(_summary(checkpoint, params))), _weights(params, layout)])


def _summary(checkpoint: Checkpoint, params: Any) -> list[tuple[str, str]]:
    family = getattr(getattr(checkpoint, "family", None), "model_type", "")
    kind = f"{checkpoint.format}, {family}" if family else checkpoint.format
    leaves = list(tree.named_leaves(params).values())
    count = dims.num_parameters(params)
    kinds = {str(np.dtype(leaf.dtype)): 0 for leaf in leaves}
    for leaf in leaves:
        kinds[str(np.dtype(leaf.dtype))] += math.prod(leaf.shape)
    stored = ", ".join(f"{kind} {elements / count:.0%}" for kind, elements in kinds.items())
    rows = [
        ("checkpoint", f"{checkpoint.name} ({kind})"),
        ("weights", f"{count:,} parameters, {show_bytes(tree.total_bytes(params))} ({stored})"),
    ]
    if isinstance(checkpoint.config, DecoderConfig):
        rows.append(("model", _shape(checkpoint.config)))
        rows.append(("options", ", ".join(_options(checkpoint.config)) or "none"))
    rows.append(("tokenizer", _tokenizer(checkpoint.tokenizer(), checkpoint.config.vocab_size)))
    return rows


def _shape(config: DecoderConfig) -> str:
    heads = f"{config.num_heads} heads of {config.head_dim}"
    shared = (
        f" on {config.num_kv_heads} kv head{'s'[: config.num_kv_heads - 1]}"
        if config.num_kv_heads != config.num_heads
        else ""
    )
    return (
        f"{config.num_layers} layers, embed {config.embed_dim}, {heads}{shared}, mlp {config.mlp_dim}, "
        f"vocab {config.vocab_size}, {config.max_positions} positions"
    )


def _options(config: DecoderConfig) -> list[str]:
    """Name what sets the model apart from a plain decoder."""
    moe, scaling = config.moe, config.rope_scaling
    found = [
        ("tied", config.tied),
        (f"{moe.num_experts} experts of {moe.mlp_dim or config.mlp_dim}", moe.num_experts),
        (f"{moe.experts_per_token} of them per token", moe.num_experts),
        (f"shared expert of {moe.shared_mlp_dim}", moe.shared_mlp_dim),
        (f"{config.mlp} mlp with {config.activation}", True),
        (_norms(config), True),
        ("learned positions", config.positions == "learned"),
        (f"rope base {config.rope_base:g}", config.positions == "rope"),
        (f"rope {scaling.kind}" + (f" x{scaling.factor:g}" if scaling.factor != 1 else ""), scaling.kind != "none"),
        (f"{config.rotary_dim} of {config.head_dim} dims rotate", 0 < config.rotary_dim < config.head_dim),
        (f"window {config.window}{_some(config.window_layers, config)}", config.window),
        (f"rope{_some(config.rope_layers, config)}", not all(config.rope_layers)),
        ("qk norm " + {"head": "of each head"}.get(config.qk_norm, "over all heads"), config.qk_norm != "none"),
        ("qkv bias", config.qkv_bias),
        ("bias after attention", config.out_bias),
        ("mlp bias", config.mlp_bias),
        ("scaled embedding", config.embed_scale),
        ("parallel residual", config.parallel),
        (f"attention soft cap {config.attention_soft_cap:g}", config.attention_soft_cap),
        (f"logit soft cap {config.logit_soft_cap:g}", config.logit_soft_cap),
    ]
    return [text for text, holds in found if holds]


def _norms(config: DecoderConfig) -> str:
    place = {"pre": "before", "post": "after", "both": "before and after"}[config.norm_place]
    return f"{config.norm} norm {place} each part"


def _some(pattern: Sequence[bool], config: DecoderConfig) -> str:
    """Say in how many layers something holds."""
    held = sum(spread(pattern, config.num_layers))
    return "" if held == config.num_layers else f" in {held} of {config.num_layers} layers"


def _tokenizer(tokenizer: Tokenizer | None, rows: int) -> str:
    if tokenizer is None:
        return "none"
    ends = " ".join(tokenizer.token(end) for end in sorted(tokenizer.ends))
    parts = [f"{tokenizer.vocab_size} tokens for {rows} rows", f"ends at {ends}"]
    if tokenizer.add_bos and tokenizer.begin_of_text is not None:
        parts.append(f"begins with {tokenizer.token(tokenizer.begin_of_text)}")
    return ", ".join([*parts, "with a chat template" if tokenizer.chat_template else "no chat template"])


def _weights(params: Any, layout: Layout) -> str:
    arrows, leaves = dims.arrows(params, layout.dims), tree.named_leaves(params)
    rows: list[Sequence[str]] = [("parameter", "arrow", "shape and dtype", "sharding", "bytes")]
    for path, leaf in leaves.items():
        dtype = np.dtype(leaf.dtype).name
        kind = f"{'x'.join(map(str, leaf.shape))} {SHORT_DTYPES.get(dtype, dtype)}"
        split = split_words(layout, arrows[path])
        rows.append((path, str(arrows[path]), kind, split, show_bytes(bytes_per_device(leaf))))
    rows.append(("total", "", "", "", show_bytes(sum(bytes_per_device(leaf) for leaf in leaves.values()))))
    return "\n".join(["weights; bytes are those on each device", *columns(rows, right=(4,))])
