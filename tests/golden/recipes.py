"""The golden cases: one tiny configuration for each family and trait that changes the maths.

The keywords are those of transformers 4.x: 4.57.6 writes them to `config_v4.json` as they are, 5.24 rewrites them into
its own spelling in `config.json`. Epsilons are mostly not the family's default, so that one that is not read shows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Recipe:
    """One case: the model to build and which extra logits to keep."""

    model_type: str
    config: dict[str, Any]
    long: bool = False  # keep logits past the original context, where the rotary rule changes
    bf16: bool = False  # keep the logits of the same model in bfloat16
    gains: dict[str, float] = field(default_factory=dict)  # part of a tensor's name -> factor on its deviation


CALM = {"q_proj": 0.6, "k_proj": 0.6, "o_proj": 0.6, "down_proj": 0.6, "embed_tokens": 3.0}
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def _llama(model_type: str = "llama", *, long: bool = False, bf16: bool = False, **config: Any) -> Recipe:
    """Build a recipe on the skeleton that most families share: 64 wide, 4 query and 2 key-value heads.

    An untied bfloat16 case is narrower (`CALM`), so that two orders of rounding stay well within 2% of each other.
    """
    base = {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        **SPECIAL,
    }
    return Recipe(model_type, base | config, long, bf16, CALM if bf16 and not config.get("tie_word_embeddings") else {})


def _llama3_rope(factor: float) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }


def _longrope(num_frequencies: int) -> dict[str, Any]:
    steps = range(num_frequencies)
    return {
        "type": "longrope",
        "short_factor": [round(1.0 + 0.05 * step, 2) for step in steps],
        "long_factor": [round(1.5 + 0.75 * step, 2) for step in steps],
    }


_GPT2 = {
    "vocab_size": 251,
    "n_embd": 48,
    "n_head": 4,
    "n_layer": 3,
    "n_positions": 64,
    "layer_norm_epsilon": 1e-4,
    **SPECIAL,
}
_NEOX = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "rotary_pct": 0.25,
    "rotary_emb_base": 10000,
    "layer_norm_eps": 1e-4,
    "hidden_act": "gelu",
    "tie_word_embeddings": False,
    **SPECIAL,
}
_GEMMA = {"hidden_size": 48, "tie_word_embeddings": True, "rms_norm_eps": 1e-3}
_QWEN2_MOE = {
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "norm_topk_prob": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "rope_theta": 1e6,
}
_QWEN3_MOE = {
    "head_dim": 24,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "rope_theta": 1e6,
}

RECIPES: dict[str, Recipe] = {
    "llama2": _llama(num_key_value_heads=4, vocab_size=251, rms_norm_eps=1e-3),
    "llama_gqa": _llama(bf16=True, rms_norm_eps=1e-4),
    "llama_mqa": _llama(num_key_value_heads=1, rms_norm_eps=1e-3),
    "llama31": _llama(
        rope_theta=500000.0, rope_scaling=_llama3_rope(8.0), max_position_embeddings=256, eos_token_id=[2, 5, 7]
    ),
    "llama32": _llama(
        rope_theta=500000.0,
        rope_scaling=_llama3_rope(32.0),
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        head_dim=16,
    ),
    "llama_linear": _llama(rope_scaling={"rope_type": "linear", "factor": 4.0}),
    "llama_dynamic": _llama(
        rope_scaling={"rope_type": "dynamic", "factor": 4.0}, max_position_embeddings=32, long=True
    ),
    "llama_yarn": _llama(
        rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, long=True
    ),
    "llama_bias": _llama(attention_bias=True, mlp_bias=True, head_dim=24),
    "smollm": _llama(hidden_size=72, num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True),
    "smollm3": _llama(
        "smollm3",
        num_hidden_layers=4,
        rope_theta=2000000.0,
        no_rope_layers=[1, 1, 1, 0],
        no_rope_layer_interval=4,
        tie_word_embeddings=True,
        rms_norm_eps=1e-4,
    ),
    "mistral": _llama("mistral", sliding_window=8, rms_norm_eps=1e-3),
    "mistral_nemo": _llama("mistral", sliding_window=None, head_dim=24, rope_theta=1e6, rms_norm_eps=1e-4),
    "qwen2": _llama("qwen2", tie_word_embeddings=True, vocab_size=251, rope_theta=1e6, rms_norm_eps=1e-6),
    "qwen2_window": _llama(
        "qwen2", num_hidden_layers=4, use_sliding_window=True, sliding_window=8, max_window_layers=2, rms_norm_eps=1e-4
    ),
    "qwen3": _llama("qwen3", head_dim=24, rope_theta=1e6, rms_norm_eps=1e-4, bf16=True),
    "gemma": _llama("gemma", **_GEMMA, num_key_value_heads=1, head_dim=16, hidden_activation="gelu_pytorch_tanh"),
    "gemma2": _llama(
        "gemma2",
        **_GEMMA,
        num_hidden_layers=4,
        head_dim=32,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=10.0,
        sliding_window=8,
        bf16=True,
    ),
    "gemma3": _llama(
        "gemma3_text",
        **_GEMMA,
        num_hidden_layers=8,
        head_dim=16,
        query_pre_attn_scalar=24,
        sliding_window=8,
        sliding_window_pattern=6,
        rope_theta=1e6,
        rope_local_base_freq=10000.0,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    ),
    "phi3": _llama("phi3", num_key_value_heads=4, sliding_window=8, rms_norm_eps=1e-3),
    "phi3_longrope": _llama(
        "phi3",
        num_key_value_heads=4,
        rope_scaling=_longrope(8),
        original_max_position_embeddings=32,
        sliding_window=None,
        long=True,
    ),
    "phi4_mini": _llama(
        "phi3",
        tie_word_embeddings=True,
        partial_rotary_factor=0.75,
        rope_scaling=_longrope(6),
        original_max_position_embeddings=32,
        sliding_window=None,
        long=True,
    ),
    "gpt2": Recipe("gpt2", _GPT2),
    "gpt_neox": Recipe("gpt_neox", _NEOX | {"use_parallel_residual": True}),
    "gpt_neox_serial": Recipe("gpt_neox", _NEOX | {"use_parallel_residual": False}),
    "olmo2": _llama("olmo2", rope_theta=500000.0, rms_norm_eps=1e-4, bf16=True),
    "mixtral": _llama(
        "mixtral",
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=None,
        rope_theta=1e6,
        rms_norm_eps=1e-3,
        intermediate_size=48,
    ),
    "qwen2_moe": _llama("qwen2_moe", **_QWEN2_MOE, rms_norm_eps=1e-3, num_key_value_heads=4),
    "qwen3_moe": _llama("qwen3_moe", **_QWEN3_MOE, rms_norm_eps=1e-3),
}
