"""GPT-NeoX and Pythia: attention and mlp read the same stream, heads are partly rotated, qkv is fused head by head.

Source: Black et al., GPT-NeoX-20B, 2022; Biderman et al., Pythia, 2023.
"""

from __future__ import annotations

from typing import Any

from jaxpp.convert.attributes import Attributes
from jaxpp.convert.part import Part
from jaxpp.models.decoder_config import DecoderConfig
from jaxpp.models.family import Family
from jaxpp.models.llama_attributes import activation_name, read_activation
from jaxpp.models.llama_tensors import BUFFERS, Parts, linear, norm
from jaxpp.models.rope_attributes import RopeNames, read_rope, write_rope

LAYER = "gpt_neox.layers.{layer}."
NEOX_ROPE = RopeNames(base="rotary_emb_base", partial="rotary_pct", default_partial=0.25)


def _parse(attributes: Attributes) -> DecoderConfig:
    width, heads = attributes.take("hidden_size", kind=int), attributes.take("num_attention_heads", kind=int)
    max_positions = attributes.take("max_position_embeddings", kind=int)
    bias = attributes.take("attention_bias", kind=bool, default=True)
    return DecoderConfig(
        vocab_size=attributes.take("vocab_size", kind=int),
        num_layers=attributes.take("num_hidden_layers", kind=int),
        embed_dim=width,
        num_heads=heads,
        mlp_dim=attributes.take("intermediate_size", kind=int),
        max_positions=max_positions,
        tied=attributes.take("tie_word_embeddings", kind=bool, default=False),
        mlp="plain",
        activation=read_activation(attributes, "hidden_act", default="gelu"),
        norm="layer",
        norm_epsilon=attributes.take("layer_norm_eps", kind=float, default=1e-5),
        parallel=attributes.take("use_parallel_residual", kind=bool, default=True),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=True,
        **read_rope(attributes, width // max(heads, 1), max_positions, NEOX_ROPE),
    )


def _spell(config: DecoderConfig) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.embed_dim,
        "intermediate_size": config.mlp_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": config.tied,
        "hidden_act": activation_name(config),
        "layer_norm_eps": config.norm_epsilon,
        "use_parallel_residual": config.parallel,
        "attention_bias": config.qkv_bias,
        **write_rope(config, NEOX_ROPE),
    }


def _tensors(config: DecoderConfig) -> Parts:
    out_bias = "embed" if config.out_bias else ""
    parts: Parts = {
        "tokens/table": (Part("gpt_neox.embed_in.weight", "vocab embed"),),
        **norm("blocks/attention_norm", f"{LAYER}input_layernorm", bias=True),
        **norm("blocks/mlp_norm", f"{LAYER}post_attention_layernorm", bias=True),
        **linear("blocks/attention/out", f"{LAYER}attention.dense", "embed (heads head_dim)", out_bias),
        **linear("blocks/mlp/up", f"{LAYER}mlp.dense_h_to_4h", "mlp embed", "mlp"),
        **linear("blocks/mlp/down", f"{LAYER}mlp.dense_4h_to_h", "embed mlp", "embed"),
        **norm("final_norm", "gpt_neox.final_layer_norm", bias=True),
    }
    for one, (name, heads) in enumerate((("query", "heads"), ("key", "kv_heads"), ("value", "kv_heads"))):
        rows = f"({heads} {one}/3 head_dim)"  # q, k and v of one head, then of the next
        bias = rows if config.qkv_bias else ""
        parts |= linear(f"blocks/attention/{name}", f"{LAYER}attention.query_key_value", f"{rows} embed", bias)
    if not config.tied:
        parts["head/kernel"] = (Part("embed_out.weight", "vocab embed"), Part("lm_head.weight", "vocab embed"))
    return parts


_PYTHIA = dict(
    vocab_size=50_304, max_positions=2048, mlp="plain", activation="gelu", norm="layer", parallel=True,
    qkv_bias=True, out_bias=True, mlp_bias=True,
)  # fmt: skip

GPT_NEOX = Family(
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    parse=_parse,
    spell=_spell,
    tensors=_tensors,
    renames=((r"^(?=(embed_in|layers|final_layer_norm)\.)", "gpt_neox."),),
    ignored=BUFFERS,
    presets={
        "pythia-70m": dict(**_PYTHIA, num_layers=6, embed_dim=512, num_heads=8, mlp_dim=2048, rotary_dim=16),
        "pythia-160m": dict(**_PYTHIA, num_layers=12, embed_dim=768, num_heads=12, mlp_dim=3072, rotary_dim=16),
        "pythia-410m": dict(**_PYTHIA, num_layers=24, embed_dim=1024, num_heads=16, mlp_dim=4096, rotary_dim=16),
        "pythia-1b": dict(**_PYTHIA, num_layers=16, embed_dim=2048, num_heads=8, mlp_dim=8192, rotary_dim=64),
        "pythia-1.4b": dict(**_PYTHIA, num_layers=24, embed_dim=2048, num_heads=16, mlp_dim=8192, rotary_dim=32),
    },
)
