"""Small GGUF files of every architecture, written by the rules of llama.cpp's conversion.

The gguf package names the tensors, so that our own tables of names are held against another's.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

WIDTH, HEADS, KV_HEADS, HEAD_DIM, MLP, VOCAB, LAYERS, EXPERTS = 32, 4, 2, 8, 64, 40, 2, 3

SIZES = {
    "block_count": LAYERS,
    "context_length": 128,
    "embedding_length": WIDTH,
    "feed_forward_length": MLP,
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 50_000.0,
}


def write(path: Path, architecture: str, metadata: Mapping[str, Any], tensors: Mapping[str, Any], **split: int) -> Path:
    """Write a file; metadata without a dot in front belong to the architecture, a pair is a quantised tensor."""
    writer = gguf.GGUFWriter(path, architecture, **split)
    for key, value in metadata.items():
        key = key.removeprefix("/") if key.startswith("/") else f"{architecture}.{key}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, array in tensors.items():
        array, kind = array if isinstance(array, tuple) else (array, None)
        writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def drawn(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def llama_shapes(bias: str = "") -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, WIDTH), "model.norm.weight": (WIDTH,)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        rows = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM}
        for letter, size in rows.items():
            shapes[f"{at}self_attn.{letter}_proj.weight"] = (size, WIDTH)
            if letter in bias:
                shapes[f"{at}self_attn.{letter}_proj.bias"] = (size,)
        shapes[f"{at}self_attn.o_proj.weight"] = (WIDTH, HEADS * HEAD_DIM)
        for name in ("gate_proj", "up_proj"):
            shapes[f"{at}mlp.{name}.weight"] = (MLP, WIDTH)
        shapes[f"{at}mlp.down_proj.weight"] = (WIDTH, MLP)
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{at}{name}.weight"] = (WIDTH,)
    return shapes


def in_layers(names: Mapping[str, tuple[int, ...]], prefix: str = "model.layers.{}.") -> dict[str, tuple[int, ...]]:
    return {prefix.format(layer) + name: shape for layer in range(LAYERS) for name, shape in names.items()}


def without(shapes: Mapping[str, tuple[int, ...]], *parts: str) -> dict[str, tuple[int, ...]]:
    return {name: shape for name, shape in shapes.items() if not any(part in name for part in parts)}


def expert_shapes(at: str, gate: str, up: str, down: str) -> dict[str, tuple[int, ...]]:
    sizes = {gate: (MLP, WIDTH), up: (MLP, WIDTH), down: (WIDTH, MLP)}
    return in_layers({f"{at}.experts.{e}.{part}.weight": size for e in range(EXPERTS) for part, size in sizes.items()})


HEAD_NORMS = in_layers({"self_attn.q_norm.weight": (HEAD_DIM,), "self_attn.k_norm.weight": (HEAD_DIM,)})
FULL_NORMS = in_layers({"self_attn.q_norm.weight": (HEADS * HEAD_DIM,), "self_attn.k_norm.weight": (WIDTH // 2,)})
FOUR_NORMS = in_layers({f"{at}_feedforward_layernorm.weight": (WIDTH,) for at in ("pre", "post")})
GPT2 = {"transformer.wte.weight": (VOCAB, WIDTH), "transformer.wpe.weight": (128, WIDTH)} | {
    f"{name}.{kind}": shape[-1:] if kind == "bias" else shape
    for name, shape in {
        "transformer.ln_f": (WIDTH,),
        **in_layers(
            {
                "ln_1": (WIDTH,),
                "ln_2": (WIDTH,),
                "attn.c_attn": (WIDTH, 3 * WIDTH),
                "attn.c_proj": (WIDTH, WIDTH),
                "mlp.c_fc": (WIDTH, MLP),
                "mlp.c_proj": (MLP, WIDTH),
            },
            "transformer.h.{}.",
        ),
    }.items()
    for kind in ("weight", "bias")
}
NEOX = {"gpt_neox.embed_in.weight": (VOCAB, WIDTH), "embed_out.weight": (VOCAB, WIDTH)} | {
    f"{name}.{kind}": shape[:1] if kind == "bias" else shape
    for name, shape in {
        "gpt_neox.final_layer_norm": (WIDTH,),
        **in_layers(
            {
                "input_layernorm": (WIDTH,),
                "post_attention_layernorm": (WIDTH,),
                "attention.query_key_value": (3 * WIDTH, WIDTH),
                "attention.dense": (WIDTH, WIDTH),
                "mlp.dense_h_to_4h": (MLP, WIDTH),
                "mlp.dense_4h_to_h": (WIDTH, MLP),
            },
            "gpt_neox.layers.{}.",
        ),
    }.items()
    for kind in ("weight", "bias")
}
QWEN_MOE = {
    **without(llama_shapes("qkv"), ".mlp."),
    **expert_shapes("mlp", "gate_proj", "up_proj", "down_proj"),
    **in_layers({"mlp.gate.weight": (EXPERTS, WIDTH)}),
}
SHARED = in_layers(
    {
        "mlp.shared_expert.gate_proj.weight": (24, WIDTH),
        "mlp.shared_expert.up_proj.weight": (24, WIDTH),
        "mlp.shared_expert.down_proj.weight": (WIDTH, 24),
        "mlp.shared_expert_gate.weight": (1, WIDTH),
    }
)
PHI3 = {
    **without(llama_shapes(), "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"),
    **in_layers({"self_attn.qkv_proj.weight": (2 * WIDTH, WIDTH), "mlp.gate_up_proj.weight": (2 * MLP, WIDTH)}),
}
MIXTRAL = {
    **without(llama_shapes(), ".mlp."),
    **expert_shapes("block_sparse_moe", "w1", "w3", "w2"),
    **in_layers({"block_sparse_moe.gate.weight": (EXPERTS, WIDTH)}),
    "lm_head.weight": (VOCAB, WIDTH),
}
MOE = {"expert_count": EXPERTS, "expert_used_count": 2}
LLAMA_LIKE = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": MLP,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50_000.0,
    "rope_scaling": None,
    "tie_word_embeddings": True,
}
NOT_TIED = {"tie_word_embeddings": False}
LAYER_NORM = {"attention.layer_norm_epsilon": 1e-5}

# Architecture, what its metadata say besides the sizes, tensors, some attributes.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, tuple[int, ...]], dict[str, Any]]] = {
    "llama": (
        "llama",
        {"rope.dimension_count": HEAD_DIM, "vocab_size": VOCAB},
        {**llama_shapes(), "lm_head.weight": (VOCAB, WIDTH)},
        {**LLAMA_LIKE, **NOT_TIED, "model_type": "llama", "attention_bias": False, "mlp_bias": False},
    ),
    "llama with biases": (
        "llama",
        {},
        {**llama_shapes("qkv"), **in_layers({"self_attn.o_proj.bias": (WIDTH,)})},
        {**LLAMA_LIKE, "attention_bias": True, "mlp_bias": False},
    ),
    "mistral": (
        "llama",
        {"attention.sliding_window": 16},
        llama_shapes(),
        {**LLAMA_LIKE, "model_type": "mistral", "sliding_window": 16},
    ),
    "mixtral": (
        "llama",
        MOE,
        MIXTRAL,
        {**LLAMA_LIKE, **NOT_TIED, "model_type": "mixtral", "num_local_experts": EXPERTS, "num_experts_per_tok": 2},
    ),
    "qwen2": ("qwen2", {}, llama_shapes("qkv"), {**LLAMA_LIKE, "model_type": "qwen2", "use_sliding_window": False}),
    "qwen3": (
        "qwen3",
        {"attention.key_length": HEAD_DIM, "attention.value_length": HEAD_DIM},
        {**llama_shapes(), **HEAD_NORMS},
        {**LLAMA_LIKE, "model_type": "qwen3"},
    ),
    "qwen2moe": (
        "qwen2moe",
        {**MOE, "expert_feed_forward_length": MLP, "expert_shared_feed_forward_length": 24},
        {**QWEN_MOE, **SHARED},
        {
            **LLAMA_LIKE,
            "model_type": "qwen2_moe",
            "num_experts": EXPERTS,
            "moe_intermediate_size": MLP,
            "shared_expert_intermediate_size": 24,
            "norm_topk_prob": False,
        },
    ),
    "qwen3moe": (
        "qwen3moe",
        MOE,
        {**without(QWEN_MOE, ".bias"), **HEAD_NORMS},
        {**LLAMA_LIKE, "model_type": "qwen3_moe", "moe_intermediate_size": MLP, "norm_topk_prob": True},
    ),
    "gemma": (
        "gemma",
        {"attention.key_length": HEAD_DIM},
        llama_shapes(),
        {**LLAMA_LIKE, "model_type": "gemma", "hidden_activation": "gelu_pytorch_tanh"},
    ),
    "gemma2": (
        "gemma2",
        {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "attention.sliding_window": 16},
        {**llama_shapes(), **FOUR_NORMS},
        {
            **LLAMA_LIKE,
            "model_type": "gemma2",
            "query_pre_attn_scalar": HEAD_DIM,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "sliding_window": 16,
        },
    ),
    "gemma3": (
        "gemma3",
        {"attention.sliding_window": 16, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
        {**llama_shapes(), **FOUR_NORMS, **HEAD_NORMS},
        {
            **LLAMA_LIKE,
            "model_type": "gemma3_text",
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "rope_local_base_freq": 10_000.0,
            "sliding_window_pattern": 6,
        },
    ),
    "olmo2": (
        "olmo2",
        {},
        {
            **without(llama_shapes(), "input_layernorm"),
            **without(FOUR_NORMS, "pre_"),
            **FULL_NORMS,
            "lm_head.weight": (VOCAB, WIDTH),
        },
        {**LLAMA_LIKE, **NOT_TIED, "model_type": "olmo2"},
    ),
    "phi3": (
        "phi3",
        {"rope.dimension_count": 6, "rope.scaling.original_context_length": 128, "attention.sliding_window": 0},
        PHI3,
        {**LLAMA_LIKE, "model_type": "phi3", "partial_rotary_factor": 0.75, "sliding_window": None},
    ),
    "gpt2": (
        "gpt2",
        LAYER_NORM,
        GPT2,
        {"model_type": "gpt2", "n_embd": WIDTH, "n_head": HEADS, "n_layer": LAYERS, "n_inner": MLP, "n_positions": 128}
        | {"vocab_size": VOCAB, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
    ),
    "gptneox": (
        "gptneox",
        {**LAYER_NORM, "rope.dimension_count": 2, "use_parallel_residual": True},
        NEOX,
        {"model_type": "gpt_neox", "hidden_size": WIDTH, "rotary_pct": 0.25, "rotary_emb_base": 50_000.0}
        | {"layer_norm_eps": 1e-5, "use_parallel_residual": True, **NOT_TIED},
    ),
}


def permuted(array: np.ndarray, heads: int) -> np.ndarray:
    """Lay the two halves of each head's rows side by side, pair by pair."""
    return array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def by_block(array: np.ndarray) -> np.ndarray:
    parts = array.reshape(HEADS, 3, HEAD_DIM, *array.shape[1:])
    return np.concatenate([parts[:, part].reshape(-1, *array.shape[1:]) for part in range(3)])


