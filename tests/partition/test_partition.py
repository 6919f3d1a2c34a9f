"""The ranking of layouts: published figures, regimes, bytes against real shardings, and what is refused."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpp import dims, tree
from jaxpp.dims import flops_per_token, num_parameters
from jaxpp.models.decoder_config import DecoderConfig
from jaxpp.models.llama import LLAMA
from jaxpp.models.mistral import MIXTRAL
from jaxpp.nn.moe import MoeConfig
from jaxpp.partition.candidates import Candidate, candidate
from jaxpp.partition.costs import kv_bytes, memory, seconds
from jaxpp.partition.device_kinds import DEVICE_KINDS, device_kind
from jaxpp.partition.layouts import Layout, ServingMesh, layouts
from jaxpp.partition.rank import Ranking, rank_layouts
from jaxpp.partition.sizes import ModelSizes, model_sizes
from jaxpp.partition.volumes import Work
from jaxpp.pretrained import abstract_params

PALM: dict[str, Any] = dict(
    vocab_size=256_000, num_layers=118, embed_dim=18_432, num_heads=48, num_kv_heads=1, head_dim=256, mlp_dim=73_728,
    parallel=True, tied=True, max_positions=131_072,
)  # fmt: skip
SMALL: dict[str, Any] = dict(
    vocab_size=96, num_layers=3, embed_dim=64, num_heads=8, num_kv_heads=4, head_dim=8, mlp_dim=128, max_positions=4096
)


def config_of(base: Mapping[str, Any], **changes: Any) -> DecoderConfig:
    return DecoderConfig(**{**base, **changes})


EIGHT_B = DecoderConfig(**LLAMA.presets["llama-3.1-8b"])


@functools.cache
def ranked(config: DecoderConfig, mesh: str, **load: Any) -> Ranking:
    return rank_layouts(config, mesh, **load)


def named(candidates: Sequence[Candidate], name: str, kv: str) -> Candidate:
    return next(one for one in candidates if (one.layout.name, one.layout.kv) == (name, kv))


def decoding(batch: int, context: int = 128) -> Work:
    return Work(False, batch, 1, context, 2, 2, 2)


@pytest.mark.parametrize(
    "attention, kv, batch, longest",
    [
        ("multiquery", "heads", 128, 660), ("multiquery", "batch", 128, 43_000), ("multihead", "heads", 128, 1320),
        ("multiquery", "heads", 512, 165), ("multiquery", "batch", 512, 10_700), ("multihead", "heads", 512, 330),
    ],
)  # fmt: skip
def test_the_longest_contexts_of_palm_are_the_published_ones(attention: str, kv: str, batch: int, longest: int) -> None:
    """540B on 64 v4, 30% of the memory for keys and values: within 1%, which is how the paper rounds."""
    heads: dict[str, Any] = dict(num_kv_heads=48, head_dim=128) if attention == "multihead" else {}
    ranking = ranked(
        config_of(PALM, **heads), "tensor:64", batch=batch, context=128, prompt=1, device="v4", kv_share=0.3
    )
    assert named(ranking.decode, "2D 4x16", kv).max_context == pytest.approx(longest, rel=0.01)


def test_the_model_of_that_table_has_540_billion_weights() -> None:
    assert model_sizes(config_of(PALM)).num_parameters == pytest.approx(540e9, rel=0.01)


def test_decoding_palm_takes_2d_and_batch_and_prompts_gather_more_of_the_mesh_the_longer_they_are() -> None:
    config = config_of(PALM, num_layers=1, vocab_size=1024, num_heads=64, mlp="plain")

    def prefill(prompt: int) -> str:
        ranking = ranked(config, "tensor:64", batch=64, context=2**16, prompt=prompt, device="v4")
        sharded = [one for one in ranking.prefill if one.layout.scheme != "replicas"]
        return sharded[0].layout.name

    decode = ranked(config, "tensor:64", batch=64, context=2**16, prompt=1, device="v4").decode
    assert decode[0].layout.scheme == "2D" and decode[0].layout.kv == "batch"
    picks = [prefill(2**k) for k in (4, 8, 11, 15)]  # 1k, 16k, 131k and 2M tokens
    gathers = [1 if name.startswith("2D") else int(name.split()[1]) for name in picks]
    assert gathers[0] == 1 and 1 < gathers[2] < 64 and gathers[3] == 64 and gathers == sorted(gathers)


def sharded_bytes(one: Layout, params: Any) -> int:
    """Count what a device holds of float32 weights that lie as the layout's rules say, by real shardings."""
    shape = [one.axes[axis] for axis in one.axes]
    mesh = Mesh(np.array(jax.devices()[: math.prod(shape)]).reshape(shape), tuple(one.axes))
    total = 0
    for path, node in tree.named_nodes(params).items():
        arrow = dims.of(node, path)
        axes = [one.weights.get(dim, ()) if arrow.reads or dim != "embed" else () for dim in arrow.dims]
        sharding = NamedSharding(mesh, PartitionSpec(*(over or None for over in axes)))
        total += math.prod(sharding.shard_shape(tuple(node.shape))) * 4
    return total


