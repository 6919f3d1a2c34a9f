"""Config files as released, attributes of no use included, and our presets of the same name."""

from __future__ import annotations

from typing import Any

import pytest

from jaxpp.models.decoder_config import DecoderConfig
from jaxpp.models.published import read_config

_COMMON = dict(initializer_range=0.02, use_cache=True, torch_dtype="bfloat16", transformers_version="4.51.0",
               attention_dropout=0.0)  # fmt: skip
_LLAMA3_SCALING = dict(factor=32.0, high_freq_factor=4.0, low_freq_factor=1.0, original_max_position_embeddings=8192,
                       rope_type="llama3")  # fmt: skip

RELEASED: dict[str, dict[str, Any]] = {
    "llama-3.2-1b": dict(
        architectures=["LlamaForCausalLM"], attention_bias=False, bos_token_id=128000, eos_token_id=[128001, 128008,
        128009], head_dim=64, hidden_act="silu", hidden_size=2048, intermediate_size=8192,
        max_position_embeddings=131072, mlp_bias=False, model_type="llama", num_attention_heads=32,
        num_hidden_layers=16, num_key_value_heads=8, pretraining_tp=1, rms_norm_eps=1e-05,
        rope_scaling=_LLAMA3_SCALING, rope_theta=500000.0, tie_word_embeddings=True, vocab_size=128256,
    ),
    "llama-2-7b": dict(
        architectures=["LlamaForCausalLM"], bos_token_id=1, eos_token_id=2, hidden_act="silu", hidden_size=4096,
        intermediate_size=11008, max_position_embeddings=4096, model_type="llama", num_attention_heads=32,
        num_hidden_layers=32, num_key_value_heads=32, pretraining_tp=1, rms_norm_eps=1e-05, rope_scaling=None,
        tie_word_embeddings=False, vocab_size=32000,
    ),
    "smollm2-135m": dict(
        architectures=["LlamaForCausalLM"], attention_bias=False, bos_token_id=1, eos_token_id=2, pad_token_id=2,
        hidden_act="silu", hidden_size=576, intermediate_size=1536, is_llama_config=True,
        max_position_embeddings=8192, mlp_bias=False, model_type="llama", num_attention_heads=9, num_hidden_layers=30,
        num_key_value_heads=3, pretraining_tp=1, rms_norm_eps=1e-05, rope_interleaved=False, rope_scaling=None,
        rope_theta=100000, tie_word_embeddings=True, vocab_size=49152, **{"transformers.js_config": {"kv_cache_dtype":
        {"q4f16": "float16"}}},
    ),
    "smollm3-3b": dict(
        architectures=["SmolLM3ForCausalLM"], attention_bias=False, eos_token_id=128012, pad_token_id=128004,
        hidden_act="silu", hidden_size=2048, intermediate_size=11008, layer_types=["full_attention"] * 36,
        max_position_embeddings=65536, max_window_layers=28, mlp_bias=False, model_type="smollm3",
        no_rope_layer_interval=4, no_rope_layers=[1, 1, 1, 0] * 9, num_attention_heads=16, num_hidden_layers=36,
        num_key_value_heads=4, pretraining_tp=2, rms_norm_eps=1e-06, rope_scaling=None, rope_theta=5000000.0,
        sliding_window=None, use_sliding_window=False, vocab_size=128256,
    ),
    "mistral-7b-v0.1": dict(
        architectures=["MistralForCausalLM"], hidden_act="silu", hidden_size=4096, intermediate_size=14336,
        max_position_embeddings=32768, model_type="mistral", num_attention_heads=32, num_hidden_layers=32,
        num_key_value_heads=8, rms_norm_eps=1e-05, rope_theta=10000.0, sliding_window=4096, tie_word_embeddings=False,
        vocab_size=32000,
    ),
    "mistral-nemo-12b": dict(
        architectures=["MistralForCausalLM"], head_dim=128, hidden_act="silu", hidden_size=5120,
        intermediate_size=14336, max_position_embeddings=131072, model_type="mistral", num_attention_heads=32,
        num_hidden_layers=40, num_key_value_heads=8, rms_norm_eps=1e-05, rope_theta=1000000.0, sliding_window=None,
        tie_word_embeddings=False, vocab_size=131072,
    ),
    "mixtral-8x7b": dict(
        architectures=["MixtralForCausalLM"], hidden_act="silu", hidden_size=4096, intermediate_size=14336,
        max_position_embeddings=32768, model_type="mixtral", num_attention_heads=32, num_experts_per_tok=2,
        num_hidden_layers=32, num_key_value_heads=8, num_local_experts=8, output_router_logits=False,
        rms_norm_eps=1e-05, rope_theta=1000000.0, router_aux_loss_coef=0.02, sliding_window=None,
        tie_word_embeddings=False, vocab_size=32000,
    ),
    "qwen2.5-0.5b": dict(
        architectures=["Qwen2ForCausalLM"], bos_token_id=151643, eos_token_id=151643, hidden_act="silu",
        hidden_size=896, intermediate_size=4864, max_position_embeddings=32768, max_window_layers=24,
        model_type="qwen2", num_attention_heads=14, num_hidden_layers=24, num_key_value_heads=2, rms_norm_eps=1e-06,
        rope_theta=1000000.0, sliding_window=32768, tie_word_embeddings=True, use_mrope=False,
        use_sliding_window=False, vocab_size=151936,
    ),
    "qwen3-30b-a3b": dict(
        architectures=["Qwen3MoeForCausalLM"], attention_bias=False, bos_token_id=151643, eos_token_id=151645,
        decoder_sparse_step=1, head_dim=128, hidden_act="silu", hidden_size=2048, intermediate_size=6144,
        max_position_embeddings=40960, max_window_layers=48, mlp_only_layers=[], model_type="qwen3_moe",
        moe_intermediate_size=768, norm_topk_prob=True, num_attention_heads=32, num_experts=128,
        num_experts_per_tok=8, num_hidden_layers=48, num_key_value_heads=4, output_router_logits=False,
        rms_norm_eps=1e-06, rope_scaling=None, rope_theta=1000000.0, router_aux_loss_coef=0.001, sliding_window=None,
        tie_word_embeddings=False, use_sliding_window=False, vocab_size=151936,
    ),
    "gemma-2b": dict(
        architectures=["GemmaForCausalLM"], attention_bias=False, bos_token_id=2, eos_token_id=1, pad_token_id=0,
        head_dim=256, hidden_act="gelu", hidden_activation=None, hidden_size=2048, intermediate_size=16384,
        max_position_embeddings=8192, model_type="gemma", num_attention_heads=8, num_hidden_layers=18,
        num_key_value_heads=1, rms_norm_eps=1e-06, rope_scaling=None, rope_theta=10000.0, vocab_size=256000,
    ),
    "gemma-2-27b": dict(
        architectures=["Gemma2ForCausalLM"], attention_bias=False, attn_logit_softcapping=50.0, bos_token_id=2,
        cache_implementation="hybrid", eos_token_id=1, final_logit_softcapping=30.0, head_dim=128,
        hidden_act="gelu_pytorch_tanh", hidden_activation="gelu_pytorch_tanh", hidden_size=4608,
        intermediate_size=36864, max_position_embeddings=8192, model_type="gemma2", num_attention_heads=32,
        num_hidden_layers=46, num_key_value_heads=16, pad_token_id=0, query_pre_attn_scalar=144, rms_norm_eps=1e-06,
        rope_theta=10000.0, sliding_window=4096, vocab_size=256000,
    ),
    "gemma-3-1b": dict(
        architectures=["Gemma3ForCausalLM"], attention_bias=False, attn_logit_softcapping=None, bos_token_id=2,
        cache_implementation="hybrid", eos_token_id=[1, 106], final_logit_softcapping=None, head_dim=256,
        hidden_activation="gelu_pytorch_tanh", hidden_size=1152, intermediate_size=6912,
        max_position_embeddings=32768, model_type="gemma3_text", num_attention_heads=4, num_hidden_layers=26,
        num_key_value_heads=1, pad_token_id=0, query_pre_attn_scalar=256, rms_norm_eps=1e-06,
        rope_local_base_freq=10000, rope_scaling=None, rope_theta=1000000, sliding_window=512,
        sliding_window_pattern=6, vocab_size=262144,
    ),
    "phi-3-mini-4k": dict(
        _name_or_path="Phi-3-mini-4k-instruct", architectures=["Phi3ForCausalLM"], attention_bias=False,
        auto_map={"AutoConfig": "configuration_phi3.Phi3Config"}, bos_token_id=1, embd_pdrop=0.0, eos_token_id=32000,
        hidden_act="silu", hidden_size=3072, intermediate_size=8192, max_position_embeddings=4096, model_type="phi3",
        num_attention_heads=32, num_hidden_layers=32, num_key_value_heads=32, original_max_position_embeddings=4096,
        pad_token_id=32000, resid_pdrop=0.0, rms_norm_eps=1e-05, rope_scaling=None, rope_theta=10000.0,
        sliding_window=2047, tie_word_embeddings=False, vocab_size=32064,
    ),
    "gpt2": dict(
        activation_function="gelu_new", architectures=["GPT2LMHeadModel"], attn_pdrop=0.1, bos_token_id=50256,
        embd_pdrop=0.1, eos_token_id=50256, layer_norm_epsilon=1e-05, model_type="gpt2", n_ctx=1024, n_embd=768,
        n_head=12, n_layer=12, n_positions=1024, resid_pdrop=0.1, summary_activation=None, summary_first_dropout=0.1,
        summary_proj_to_labels=True, summary_type="cls_index", summary_use_proj=True,
        task_specific_params={"text-generation": {"do_sample": True, "max_length": 50}}, vocab_size=50257,
    ),
    "pythia-160m": dict(
        architectures=["GPTNeoXForCausalLM"], bos_token_id=0, eos_token_id=0, hidden_act="gelu", hidden_size=768,
        intermediate_size=3072, layer_norm_eps=1e-05, max_position_embeddings=2048, model_type="gpt_neox",
        num_attention_heads=12, num_hidden_layers=12, rotary_emb_base=10000, rotary_pct=0.25,
        tie_word_embeddings=False, use_parallel_residual=True, vocab_size=50304,
    ),
    "olmo-2-7b": dict(
        architectures=["Olmo2ForCausalLM"], attention_bias=False, eos_token_id=100257, hidden_act="silu",
        hidden_size=4096, intermediate_size=11008, max_position_embeddings=4096, model_type="olmo2",
        num_attention_heads=32, num_hidden_layers=32, num_key_value_heads=32, pad_token_id=100277, rms_norm_eps=1e-06,
        rope_scaling=None, rope_theta=500000, tie_word_embeddings=False, vocab_size=100352,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RELEASED)
def test_a_released_config_is_the_preset(name: str) -> None:
    family, config = read_config({**_COMMON, **RELEASED[name]})
    assert config == DecoderConfig(**family.presets[name])
