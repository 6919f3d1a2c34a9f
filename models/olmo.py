"""OLMo-2: norms on what a branch adds, not on what it reads; queries and keys normed over all heads at once.

Source: OLMo Team, 2 OLMo 2 Furious, 2024.
"""

from __future__ import annotations

from typing import Any

from jaxpp.convert.attributes import Attributes
from jaxpp.models.decoder_config import DecoderConfig
from jaxpp.models.family import Family
from jaxpp.models.llama_attributes import read_biases, read_llama, write_llama
from jaxpp.models.llama_tensors import BASE_MODEL, BUFFERS, llama_tensors


def _parse(attributes: Attributes) -> DecoderConfig:
    shape = read_llama(attributes, epsilon=1e-5)
    return DecoderConfig(**shape, **read_biases(attributes), norm_scale="wide", norm_place="post", qk_norm="full")


def _spell(config: DecoderConfig) -> dict[str, Any]:
    return {**write_llama(config), "attention_bias": config.qkv_bias}


_OLMO2 = dict(
    vocab_size=100_352, max_positions=4096, norm_epsilon=1e-6, norm_scale="wide", norm_place="post", qk_norm="full",
    rope_base=500_000.0,
)  # fmt: skip

OLMO2 = Family(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    parse=_parse,
    spell=_spell,
    tensors=llama_tensors,
    renames=(BASE_MODEL,),
    ignored=BUFFERS,
    presets={
        "olmo-2-1b": dict(**_OLMO2, num_layers=16, embed_dim=2048, num_heads=16, mlp_dim=8192),
        "olmo-2-7b": dict(**_OLMO2, num_layers=32, embed_dim=4096, num_heads=32, mlp_dim=11_008),
        "olmo-2-13b": dict(**_OLMO2, num_layers=40, embed_dim=5120, num_heads=40, mlp_dim=13_824),
    },
)
