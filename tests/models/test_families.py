"""Families of published checkpoints: their configs in every spelling, and the tensors that each weight lies in."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flax import nnx

from jaxpp import dims, tree
from jaxpp.convert.part import Part
from jaxpp.models.canonical import canonical
from jaxpp.models.decoder_config import DecoderConfig
from jaxpp.models.published import PUBLISHED, family_for, read_config
from jaxpp.nn.moe import MoeConfig
from jaxpp.nn.scaling import RopeScaling
from tests.golden import reading

CASES = reading.cases()
PRESETS = [(family.model_type, name) for family in PUBLISHED.values() for name in family.presets]

# What the papers and the files' own indices count.
PARAMETERS = {
    "llama-2-7b": 6_738_415_616,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm3-3b": 3_075_098_624,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "mistral-nemo-12b": 12_247_782_400,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "qwen3-30b-a3b": 30_532_122_624,
    "gemma-2b": 2_506_172_416,
    "gemma-7b": 8_537_680_896,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "gemma-3-270m": 268_098_176,
    "gemma-3-1b": 999_885_952,
    "phi-3-mini-4k": 3_821_079_552,
    "phi-4": 14_659_507_200,
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "pythia-160m": 162_322_944,
    "pythia-1.4b": 1_414_647_808,
    "olmo-2-7b": 7_298_617_344,
}


def golden(name: str) -> tuple[str, DecoderConfig]:
    family, config = read_config(reading.load(name).config)
    return family.model_type, config


@functools.cache
def weights(config: DecoderConfig) -> dict[str, Any]:
    return tree.named_nodes(nnx.state(nnx.eval_shape(lambda: config.build(nnx.Rngs(0))), nnx.Param))


def dims_in(axes: str) -> list[str]:
    """List the dims that a part's axes name."""
    return [word.partition("@")[0] for word in re.findall(r"[^\s()]+", axes) if not word[0].isdigit()]


def sizes(node: Any) -> dict[str, int]:
    return dict(zip(dims.of(node).dims, node.shape, strict=True))


