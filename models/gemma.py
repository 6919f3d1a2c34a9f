"""Gemma 1 and 2: norms that scale by 1 + weight, a scaled embedding; then windows, four norms and soft caps.

Source: Gemma Team, Gemma, 2024; Gemma 2, 2024.
"""

from __future__ import annotations

from typing import Any

from jaxpp.convert.attributes import Attributes
from jaxpp.models.decoder_config import DecoderConfig
from jaxpp.models.family import Family
from jaxpp.models.llama_attributes import (
    activation_name,
    check_width,
    layer_types,
    read_activation,
    read_biases,
    read_layer_types,
    read_llama,
    write_llama,
)
from jaxpp.models.llama_tensors import BASE_MODEL, BUFFERS, llama_tensors
from jaxpp.models.rope_attributes import LLAMA_ROPE, RopeNames


def read_gemma(attributes: Attributes, names: RopeNames = LLAMA_ROPE) -> dict[str, Any]:
    """Read what all generations share: arguments of `DecoderConfig`."""
    shape = read_llama(attributes, names, tied=True, head_dim=256)
    if attributes.take("hidden_activation", default=None) is not None:
        shape["activation"] = read_activation(attributes, "hidden_activation")
    elif attributes.take("hidden_act", default="gelu") == "gelu":
        shape["activation"] = "gelu_tanh"  # early files say gelu and mean its approximation
    return dict(**shape, **read_biases(attributes), embed_scale=True, norm_scale="offset")


def write_gemma(config: DecoderConfig, names: RopeNames = LLAMA_ROPE) -> dict[str, Any]:
    """Write what `read_gemma` reads."""
    name = activation_name(config)
    return {**write_llama(config, names), "hidden_activation": name, "attention_bias": config.qkv_bias}


def _spell_gemma(config: DecoderConfig) -> dict[str, Any]:
    if config.activation == "gelu":
        raise ValueError("transformers 5 reads its exact gelu as the approximate one, gelu_tanh")
    return write_gemma(config)


def read_scores(attributes: Attributes, attention_cap: float | None, logit_cap: float | None) -> dict[str, Any]:
    """Read the scale of the scores and the soft caps; `attention_cap` and `logit_cap` stand for absent ones."""
    caps = [
        attributes.take_or_null(name, kind=float, default=default) or 0.0
        for name, default in (("attn_logit_softcapping", attention_cap), ("final_logit_softcapping", logit_cap))
    ]
    scale = attributes.take("query_pre_attn_scalar", kind=float, at_least=1, default=256.0) ** -0.5
    return dict(attention_scale=scale, attention_soft_cap=caps[0], logit_soft_cap=caps[1])


def write_scores(config: DecoderConfig) -> dict[str, Any]:
    """Write what `read_scores` reads, and the window."""
    check_width(config)
    return {
        "query_pre_attn_scalar": round(config.attention_scale**-2) if config.attention_scale else config.head_dim,
        "attn_logit_softcapping": config.attention_soft_cap or None,
        "final_logit_softcapping": config.logit_soft_cap or None,
        "sliding_window": config.window or None,
        "layer_types": layer_types(config),
    }


def _parse_gemma2(attributes: Attributes) -> DecoderConfig:
    shape = read_gemma(attributes)
    num_layers = shape["num_layers"]
    return DecoderConfig(
        **shape,
        **read_scores(attributes, 50.0, 30.0),
        norm_place="both",
        window=attributes.take_or_null("sliding_window", kind=int, default=4096) or 0,
        window_layers=read_layer_types(attributes, num_layers, [i % 2 == 0 for i in range(num_layers)]),
    )


SHAPE = dict(tied=True, activation="gelu_tanh", embed_scale=True, norm_scale="offset", norm_epsilon=1e-6)
_GEMMA1 = dict(**SHAPE, vocab_size=256_000, head_dim=256, max_positions=8192)
_GEMMA2 = dict(
    **_GEMMA1, norm_place="both", window=4096, window_layers=(True, False), attention_soft_cap=50.0, logit_soft_cap=30.0
)
GEMMA = Family(
    model_type="gemma",
    architecture="GemmaForCausalLM",
    parse=lambda attributes: DecoderConfig(**read_gemma(attributes)),
    spell=_spell_gemma,
    tensors=llama_tensors,
    renames=(BASE_MODEL,),
    ignored=BUFFERS,
    presets={
        "gemma-2b": dict(**_GEMMA1, num_layers=18, embed_dim=2048, num_heads=8, num_kv_heads=1, mlp_dim=16_384),
        "gemma-7b": dict(**_GEMMA1, num_layers=28, embed_dim=3072, num_heads=16, mlp_dim=24_576),
    },
)

GEMMA2 = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    parse=_parse_gemma2,
    spell=lambda config: {**write_gemma(config), **write_scores(config)},
    tensors=llama_tensors,
    renames=(BASE_MODEL,),
    ignored=BUFFERS,
    presets={
        "gemma-2-2b": dict(**_GEMMA2, num_layers=26, embed_dim=2304, num_heads=8, num_kv_heads=4, mlp_dim=9216),
        "gemma-2-9b": dict(**_GEMMA2, num_layers=42, embed_dim=3584, num_heads=16, num_kv_heads=8, mlp_dim=14_336),
        "gemma-2-27b": dict(
            **{**_GEMMA2, "head_dim": 128}, num_layers=46, embed_dim=4608, num_heads=32, num_kv_heads=16, 
            mlp_dim=36_864, attention_scale=144**-0.5,
        ),
    },
)  # fmt: skip
