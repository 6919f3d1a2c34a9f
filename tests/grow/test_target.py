"""Operators that lead to the sizes of another model, or which dim none leads to."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jaxpp.grow import Growth, Request
from jaxpp.grow.target import SIZES, preset, steps_to
from jaxpp.models import DecoderConfig

SMALL = preset("smollm2-135m")


def names(growth: Growth) -> list[str]:
    return [step.name for step in growth.steps]


def test_a_published_size_is_reached_dim_by_dim() -> None:
    growth = Request(target="smollm2-360m").growth(SMALL)
    assert names(growth) == ["lemon", "heads", "mlp", "identity"]
    assert not growth.gap
    wanted = preset("smollm2-360m")
    assert {name: getattr(growth.target, name) for name in SIZES} == {name: getattr(wanted, name) for name in SIZES}


def test_a_whole_factor_is_taken_at_once() -> None:
    twice = replace(SMALL, embed_dim=1152, num_heads=18, num_kv_heads=6, mlp_dim=4608)
    growth = Request(target=twice).growth(SMALL)
    assert names(growth) == ["hypercloning"] and growth.target == twice


@pytest.mark.parametrize(("changes", "message"), [
    (dict(embed_dim=512), r"embed_dim 576 would shrink to 512, and models only grow \(nearest: 576\)"),
    (dict(head_dim=96), r"head_dim 64 grows by whole factors, not to 96 \(nearest: 64 or 128\)"),
    (dict(num_heads=12, num_kv_heads=6), r"groups of 2, and 3 queries share a key \(nearest: 18 heads\)"),
    (dict(num_layers=24), "num_layers 30 would shrink to 24"),
    (dict(norm="layer"), "different families: norm rms against layer"),
    (dict(mlp="plain", qkv_bias=True), "mlp gated against plain, qkv_bias False against True"),
])  # fmt: skip
def test_what_cannot_be_reached(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        steps_to(SMALL, replace(SMALL, **changes))  # type: ignore[arg-type]


def test_experts_and_new_tokens() -> None:
    mixture = replace(
        SMALL, vocab_size=50_000, num_layers=32, moe=replace(SMALL.moe, num_experts=4, experts_per_token=2)
    )
    growth = Growth(tuple(steps_to(SMALL, mixture)))
    assert names(growth) == ["vocab", "identity", "upcycle"] and not growth.gap


def test_nothing_to_do_is_said() -> None:
    with pytest.raises(ValueError, match="nothing to grow"):
        Request(target=SMALL).growth(SMALL)


def test_an_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="smollm2-135m"):
        preset("smollm-135m")
    assert isinstance(preset("1b"), DecoderConfig)
