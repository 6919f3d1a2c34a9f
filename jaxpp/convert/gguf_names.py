"""The tensors of GGUF files: what each is called in a Hugging Face checkpoint, and how its layout differs there.

A GGUF tensor is called ``token_embd.weight`` or, in layer 3, ``blk.3.attn_q.weight``; the tables hold the part in
between. What the conversion to GGUF did to a layout is undone when the tensor is read.

Source: the gguf package's tensor name map, and llama.cpp's conversion of each family.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

SIDE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that are settings of rotary positions and no weights."""

_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_TOP = re.compile(r"(\w+)\.(weight|bias)")


@dataclass(frozen=True)
class Heads:
    """Numbers of heads, by which some layouts are ordered.

    Args:
        query: of queries.
        key: of keys and values.
    """

    query: int
    key: int


def rotate_half(array: np.ndarray, heads: int) -> np.ndarray:
    """Reorder rows whose neighbours form a rotary pair so that the first half of a head pairs with the second.

    Args:
        array: [heads x head_dim, ...].
        heads: how many.
    """
    pairs = array.reshape(heads, array.shape[0] // heads // 2, 2, *array.shape[1:])
    return pairs.swapaxes(1, 2).reshape(array.shape)


def _by_head(array: np.ndarray, heads: int) -> np.ndarray:
    """Reorder the blocks of all queries, all keys, all values to query, key and value of each head."""
    blocks = array.reshape(3, heads, array.shape[0] // heads // 3, *array.shape[1:])
    return blocks.swapaxes(0, 1).reshape(array.shape)


@dataclass(frozen=True)
class Layout:
    """What undoes the layout of a GGUF tensor.

    Args:
        undo: from the GGUF tensor, in the order [out, in], to that of a Hugging Face checkpoint.
        shape: the same of its shape.
    """

    undo: Callable[[np.ndarray, Heads], np.ndarray] = lambda array, heads: array
    shape: Callable[[tuple[int, ...]], tuple[int, ...]] = lambda shape: shape


_SAME = Layout()
_QUERY = Layout(lambda array, heads: rotate_half(array, heads.query))
_KEY = Layout(lambda array, heads: rotate_half(array, heads.key))
_FUSED = Layout(lambda array, heads: _by_head(array, heads.query))
_ACROSS = Layout(lambda array, heads: array.T, lambda shape: shape[::-1])  # GPT-2 stores [in, out]; its biases stay
_OFFSET = Layout(lambda array, heads: array - np.asarray(1, array.dtype))  # Gemma's norms multiply by 1 + weight
_ROW = Layout(lambda array, heads: array.reshape(1, -1), lambda shape: (1, int(np.prod(shape))))

Names = Mapping[str, tuple[str, Layout]]

_TOP_NAMES: Names = {
    "token_embd": ("model.embed_tokens", _SAME),
    "output_norm": ("model.norm", _SAME),
    "output": ("lm_head", _SAME),
}
_ATTENTION: Names = {
    "attn_q": ("self_attn.q_proj", _SAME),
    "attn_k": ("self_attn.k_proj", _SAME),
    "attn_v": ("self_attn.v_proj", _SAME),
    "attn_output": ("self_attn.o_proj", _SAME),
}
_PAIRED = {"attn_q": ("self_attn.q_proj", _QUERY), "attn_k": ("self_attn.k_proj", _KEY)}
_HEAD_NORMS: Names = {"attn_q_norm": ("self_attn.q_norm", _SAME), "attn_k_norm": ("self_attn.k_norm", _SAME)}
_MLP: Names = {
    "ffn_gate": ("mlp.gate_proj", _SAME),
    "ffn_up": ("mlp.up_proj", _SAME),
    "ffn_down": ("mlp.down_proj", _SAME),
}
_NORMS: Names = {"attn_norm": ("input_layernorm", _SAME), "ffn_norm": ("post_attention_layernorm", _SAME)}
_EXPERTS: Names = {
    "ffn_gate_inp": ("mlp.gate", _SAME),
    "ffn_gate_exps": ("mlp.experts.{expert}.gate_proj", _SAME),
    "ffn_up_exps": ("mlp.experts.{expert}.up_proj", _SAME),
    "ffn_down_exps": ("mlp.experts.{expert}.down_proj", _SAME),
}
_SHARED: Names = {
    "ffn_gate_inp_shexp": ("mlp.shared_expert_gate", _ROW),
    "ffn_gate_shexp": ("mlp.shared_expert.gate_proj", _SAME),
    "ffn_up_shexp": ("mlp.shared_expert.up_proj", _SAME),
    "ffn_down_shexp": ("mlp.shared_expert.down_proj", _SAME),
}
_MIXTRAL: Names = {
    "ffn_gate_inp": ("block_sparse_moe.gate", _SAME),
    "ffn_gate_exps": ("block_sparse_moe.experts.{expert}.w1", _SAME),
    "ffn_up_exps": ("block_sparse_moe.experts.{expert}.w3", _SAME),
    "ffn_down_exps": ("block_sparse_moe.experts.{expert}.w2", _SAME),
}
_GEMMA_TOP: Names = {**_TOP_NAMES, "output_norm": ("model.norm", _OFFSET)}
_GEMMA: Names = {
    "attn_norm": ("input_layernorm", _OFFSET),
    "ffn_norm": ("post_attention_layernorm", _OFFSET),
}
_GEMMA2: Names = {
    "attn_norm": ("input_layernorm", _OFFSET),
    "post_attention_norm": ("post_attention_layernorm", _OFFSET),
    "ffn_norm": ("pre_feedforward_layernorm", _OFFSET),
    "post_ffw_norm": ("post_feedforward_layernorm", _OFFSET),
}
_GEMMA3 = {"attn_q_norm": ("self_attn.q_norm", _OFFSET), "attn_k_norm": ("self_attn.k_norm", _OFFSET)}
_OLMO2: Names = {
    "post_attention_norm": ("post_attention_layernorm", _SAME),
    "post_ffw_norm": ("post_feedforward_layernorm", _SAME),
}
_PHI3: Names = {
    "attn_qkv": ("self_attn.qkv_proj", _SAME),
    "attn_output": ("self_attn.o_proj", _SAME),
    "ffn_up": ("mlp.gate_up_proj", _SAME),
    "ffn_down": ("mlp.down_proj", _SAME),
}
_GPT2_TOP: Names = {
    "token_embd": ("transformer.wte", _SAME),
    "position_embd": ("transformer.wpe", _SAME),
    "output_norm": ("transformer.ln_f", _SAME),
    "output": ("lm_head", _SAME),
}
_GPT2: Names = {
    "attn_norm": ("ln_1", _SAME),
    "attn_qkv": ("attn.c_attn", _ACROSS),
    "attn_output": ("attn.c_proj", _ACROSS),
    "ffn_norm": ("ln_2", _SAME),
    "ffn_up": ("mlp.c_fc", _ACROSS),
    "ffn_down": ("mlp.c_proj", _ACROSS),
}
_NEOX_TOP: Names = {
    "token_embd": ("gpt_neox.embed_in", _SAME),
    "output_norm": ("gpt_neox.final_layer_norm", _SAME),
    "output": ("embed_out", _SAME),
}
_NEOX: Names = {
    "attn_norm": ("input_layernorm", _SAME),
    "attn_qkv": ("attention.query_key_value", _FUSED),
    "attn_output": ("attention.dense", _SAME),
    "ffn_norm": ("post_attention_layernorm", _SAME),
    "ffn_up": ("mlp.dense_h_to_4h", _SAME),
    "ffn_down": ("mlp.dense_4h_to_h", _SAME),
}


@dataclass(frozen=True)
class TensorNames:
    """The tensors of one architecture.

    Args:
        top: outside of the layers.
        block: of a layer.
        prefix: what stands before the name of a layer's tensor in a Hugging Face checkpoint.
    """

    top: Names
    block: Names
    prefix: str = "model.layers.{layer}."


_SPARSE = {**_NORMS, **_ATTENTION, **_EXPERTS}

TENSORS: Mapping[str, TensorNames] = {
    # One architecture for Llama, Mistral, SmolLM and Mixtral, and the only one with rotary pairs side by side.
    "llama": TensorNames(_TOP_NAMES, {**_NORMS, **_ATTENTION, **_PAIRED, **_MLP, **_MIXTRAL}),
    "qwen2": TensorNames(_TOP_NAMES, {**_NORMS, **_ATTENTION, **_MLP}),
    "qwen3": TensorNames(_TOP_NAMES, {**_NORMS, **_ATTENTION, **_MLP, **_HEAD_NORMS}),
    "qwen2moe": TensorNames(_TOP_NAMES, {**_SPARSE, **_SHARED}),
    "qwen3moe": TensorNames(_TOP_NAMES, {**_SPARSE, **_HEAD_NORMS}),
    "gemma": TensorNames(_GEMMA_TOP, {**_GEMMA, **_ATTENTION, **_MLP}),
    "gemma2": TensorNames(_GEMMA_TOP, {**_GEMMA2, **_ATTENTION, **_MLP}),
    "gemma3": TensorNames(_GEMMA_TOP, {**_GEMMA2, **_GEMMA3, **_ATTENTION, **_MLP}),
    "olmo2": TensorNames(_TOP_NAMES, {**_OLMO2, **_ATTENTION, **_HEAD_NORMS, **_MLP}),
    "phi3": TensorNames(_TOP_NAMES, {**_NORMS, **_PHI3}),
    "gpt2": TensorNames(_GPT2_TOP, _GPT2, "transformer.h.{layer}."),
    "gptneox": TensorNames(_NEOX_TOP, _NEOX, "gpt_neox.layers.{layer}."),
}
"""``general.architecture`` to its tensors."""


@dataclass(frozen=True)
class Place:
    """Where a tensor of a Hugging Face checkpoint lies in a GGUF file.

    Args:
        name: its name in a Hugging Face checkpoint.
        expert: index in the file's tensor of all experts; None: it has that tensor to itself.
        layout: what undoes the file's layout.
    """

    name: str
    expert: int | None
    layout: Layout


def places(architecture: str, tensor: str, num_experts: int) -> Iterator[Place]:
    """Give what a tensor of a GGUF file holds: nothing, if it is none of this architecture.

    Args:
        architecture: a key of `TENSORS`.
        tensor: its name in the file.
        num_experts: of the model.
    """
    names = TENSORS[architecture]
    if match := _BLOCK.fullmatch(tensor):
        layer, part, kind = match.groups()
        table, prefix = names.block, names.prefix.replace("{layer}", layer)
    elif match := _TOP.fullmatch(tensor):
        (part, kind), table, prefix = match.groups(), names.top, ""
    else:
        return
    if part not in table:
        return
    name, layout = table[part]
    layout = _SAME if layout is _ACROSS and kind == "bias" else layout
    if "{expert}" not in name:
        yield Place(f"{prefix}{name}.{kind}", None, layout)
        return
    for expert in range(num_experts):
        yield Place(f"{prefix}{name.replace('{expert}', str(expert))}.{kind}", expert, layout)
