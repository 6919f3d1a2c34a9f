"""Qwen2-MoE: many small experts and one that all tokens share, behind a gate. Qwen3-MoE: none shared.

Source: Yang et al., Qwen2 Technical Report, 2024, section 2.2; Yang et al., Qwen3 Technical Report, 2025.
"""

from __future__ import annotations

from typing import Any

from jaxpp.convert.attributes import Attributes
from jaxpp.convert.part import Part
from jaxpp.models.decoder_config import DecoderConfig
from jaxpp.models.family import Family
from jaxpp.models.llama_attributes import layer_types, read_biases, read_layer_types, read_llama, write_llama
from jaxpp.models.llama_tensors import BASE_MODEL, BUFFERS, LAYER, Parts, attention, experts, mlp, outside
from jaxpp.nn.moe import MoeConfig


def _read_moe(attributes: Attributes, num_layers: int, **shared: Any) -> MoeConfig:
    step = attributes.take("decoder_sparse_step", kind=int, default=1)
    named = attributes.take("mlp_only_layers", kind=list, default=[])
    dense = [i for i in range(num_layers) if i in named or not step or (i + 1) % step]
    if dense:
        raise ValueError(
            f"{attributes.source}: layers {', '.join(map(str, dense))} of {num_layers} are dense (decoder_sparse_step "
            f"{step}, mlp_only_layers {named}); blocks are stacked, so all layers must have experts"
        )
    return MoeConfig(
        num_experts=attributes.take("num_experts", "num_local_experts", kind=int),
        experts_per_token=attributes.take("num_experts_per_tok", kind=int),
        mlp_dim=attributes.take("moe_intermediate_size", kind=int),
        normalize=attributes.take("norm_topk_prob", kind=bool, default=False),
        **shared,
    )


def _parse_qwen2_moe(attributes: Attributes) -> DecoderConfig:
    shape = read_llama(attributes)
    shared = attributes.take("shared_expert_intermediate_size", kind=int)
    if shared < 1:
        raise ValueError(f"{attributes.source}: shared_expert_intermediate_size = {shared}: 1 or more is needed")
    moe = _read_moe(attributes, shape["num_layers"], shared_mlp_dim=shared, shared_gate=True)
    bias = attributes.take("qkv_bias", kind=bool, default=True)
    return DecoderConfig(**shape, **_read_qwen2_window(attributes, shape["num_layers"]), moe=moe, qkv_bias=bias)


def _read_qwen2_window(attributes: Attributes, num_layers: int) -> dict[str, Any]:
    window = attributes.take_or_null("sliding_window", kind=int, default=4096) or 0
    used = attributes.take("use_sliding_window", kind=bool, default=False)
    attributes.take("max_window_layers", kind=int, default=None)
    layers = read_layer_types(attributes, num_layers, ())
    if used and window and not layers:
        raise ValueError(
            f"{attributes.source}: use_sliding_window without layer_types; versions of transformers differ in which "
            "layers of this family then have the window, so list them in layer_types"
        )
    return dict(window=window if used else 0, window_layers=layers)


def _parse_qwen3_moe(attributes: Attributes) -> DecoderConfig:
    shape = read_llama(attributes)
    moe = _read_moe(attributes, shape["num_layers"])
    window = attributes.take_or_null("sliding_window", kind=int, default=4096) or 0
    used = attributes.take("use_sliding_window", kind=bool, default=False)
    attributes.take("max_window_layers", kind=int, default=None)  # released configs have it, and nothing reads it
    return DecoderConfig(**shape, **read_biases(attributes), moe=moe, window=window if used else 0, qk_norm="head")


def _write_moe(config: DecoderConfig) -> dict[str, Any]:
    moe = config.moe
    return {
        **write_llama(config),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.experts_per_token,
        "moe_intermediate_size": moe.mlp_dim or config.mlp_dim,
        "norm_topk_prob": moe.normalize,
        "use_sliding_window": config.window > 0,
        "sliding_window": config.window or None,
    }


def _spell_qwen2_moe(config: DecoderConfig) -> dict[str, Any]:
    return {
        **_write_moe(config),
        "shared_expert_intermediate_size": config.moe.shared_mlp_dim,
        "qkv_bias": config.qkv_bias,
        "layer_types": layer_types(config),
    }


def _spell_qwen3_moe(config: DecoderConfig) -> dict[str, Any]:
    # transformers 4 knows num_experts only; 5 takes either and writes this one
    return {**_write_moe(config), "num_local_experts": config.moe.num_experts, "attention_bias": config.qkv_bias}


def _tensors(config: DecoderConfig) -> Parts:
    layer = f"{LAYER}mlp."
    parts = {
        **outside(config),
        **attention(config),
        **experts((f"{layer}gate",), f"{layer}experts.{{expert}}.", ("gate_proj", "up_proj", "down_proj")),
    }
    if config.moe.shared_mlp_dim:
        parts |= mlp(config, "blocks/mlp/shared", f"{layer}shared_expert")
    if config.moe.shared_gate:
        parts["blocks/mlp/shared_gate/kernel"] = (Part(f"{layer}shared_expert_gate.weight", "0/1 embed"),)
    return parts


_QWEN2_EXPERTS: dict[str, Any] = dict(num_experts=60, experts_per_token=4, mlp_dim=1408, normalize=False)
_QWEN3_EXPERTS: dict[str, Any] = dict(num_experts=128, experts_per_token=8)
_QWEN3 = dict(
    vocab_size=151_936, norm_epsilon=1e-6, rope_base=1_000_000.0, max_positions=40_960, head_dim=128, qk_norm="head"
)

QWEN2_MOE = Family(
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    parse=_parse_qwen2_moe,
    spell=_spell_qwen2_moe,
    tensors=_tensors,
    renames=(BASE_MODEL,),
    ignored=BUFFERS,
    presets={
        "qwen1.5-moe-a2.7b": dict(
            vocab_size=151_936, num_layers=24, embed_dim=2048, num_heads=16, mlp_dim=5632, max_positions=8192,
            norm_epsilon=1e-6, rope_base=1_000_000.0, qkv_bias=True,
            moe=MoeConfig(**_QWEN2_EXPERTS, shared_mlp_dim=5632, shared_gate=True),
        ),
    },
)  # fmt: skip

QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    parse=_parse_qwen3_moe,
    spell=_spell_qwen3_moe,
    tensors=_tensors,
    renames=(BASE_MODEL,),
    ignored=BUFFERS,
    presets={
        "qwen3-30b-a3b": dict(
            **_QWEN3, num_layers=48, embed_dim=2048, num_heads=32, num_kv_heads=4, mlp_dim=6144,
            moe=MoeConfig(**_QWEN3_EXPERTS, mlp_dim=768),
        ),
        "qwen3-235b-a22b": dict(
            **_QWEN3, num_layers=94, embed_dim=4096, num_heads=64, num_kv_heads=4, mlp_dim=12_288,
            moe=MoeConfig(**_QWEN3_EXPERTS, mlp_dim=1536),
        ),
    },
)  # fmt: skip
