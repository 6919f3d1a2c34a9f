"""What a layout sends, against the closed formulas of the literature and figures taken from compiled programs."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import pytest

from jaxpp.models.decoder_config import DecoderConfig
from jaxpp.nn.moe import MoeConfig
from jaxpp.partition.layouts import Layout, ServingMesh, layouts
from jaxpp.partition.sizes import ModelSizes, model_sizes
from jaxpp.partition.volumes import Collective, Work, layer_collectives, outer_collectives, step_collectives


@functools.cache
def sizes(**changes: Any) -> ModelSizes:
    """Return a plain model of width 64 whose dims split over 16 devices."""
    shape: dict[str, Any] = dict(
        vocab_size=64, num_layers=3, embed_dim=64, num_heads=16, head_dim=16, mlp_dim=256, mlp="plain",
        max_positions=4096,
    )  # fmt: skip
    return model_sizes(DecoderConfig(**{**shape, **changes}))


def layout(model: ModelSizes, name: str, kv: str, mesh: str = "tensor:16", stored: int = 0) -> Layout:
    """Return the one layout of this name, where `stored` is the parts of embed in storage if that is not clear."""
    found = [one for one in layouts(model, ServingMesh.parse(mesh))[0] if (one.name, one.kv) == (name, kv)]
    return next(one for one in found if not stored or one.storage[1] == stored)


def decoding(batch: int, entry_bytes: int = 4) -> Work:
    return Work(False, batch, 1, 128, entry_bytes, entry_bytes, entry_bytes)


def sent(found: tuple[Collective, ...], *parts: str) -> float:
    """Return the bytes that one device sends for parts of the model."""
    return sum(one.wire_bytes for one in found if one.part.startswith(parts))


MLP = ("mlp", "weights blocks/mlp/")


@pytest.mark.parametrize(
    "name, tokens, num_bytes",
    [("2D 2x8", 64, 22_528), ("gathered 16 of 16", 64, 122_880), ("gathered 16 of 16", 1024, 122_880)],
)
def test_the_mlp_sends_what_a_compiled_program_was_seen_to_send(name: str, tokens: int, num_bytes: int) -> None:
    model = sizes()
    kv = "batch" if name.startswith("gathered") else "heads"
    found = layer_collectives(model, layout(model, name, kv), decoding(tokens))
    assert sent(found, *MLP) == num_bytes


def test_1d_is_one_all_reduce_of_the_stream_after_attention_and_one_after_the_mlp() -> None:
    model, tokens, n = sizes(), 32, 16
    found = layer_collectives(model, layout(model, "1D", "heads"), decoding(tokens))
    assert [(one.kind, one.part, one.group, one.message_bytes, one.count) for one in found] == [
        ("all-reduce", "attention", n, tokens * 64 * 4, 1),
        ("all-reduce", "mlp", n, tokens * 64 * 4, 1),
    ]
    assert sent(found, "mlp") == 2 * tokens * 64 * (1 - 1 / n) * 4


def test_parallel_attention_and_mlp_share_their_collectives() -> None:
    for name in ("1D", "2D 4x4"):
        apart, together = sizes(), sizes(parallel=True)
        one, both = (layer_collectives(m, layout(m, name, "heads"), decoding(32)) for m in (together, apart))
        stream = [c.wire_bytes for c in both if c.part == "attention" and c.kind != "all-to-all"]
        assert sent(both, "attention", "mlp") - sent(one, "attention", "mlp", "block") == pytest.approx(sum(stream))


@pytest.mark.parametrize("mlp, inputs", [("plain", 1), ("gated", 2)])
@pytest.mark.parametrize("x", [2, 4, 8])
def test_2d_follows_the_formula_with_its_gated_correction(mlp: str, inputs: int, x: int) -> None:
    model, t, e, f, yz = sizes(mlp=mlp), 32, 64, 256, 16 // x
    found = layer_collectives(model, layout(model, f"2D {x}x{yz}", "heads"), decoding(t))
    elements = 2 * t * e / x * (1 - 1 / yz) + (inputs + 1) * t * f / yz * (1 - 1 / x)
    assert sent(found, *MLP) == elements * 4


@pytest.mark.parametrize("mlp, weights", [("plain", 2), ("gated", 3)])
@pytest.mark.parametrize("gathered, stored", list(itertools.product((2, 4, 8, 16), (1, 2))))
def test_gathered_weights_follow_the_formula_whatever_the_storage(
    mlp: str, weights: int, gathered: int, stored: int
) -> None:
    model, t, e, f, n = sizes(mlp=mlp), 64, 64, 256, 16
    kv = "mixed" if gathered < n else "batch"
    found = layer_collectives(model, layout(model, f"gathered {gathered} of {n}", kv, stored=stored), decoding(t))
    moved = weights * e * f * gathered / n * (1 - 1 / gathered)
    elements = moved + 2 * t * e / gathered * (1 - gathered / n)
    assert sent(found, *MLP) == elements * 4


def mlp_of(model: ModelSizes, one: Layout, tokens: int) -> float:
    return sent(layer_collectives(model, one, decoding(tokens, 2)), *MLP) / 2


PALM: dict[str, Any] = dict(
    vocab_size=1024, num_layers=1, embed_dim=18_432, num_heads=64, head_dim=256, num_kv_heads=1, mlp_dim=4 * 18_432
)


def test_the_best_shape_of_2d_is_half_the_root_of_n_and_its_volume_falls_with_that_root() -> None:
    model, n, t = sizes(**PALM), 64, 64
    volumes = {
        x: mlp_of(model, layout(model, f"2D {x}x{n // x}", "batch", f"tensor:{n}"), t) for x in (2, 4, 8, 16, 32)
    }
    assert min(volumes, key=lambda x: volumes[x]) == math.sqrt(n) / 2
    exact = 8 * t * model.embed / math.sqrt(n) - 2 * t * (model.embed + 4 * model.embed) / n
    assert volumes[4] == pytest.approx(exact)  # the asymptote 8TE/sqrt(n), less the shares that stay


def test_gated_2d_is_best_where_the_derived_optimum_lies() -> None:
    model, n = sizes(**{**PALM, "mlp": "gated"}), 64
    volumes = {x: mlp_of(model, layout(model, f"2D {x}x{n // x}", "batch", f"tensor:{n}"), 64) for x in (2, 4, 8, 16)}
    optimum = math.sqrt(2 * n * model.embed / (3 * 4 * model.embed))  # 3.3
    assert min(volumes, key=lambda x: volumes[x]) == min(volumes, key=lambda x: abs(math.log(x / optimum))) == 4


@pytest.mark.parametrize("tokens", [2**14, 2**16, 2**18])
def test_the_best_gather_is_the_root_of_t_n_over_f(tokens: int) -> None:
    model, n, f = sizes(**PALM), 64, 4 * 18_432
    options = [(g, layout(model, f"gathered {g} of {n}", "batch", f"tensor:{n}")) for g in (2, 4, 8, 16, 32, 64)]
    volumes = {g: mlp_of(model, one, tokens) for g, one in options}
    optimum = math.sqrt(tokens * n / f)
    best = min(volumes, key=lambda g: volumes[g])
    assert best == min(volumes, key=lambda g: abs(math.log(g / optimum)))
    assert 0.8 < volumes[best] / (4 * model.embed * math.sqrt(tokens * f / n)) < 1.1


def test_the_regimes_of_the_mlp_follow_each_other_as_tokens_grow() -> None:
    model, n, f = sizes(**PALM), 64, 4 * 18_432
    found = [one for one in layouts(model, ServingMesh.parse(f"tensor:{n}"))[0] if one.kv == "batch" and one.group > 1]

    def best(tokens: int) -> str:
        return min(found, key=lambda one: mlp_of(model, one, tokens)).name

    picks = [best(2**k) for k in range(6, 24)]
    assert [name for name, _ in itertools.groupby(picks)] == [
        "2D 4x16", "gathered 4 of 64", "gathered 8 of 64", "gathered 16 of 64", "gathered 32 of 64", "gathered 64 of 64"
    ]  # fmt: skip
    assert best(64) == "2D 4x16" and best(150_000) == "gathered 16 of 64"
    assert best(n // 2 * f - n) == "gathered 32 of 64" and best(n // 2 * f + n) == "gathered 64 of 64"


def test_gathering_all_beats_2d_from_f_root_n_over_4_tokens() -> None:
    """The exact factors move the crossing up: by the shares that stay with a device."""
    model, n, f = sizes(**PALM), 64, 4 * 18_432
    two, whole = (layout(model, name, "batch", f"tensor:{n}") for name in ("2D 4x16", "gathered 64 of 64"))
    crossing = f * math.sqrt(n) / 4
    exact = 2 * f * (1 - 1 / n) / (2 * (1 / 4 * (1 - 1 / 16) + 4 / 16 * (1 - 1 / 4)))
    assert (
        mlp_of(model, two, int(0.99 * exact) // n * n) < mlp_of(model, whole, 64) < mlp_of(model, two, int(exact) + n)
    )
    assert 1 < exact / crossing < 1.2


def test_the_small_crossing_is_where_it_was_measured() -> None:
    """2D wins at 64 tokens and gathering at 1024; formula 349."""
    model = sizes()
    two, whole = layout(model, "2D 2x8", "heads"), layout(model, "gathered 16 of 16", "batch")
    wins = [t for t in range(16, 1040, 16) if mlp_of(model, two, t) < mlp_of(model, whole, t)]
    assert max(wins) == 336


def test_kv_by_batch_moves_queries_and_outputs_and_the_few_heads_of_keys() -> None:
    model, n, b, hd = sizes(num_kv_heads=2), 16, 32, 16
    found = layer_collectives(model, layout(model, "1D", "batch"), decoding(b))
    assert sent(found, "attention query") == sent(found, "attention out") == b * 16 * hd / n * (1 - 1 / n) * 4
    assert sent(found, "attention kv") == 2 * b * 2 * hd / n * (1 - 1 / 2) * 4
    assert {one.kind for one in found if one.part in ("attention query", "attention kv", "attention out")} == {
        "all-to-all"
    }


def test_kv_mixed_moves_queries_within_the_groups_that_share_a_head_and_no_keys() -> None:
    model, n, b, hd = sizes(num_kv_heads=4), 16, 32, 16
    found = layer_collectives(model, layout(model, "1D", "mixed"), decoding(b))
    assert [(one.group, one.wire_bytes) for one in found if one.kind == "all-to-all"] == [
        (4, b * 16 * hd / n * (1 - 1 / 4) * 4)
    ] * 2
    assert not sent(found, "attention kv")


def test_kv_by_sequence_gathers_queries_and_combines_partial_softmaxes() -> None:
    model, n, b, hd = sizes(num_kv_heads=4), 16, 2, 16
    found = layer_collectives(model, layout(model, "1D", "sequence"), decoding(b))
    assert sent(found, "attention query") == b * 16 * hd * (1 - 1 / n) * 4
    assert sent(found, "attention kv") == 2 * b * 4 * hd * (1 - 1 / 4) * 4
    assert sent(found, "attention softmax") == 2 * 2 * b * 16 * (1 - 1 / n) * 4
    assert sent(found, "attention out") == b * 16 * hd * (1 - 1 / n) * 4


def test_a_prompt_by_sequence_gathers_keys_of_all_tokens() -> None:
    model, n, b, length = sizes(num_kv_heads=4), 16, 2, 64
    work = Work(True, b, length, length, 4, 4, 4)
    found = layer_collectives(model, layout(model, "1D", "sequence"), work)
    gathers = [one for one in found if one.kind == "all-gather"]
    assert [(one.group, one.message_bytes, one.count) for one in gathers] == [(n, b * length * 4 * 16 * 4, 2)]


def test_every_layer_counts_once_in_a_step_and_the_embedding_and_head_once_in_all() -> None:
    model = sizes()
    one = layout(model, "2D 4x4", "batch")
    layer, outside = (part(model, one, decoding(32)) for part in (layer_collectives, outer_collectives))
    step = step_collectives(model, one, decoding(32))
    assert sent(step, "") == pytest.approx(3 * sent(layer, "") + sent(outside, ""))
    assert sum(c.count for c in step) == 3 * sum(c.count for c in layer) + sum(c.count for c in outside)
    assert {(c.kind, c.part) for c in outside} == {
        ("reduce-scatter", "embedding"), ("all-reduce", "norm"), ("all-gather", "head"), ("reduce-scatter", "head"),
        ("all-gather", "head best"),
    }  # fmt: skip


def test_a_mixture_sends_the_rows_of_the_experts_that_are_visited_and_gathers_all_experts() -> None:
    model, t = sizes(mlp="gated", moe=MoeConfig(num_experts=4, experts_per_token=2)), 32
    two = layer_collectives(model, layout(model, "2D 4x4", "heads"), decoding(t))
    inside = [one for one in two if one.part == "mlp" and one.group == 4 and one.message_bytes == t * 2 * 256 / 4 * 4]
    assert [(one.kind, one.count) for one in inside] == [("reduce-scatter", 2), ("all-gather", 1)]
    whole = layer_collectives(model, layout(model, "gathered 16 of 16", "batch", stored=1), decoding(t))
    assert sent(whole, "weights blocks/mlp/experts") == 4 * 3 * 64 * 256 * (1 - 1 / 16) * 4


def test_replicas_send_nothing() -> None:
    model = sizes()
    assert not step_collectives(model, layout(model, "replicas", "batch"), decoding(32))


def test_norms_over_all_heads_and_of_layer_norm_are_counted() -> None:
    model = sizes(norm="layer", qk_norm="full")
    found = layer_collectives(model, layout(model, "2D 4x4", "heads"), decoding(32))
    assert [(one.part, one.count, one.message_bytes) for one in found if "norm" in one.part] == [
        ("norm", 4, 128), ("head norm", 2, 128)
    ]  # fmt: skip