def named(part: Part, node: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the names and shapes of the tensors that hold a weight."""
    size = sizes(node)
    for layer in range(size["layers"] if "{layer}" in part.tensor else 1):
        for expert in range(size["experts"] if "{expert}" in part.tensor else 1):
            yield part.name(layer, expert), part.shape(size)


@pytest.mark.parametrize("case", CASES)
def test_all_spellings_of_a_config_say_the_same(case: str) -> None:
    stored = reading.load(case)
    newest = read_config(stored.config)
    assert newest[0].model_type == stored.config["model_type"]
    assert read_config(stored.config_v4) == newest
    assert read_config(reading.early(stored.config_v4)) == newest
    assert canonical(newest[1]) == newest[1]


@pytest.mark.parametrize("case", CASES)
def test_a_config_survives_writing_and_reading(case: str) -> None:
    model_type, config = golden(case)
    family = family_for(config, preferred=model_type)
    written = family.write(config)
    assert family.model_type == model_type == written["model_type"]
    assert read_config(written) == (family, config)
    old = {name: value for name, value in written.items() if name != "rope_parameters"}
    new = {
        name: value for name, value in written.items() if not name.startswith(("rope_scaling", "rope_theta", "rotary_"))
    }
    new.pop("rope_local_base_freq", None)
    assert read_config(old)[1] == read_config(new)[1] == config


@pytest.mark.parametrize("case", CASES)
def test_weights_and_tensors_are_the_same_set(case: str) -> None:
    model_type, config = golden(case)
    tensors = PUBLISHED[model_type].tensors(config)
    assert tensors.keys() == weights(config).keys()
    found = dict(pair for path, node in weights(config).items() for pair in named(tensors[path][0], node))
    stored = {name: value.shape for name, value in reading.weights(case).items()}
    assert found == stored


@pytest.mark.parametrize("case", reading.fused_cases())
def test_fused_experts_are_the_second_form(case: str) -> None:
    model_type, config = golden(case)
    tensors = PUBLISHED[model_type].tensors(config)
    found = dict(pair for path, node in weights(config).items() for pair in named(tensors[path][-1], node))
    assert found == {name: value.shape for name, value in reading.weights(case, fused=True).items()}


@pytest.mark.parametrize("case", CASES)
def test_a_part_names_the_dims_of_its_arrow(case: str) -> None:
    model_type, config = golden(case)
    for path, parts in PUBLISHED[model_type].tensors(config).items():
        arrow = dims.of(weights(config)[path])
        for part in parts:
            spelled = {dim for dim, mark in (("layers", "{layer}"), ("experts", "{expert}")) if mark in part.tensor}
            assert sorted(dims_in(part.axes)) == sorted(set(arrow.dims) - spelled), path


@pytest.mark.parametrize(("model_type", "name"), PRESETS)
def test_presets_are_configs_of_their_family(model_type: str, name: str) -> None:
    family = PUBLISHED[model_type]
    config = DecoderConfig(**family.presets[name])
    assert read_config(family.write(config)) == (family, config)


@pytest.mark.parametrize("name", PARAMETERS)
def test_presets_have_as_many_parameters_as_published(name: str) -> None:
    preset = next(family.presets[name] for family in PUBLISHED.values() if name in family.presets)
    assert sum(math.prod(node.shape) for node in weights(DecoderConfig(**preset)).values()) == PARAMETERS[name]


def test_preset_of_qwen3_30b_a3b() -> None:
    config = DecoderConfig(**PUBLISHED["qwen3_moe"].presets["qwen3-30b-a3b"])
    assert (config.rope_base, config.max_positions) == (1e6, 40_960)
    assert (config.moe.num_experts, config.moe.experts_per_token, config.moe.normalize) == (128, 8, True)


def view(case: str, path: str, array: np.ndarray) -> np.ndarray:
    """Return the weight `path` in the tensor of a file, in the order of its arrow less the layer."""
    model_type, config = golden(case)
    part, node = PUBLISHED[model_type].tensors(config)[path][0], weights(config)[path]
    return part.view(array, dims.of(node).dims[1:], sizes(node))


def test_fused_rows_of_phi3() -> None:
    _, config = golden("phi3")
    q, k = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    fused = np.random.default_rng(0).normal(size=(q + 2 * k, config.embed_dim))
    for name, rows in (("query", fused[:q]), ("key", fused[q : q + k]), ("value", fused[q + k :])):
        found = view("phi3", f"blocks/attention/{name}/kernel", fused)
        np.testing.assert_array_equal(found.reshape(config.embed_dim, -1), rows.T)
    fused = np.random.default_rng(1).normal(size=(2 * config.mlp_dim, config.embed_dim))
    np.testing.assert_array_equal(view("phi3", "blocks/mlp/gate/kernel", fused), fused[: config.mlp_dim].T)
    np.testing.assert_array_equal(view("phi3", "blocks/mlp/up/kernel", fused), fused[config.mlp_dim :].T)


def test_rows_of_gpt_neox_lie_head_by_head() -> None:
    _, config = golden("gpt_neox")
    size = config.head_dim
    fused = np.random.default_rng(0).normal(size=(3 * config.embed_dim, config.embed_dim))
    for one, name in enumerate(("query", "key", "value")):
        found = view("gpt_neox", f"blocks/attention/{name}/kernel", fused)
        for head in range(config.num_heads):
            start = (3 * head + one) * size
            np.testing.assert_array_equal(found[:, head], fused[start : start + size].T)


def test_square_kernels_of_gpt2_are_not_transposed() -> None:
    _, config = golden("gpt2")
    square = np.random.default_rng(0).normal(size=(config.embed_dim, config.embed_dim))
    np.testing.assert_array_equal(view("gpt2", "blocks/attention/out/kernel", square).reshape(square.shape), square)


def test_square_kernels_of_llama_are_transposed() -> None:
    _, config = golden("llama2")
    square = np.random.default_rng(0).normal(size=(config.embed_dim, config.embed_dim))
    np.testing.assert_array_equal(
        view("llama2", "blocks/attention/query/kernel", square).reshape(square.shape), square.T
    )


def renamed(model_type: str, name: str) -> str:
    for pattern, replacement in PUBLISHED[model_type].renames:
        name = re.sub(pattern, replacement, name)
    return name


@pytest.mark.parametrize(
    ("model_type", "name", "wanted"),
    [
        ("gpt2", "h.0.attn.c_attn.weight", "transformer.h.0.attn.c_attn.weight"),
        ("gpt2", "transformer.wte.weight", "transformer.wte.weight"),
        ("gpt2", "lm_head.weight", "lm_head.weight"),
        ("gemma3_text", "language_model.model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"),
        ("gemma3_text", "model.language_model.norm.weight", "model.norm.weight"),
        ("gemma3_text", "model.norm.weight", "model.norm.weight"),
        ("llama", "layers.0.input_layernorm.weight", "model.layers.0.input_layernorm.weight"),
        ("gpt_neox", "layers.0.attention.dense.bias", "gpt_neox.layers.0.attention.dense.bias"),
        ("gpt_neox", "embed_out.weight", "embed_out.weight"),
    ],
)
def test_prefixes(model_type: str, name: str, wanted: str) -> None:
    assert renamed(model_type, name) == wanted


@pytest.mark.parametrize("model_type", PUBLISHED)
def test_stored_buffers_are_ignored_and_weights_are_not(model_type: str) -> None:
    def ignored(name: str) -> bool:
        return any(re.search(pattern, name) for pattern in PUBLISHED[model_type].ignored)

    buffers = ("x.0.attn.bias", "x.0.attn.masked_bias", "x.attention.bias", "x.attention.masked_bias")
    assert all(map(ignored, buffers)) and ignored("model.layers.0.self_attn.rotary_emb.inv_freq")
    assert not ignored("lm_head.bias") and not ignored("x.attn.c_attn.bias") and not ignored("x.attention.dense.bias")
    case = next(name for name in CASES if golden(name)[0] == model_type)
    assert not [name for name in reading.weights(case) if ignored(name)]


SMALL = DecoderConfig(vocab_size=64, num_layers=2, embed_dim=32, num_heads=4, mlp_dim=64, max_positions=64)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, "llama"),
        (dict(window=8), "mistral"),
        (dict(window=8, window_layers=(False, True), qkv_bias=True), "qwen2"),
        (dict(rope_layers=(True, False)), "smollm3"),
        (dict(moe=MoeConfig(num_experts=4)), "mixtral"),
        (dict(moe=MoeConfig(num_experts=4, z_loss=0.1, balance_loss=0.1, mlp_dim=16)), "mixtral"),
        (dict(moe=MoeConfig(num_experts=4, shared_mlp_dim=16, shared_gate=True), qkv_bias=True), "qwen2_moe"),
        (dict(embed_dim=36, head_dim=8, num_heads=8), "mistral"),  # Llama's class wants a multiple of the heads
        (dict(rope_scaling=RopeScaling("linear", factor=2.0)), "llama"),
        (dict(rotary_dim=4, window=8), "phi3"),
        (dict(mlp="plain", norm="layer", activation="gelu", mlp_bias=True, rotary_dim=4), "gpt_neox"),
    ],
)
def test_family_for(options: dict[str, Any], wanted: str) -> None:
    config = replace(SMALL, **{"num_kv_heads": 0, "head_dim": 0, "rotary_dim": 0, **options})
    assert family_for(config).model_type == wanted


def test_family_for_prefers_the_one_asked_for() -> None:
    assert family_for(SMALL, "mistral").model_type == "mistral"
    assert family_for(replace(SMALL, window=8), "llama").model_type == "mistral"
    with pytest.raises(ValueError, match='unknown model_type "lama"'):
        family_for(SMALL, "lama")


def test_a_config_that_no_family_holds_says_why() -> None:
    with pytest.raises(
        ValueError, match=r"no published family .* cannot hold .*logit_soft_cap 3.0 \(it would be 0.0\)"
    ):
        family_for(replace(SMALL, logit_soft_cap=3.0))


@pytest.mark.parametrize("model_type", PUBLISHED)
def test_a_family_refuses_to_write_what_it_would_lose(model_type: str) -> None:
    case = next(name for name in CASES if golden(name)[0] == model_type)
    config = golden(case)[1]
    other = {"gpt2": dict(head_dim=8), "gpt_neox": dict(norm_place="both")}.get(model_type, dict(mlp="plain"))
    with pytest.raises(ValueError, match=f"a {model_type} checkpoint cannot hold"):
        PUBLISHED[model_type].write(replace(config, **other))