@pytest.mark.parametrize(
    "changes",
    [
        {}, dict(num_kv_heads=1), dict(num_kv_heads=2, tied=True, mlp="plain", mlp_bias=True, norm="layer"),
        dict(moe=MoeConfig(4, 2, shared_mlp_dim=64, shared_gate=True)),
    ],
)  # fmt: skip
def test_weights_take_the_bytes_of_real_shardings_by_the_rules_of_each_layout(changes: dict[str, Any]) -> None:
    config = config_of(SMALL, **changes)
    model, params = model_sizes(config), abstract_params(config)
    found, refused = layouts(model, ServingMesh.parse("data:1 tensor:8"))
    assert len(found) > 20 and not refused
    for one in found:
        assert memory(model, one, replace(decoding(8), weight_bytes=4)).weights == sharded_bytes(one, params), one


def test_the_rules_of_a_cache_use_each_axis_once_and_cover_all_but_the_copies() -> None:
    for kv_heads in (1, 2, 4, 8):
        model = model_sizes(config_of(SMALL, num_kv_heads=kv_heads))
        for one in layouts(model, ServingMesh.parse("data:2 tensor:8"))[0]:
            axes = [axis for over in one.cache.values() for axis in over]
            assert len(axes) == len(set(axes)), one
            work = decoding(32, 256)
            whole = 2 * 3 * 32 * 256 * kv_heads * 8 * 2
            assert kv_bytes(model, one, work, 256) * one.num_devices == whole * one.copies, one


def test_all_devices_together_do_the_products_of_the_model_once() -> None:
    config = config_of(SMALL, num_kv_heads=8)
    model, device = model_sizes(config), device_kind("v4")
    products = flops_per_token(abstract_params(config), 0) / 3 * 16
    scores = 4 * 3 * 16 * 128 * 8 * 8
    for one in layouts(model, ServingMesh.parse("tensor:8"))[0]:
        spent = seconds(model, one, decoding(16), device).compute_s * device.bf16_flops * 8
        repeated = 1 if one.p == one.m else one.m / one.p  # keys and values whose heads do not split
        assert repeated == 1 and spent == pytest.approx(products + scores), one


def test_parameters_are_counted_as_elsewhere() -> None:
    for config in (EIGHT_B, DecoderConfig(**MIXTRAL.presets["mixtral-8x7b"])):
        assert model_sizes(config).num_parameters == num_parameters(abstract_params(config))


def sizes_of(**changes: Any) -> ModelSizes:
    return model_sizes(config_of(SMALL, **changes))


def first(model: ModelSizes, kv: str, scheme: str = "1D") -> Layout:
    found, _ = layouts(model, ServingMesh.parse("tensor:8"))
    return next(one for one in found if (one.scheme, one.kv) == (scheme, kv))


def test_kv_by_heads_says_how_often_a_head_is_repeated_and_batch_and_mixed_repeat_none() -> None:
    model = sizes_of(num_kv_heads=2)
    assert [first(model, kv).copies for kv in ("heads", "batch", "mixed", "sequence")] == [4, 1, 1, 1]
    work = decoding(64)
    assert kv_bytes(model, first(model, "heads"), work, 128) == 4 * kv_bytes(model, first(model, "batch"), work, 128)


def test_a_window_caps_the_cache_of_the_layers_that_have_it() -> None:
    whole, some, each = (
        sizes_of(**changes) for changes in ({}, dict(window=32, window_layers=(True, True, False)), dict(window=32))
    )
    kept = [kv_bytes(model, first(model, "batch"), decoding(8), 1024) for model in (whole, some, each)]
    assert kept[1] / kept[0] == pytest.approx((32 + 32 + 1024) / (3 * 1024)) and kept[2] / kept[0] == 32 / 1024


def test_a_small_batch_reads_the_experts_that_it_visits() -> None:
    model = sizes_of(moe=MoeConfig(8, 2))
    one, device = first(model, "heads"), device_kind("h200")
    experts = sum(weight.size for weight in model.weights if weight.each_expert) * 3 * 2 / 8  # bytes of one device

    def read(batch: int) -> float:
        taken = seconds(model, one, decoding(batch), device).memory_s * device.memory_bytes_per_s
        return taken - kv_bytes(model, one, decoding(batch), 128)

    assert read(64) - read(1) == pytest.approx(experts * (1 - 0.25), rel=1e-6)


