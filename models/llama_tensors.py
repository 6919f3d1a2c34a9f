"""Where weights lie in a file, under the names that Llama gave them and most families kept."""

from __future__ import annotations

from collections.abc import Mapping

from jaxpp.convert.part import Part
from jaxpp.models.decoder_config import DecoderConfig

LAYER = "model.layers.{layer}."

BUFFERS = (r"\.rotary_emb\.inv_freq$", r"\.attn\.(bias|masked_bias)$", r"\.attention\.(bias|masked_bias)$")
"""Tensors that old files store and that are computed."""

BASE_MODEL = (r"^(?=(embed_tokens|layers|norm)\.)", "model.")
"""A file of the model without its head lacks the prefix."""

NORMS: Mapping[str, Mapping[str, str]] = {
    "pre": {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
    "post": {"attention_post_norm": "post_attention_layernorm", "mlp_post_norm": "post_feedforward_layernorm"},
    "both": {
        "attention_norm": "input_layernorm",
        "attention_post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    },
}
"""``norm_place`` to our norms and theirs, whose ``post_attention_layernorm`` is two things."""

Parts = dict[str, tuple[Part, ...]]


def linear(path: str, tensor: str, kernel: str, bias: str = "") -> Parts:
    """Return where the kernel lies, and the bias if it has axes."""
    parts: Parts = {f"{path}/kernel": (Part(f"{tensor}.weight", kernel),)}
    if bias:
        parts[f"{path}/bias"] = (Part(f"{tensor}.bias", bias),)
    return parts


def norm(path: str, tensor: str, bias: bool = False) -> Parts:
    """Return where the scale lies, and the bias of a layer norm."""
    parts: Parts = {f"{path}/scale": (Part(f"{tensor}.weight", "embed"),)}
    if bias:
        parts[f"{path}/bias"] = (Part(f"{tensor}.bias", "embed"),)
    return parts


def llama_tensors(config: DecoderConfig) -> Parts:
    """Return where each weight lies in a family with Llama's names."""
    return {**outside(config), **attention(config), **mlp(config)}


def outside(config: DecoderConfig) -> Parts:
    """Return the tables, the head and the norms."""
    parts: Parts = {"tokens/table": (Part("model.embed_tokens.weight", "vocab embed"),)}
    for ours, theirs in NORMS[config.norm_place].items():
        parts |= norm(f"blocks/{ours}", LAYER + theirs)
    parts |= norm("final_norm", "model.norm")
    return parts if config.tied else {**parts, **linear("head", "lm_head", "vocab embed")}


def attention(config: DecoderConfig) -> Parts:
    """Return the four projections, and the norms of queries and keys."""
    parts: Parts = {}
    for ours, theirs, heads in (("query", "q", "heads"), ("key", "k", "kv_heads"), ("value", "v", "kv_heads")):
        axes = f"({heads} head_dim)"
        bias = axes if config.qkv_bias else ""
        parts |= linear(f"blocks/attention/{ours}", f"{LAYER}self_attn.{theirs}_proj", f"{axes} embed", bias)
        if config.qk_norm != "none" and ours != "value":
            scale = "head_dim" if config.qk_norm == "head" else axes
            parts[f"blocks/attention/{ours}_norm/scale"] = (Part(f"{LAYER}self_attn.{theirs}_norm.weight", scale),)
    bias = "embed" if config.out_bias else ""
    return {**parts, **linear("blocks/attention/out", f"{LAYER}self_attn.o_proj", "embed (heads head_dim)", bias)}


def mlp(config: DecoderConfig, path: str = "blocks/mlp", tensor: str = f"{LAYER}mlp") -> Parts:
    """Return the three products of a gated mlp."""
    wide, back = ("mlp", "embed") if config.mlp_bias else ("", "")
    return {
        **linear(f"{path}/gate", f"{tensor}.gate_proj", "mlp embed", wide),
        **linear(f"{path}/up", f"{tensor}.up_proj", "mlp embed", wide),
        **linear(f"{path}/down", f"{tensor}.down_proj", "embed mlp", back),
    }


def experts(router: tuple[str, ...], one: str, names: tuple[str, str, str]) -> Parts:
    """Return the router and the experts of a mixture: a tensor for each expert, or fused as transformers 5 may write.

    Args:
        router: names of the router's weight, without ``.weight``.
        one: prefix of one expert's tensors.
        names: gate, up and down in it.
    """
    fused = f"{LAYER}mlp.experts"
    gate, up, down = (f"{one}{name}.weight" for name in names)
    return {
        "blocks/mlp/router/kernel": tuple(Part(f"{name}.weight", "experts embed") for name in router),
        "blocks/mlp/experts/gate": (Part(gate, "mlp embed"), Part(f"{fused}.gate_up_proj", "experts (0/2 mlp) embed")),
        "blocks/mlp/experts/up": (Part(up, "mlp embed"), Part(f"{fused}.gate_up_proj", "experts (1/2 mlp) embed")),
        "blocks/mlp/experts/down": (Part(down, "embed mlp"), Part(f"{fused}.down_proj", "experts embed mlp")),
    }
