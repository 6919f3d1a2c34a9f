"""Gemma 3, the language model: Gemma 2 with norms on queries and keys, without soft caps, and two rotary bases.

Source: Gemma Team, Gemma 3 Technical Report, 2025.
"""

from __future__ import annotations

from typing import Any

from jaxpp.convert.attributes import Attributes
from jaxpp.models.decoder_config import DecoderConfig
from jaxpp.models.family import Family
from jaxpp.models.gemma import SHAPE, read_gemma, read_scores, write_gemma, write_scores
from jaxpp.models.llama_attributes import read_layer_types
from jaxpp.models.llama_tensors import BASE_MODEL, BUFFERS, llama_tensors
from jaxpp.models.rope_attributes import PER_LAYER, RopeNames, agreed
from jaxpp.nn.scaling import RopeScaling

GEMMA3_ROPE = RopeNames(default_base=1_000_000.0)
LOCAL_BASE = 10_000.0  # of the layers with a window, where none is said

TEXT_DEFAULTS = dict(
    vocab_size=262_208, num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=131_072
)  # fmt: skip
"""What the ``text_config`` of released multimodal configs leaves out."""


def _parse_gemma3(attributes: Attributes) -> DecoderConfig:
    shape = read_gemma(attributes, GEMMA3_ROPE)
    num_layers = shape["num_layers"]
    every = attributes.take("sliding_window_pattern", "_sliding_window_pattern", kind=int, at_least=1, default=6)
    return DecoderConfig(
        **shape,
        **read_scores(attributes, None, None),
        norm_place="both",
        qk_norm="head",
        window=attributes.take_or_null("sliding_window", kind=int, default=4096) or 0,
        window_layers=read_layer_types(attributes, num_layers, [(i + 1) % every != 0 for i in range(num_layers)]),
        window_rope_base=_local_base(attributes),
    )


def _local_base(attributes: Attributes) -> float:
    """Read the rotary base of the layers with a window, which are never stretched."""
    spelled = attributes.take("rope_parameters", kind=dict, default={}).get(PER_LAYER[1]) or {}
    if not isinstance(spelled, dict):
        raise ValueError(f"{attributes.source}: rope_parameters.{PER_LAYER[1]} = {spelled!r}; a mapping is needed")
    if spelled.get("rope_type", spelled.get("type", "default")) != "default":
        raise ValueError(
            f"{attributes.source}: rope_parameters of {PER_LAYER[1]} {spelled}: only rope_type default is supported"
        )
    found = {f"rope_parameters.{PER_LAYER[1]}": {"rope_local_base_freq": spelled.get("rope_theta")}}
    return agreed(attributes, found, "rope_local_base_freq", "", LOCAL_BASE)


def _spell_gemma3(config: DecoderConfig) -> dict[str, Any]:
    common = write_gemma(config, GEMMA3_ROPE)
    local = config.window_rope_base or (config.rope_base if config.window else LOCAL_BASE)
    if config.window and not config.window_rope_base and config.rope_scaling != RopeScaling():
        raise ValueError("its layers with a window are never stretched; set window_rope_base")
    nested = {PER_LAYER[0]: common["rope_parameters"], PER_LAYER[1]: {"rope_type": "default", "rope_theta": local}}
    return {**common, **write_scores(config), "rope_local_base_freq": local, "rope_parameters": nested}


_GEMMA3 = dict(
    **SHAPE, norm_place="both", qk_norm="head", rope_base=1_000_000.0, window_rope_base=LOCAL_BASE,
    window_layers=(True,) * 5 + (False,),
)  # fmt: skip
_STRETCHED = dict(
    rope_scaling=RopeScaling("linear", factor=8.0), max_positions=131_072, window=1024, vocab_size=262_208
)

GEMMA3 = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    parse=_parse_gemma3,
    spell=_spell_gemma3,
    tensors=llama_tensors,
    renames=(
        (r"^language_model\.model\.", "model."),
        (r"^model\.language_model\.", "model."),
        (r"^language_model\.lm_head\.", "lm_head."),
        BASE_MODEL,
    ),
    ignored=(*BUFFERS, r"^(model\.)?(vision_tower|multi_modal_projector)\."),
    presets={
        "gemma-3-270m": dict(
            **_GEMMA3, vocab_size=262_144, num_layers=18, embed_dim=640, num_heads=4, num_kv_heads=1, head_dim=256,
            mlp_dim=2048, max_positions=32_768, window=512,
        ),
        "gemma-3-1b": dict(
            **_GEMMA3, vocab_size=262_144, num_layers=26, embed_dim=1152, num_heads=4, num_kv_heads=1, head_dim=256,
            mlp_dim=6912, max_positions=32_768, window=512,
        ),
        "gemma-3-4b": dict(
            **_GEMMA3, **_STRETCHED, num_layers=34, embed_dim=2560, num_heads=8, num_kv_heads=4, head_dim=256,
            mlp_dim=10_240,
        ),
        "gemma-3-27b": dict(
            **_GEMMA3, **_STRETCHED, num_layers=62, embed_dim=5376, num_heads=32, num_kv_heads=16, head_dim=128,
            mlp_dim=21_504, attention_scale=168**-0.5,
        ),
    },
)  # fmt: skip