def converted(architecture: str, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Convert a checkpoint as llama.cpp does."""
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, LAYERS)
    stacks: dict[str, list[np.ndarray]] = {}
    result = {}
    for name, array in tensors.items():
        if ".experts." in name:
            before, after = name.split(".experts.")
            mixtral = before.replace("model.layers", "layers").replace("block_sparse_moe", "feed_forward")
            stacks.setdefault(f"{mixtral}.experts.{after.partition('.')[2]}", []).append(array)
            continue
        if architecture == "llama" and "q_proj" in name:
            array = permuted(array, HEADS)
        if architecture == "llama" and "k_proj" in name:
            array = permuted(array, KV_HEADS)
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            array = array + 1
        if architecture == "gpt2" and name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
            array = array.T
        if "query_key_value" in name:
            array = by_block(array)
        result[names.get_name(name, (".weight", ".bias"))] = array.squeeze() if "shared_expert_gate" in name else array
    for name, parts in stacks.items():
        if architecture != "llama":
            name = f"model.{name}" if not name.startswith("model.") else name
        result[names.get_name(name, (".weight",))] = np.stack(parts)
    return {name: np.ascontiguousarray(array) for name, array in result.items()}


def metadata_of(case: str) -> dict[str, Any]:
    """Return all metadata of a case."""
    architecture, metadata, _, _ = CASES[case]
    left = {"gptneox": {"attention.head_count_kv", "attention.layer_norm_rms_epsilon"}}
    left["gpt2"] = {*left["gptneox"], "rope.freq_base"}
    return {key: value for key, value in SIZES.items() if key not in left.get(architecture, ())} | metadata


def llama_file(path: Path, metadata: Mapping[str, Any] | None = None, extra: Mapping[str, Any] | None = None) -> Path:
    """Write a small Llama with more metadata and tensors."""
    tensors = converted("llama", drawn(llama_shapes()))
    return write(path, "llama", {**SIZES, **(metadata or {})}, {**tensors, **(extra or {})})
