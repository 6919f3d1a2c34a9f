"""Advanced knowledge initialisation: old units from the layer itself, new ones from the layer above."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from jaxpp.grow.aki import aki
from jaxpp.grow.width import net2net
from jaxpp.models import DecoderConfig
from tests.grow.growing import GPT2, LLAMA, MIXTRAL, difference, grown_weights, weights

STEP, COPIES = aki(LLAMA, embed_dim=80), net2net(LLAMA, embed_dim=80, noise_db=None)
WRITTEN = {
    "blocks/attention/out/kernel": (64, 3), "blocks/mlp/down/kernel": (64, 2),
    "blocks/mlp/gate/kernel": (96, 2), "blocks/mlp/up/kernel": (96, 2),
}  # fmt: skip


@pytest.mark.parametrize("path", WRITTEN)
def test_new_units_come_from_the_layer_above(path: str) -> None:
    (old, axis), found, copied = WRITTEN[path], grown_weights(STEP)[path], np.asarray(grown_weights(COPIES)[path])
    low, high = np.split(np.asarray(found), [old], axis)
    own, new = np.split(copied, [old], axis)
    assert np.array_equal(low, own)
    assert np.array_equal(high, new[[1, 2, 2]])
    assert not np.array_equal(high[0], new[0])


def test_all_else_grows_as_copies_do() -> None:
    found, copied = grown_weights(STEP), grown_weights(COPIES)
    changed = {path for path in found if not np.array_equal(found[path], copied[path])}
    assert changed == set(WRITTEN)
    assert STEP.target == COPIES.target


@pytest.mark.parametrize(("config", "path"), [(MIXTRAL, "blocks/mlp/experts/down"), (GPT2, "blocks/mlp/up/bias")])
def test_experts_and_biases_move_too(config: DecoderConfig, path: str) -> None:
    found = np.asarray(grown_weights(aki(config, width=2))[path])
    copied = np.asarray(grown_weights(net2net(config, width=2, noise_db=None))[path])
    size = weights(config)[path].shape[-1]
    assert np.array_equal(found[..., size:], copied[[1, 2, 2]][..., size:])
    assert not np.array_equal(found, copied)


def test_moments_follow_their_weights() -> None:
    path = "blocks/mlp/up/kernel"
    x = weights(LLAMA)[path]
    found, copied = (np.asarray(step.leaves[path].moment(x, 2)) for step in (STEP, COPIES))
    assert np.array_equal(found[..., :96], copied[..., :96])
    assert np.array_equal(found[..., 96:], copied[[1, 2, 2]][..., 96:])


def test_it_says_that_it_does_not_preserve() -> None:
    assert STEP.gap == "new units of layer l hold the weights of layer l + 1"
    assert difference(LLAMA, lambda config: aki(config, embed_dim=80)) > 1e-2


def test_a_single_layer_and_no_growth_are_plain_copies() -> None:
    assert aki(replace(LLAMA, num_layers=1), width=1.5).gap == net2net(LLAMA, width=1.5).gap
    assert aki(LLAMA, width=1).preserves


def test_a_smaller_width_is_refused() -> None:
    with pytest.raises(ValueError, match="embed_dim 48: 64 or more are needed"):
        aki(LLAMA, embed_dim=48)
