"""More layers: identities change no bit and learn at once; every other order says that it is another function."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpp.grow.depth import depth, explicit, identity, interpolate, solar, stack
from jaxpp.grow.step import Step, branch_ends
from jaxpp.models import DecoderConfig
from jaxpp.models.canonical import spread
from tests.grow.growing import (
    GEMMA2,
    LLAMA,
    MODELS,
    NEOX,
    TIED,
    difference,
    gradients,
    grown_weights,
    logits,
    source_logits,
    weights,
)  # fmt: skip

LLAMA_32 = replace(LLAMA, num_layers=32)


def sources(step: Step) -> list[int]:
    """Read off the leaves which layer each one copies."""
    numbers = jnp.arange(step.source.num_layers, dtype=jnp.float32)
    leaf = step.leaves["blocks/attention/query/kernel"]
    x = jnp.broadcast_to(numbers[:, None, None, None], (len(numbers), *weights(LLAMA)[leaf.source].shape[1:]))
    return np.asarray(leaf.weight(x, jnp.dtype(jnp.float32)))[:, 0, 0, 0].astype(int).tolist()


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "olmo2", "mixtral"])
def test_identities_change_no_bit(name: str) -> None:
    step = identity(MODELS[name], num_layers=5)
    assert step.preserves
    assert np.array_equal(logits(step.target, grown_weights(step)), source_logits(MODELS[name]))


@pytest.mark.parametrize("config", [LLAMA, GEMMA2, NEOX], ids=["norms before", "norms behind", "biases"])
def test_identities_learn_from_the_first_step(config: DecoderConfig) -> None:
    step = identity(config, num_layers=5)
    found, slopes = grown_weights(step), gradients(step.target, grown_weights(step))
    assert sources(step) == [0, 1, 1, 2, 2]
    for path in branch_ends(config):
        zero = -1.0 if config.norm_scale == "offset" and path.endswith("norm/scale") else 0.0
        assert (np.asarray(found[path])[[2, 4]] == zero).all()
        assert (np.abs(np.asarray(slopes[path])[[2, 4]]).reshape(2, -1).max(1) > 0).all(), path


def test_layers_are_copied_as_each_operator_says() -> None:
    assert sources(stack(LLAMA, num_layers=7)) == [0, 1, 2, 0, 1, 2, 0]
    assert sources(interpolate(LLAMA, num_layers=5)) == [i * 3 // 5 for i in range(5)] == [0, 0, 1, 1, 2]
    assert sources(solar(LLAMA_32, num_layers=48)) == [*range(24), *range(8, 32)]
    assert sources(solar(LLAMA, num_layers=4)) == [0, 1, 1, 2]
    assert sources(explicit(LLAMA, sources=[2, 0, 1, 1])) == [2, 0, 1, 1]
    assert sources(identity(LLAMA_32, num_layers=40)) == [i for i in range(32) for _ in range(2 if i % 4 == 3 else 1)]
    assert sources(identity(LLAMA, num_layers=9)) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_what_is_not_the_source_in_its_order_says_so() -> None:
    gaps = [
        stack(LLAMA, num_layers=6), interpolate(LLAMA, num_layers=6), explicit(LLAMA, sources=[0, 1, 2, 2]),
        solar(LLAMA_32, num_layers=48), explicit(LLAMA, sources=[2, 1, 0]),
        depth(LLAMA, layers=[0, 1, 2, 2], identities=[0]),
    ]  # fmt: skip
    assert [step.gap for step in gaps] == [
        f"the source's layers run {found}"
        for found in (
            "0-2, 0-2, not 0-2", "0, 0-1, 1-2, 2, not 0-2", "0-2, 2, not 0-2", "0-23, 8-31, not 0-31",
            "2, 1, 0, not 0-2", "1-2, 2, not 0-2",
        )
    ]  # fmt: skip
    assert difference(TIED, lambda config: stack(config, num_layers=5)) > 1e-2


def test_the_copy_that_is_kept_may_stand_behind_its_identity() -> None:
    step = depth(LLAMA, layers=[0, 0, 1, 2], identities=[0])
    assert step.preserves
    assert np.array_equal(logits(step.target, grown_weights(step)), source_logits(LLAMA))


def test_windows_and_turning_go_with_the_layer() -> None:
    config = replace(GEMMA2, rope_layers=(True, True, False))
    target = interpolate(config, num_layers=6).target
    assert spread(target.window_layers, 6) == (True, True, False, False, True, True)
    assert target.rope_layers == (True, True, True, True, False, False)
    assert stack(config, num_layers=6).target.window_layers == (True, False, True)
    assert identity(replace(GEMMA2, num_layers=4), num_layers=8).target.window_layers == (True, True, False, False)


def test_first_moments_of_identities_begin_at_zero_and_second_ones_stay() -> None:
    leaf, x = identity(LLAMA, num_layers=5).leaves["blocks/mlp/up/kernel"], weights(LLAMA)["blocks/mlp/up/kernel"]
    first, second = (np.asarray(leaf.moment(x, power)) for power in (1, 2))
    assert np.array_equal(second, np.asarray(x)[[0, 1, 1, 2, 2]])
    assert not first[[2, 4]].any() and np.array_equal(first[[0, 1, 3]], np.asarray(x))


@pytest.mark.parametrize("operator", [stack, interpolate, identity])
def test_fewer_layers_are_refused(operator) -> None:
    with pytest.raises(ValueError, match="2 layers: 3 or more are needed"):
        operator(LLAMA, num_layers=2)


@pytest.mark.parametrize(("num_layers", "nearest"), [(47, "46 or 48"), (66, "64"), (30, "32"), (31, "32"), (65, "64")])
def test_solar_refuses_what_it_cannot_reach(num_layers: int, nearest: str) -> None:
    with pytest.raises(ValueError, match=f"an even number from 32 to 64 is needed, {nearest} is nearest"):
        solar(LLAMA_32, num_layers=num_layers)


@pytest.mark.parametrize(
    ("listed", "message"),
    [
        ([0, 1, 3, -1], "layers -1, 3: this model has 3, 0 to 2"),
        ([0, 1], "2 source layers: 3 or more are needed"),
        ([], "0 source layers: 3 or more are needed"),
    ],
)
def test_lists_that_fit_no_layers_are_refused(listed: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        explicit(LLAMA, sources=listed)


def test_an_identity_beyond_the_last_layer_is_refused() -> None:
    with pytest.raises(ValueError, match="identities 4: there are 4 layers, 0 to 3"):
        depth(LLAMA, layers=[0, 1, 2, 2], identities=[4])
