"""GPT-2: learned positions, layer norms, a plain mlp, biases everywhere, kernels stored [in, out].

Source: Radford et al., Language Models are Unsupervised Multitask Learners, 2019.
"""

from __future__ import annotations

from typing import Any

from jaxpp.convert.attributes import Attributes
from jaxpp.convert.part import Part
from jaxpp.models.decoder_config import DecoderConfig
from jaxpp.models.family import Family
from jaxpp.models.llama_attributes import activation_name, read_activation
from jaxpp.models.llama_tensors import BUFFERS, Parts, linear, norm

LAYER = "transformer.h.{layer}."


def _parse(attributes: Attributes) -> DecoderConfig:
    for name in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        attributes.must_be(name, False)
    width = attributes.take("n_embd", "hidden_size", kind=int)
    scaled = attributes.take("scale_attn_weights", kind=bool, default=True)
    return DecoderConfig(
        vocab_size=attributes.take("vocab_size", kind=int),
        num_layers=attributes.take("n_layer", "num_hidden_layers", kind=int),
        embed_dim=width,
        num_heads=attributes.take("n_head", "num_attention_heads", kind=int),
        mlp_dim=attributes.take("n_inner", kind=int, default=4 * width),
        max_positions=attributes.take("n_positions", "max_position_embeddings", kind=int),
        tied=attributes.take("tie_word_embeddings", kind=bool, default=True),
        mlp="plain",
        activation=read_activation(attributes, "activation_function", default="gelu_new"),
        norm="layer",
        norm_epsilon=attributes.take("layer_norm_epsilon", kind=float, default=1e-5),
        positions="learned",
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        attention_scale=0.0 if scaled else 1.0,
    )


def _spell(config: DecoderConfig) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "n_embd": config.embed_dim,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_inner": config.mlp_dim,
        "n_positions": config.max_positions,
        "tie_word_embeddings": config.tied,
        "activation_function": activation_name(config, tanh="gelu_new"),
        "layer_norm_epsilon": config.norm_epsilon,
        "scale_attn_weights": config.attention_scale != 1.0,
    }


def _tensors(config: DecoderConfig) -> Parts:
    parts: Parts = {
        "tokens/table": (Part("transformer.wte.weight", "vocab embed"),),
        "places/table": (Part("transformer.wpe.weight", "positions embed"),),
        **norm("blocks/attention_norm", f"{LAYER}ln_1", bias=True),
        **norm("blocks/mlp_norm", f"{LAYER}ln_2", bias=True),
        **linear("blocks/attention/out", f"{LAYER}attn.c_proj", "(heads head_dim) embed", "embed"),
        **linear("blocks/mlp/up", f"{LAYER}mlp.c_fc", "embed mlp", "mlp"),
        **linear("blocks/mlp/down", f"{LAYER}mlp.c_proj", "mlp embed", "embed"),
        **norm("final_norm", "transformer.ln_f", bias=True),
    }
    for block, (name, heads) in enumerate((("query", "heads"), ("key", "kv_heads"), ("value", "kv_heads"))):
        columns = f"({block}/3 {heads} head_dim)"
        parts |= linear(f"blocks/attention/{name}", f"{LAYER}attn.c_attn", f"embed {columns}", columns)
    return parts if config.tied else {**parts, **linear("head", "lm_head", "vocab embed")}


_GPT2 = dict(
    vocab_size=50_257, max_positions=1024, tied=True, mlp="plain", activation="gelu_tanh", norm="layer",
    positions="learned", qkv_bias=True, out_bias=True, mlp_bias=True,
)  # fmt: skip

GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    parse=_parse,
    spell=_spell,
    tensors=_tensors,
    renames=((r"^(?=(wte|wpe|h|ln_f)\.)", "transformer."),),
    ignored=BUFFERS,
    presets={
        "gpt2": dict(**_GPT2, num_layers=12, embed_dim=768, num_heads=12, mlp_dim=3072),
        "gpt2-medium": dict(**_GPT2, num_layers=24, embed_dim=1024, num_heads=16, mlp_dim=4096),
        "gpt2-large": dict(**_GPT2, num_layers=36, embed_dim=1280, num_heads=20, mlp_dim=5120),
        "gpt2-xl": dict(**_GPT2, num_layers=48, embed_dim=1600, num_heads=25, mlp_dim=6400),
    },
)
