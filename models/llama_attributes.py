"""The attributes of a ``config.json`` that most families share, under the names that Llama gave them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxpp.convert.attributes import Attributes
from jaxpp.models.canonical import spread
from jaxpp.models.decoder_config import DecoderConfig
from jaxpp.models.rope_attributes import LLAMA_ROPE, RopeNames, read_rope, write_rope
from jaxpp.names import unknown
from jaxpp.nn.mlp import Activation

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
}
"""``hidden_act`` to our activation."""

WINDOW, FULL = "sliding_attention", "full_attention"


def read_activation(attributes: Attributes, *names: str, default: str = "silu") -> Activation:
    """Read an activation.

    Raises:
        ValueError: it is none of `ACTIVATIONS`.
    """
    name = attributes.take(*names, kind=str, default=default)
    if name not in ACTIVATIONS:
        raise ValueError(unknown(f"{attributes.source}: {names[0]} is not supported:", name, ACTIVATIONS, "supported"))
    return ACTIVATIONS[name]


def activation_name(config: DecoderConfig, tanh: str = "gelu_pytorch_tanh") -> str:
    """Write an activation; `tanh` is the family's name of the approximate GELU."""
    return tanh if config.activation == "gelu_tanh" else config.activation


def read_llama(
    attributes: Attributes,
    names: RopeNames = LLAMA_ROPE,
    *,
    tied: bool = False,
    epsilon: float = 1e-6,
    head_dim: int = 0,
) -> dict[str, Any]:
    """Read sizes, activation, tie, norm epsilon and rotary settings: arguments of `DecoderConfig`.

    Args:
        attributes: of the config.
        names: the family's rotary names.
        tied: whether a config that does not say so is tied.
        epsilon: of the norms, where it is not said.
        head_dim: size of a head, where it is not said; 0: width / heads.
    """
    for name in ("rope_interleaved", "use_mrope", "use_bidirectional_attention"):
        attributes.must_be(name, False)
    width, heads = attributes.take("hidden_size", kind=int), attributes.take("num_attention_heads", kind=int)
    head_dim = attributes.take_or_null("head_dim", kind=int, default=head_dim) or 0
    max_positions = attributes.take("max_position_embeddings", kind=int)
    return dict(
        vocab_size=attributes.take("vocab_size", kind=int),
        num_layers=attributes.take("num_hidden_layers", kind=int),
        embed_dim=width,
        num_heads=heads,
        num_kv_heads=attributes.take("num_key_value_heads", kind=int, default=heads),
        head_dim=head_dim,
        mlp_dim=attributes.take("intermediate_size", kind=int),
        max_positions=max_positions,
        tied=attributes.take("tie_word_embeddings", kind=bool, default=tied),
        activation=read_activation(attributes, "hidden_act"),
        norm_epsilon=attributes.take("rms_norm_eps", kind=float, default=epsilon),
        **read_rope(attributes, head_dim or width // max(heads, 1), max_positions, names),
    )


def write_llama(config: DecoderConfig, names: RopeNames = LLAMA_ROPE) -> dict[str, Any]:
    """Write what `read_llama` reads."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.embed_dim,
        "intermediate_size": config.mlp_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": config.tied,
        "hidden_act": activation_name(config),
        "rms_norm_eps": config.norm_epsilon,
        **write_rope(config, names),
    }


def check_width(config: DecoderConfig) -> None:
    """Refuse what some classes of transformers do, though they take the size of a head from the config.

    Raises:
        ValueError: the width is no multiple of the heads.
    """
    if config.embed_dim % config.num_heads:
        raise ValueError(
            f"embed_dim {config.embed_dim}; its class in transformers wants a multiple of num_heads {config.num_heads}"
        )


def read_biases(attributes: Attributes) -> dict[str, Any]:
    """Read ``attention_bias``, which is of query, key, value and output alike."""
    bias = attributes.take("attention_bias", kind=bool, default=False)
    return dict(qkv_bias=bias, out_bias=bias)


def read_layer_types(attributes: Attributes, num_layers: int, default: Sequence[bool]) -> tuple[bool, ...]:
    """Read which layers have the window.

    Args:
        attributes: of the config.
        num_layers: of the model.
        default: one for each layer, where ``layer_types`` is not there.

    Raises:
        ValueError: a kind of layer that is not ours, or not one for each layer.
    """
    types = attributes.take("layer_types", kind=list, default=None)
    if types is None:
        return tuple(default)
    for one in types:
        if one not in (WINDOW, FULL):
            raise ValueError(
                unknown(f"{attributes.source}: unsupported layer type", str(one), (FULL, WINDOW), "supported")
            )
    if len(types) != num_layers:
        raise ValueError(f"{attributes.source}: layer_types names {len(types)} layers, num_hidden_layers {num_layers}")
    return tuple(one == WINDOW for one in types)


def layer_types(config: DecoderConfig) -> list[str]:
    """Write which layers have the window."""
    layers = spread(config.window_layers, config.num_layers)
    return [WINDOW if config.window and has_window else FULL for has_window in layers]
