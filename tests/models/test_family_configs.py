"""What a ``config.json`` says when it is complete, when it leaves things out, and when it is wrong."""

from __future__ import annotations

import re
from typing import Any

import pytest

from jaxpp.models.decoder_config import DecoderConfig
from jaxpp.models.published import PUBLISHED, family_of, read_config
from tests.golden import reading


def changed(case: str, drop: str = "", **values: Any) -> dict[str, Any]:
    """Return the transformers 4 config of a case with other values."""
    config = {**reading.load(case).config_v4, **values}
    for name in drop.split():
        config.pop(name, None)
    return config


def config_of(case: str, drop: str = "", **values: Any) -> DecoderConfig:
    return read_config(changed(case, drop, **values))[1]


@pytest.mark.parametrize(
    ("case", "drop", "field", "wanted"),
    [
        ("gpt2", "tie_word_embeddings", "tied", True),
        ("gemma", "tie_word_embeddings", "tied", True),
        ("gemma3", "tie_word_embeddings", "tied", True),
        ("smollm3", "tie_word_embeddings", "tied", True),
        ("llama_gqa", "tie_word_embeddings", "tied", False),
        ("qwen2", "tie_word_embeddings", "tied", False),
        ("gpt_neox", "tie_word_embeddings", "tied", False),
        ("llama_gqa", "num_key_value_heads", "num_kv_heads", 4),
        ("llama_gqa", "head_dim", "head_dim", 16),
        ("mixtral", "head_dim", "head_dim", 16),
        ("qwen3", "head_dim", "head_dim", 128),
        ("gemma2", "head_dim", "head_dim", 256),
        ("llama_gqa", "rope_theta", "rope_base", 1e4),
        ("mixtral", "rope_theta", "rope_base", 1e6),
        ("smollm3", "rope_theta", "rope_base", 2e6),
        ("gemma3", "rope_theta", "rope_base", 1e6),
        ("gemma3", "rope_local_base_freq", "window_rope_base", 1e4),
        ("gpt_neox", "rotary_pct partial_rotary_factor", "rotary_dim", 4),
        ("mistral", "sliding_window", "window", 4096),
        ("mixtral", "sliding_window", "window", 0),
        ("gpt2", "n_inner", "mlp_dim", 4 * 48),
        ("qwen2_moe", "norm_topk_prob", "moe", False),
    ],
)
def test_absent_attributes_have_the_default_of_their_family(case: str, drop: str, field: str, wanted: Any) -> None:
    found = getattr(config_of(case, drop), field)
    assert (found.normalize if field == "moe" else found) == wanted


def test_null_is_not_absent() -> None:
    assert config_of("mistral", sliding_window=None).window == 0
    assert config_of("gemma2", attn_logit_softcapping=None).attention_soft_cap == 0
    assert config_of("gemma2", "attn_logit_softcapping").attention_soft_cap == 50
    assert config_of("llama_gqa", head_dim=None).head_dim == 16


def test_flags_of_layers_without_rotary_positions_are_ones_where_there_are() -> None:
    given = config_of("smollm3", "layer_types", num_hidden_layers=4, no_rope_layers=[0, 1, 1, 1])
    assert given.rope_layers == (False, True, True, True)
    absent = config_of("smollm3", "no_rope_layers layer_types", num_hidden_layers=8)
    assert absent.rope_layers == (True, True, True, False)


def test_layers_with_a_window() -> None:
    window = dict(use_sliding_window=True, sliding_window=8, max_window_layers=1, num_hidden_layers=3)
    assert config_of("qwen2", "layer_types", **window).window_layers == (False, True, True)
    assert config_of("qwen2", "layer_types", **{**window, "max_window_layers": 0}).window_layers == ()
    off = config_of("qwen2", "layer_types", **{**window, "use_sliding_window": False})
    assert (off.window, off.window_layers) == (0, ())
    assert config_of("gemma2", "layer_types", num_hidden_layers=5).window_layers == (True, False)
    pattern = config_of("gemma3", "layer_types sliding_window_pattern _sliding_window_pattern", num_hidden_layers=8)
    assert pattern.window_layers == (True, True, True, True, True, False)
    full = config_of("gemma3", layer_types=["full_attention"] * 2, num_hidden_layers=2)
    assert (full.window, full.window_rope_base) == (0, 0.0)


