"""Llama 1 to 3.3, SmolLM 1 and 2 and the many that share their config; SmolLM3, some layers of which do not rotate.

Source: Touvron et al., LLaMA, 2023; Grattafiori et al., The Llama 3 Herd of Models, 2024; Allal et al., SmolLM2, 2025.
"""

from __future__ import annotations

from typing import Any

from jaxpp.convert.attributes import Attributes
from jaxpp.models.canonical import spread
from jaxpp.models.decoder_config import DecoderConfig
from jaxpp.models.family import Family
from jaxpp.models.llama_attributes import (
    check_width,
    layer_types,
    read_biases,
    read_layer_types,
    read_llama,
    write_llama,
)
from jaxpp.models.llama_tensors import BASE_MODEL, BUFFERS, llama_tensors
from jaxpp.models.rope_attributes import RopeNames
from jaxpp.nn.scaling import RopeScaling


def _parse(attributes: Attributes) -> DecoderConfig:
    bias = attributes.take("mlp_bias", kind=bool, default=False)
    return DecoderConfig(**read_llama(attributes), **read_biases(attributes), mlp_bias=bias)


def _spell(config: DecoderConfig) -> dict[str, Any]:
    check_width(config)
    return {**write_llama(config), "attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias}


SMOLLM3_ROPE = RopeNames(default_base=2_000_000.0)


def _parse_smollm3(attributes: Attributes) -> DecoderConfig:
    shape = read_llama(attributes, SMOLLM3_ROPE, tied=True)
    num_layers = shape["num_layers"]
    interval = attributes.take("no_rope_layer_interval", kind=int, at_least=1, default=4)
    flags = attributes.take(
        "no_rope_layers", kind=list, default=[int((i + 1) % interval != 0) for i in range(num_layers)]
    )
    if len(flags) < num_layers:
        raise ValueError(f"{attributes.source}: no_rope_layers has {len(flags)} flags for {num_layers} layers")
    rotary = tuple(bool(flag) for flag in flags[:num_layers])  # 1 is a layer that does rotate, whatever the name says
    window = attributes.take("sliding_window", kind=int, default=0)
    attributes.take("max_window_layers", kind=int, default=None)  # the released config has it, and nothing reads it
    windowed = attributes.take("use_sliding_window", kind=bool, default=False)
    layers = read_layer_types(attributes, num_layers, [not rotates for rotates in rotary])
    return DecoderConfig(
        **shape,
        **read_biases(attributes),
        mlp_bias=attributes.take("mlp_bias", kind=bool, default=False),
        rope_layers=rotary,
        window=window if windowed else 0,
        window_layers=layers,
    )


def _spell_smollm3(config: DecoderConfig) -> dict[str, Any]:
    return {
        **write_llama(config, SMOLLM3_ROPE),
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
        "no_rope_layers": [int(rotates) for rotates in spread(config.rope_layers, config.num_layers)],
        "no_rope_layer_interval": 4,
        "use_sliding_window": config.window > 0,
        "sliding_window": config.window or None,
        "layer_types": layer_types(config),
    }


_LONG = dict(max_positions=131_072, rope_base=500_000.0, vocab_size=128_256)


def _llama3(factor: float) -> RopeScaling:
    return RopeScaling("llama3", factor=factor, original_positions=8192)


_PRESETS: dict[str, dict[str, Any]] = {
    "llama-2-7b": dict(
        vocab_size=32_000, num_layers=32, embed_dim=4096, num_heads=32, mlp_dim=11_008, max_positions=4096
    ),
    "llama-3.1-8b": dict(
        **_LONG, num_layers=32, embed_dim=4096, num_heads=32, num_kv_heads=8, mlp_dim=14_336, rope_scaling=_llama3(8.0)
    ),
    "llama-3.1-70b": dict(
        **_LONG, num_layers=80, embed_dim=8192, num_heads=64, num_kv_heads=8, mlp_dim=28_672, rope_scaling=_llama3(8.0)
    ),
    "llama-3.2-1b": dict(
        **_LONG, num_layers=16, embed_dim=2048, num_heads=32, num_kv_heads=8, mlp_dim=8192, tied=True,
        rope_scaling=_llama3(32.0),
    ),
    "llama-3.2-3b": dict(
        **_LONG, num_layers=28, embed_dim=3072, num_heads=24, num_kv_heads=8, mlp_dim=8192, tied=True,
        rope_scaling=_llama3(32.0),
    ),
    "smollm2-135m": dict(
        vocab_size=49_152, num_layers=30, embed_dim=576, num_heads=9, num_kv_heads=3, mlp_dim=1536, max_positions=8192,
        tied=True, rope_base=100_000.0,
    ),
    "smollm2-360m": dict(
        vocab_size=49_152, num_layers=32, embed_dim=960, num_heads=15, num_kv_heads=5, mlp_dim=2560, max_positions=8192,
        tied=True, rope_base=100_000.0,
    ),
}  # fmt: skip

LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    parse=_parse,
    spell=_spell,
    tensors=llama_tensors,
    renames=(BASE_MODEL,),
    ignored=BUFFERS,
    presets=_PRESETS,
)

SMOLLM3 = Family(
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    parse=_parse_smollm3,
    spell=_spell_smollm3,
    tensors=llama_tensors,
    renames=(BASE_MODEL,),
    ignored=BUFFERS,
    presets={
        "smollm3-3b": dict(
            vocab_size=128_256, num_layers=36, embed_dim=2048, num_heads=16, num_kv_heads=4, mlp_dim=11_008,
            max_positions=65_536, tied=True, norm_epsilon=1e-6, rope_base=5_000_000.0,
            rope_layers=(True, True, True, False),
        ),
    },
)  # fmt: skip
