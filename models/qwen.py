"""Qwen2 and 2.5: Llama with biases on query, key and value. Qwen3: without them, and a norm on each head.

Source: Yang et al., Qwen2 Technical Report, 2024; Yang et al., Qwen3 Technical Report, 2025.
"""

from __future__ import annotations

from typing import Any

from jaxpp.convert.attributes import Attributes
from jaxpp.models.decoder_config import DecoderConfig
from jaxpp.models.family import Family
from jaxpp.models.llama_attributes import layer_types, read_biases, read_layer_types, read_llama, write_llama
from jaxpp.models.llama_tensors import BASE_MODEL, BUFFERS, llama_tensors


def _read_window(attributes: Attributes, num_layers: int) -> dict[str, Any]:
    """Read the window, which counts only where it is switched on, and then from `max_window_layers` on."""
    window = attributes.take_or_null("sliding_window", kind=int, default=4096) or 0
    first = attributes.take("max_window_layers", kind=int, default=28)
    used = attributes.take("use_sliding_window", kind=bool, default=False)
    layers = read_layer_types(attributes, num_layers, [i >= first for i in range(num_layers)])
    return dict(window=window if used else 0, window_layers=layers)


def _write_window(config: DecoderConfig) -> dict[str, Any]:
    layers = layer_types(config)
    first = next((i for i, kind in enumerate(layers) if kind == "sliding_attention"), config.num_layers)
    return {
        "use_sliding_window": config.window > 0,
        "sliding_window": config.window or None,
        "max_window_layers": first,
        "layer_types": layers,
    }


def _parse_qwen2(attributes: Attributes) -> DecoderConfig:
    shape = read_llama(attributes)
    return DecoderConfig(**shape, **_read_window(attributes, shape["num_layers"]), qkv_bias=True)


def _parse_qwen3(attributes: Attributes) -> DecoderConfig:
    shape = read_llama(attributes, head_dim=128)
    window = _read_window(attributes, shape["num_layers"])
    return DecoderConfig(**shape, **window, **read_biases(attributes), qk_norm="head")


def _spell_qwen2(config: DecoderConfig) -> dict[str, Any]:
    return {**write_llama(config), **_write_window(config)}


def _spell_qwen3(config: DecoderConfig) -> dict[str, Any]:
    return {**_spell_qwen2(config), "attention_bias": config.qkv_bias}


_QWEN = dict(vocab_size=151_936, norm_epsilon=1e-6, rope_base=1_000_000.0, max_positions=32_768)
_QWEN2 = dict(**_QWEN, qkv_bias=True)
_QWEN3 = dict(**{**_QWEN, "max_positions": 40_960}, head_dim=128, qk_norm="head", num_kv_heads=8)

QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    parse=_parse_qwen2,
    spell=_spell_qwen2,
    tensors=llama_tensors,
    renames=(BASE_MODEL,),
    ignored=BUFFERS,
    presets={
        "qwen2.5-0.5b": dict(
            **_QWEN2, num_layers=24, embed_dim=896, num_heads=14, num_kv_heads=2, mlp_dim=4864, tied=True
        ),
        "qwen2.5-1.5b": dict(
            **{**_QWEN2, "max_positions": 131_072}, num_layers=28, embed_dim=1536, num_heads=12, num_kv_heads=2,
            mlp_dim=8960, tied=True,
        ),
        "qwen2.5-7b": dict(
            **{**_QWEN2, "max_positions": 131_072, "vocab_size": 152_064}, num_layers=28, embed_dim=3584, num_heads=28,
            num_kv_heads=4, mlp_dim=18_944,
        ),
    },
)  # fmt: skip

QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    parse=_parse_qwen3,
    spell=_spell_qwen3,
    tensors=llama_tensors,
    renames=(BASE_MODEL,),
    ignored=BUFFERS,
    presets={
        "qwen3-0.6b": dict(**_QWEN3, num_layers=28, embed_dim=1024, num_heads=16, mlp_dim=3072, tied=True),
        "qwen3-1.7b": dict(**_QWEN3, num_layers=28, embed_dim=2048, num_heads=16, mlp_dim=6144, tied=True),
        "qwen3-4b": dict(**_QWEN3, num_layers=36, embed_dim=2560, num_heads=32, mlp_dim=9728, tied=True),
        "qwen3-8b": dict(**_QWEN3, num_layers=36, embed_dim=4096, num_heads=32, mlp_dim=12_288),
    },
)