def test_early_gemma_means_the_approximate_gelu() -> None:
    assert config_of("gemma", "hidden_activation", hidden_act="gelu").activation == "gelu_tanh"
    assert config_of("gpt_neox", hidden_act="gelu").activation == "gelu"
    assert config_of("gemma").embed_scale and not config_of("llama_gqa").embed_scale


def test_scale_of_scores_comes_from_its_own_attribute() -> None:
    assert config_of("gemma2", query_pre_attn_scalar=144).attention_scale == 144**-0.5
    head_dim = config_of("gemma2").head_dim
    assert config_of("gemma2", query_pre_attn_scalar=head_dim).attention_scale == 0
    assert config_of("gpt2", scale_attn_weights=False).attention_scale == 1


def test_multimodal_gemma_holds_its_language_model() -> None:
    text = reading.load("gemma3").config
    values = {
        "model_type": "gemma3",
        "text_config": text,
        "vision_config": {"hidden_size": 8},
        "mm_tokens_per_image": 4,
    }
    assert read_config(values) == read_config(text)
    sparse = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10_240, "num_hidden_layers": 34,
              "sliding_window": 1024, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}  # fmt: skip
    released = read_config({"model_type": "gemma3", "text_config": sparse, "vision_config": {}})[1]
    assert released == DecoderConfig(**PUBLISHED["gemma3_text"].presets["gemma-3-4b"])


REFUSED = {
    "unknown family": (dict(model_type="lama"), 'unknown model_type "lama"; did you mean "llama"?'),
    "no family": (dict(model_type=None), 'no "model_type"'),
    "unknown attribute": (dict(logit_scale=0.5), "logit_scale = 0.5"),
    "quantised": (dict(quantization_config={"quant_method": "gptq"}), "method gptq"),
    "activation": (dict(hidden_act="geluu"), 'hidden_act is not supported: "geluu"'),
    "interleaved rotary pairs": (dict(rope_interleaved=True), "rope_interleaved = True is not supported; False is"),
    "text for a number": (dict(hidden_size="64"), "hidden_size = '64'; a whole number is needed"),
    "truth for a number": (dict(num_hidden_layers=True), "a whole number is needed"),
    "partial rotary": (dict(partial_rotary_factor=0.5), "partial_rotary_factor = 0.5 is not supported"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_configs(what: str) -> None:
    values, message = REFUSED[what]
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        config_of("llama_gqa", **values)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("case", "values", "message"),
    [
        ("gpt2", dict(scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx = True is not supported"),
        ("gemma", dict(use_bidirectional_attention=True), "use_bidirectional_attention = True is not supported"),
        ("qwen2_moe", dict(decoder_sparse_step=2), "layers 0 of 2 are dense"),
        ("qwen3_moe", dict(mlp_only_layers=[1]), "layers 1 of 2 are dense"),
        ("qwen2_moe", dict(use_sliding_window=True, sliding_window=8, layer_types=None), "list them in layer_types"),
        ("qwen3_moe", dict(num_local_experts=4), "num_experts 8 and num_local_experts 4"),
        ("gemma2", dict(layer_types=["chunked_attention"] * 2), 'unsupported layer type "chunked_attention"'),
        ("gemma2", dict(layer_types=["full_attention"]), "layer_types names 1 layers"),
        ("smollm3", dict(no_rope_layers=[1]), "no_rope_layers has 1 flags"),
        ("phi3_longrope", dict(rope_scaling={"type": "longrope", "short_factor": [1.0]}), "has no long_factor"),
    ],
)  # fmt: skip
def test_refused_options_of_families(case: str, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        config_of(case, **values)


def test_missing_attributes_are_named() -> None:
    with pytest.raises(ValueError, match='no "vocab_size", which a llama model needs'):
        config_of("llama_gqa", "vocab_size")


def test_accepted_attributes_are_not_refused() -> None:
    values = changed("llama_gqa", logit_scale=0.5)
    assert read_config(values, accept=["logit_scale"])[1] == config_of("llama_gqa")


def test_harmless_attributes_are_not_refused() -> None:
    extra = dict(use_cache=False, attention_dropout=0.1, id2label={}, router_aux_loss_coef=0.1)
    assert config_of("llama_gqa", **extra) == config_of("llama_gqa")


def test_family_of() -> None:
    assert family_of({"model_type": "qwen2"}) is PUBLISHED["qwen2"]
    assert all(name == family.model_type for name, family in PUBLISHED.items())
