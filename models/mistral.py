"""Mistral and Mistral-Nemo: Llama with a window on every layer, or none. Mixtral: experts in place of the mlp.

Source: Jiang et al., Mistral 7B, 2023; Jiang et al., Mixtral of Experts, 2024.
"""

from __future__ import annotations

from typing import Any

from jaxpp.convert.attributes import Attributes
from jaxpp.models.decoder_config import DecoderConfig
from jaxpp.models.family import Family
from jaxpp.models.llama_attributes import read_llama, write_llama
from jaxpp.models.llama_tensors import BASE_MODEL, BUFFERS, LAYER, Parts, attention, experts, llama_tensors, outside
from jaxpp.models.rope_attributes import RopeNames
from jaxpp.nn.moe import MoeConfig


def _parse(attributes: Attributes) -> DecoderConfig:
    for name in ("attention_bias", "mlp_bias"):
        attributes.must_be(name, False)
    window = attributes.take_or_null("sliding_window", kind=int, default=4096)
    return DecoderConfig(**read_llama(attributes), window=window or 0)


def _spell(config: DecoderConfig) -> dict[str, Any]:
    return {**write_llama(config), "sliding_window": config.window or None}


MIXTRAL_ROPE = RopeNames(default_base=1_000_000.0)


def _parse_mixtral(attributes: Attributes) -> DecoderConfig:
    moe = MoeConfig(
        num_experts=attributes.take("num_local_experts", "num_experts", kind=int, default=8),
        experts_per_token=attributes.take("num_experts_per_tok", kind=int, default=2),
    )
    window = attributes.take("sliding_window", kind=int, default=0)
    return DecoderConfig(**read_llama(attributes, MIXTRAL_ROPE, epsilon=1e-5), moe=moe, window=window)


def _spell_mixtral(config: DecoderConfig) -> dict[str, Any]:
    return {
        **write_llama(config, MIXTRAL_ROPE),
        "intermediate_size": config.moe.mlp_dim or config.mlp_dim,
        "num_local_experts": config.moe.num_experts,
        "num_experts_per_tok": config.moe.experts_per_token,
        "sliding_window": config.window or None,
    }


def _mixtral_tensors(config: DecoderConfig) -> Parts:
    old = f"{LAYER}block_sparse_moe."
    mixture = experts((f"{old}gate", f"{LAYER}mlp.gate"), f"{old}experts.{{expert}}.", ("w1", "w3", "w2"))
    return {**outside(config), **attention(config), **mixture}


_EIGHT_BY_7B = dict(num_layers=32, embed_dim=4096, num_heads=32, num_kv_heads=8, mlp_dim=14_336, vocab_size=32_000)

MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    parse=_parse,
    spell=_spell,
    tensors=llama_tensors,
    renames=(BASE_MODEL,),
    ignored=BUFFERS,
    presets={
        "mistral-7b-v0.1": dict(**_EIGHT_BY_7B, max_positions=32_768, window=4096),
        "mistral-7b-v0.3": dict(**{**_EIGHT_BY_7B, "vocab_size": 32_768}, max_positions=32_768, rope_base=1_000_000.0),
        "mistral-nemo-12b": dict(
            vocab_size=131_072, num_layers=40, embed_dim=5120, num_heads=32, num_kv_heads=8, head_dim=128,
            mlp_dim=14_336, max_positions=131_072, rope_base=1_000_000.0,
        ),
    },
)  # fmt: skip

MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    parse=_parse_mixtral,
    spell=_spell_mixtral,
    tensors=_mixtral_tensors,
    renames=(BASE_MODEL,),
    ignored=BUFFERS,
    presets={
        "mixtral-8x7b": dict(
            **_EIGHT_BY_7B, max_positions=32_768, rope_base=1_000_000.0,
            moe=MoeConfig(num_experts=8, experts_per_token=2),
        ),
        "mixtral-8x22b": dict(
            vocab_size=32_768, num_layers=56, embed_dim=6144, num_heads=48, num_kv_heads=8, mlp_dim=16_384,
            max_positions=65_536, rope_base=1_000_000.0, moe=MoeConfig(num_experts=8, experts_per_token=2),
        ),
    },
)  # fmt: skip
