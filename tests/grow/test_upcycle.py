"""Experts in place of an mlp: the same logits whichever a token visits, and gradients that are an E-th in the mean."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpp import tree
from jaxpp.grow.depth import identity
from jaxpp.grow.upcycle import upcycle
from jaxpp.grow.width import hypercloning
from jaxpp.models import DecoderConfig
from jaxpp.nn.moe import MoeConfig
from tests.grow.growing import (
    GEMMA2,
    GPT2,
    LLAMA,
    MIXTRAL,
    OLMO2,
    TIED,
    abstract,
    difference,
    gradients,
    grown_weights,
    growth_of,
    same_bits_when_sharded,
    source_gradients,
    weights,
)  # fmt: skip

EXPERTS = [f"blocks/mlp/experts/{name}" for name in ("gate", "up", "down")]


def four(config: DecoderConfig, **options):
    return upcycle(config, num_experts=4, **options)


@pytest.mark.parametrize("config", [LLAMA, TIED, GEMMA2, OLMO2], ids=["llama", "tied", "gemma2", "olmo2"])
def test_copies_of_an_mlp_keep_the_logits(config: DecoderConfig) -> None:
    assert difference(config, four) <= 2e-6


@pytest.mark.parametrize("granularity", [2, 3])
def test_slices_of_copies_keep_the_logits(granularity: int) -> None:
    assert difference(LLAMA, lambda config: four(config, granularity=granularity)) <= 2e-6


def test_all_experts_need_no_normalising() -> None:
    def every(config):
        return four(config, experts_per_token=4, normalize=False)

    assert every(LLAMA).preserves
    assert difference(LLAMA, every) <= 2e-6


STEPS = (hypercloning, lambda config: identity(config, num_layers=5), four)


@pytest.mark.parametrize("config", [LLAMA, GEMMA2], ids=["llama", "gemma2"])
def test_wider_then_deeper_then_experts_keeps_the_logits(config: DecoderConfig) -> None:
    assert difference(config, *STEPS) <= 2e-6


def test_experts_grow_further() -> None:
    assert difference(LLAMA, four, lambda config: identity(config, num_layers=4), hypercloning) <= 2e-6


def test_moments_have_the_shapes_of_their_weights_through_all_steps() -> None:
    growth = growth_of(LLAMA, *STEPS)
    wanted = {path: leaf.shape for path, leaf in tree.named_leaves(abstract(growth.target)[1]).items()}
    for power in (1, 2):
        found = {p: leaf.moment(weights(LLAMA)[leaf.source], power) for p, leaf in growth.leaves().items()}
        assert {path: x.shape for path, x in found.items()} == wanted
        assert all(np.isfinite(x).all() for x in found.values())


def test_the_config_says_what_was_asked_for() -> None:
    step = four(LLAMA, granularity=3)
    assert step.target.moe == MoeConfig(12, 6, 32, balance_loss=1e-2, z_loss=1e-3)
    assert step.maps == {"experts": "1 x 12 = 12", "mlp": "96 / 3 = 32"}
    assert replace(step.target, moe=MoeConfig()) == LLAMA


def test_slices_of_a_copy_stand_together_behind_equal_columns() -> None:
    found = grown_weights(four(LLAMA, granularity=2))
    router = np.asarray(found["blocks/mlp/router/kernel"])
    assert np.array_equal(router[..., ::2], router[..., 1::2])
    assert len({column.tobytes() for column in router[0].T}) == 4
    assert router.std() == pytest.approx(0.02, rel=0.1) and abs(router.mean()) < 0.002
    down = np.asarray(found["blocks/mlp/experts/down"])
    old = np.asarray(weights(LLAMA)["blocks/mlp/down/kernel"])
    for expert in range(8):
        assert np.array_equal(down[:, expert], 2 * np.split(old, 2, 1)[expert % 2])


@pytest.mark.parametrize("granularity", [1, 3])
def test_an_even_router_gives_each_copy_its_part_of_the_gradient(granularity: int) -> None:
    """With all experts chosen and equal gates the mean over tokens that the moments assume is exact."""
    step = four(LLAMA, experts_per_token=4, granularity=granularity, balance_loss=0.0, z_loss=0.0)
    even = grown_weights(step) | {"blocks/mlp/router/kernel": jnp.zeros((3, 64, 4 * granularity))}
    found, old = gradients(step.target, even), source_gradients(LLAMA)
    for path in EXPERTS:
        leaf = step.leaves[path]
        for power in (1, 2):
            wanted = np.asarray(leaf.moment(old[leaf.source] ** power, power))
            np.testing.assert_allclose(np.asarray(found[path]) ** power, wanted, atol=1e-5 * np.abs(wanted).max())
    assert not step.leaves["blocks/mlp/router/kernel"].moment(jnp.ones((3, 64)), 2).any()


def test_drop_upcycling_draws_as_many_units_of_each_expert_anew_in_all_its_weights() -> None:
    step = four(LLAMA, reinitialize=0.25)
    found, copies = grown_weights(step), grown_weights(four(LLAMA))
    anew = [np.asarray(found[path]) != np.asarray(copies[path]) for path in EXPERTS]
    gate, up, down = anew[0].any(2), anew[1].any(2), anew[2].any(3)
    assert np.array_equal(gate, up) and np.array_equal(gate, down)
    assert (gate.sum(-1) == 24).all()
    assert len({units.tobytes() for units in gate.reshape(12, 96)}) == 12
    for path, where in zip(EXPERTS, anew, strict=True):
        drawn, kept = np.asarray(found[path])[where], np.asarray(copies[path])
        assert drawn.std() == pytest.approx(kept.std(), rel=0.05) and abs(drawn.mean()) < 0.1 * kept.std()
    assert step.gap == "25% of the hidden units of each expert are drawn anew"


def test_first_moments_of_units_drawn_anew_begin_at_zero() -> None:
    leaf, whole = four(LLAMA, reinitialize=0.25).leaves[EXPERTS[0]], four(LLAMA).leaves[EXPERTS[0]]
    x = jnp.ones((3, 64, 96))
    assert np.asarray(leaf.moment(x, 1)).mean() == pytest.approx(0.75 / 4)
    assert np.array_equal(leaf.moment(x, 2), whole.moment(x, 2))


def test_gates_that_break_exactness_are_right_in_the_mean_if_asked_for() -> None:
    step = four(LLAMA, normalize=False, exact=False)
    assert step.gap == "the weights of the chosen experts do not sum to 1"
    assert step.target.moe.normalize is False
    assert 1e-3 < difference(LLAMA, lambda _: step) < 0.3


@pytest.mark.timeout(120)
@pytest.mark.parametrize("path", [EXPERTS[2], "blocks/mlp/router/kernel"])
def test_experts_and_router_have_the_same_bits_on_shards(path: str) -> None:
    leaf = four(LLAMA, reinitialize=0.5).leaves[path]
    assert same_bits_when_sharded(leaf, weights(LLAMA)[leaf.source], axis=1)


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (MIXTRAL, {}, "this model has 4 experts already"),
        (GPT2, {}, "this model's mlp is plain with biases; experts are gated"),
        (replace(LLAMA, mlp_bias=True), {}, "this model's mlp is gated with biases"),
        (LLAMA, dict(experts_per_token=5), "5 experts for each token: 1 to num_experts = 4 are needed"),
        (LLAMA, dict(granularity=5), "granularity 5 does not divide mlp_dim 96; 4 or 6 does"),
        (LLAMA, dict(granularity=0), "granularity 0 does not divide mlp_dim 96; 1 or 2 does"),
        (LLAMA, dict(reinitialize=1.5), "reinitialize 1.5: a fraction"),
        (LLAMA, dict(normalize=False), "normalize false with 2 of 4 experts: gates that break exactness"),
    ],
)
def test_what_cannot_become_a_mixture_is_refused(config: DecoderConfig, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        four(config, **options)
