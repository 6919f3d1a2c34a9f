"""The steps that lead from one config to another, and what is said where none do."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from jaxpp.grow import Request
from jaxpp.grow.step import Growth
from jaxpp.grow.target import preset, steps_to
from jaxpp.models import DecoderConfig
from jaxpp.nn.moe import MoeConfig
from jaxpp.nn.scaling import RopeScaling
from tests.grow import growing

SMALL = growing.LLAMA


def names(config: DecoderConfig, target: DecoderConfig, **options) -> list[str]:
    return [step.name for step in steps_to(config, target, **options)]


def test_a_published_size_grows_into_the_next():
    steps = steps_to(preset("smollm2-135m"), wanted := preset("smollm2-360m"))
    assert [step.name for step in steps] == ["lemon", "heads", "mlp", "identity"]
    assert all(step.preserves for step in steps)
    found = Growth(steps).target
    assert found.norm_epsilon == pytest.approx(wanted.norm_epsilon * 576 / 960)
    assert replace(found, norm_epsilon=wanted.norm_epsilon) == wanted


def test_layers_with_windows_stay_layers_with_windows():
    """13 and 13 layers become 21 and 21; a copy of one kind cannot stand in for the other."""
    steps = steps_to(preset("gemma-2-2b"), wanted := preset("gemma-2-9b"))
    assert steps[-1].name == "identity" and steps[-1].preserves
    assert steps[-1].target.window_layers == wanted.window_layers == (True, False)


def test_one_whole_factor_is_cloned():
    twice = replace(SMALL, embed_dim=128, num_heads=8, num_kv_heads=4, mlp_dim=192)
    assert names(SMALL, twice) == ["hypercloning"]
    assert names(SMALL, replace(twice, mlp_dim=200)) == ["lemon", "heads", "mlp"]
    single = replace(SMALL, num_kv_heads=1)
    assert names(single, replace(twice, num_kv_heads=1)) == ["hypercloning"]


def test_each_dim_alone_takes_its_operator():
    moe = MoeConfig(4, 2, mlp_dim=96)
    for operator, target in {
        "lemon": replace(SMALL, embed_dim=80),
        "heads": replace(SMALL, num_heads=6, num_kv_heads=3),
        "head_dim": replace(SMALL, head_dim=32, rotary_dim=32),
        "mlp": replace(SMALL, mlp_dim=100),
        "vocab": replace(SMALL, vocab_size=100),
        "identity": replace(SMALL, num_layers=4),
        "upcycle": replace(SMALL, moe=moe),
    }.items():
        assert names(SMALL, target) == [operator]
    assert names(SMALL, replace(SMALL, num_layers=4), depth_op="stack") == ["stack"]
    assert names(SMALL, SMALL) == []


def test_all_dims_at_once_preserve_the_function():
    target = replace(
        SMALL, embed_dim=80, num_heads=6, num_kv_heads=3, mlp_dim=130, vocab_size=101, num_layers=4, max_positions=96,
        moe=MoeConfig(4, 2, mlp_dim=65),
    )  # fmt: skip
    growth = Growth(steps_to(SMALL, target))
    assert [step.name for step in growth.steps] == ["lemon", "heads", "mlp", "vocab", "identity", "upcycle"]
    assert growth.target == replace(target, norm_epsilon=growth.target.norm_epsilon)
    old, new = growing.source_logits(SMALL), growing.logits(growth.target, growing.grown_weights(growth))
    assert np.abs(new[..., : SMALL.vocab_size] - old).max() <= growth.bound * np.abs(old).max()


def test_narrow_experts_are_slices_of_a_wider_mlp():
    (mlp, upcycle) = steps_to(SMALL, target := replace(SMALL, moe=MoeConfig(8, 2, mlp_dim=60)))
    assert mlp.target.mlp_dim == 120 and upcycle.target.moe == target.moe


def test_weights_of_losses_are_the_targets():
    mixture = replace(SMALL, moe=MoeConfig(4, 2, mlp_dim=48))
    steps = steps_to(mixture, replace(SMALL, moe=MoeConfig(4, 2, mlp_dim=96, balance_loss=0.01)))
    assert steps[-1].target.moe == MoeConfig(4, 2, mlp_dim=96, balance_loss=0.01)


def test_steps_draw_noise_of_their_own():
    steps = steps_to(SMALL, replace(SMALL, num_heads=6, num_kv_heads=3, mlp_dim=130), seed=5, noise_db=12.0)
    splits = [step.leaves["blocks/mlp/down/kernel"].split for step in steps]
    assert [(split.seed, split.noise_db) for split in splits] == [(5, 12.0), (6, 12.0)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(norm="layer", mlp="plain"), "different families: mlp gated against plain, norm rms against layer"),
        (dict(tied=True), "tied false against true"),
        (dict(rope_base=5e5), "rope_base 10000.0 against 500000.0"),
        (dict(rope_scaling=RopeScaling("linear", 4.0)), "rope_scaling.kind none against linear"),
        (dict(rotary_dim=8), "rotary_dim 16 of 16 against 8 of 16"),
        (dict(embed_dim=48, num_layers=2), r"embed_dim 48 \(64 or more can be reached\), num_layers 2 \(3 or more"),
        (dict(num_heads=5, num_kv_heads=5), "5 heads on 5 kv heads: 4 heads in 2 groups of 2 grow .*: 4, 6, 8"),
        (dict(head_dim=24, rotary_dim=24), "head_dim 24: a multiple of 16.*32"),
        (dict(moe=MoeConfig(4, 2, mlp_dim=20)), "experts of mlp_dim 20: .* so that 48 or more are needed"),
        (dict(moe=MoeConfig(4, 2, shared_mlp_dim=8)), "shared_mlp_dim 8"),
        (dict(moe=MoeConfig(4, 2, normalize=False)), "normalize false"),
        (dict(moe=MoeConfig(4, 2, capacity_factor=1.5)), r"moe.capacity_factor 1.5 \(0.0 can\)"),
    ],
)
def test_what_cannot_be_reached_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        steps_to(SMALL, replace(SMALL, **changes))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (MoeConfig(4, 2, mlp_dim=48), MoeConfig(8, 2, mlp_dim=48), "num_experts 8: a mixture keeps the 4"),
        (MoeConfig(4, 2, mlp_dim=48), MoeConfig(), "num_experts 0"),
        (MoeConfig(4, 2, 48, shared_mlp_dim=16), MoeConfig(4, 2, 96, shared_mlp_dim=48), "shared_mlp_dim 48 .32 can"),
    ],
)
def test_mixtures_stay_mixtures(old, new, message):
    with pytest.raises(ValueError, match=message):
        steps_to(replace(SMALL, moe=old), replace(SMALL, moe=new))


def test_learned_positions_are_weights():
    with pytest.raises(ValueError, match="max_positions 64 against 128"):
        steps_to(growing.GPT2, replace(growing.GPT2, max_positions=128))


def test_names_that_are_not_known_get_the_nearest():
    with pytest.raises(ValueError, match='did you mean "smollm2-360m"'):
        preset("smollm2-350m")
    with pytest.raises(ValueError, match='did you mean "identity"'):
        steps_to(SMALL, replace(SMALL, num_layers=4), depth_op="identities")


def test_a_model_that_is_no_decoder_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a model with a DecoderConfig, and this one has a NoneType"):
        Request(width=2).growth(None)
