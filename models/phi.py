"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini: Llama with fused projections, a partly rotated head and longrope.

Source: Abdin et al., Phi-3 Technical Report, 2024; Phi-4 Technical Report, 2024.
"""

from __future__ import annotations

from typing import Any

from jaxpp.convert.attributes import Attributes
from jaxpp.convert.part import Part
from jaxpp.models.decoder_config import DecoderConfig
from jaxpp.models.family import Family
from jaxpp.models.llama_attributes import read_llama, write_llama
from jaxpp.models.llama_tensors import BASE_MODEL, BUFFERS, LAYER, Parts, llama_tensors
from jaxpp.models.rope_attributes import RopeNames

PHI_ROPE = RopeNames(
    partial="partial_rotary_factor",
    original=4096,
    kinds={"default": "none", "longrope": "longrope", "su": "longrope", "yarn": "longrope"},  # old names of one rule
)


def _parse(attributes: Attributes) -> DecoderConfig:
    for name in ("attention_bias", "mlp_bias", "lm_head_bias"):
        attributes.must_be(name, False)
    for name in ("full_attn_mod", "interpolate_factor"):  # of Phi-4-mini's own code
        attributes.must_be(name, 1)
    window = attributes.take("sliding_window", kind=int, default=0)
    return DecoderConfig(**read_llama(attributes, PHI_ROPE, epsilon=1e-5), window=window)


def _spell(config: DecoderConfig) -> dict[str, Any]:
    attributes = {**write_llama(config, PHI_ROPE), "sliding_window": config.window or None}
    if config.rope_scaling.kind == "longrope":  # transformers 4 wants these three and no more
        scaling = attributes["rope_scaling"]
        kept = {key: scaling[key] for key in ("short_factor", "long_factor")}
        attributes["rope_scaling"] = {"type": "longrope", **kept}
    return attributes


def _tensors(config: DecoderConfig) -> Parts:
    heads, kv_heads = config.num_heads, config.num_kv_heads
    total = heads + 2 * kv_heads
    parts = llama_tensors(config)
    starts = {
        "query": f"heads@0/{total}",
        "key": f"kv_heads@{heads}/{total}",
        "value": f"kv_heads@{heads + kv_heads}/{total}",
    }
    for name, rows in starts.items():
        parts[f"blocks/attention/{name}/kernel"] = (
            Part(f"{LAYER}self_attn.qkv_proj.weight", f"({rows} head_dim) embed"),
        )
    for name, half in (("gate", "0/2"), ("up", "1/2")):
        parts[f"blocks/mlp/{name}/kernel"] = (Part(f"{LAYER}mlp.gate_up_proj.weight", f"({half} mlp) embed"),)
    return parts


PHI3 = Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    parse=_parse,
    spell=_spell,
    tensors=_tensors,
    renames=(BASE_MODEL,),
    ignored=BUFFERS,
    presets={
        "phi-3-mini-4k": dict(
            vocab_size=32_064, num_layers=32, embed_dim=3072, num_heads=32, mlp_dim=8192, max_positions=4096,
            window=2047,
        ),
        "phi-4": dict(
            vocab_size=100_352, num_layers=40, embed_dim=5120, num_heads=40, num_kv_heads=10, mlp_dim=17_920,
            max_positions=16_384, rope_base=250_000.0,
        ),
    },
)  # fmt: skip