def test_int8_weights_halve_their_bytes_and_what_gathers_send_but_not_the_activations() -> None:
    half, full = (
        ranked(EIGHT_B, "tensor:8", batch=64, context=8192, prompt=1024, dtype=d) for d in ("int8", "bfloat16")
    )
    for name, kv in (("1D", "heads"), ("gathered 8 of 8", "batch")):
        one, other = (named(ranking.prefill, name, kv) for ranking in (half, full))
        assert one.bytes.weights * 2 == other.bytes.weights and one.bytes.kv == other.bytes.kv
        sent, before = (
            [sum(c.wire_bytes for c in x.collectives if c.part.startswith("weights") == weights) for weights in (0, 1)]
            for x in (one, other)
        )
        assert sent[0] == before[0] and sent[1] * 2 == before[1]


def test_batch_one_has_every_layout() -> None:
    ranking = ranked(EIGHT_B, "tensor:8", batch=1, context=4096, prompt=512)
    for phase in (ranking.prefill, ranking.decode):
        assert not any(one.problem for one in phase)
        assert {one.layout.scheme for one in phase} == {"1D", "2D", "gathered", "replicas"}
        assert {one.layout.kv for one in phase} == {"heads", "batch", "mixed", "sequence"}
        assert all(math.isfinite(one.total_s) and one.total_s > 0 for one in phase)


def test_the_largest_batch_and_context_fit_and_one_more_does_not() -> None:
    ranking = ranked(EIGHT_B, "tensor:8", batch=64, context=8192, prompt=1024)
    before = named(ranking.decode, "1D", "heads")
    for key, largest in (("batch", before.max_batch), ("context", before.max_context)):
        requests = [ranking.request.changed(**{key: n}) for n in (largest, largest + 1)]
        fits, too_much = (candidate(request, before.layout, "decode").problem for request in requests)
        assert not fits and re.match(r"needs 118\.\d of 118\.2 GiB", too_much)


def test_candidates_come_fastest_first_and_those_that_do_not_fit_last() -> None:
    config = DecoderConfig(**LLAMA.presets["llama-3.1-70b"])
    ranking = ranked(config, "tensor:8", batch=64, context=8192, prompt=1024)
    for phase in (ranking.prefill, ranking.decode):
        times = [one.total_s for one in phase if not one.problem]
        assert times == sorted(times)
        assert [one.layout.scheme for one in phase if one.problem] == ["replicas"] == [phase[-1].layout.scheme]


def test_the_choice_shares_one_storage_and_says_what_that_costs() -> None:
    ranking = ranked(EIGHT_B, "tensor:8", batch=64, context=8192, prompt=1024)
    choice = ranking.choice
    assert choice.shared and choice.prefill.layout.storage == choice.decode.layout.storage
    assert ranking.prefill[0].layout.scheme == "replicas" and choice.prefill.layout.scheme == "gathered"
    lost = 1 - ranking.prefill[0].total_s / choice.prefill.total_s
    assert f"given up  prefill alone would take replicas: {100 * lost:.1f} % less time" in choice.reason


def test_cost_ranks_by_device_time_of_a_token_at_the_largest_batch() -> None:
    load: dict[str, Any] = dict(batch=8, context=8192, prompt=64)
    cost, latency = (ranked(EIGHT_B, "tensor:8", objective=o, **load).decode for o in ("cost", "latency"))
    rates = [one.tokens_per_device_s("cost") for one in cost]
    assert rates == sorted(rates, reverse=True) and rates[0] > latency[0].tokens_per_device_s("latency")
    assert {(one.layout.name, one.total_s) for one in cost} == {(one.layout.name, one.total_s) for one in latency}


def test_a_data_axis_splits_the_batch_and_repeats_the_rest() -> None:
    one = named(ranked(EIGHT_B, "tensor:4", batch=32, context=4096, prompt=64).decode, "1D", "heads")
    two = named(ranked(EIGHT_B, "data:2 tensor:4", batch=64, context=4096, prompt=64).decode, "1D", "heads")
    assert (one.seconds, one.bytes, 2 * one.max_batch) == (two.seconds, two.bytes, two.max_batch)
    assert two.tokens_per_s == 2 * one.tokens_per_s and two.layout.num_devices == 8
    whole = ranked(EIGHT_B, "data:8", batch=64, context=4096, prompt=64)
    assert [one.layout.scheme for one in whole.decode] == ["replicas"]


