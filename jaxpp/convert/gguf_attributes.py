"""The metadata of a GGUF file as the attributes of a ``config.json``, in the spelling of transformers 4.

A family then reads them like any other config. What the format leaves out because its one reader has it in code (which
layers of Gemma are local, whether Qwen's router renormalises) is filled in here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

from jaxpp.convert.attributes import Attributes
from jaxpp.convert.gguf_rotary import GgufHeader, read_rotary, short_float

_IGNORED = ("vocab_size", "tensor_data_layout", "rope.scaling.finetuned")
_ALWAYS_TIED = {"tie_word_embeddings": True}  # some files hold the table a second time, as the head
_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}  # whose query scale is of width / heads and not of head_dim


def attributes_of(header: GgufHeader, source: str, accept: Collection[str] = ()) -> dict[str, Any]:
    """Return the attributes of a model.

    Args:
        header: of the file.
        source: its name, for messages.
        accept: metadata, without the architecture's prefix, that the user has accepted unread.

    Raises:
        ValueError: metadata is missing, unknown, or describes what no config says.
    """
    prefix = f"{header.architecture}."
    own = {
        key.removeprefix(prefix): short_float(value) for key, value in header.metadata.items() if key.startswith(prefix)
    }
    if header.architecture == "llama" and "rope.dimension_count" in own:  # the one that says its head size so
        own.setdefault("attention.key_length", own["rope.dimension_count"])
    read = Attributes({"model_type": header.architecture, **own}, source, {*accept, *_IGNORED})
    attributes = _FAMILIES[header.architecture](read, header)
    for name in ("bos_token_id", "eos_token_id"):
        if (token := header.metadata.get(f"tokenizer.ggml.{name}")) is not None:
            attributes[name] = token
    read.check_all_read()
    return attributes


def _sizes(read: Attributes, header: GgufHeader) -> dict[str, Any]:
    """Read what all families have, under Llama's names."""
    heads = read.take("attention.head_count", kind=int)
    width = read.take("embedding_length", kind=int)
    head_dim = read.take("attention.key_length", kind=int, default=width // heads)
    read.must_be("attention.value_length", head_dim)
    read.must_be("attention.causal", True)
    if "token_embd.weight" not in header.shapes:
        raise ValueError(f"{read.source} has no token_embd.weight; it is not a whole model")
    return {
        "vocab_size": header.shapes["token_embd.weight"][0],
        "hidden_size": width,
        "intermediate_size": read.take("feed_forward_length", kind=int, default=None),
        "num_hidden_layers": read.take("block_count", kind=int),
        "num_attention_heads": heads,
        "num_key_value_heads": read.take("attention.head_count_kv", kind=int, default=heads),
        "head_dim": head_dim,
        "max_position_embeddings": read.take("context_length", kind=int),
        "tie_word_embeddings": "output.weight" not in header.shapes,
        "torch_dtype": "float32",
    }


def _gated(read: Attributes, header: GgufHeader) -> dict[str, Any]:
    """Read a family that rotates whole heads."""
    sizes = _sizes(read, header)
    read.must_be("rope.dimension_count", sizes["head_dim"])
    epsilon = read.take("attention.layer_norm_rms_epsilon", kind=float)
    return {
        **sizes,
        "rms_norm_eps": epsilon,
        "hidden_act": "silu",
        **read_rotary(read, header, sizes["max_position_embeddings"]),
    }


def _llama(read: Attributes, header: GgufHeader) -> dict[str, Any]:
    window = read.take("attention.sliding_window", kind=int, default=0)
    num_experts = read.take("expert_count", kind=int, default=0)
    attributes = _gated(read, header)
    if num_experts:
        used = read.take("expert_used_count", kind=int)
        experts = {"num_local_experts": num_experts, "num_experts_per_tok": used}
        return {"model_type": "mixtral", **attributes, **experts, "sliding_window": window or None}
    read.must_be("expert_used_count", 0)
    if window:
        return {"model_type": "mistral", **attributes, "sliding_window": window}
    biases = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_up.bias"}
    return {"model_type": "llama", **attributes, **{name: bias in header.shapes for name, bias in biases.items()}}


def _qwen2(read: Attributes, header: GgufHeader) -> dict[str, Any]:
    return {"model_type": "qwen2", **_gated(read, header), "use_sliding_window": False}


def _qwen3(read: Attributes, header: GgufHeader) -> dict[str, Any]:
    return {"model_type": "qwen3", **_gated(read, header), "attention_bias": False, "use_sliding_window": False}


def _experts(read: Attributes, header: GgufHeader, renormalised: bool) -> dict[str, Any]:
    read.must_be("expert_weights_scale", 0.0, 1.0)
    read.must_be("expert_gating_func", 1)  # softmax
    width = header.shapes.get("blk.0.ffn_up_exps.weight", (0, 0, 0))[1]
    return {
        "num_experts": read.take("expert_count", kind=int),
        "num_experts_per_tok": read.take("expert_used_count", kind=int),
        "moe_intermediate_size": read.take("expert_feed_forward_length", kind=int, default=width),
        "norm_topk_prob": read.take("expert_weights_norm", kind=bool, default=renormalised),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _qwen2_moe(read: Attributes, header: GgufHeader) -> dict[str, Any]:
    attributes = {"model_type": "qwen2_moe", **_gated(read, header), **_experts(read, header, renormalised=False)}
    shared = header.shapes.get("blk.0.ffn_up_shexp.weight", (0,))[0]
    attributes["shared_expert_intermediate_size"] = read.take(
        "expert_shared_feed_forward_length", kind=int, default=shared
    )
    return {**attributes, "use_sliding_window": False}


def _qwen3_moe(read: Attributes, header: GgufHeader) -> dict[str, Any]:
    attributes = {"model_type": "qwen3_moe", **_gated(read, header), **_experts(read, header, renormalised=True)}
    return {**attributes, "attention_bias": False, "use_sliding_window": False}


def _gemma(read: Attributes, header: GgufHeader) -> dict[str, Any]:
    attributes = {"model_type": "gemma", **_gated(read, header)}
    attributes |= {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
    return {**attributes, **_ALWAYS_TIED}


def _query_scale(attributes: Mapping[str, Any], architecture: str) -> int:
    """Return ``query_pre_attn_scalar``; the largest model of each family is the exception."""
    if attributes["num_hidden_layers"] == _LAYERS_OF_27B[architecture]:
        return attributes["hidden_size"] // attributes["num_attention_heads"]
    return attributes["head_dim"]


def _gemma2(read: Attributes, header: GgufHeader) -> dict[str, Any]:
    attributes = {**_gemma(read, header), "model_type": "gemma2"}
    del attributes["hidden_act"]
    return {
        **attributes,
        "query_pre_attn_scalar": _query_scale(attributes, "gemma2"),
        "attn_logit_softcapping": read.take("attn_logit_softcapping", kind=float, default=50.0),
        "final_logit_softcapping": read.take("final_logit_softcapping", kind=float, default=30.0),
        "sliding_window": read.take("attention.sliding_window", kind=int, default=4096),
    }


def _gemma3(read: Attributes, header: GgufHeader) -> dict[str, Any]:
    attributes = {**_gemma(read, header), "model_type": "gemma3_text"}
    del attributes["hidden_act"]
    read.must_be("attention.sliding_window_pattern", 6)
    return {
        **attributes,
        "query_pre_attn_scalar": _query_scale(attributes, "gemma3"),
        "final_logit_softcapping": read.take("final_logit_softcapping", kind=float, default=None),
        "sliding_window": read.take("attention.sliding_window", kind=int),
        "sliding_window_pattern": 6,
        "rope_local_base_freq": read.take("rope.freq_base_swa", kind=float, default=10_000.0),
    }


def _olmo2(read: Attributes, header: GgufHeader) -> dict[str, Any]:
    return {"model_type": "olmo2", **_gated(read, header), "attention_bias": False}


def _share(rotated: int, head_dim: int) -> float:
    """Return a share of a head of which ``int(head_dim x share)`` is the rotated part."""
    share = rotated / head_dim
    return share if int(head_dim * share) == rotated else math.nextafter(share, 2)


def _phi3(read: Attributes, header: GgufHeader) -> dict[str, Any]:
    sizes = _sizes(read, header)
    rotated = read.take("rope.dimension_count", kind=int, default=sizes["head_dim"])
    attributes = {
        "model_type": "phi3",
        **sizes,
        "rms_norm_eps": read.take("attention.layer_norm_rms_epsilon", kind=float),
        "hidden_act": "silu",
        "partial_rotary_factor": _share(rotated, sizes["head_dim"]),
        "sliding_window": read.take("attention.sliding_window", kind=int, default=0) or None,
        **read_rotary(read, header, sizes["max_position_embeddings"]),
    }
    if attributes["rope_scaling"] is not None:
        attributes["original_max_position_embeddings"] = attributes["rope_scaling"]["original_max_position_embeddings"]
    return attributes


def _gpt2(read: Attributes, header: GgufHeader) -> dict[str, Any]:
    sizes = _sizes(read, header)
    read.must_be("rope.dimension_count", 0)
    read.must_be("attention.head_count_kv", sizes["num_attention_heads"])
    renamed = {
        "n_embd": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_inner": "intermediate_size",
        "n_positions": "max_position_embeddings",
    }
    return {
        "model_type": "gpt2",
        **{new: sizes[old] for new, old in renamed.items()},
        **{name: sizes[name] for name in ("vocab_size", "torch_dtype")},
        **_ALWAYS_TIED,
        "layer_norm_epsilon": read.take("attention.layer_norm_epsilon", kind=float),
        "activation_function": "gelu_new",
    }


def _neox(read: Attributes, header: GgufHeader) -> dict[str, Any]:
    sizes = _sizes(read, header)
    head_dim = sizes.pop("head_dim")
    rotated = read.take("rope.dimension_count", kind=int, default=head_dim)
    read.must_be("attention.head_count_kv", sizes["num_attention_heads"])
    del sizes["num_key_value_heads"]
    return {
        "model_type": "gpt_neox",
        **sizes,
        "layer_norm_eps": read.take("attention.layer_norm_epsilon", kind=float),
        "hidden_act": "gelu",
        "rotary_pct": _share(rotated, head_dim),
        "rotary_emb_base": read.take("rope.freq_base", kind=float, default=10_000.0),
        "use_parallel_residual": read.take("use_parallel_residual", kind=bool, default=True),
    }


_FAMILIES: Mapping[str, Callable[[Attributes, GgufHeader], dict[str, Any]]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen2moe": _qwen2_moe,
    "qwen3moe": _qwen3_moe,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "olmo2": _olmo2,
    "phi3": _phi3,
    "gpt2": _gpt2,
    "gptneox": _neox,
}