def test_named_axes_fix_the_factors() -> None:
    ranking = ranked(EIGHT_B, "tensor_x:2 tensor_y:4", batch=64, context=4096, prompt=64)
    assert {one.layout.storage[1:3] for one in ranking.decode if one.layout.scheme != "replicas"} == {(2, 4)}
    gathers = {one.layout.gather for one in ranking.decode if one.layout.scheme == "gathered"}
    assert gathers == {2, 8}


def test_heads_that_do_not_split_leave_what_does_and_say_so() -> None:
    ranking = ranked(DecoderConfig(**LLAMA.presets["smollm2-135m"]), "tensor:8", batch=8, context=2048, prompt=64)
    assert ranking.refused["1x8"] == "heads 9 does not split over 8"
    assert {one.layout.storage[1:3] for one in ranking.decode if one.layout.scheme != "replicas"} == {(8, 1)}


def test_where_nothing_fits_the_message_says_what_would() -> None:
    config = DecoderConfig(**LLAMA.presets["llama-3.1-70b"])
    load: dict[str, Any] = dict(batch=64, context=8192, prompt=64)
    with pytest.raises(ValueError, match="no layout fits for prefill at batch 64 x context 8192") as caught:
        rank_layouts(config, "tensor:2", device="a100", **load)
    message = str(caught.value)
    numbers = {word: int(n) for word, n in re.findall(r"(batch|context) (\d+) would", message)}
    assert "there are 67.1 GiB" in message and 'mesh "tensor:8" would' in message and numbers["batch"] < 64
    rank_layouts(config, "tensor:8", device="a100", **load)
    for word, number in numbers.items():
        fits: dict[str, Any] = {
            **load,
            word: number,
            "prompt": min(load["prompt"], number if word == "context" else 64),
        }
        rank_layouts(config, "tensor:2", device="a100", **fits)
        with pytest.raises(ValueError, match="no layout fits"):
            rank_layouts(config, "tensor:2", device="a100", **{**fits, word: number + 1})


def test_int8_is_offered_where_it_would_do() -> None:
    config = DecoderConfig(**LLAMA.presets["llama-3.1-70b"])
    with pytest.raises(ValueError, match="; dtype int8 would"):
        rank_layouts(config, "tensor:1", batch=1, context=2048, prompt=64)
    assert rank_layouts(config, "tensor:1", batch=1, context=2048, prompt=64, dtype="int8").decode[0].max_context > 2048


@pytest.mark.parametrize(
    "mesh, changes, message",
    [
        ("tensor:8", dict(context=4097), "context 4097: 1 to 4096 are needed, the model's max_positions"),
        ("tensor:8", dict(prompt=512), "prompt 512: 1 to 256 are needed, the context"),
        ("tensor:8", dict(batch=0), "batch 0: 1 or more"),
        ("tensor:8", dict(device="h20"), 'unknown device "h20"; did you mean "h200"'),
        ("tensor:8", dict(dtype="bf16"), 'unknown dtype "bf16"; did you mean "bfloat16"'),
        ("tensor:8", dict(kv_dtype="int9"), 'unknown kv_dtype "int9"; did you mean "int8"'),
        ("tensor:8", dict(objective="speed"), 'unknown objective "speed"'),
        ("tensor:8", dict(kv_share=0.0), "kv_share 0.0: more than 0"),
        ("tensor:-1", {}, "write the size in place of -1"),
        ("fsdp:8", {}, "serving splits over data and tensor"),
        ("tensor:2 tensor_x:2", {}, "either tensor, which is factored for you"),
        ("dcn.tensor:2 tensor:4", {}, "only data may lie across slices"),
    ],
)
def test_what_cannot_be_is_refused(mesh: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        rank_layouts(config_of(SMALL), mesh, **{"batch": 8, "context": 256, **changes})


def test_device_kinds_are_found_by_their_other_names_and_are_whole() -> None:
    assert device_kind("Trillium") is DEVICE_KINDS["v6e"] and device_kind("a100").name == "a100-80g"
    for kind in DEVICE_KINDS.values():
        assert 0 < kind.link_bytes_per_s < kind.memory_bytes_per_s < kind.bf16_flops <= kind.int8_flops
        assert 10**10 < kind.memory_bytes < 10**12 and 0 < kind.latency_s < 1e-3


def test_the_largest_mesh_is_ranked_in_a_blink() -> None:
    ranking = ranked(EIGHT_B, "tensor:512", batch=512, context=2048, prompt=64)
    assert len(ranking.decode) > 70 and ranking.refused["1x512"] == "heads 32 does not split over 512"


def test_a_model_that_is_no_decoder_is_refused() -> None:
    with pytest.raises(ValueError, match="object is no decoder"):
        rank_layouts(object(), "tensor:8", batch=1, context=1)
