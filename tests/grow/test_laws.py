"""Laws of growth by dims: sums over copies are the old weights, gradients are divided over written copies."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpp.grow.head_dim import head_dim
from jaxpp.grow.heads import heads
from jaxpp.grow.leaf import ByDims
from jaxpp.grow.mlp import mlp
from jaxpp.grow.step import Step, is_norm
from jaxpp.grow.width import hypercloning, lemon
from jaxpp.models import DecoderConfig
from tests.grow.growing import (
    GEMMA2,
    GPT2,
    LLAMA,
    MIXTRAL,
    QWEN3,
    TIED,
    gradients,
    grown_weights,
    source_gradients,
    weights,
)

SUMMED: dict[str, Callable[[DecoderConfig], Step]] = {
    "symmetric": lambda config: hypercloning(config, noise_db=None),
    "with noise": hypercloning,
    "three times": lambda config: hypercloning(config, width=3),
    "diagonal with noise": lambda config: hypercloning(config, variant="diagonal"),
    "unequal": lambda config: lemon(config, width=2),
    "heads": lambda config: heads(config, num_heads=8),
    "some mlp units": lambda config: mlp(config, mlp_dim=130),
}
EXACT: dict[str, tuple[DecoderConfig, Callable[[DecoderConfig], Step]]] = {
    "symmetric": (LLAMA, lambda config: hypercloning(config, noise_db=None)),
    "tied, learned positions, biases": (GPT2, lambda config: hypercloning(config, noise_db=None)),
    "tied, scaled embedding, offset norms": (GEMMA2, lambda config: hypercloning(config, noise_db=None)),
    "mixture": (MIXTRAL, lambda config: hypercloning(config, noise_db=None)),
    "diagonal": (TIED, lambda config: hypercloning(config, variant="diagonal", noise_db=None)),
    "heads in their groups": (LLAMA, lambda config: heads(config, num_heads=6, num_kv_heads=2, noise_db=None)),
    "some mlp units": (LLAMA, lambda config: mlp(config, mlp_dim=130, noise_db=None)),
    "head_dim": (LLAMA, lambda config: head_dim(config, head_dim=32, noise_db=None)),
    "head_dim, explicit scale": (GEMMA2, lambda config: head_dim(config, head_dim=48, noise_db=None)),
    "head_dim, norms of queries": (QWEN3, lambda config: head_dim(config, head_dim=32, noise_db=None)),
}


def summed(leaf: ByDims, y: np.ndarray) -> np.ndarray:
    """Add up, one by one, what each written unit reads of all copies of a unit."""
    first = len(leaf.arrow.stacked)
    for axis in range(first, first + len(leaf.arrow.reads)):
        spread, y = leaf.spreads[axis], np.moveaxis(y, axis, 0)
        total = np.zeros((spread.old, *y.shape[1:]), y.dtype)
        for unit, source in enumerate(spread.source):
            total[source] += y[unit]
        y = np.moveaxis(total, 0, axis)
    return y


def written(leaf: ByDims, x: np.ndarray) -> np.ndarray:
    """Copy the units that are written."""
    first = len(leaf.arrow.stacked) + len(leaf.arrow.reads)
    for axis in range(first, x.ndim):
        x = np.take(x, leaf.spreads[axis].source, axis)
    return x


@pytest.mark.parametrize(
    ("name", "config"), [*((name, LLAMA) for name in SUMMED), ("with noise", MIXTRAL)], ids=[*SUMMED, "mixture"]
)
def test_copies_of_a_read_unit_share_its_weight(name: str, config: DecoderConfig) -> None:
    step = SUMMED[name](config)
    found = grown_weights(step)
    for path, leaf in step.leaves.items():
        assert isinstance(leaf, ByDims)
        if leaf.arrow.is_lookup() or is_norm(path):
            continue
        old = np.asarray(weights(config)[path], np.float64)
        sums = summed(leaf, np.asarray(found[path], np.float64))
        np.testing.assert_allclose(sums, written(leaf, old), atol=1e-6 * np.abs(old).max(), err_msg=path)


@pytest.mark.parametrize("variant", ["symmetric", "diagonal"])
def test_noise_of_pairs_cancels_and_is_as_loud_as_asked_for(variant) -> None:
    quiet = grown_weights(hypercloning(LLAMA, variant=variant, noise_db=None))
    noisy = grown_weights(hypercloning(LLAMA, variant=variant, noise_db=12.0))
    for path, halves in {"blocks/attention/query/kernel": 1, "blocks/mlp/down/kernel": 1}.items():
        change = np.asarray(noisy[path], np.float64) - np.asarray(quiet[path], np.float64)
        first, second = np.split(change, 2, halves)
        half = np.asarray(weights(LLAMA)[path]) / 2
        np.testing.assert_allclose(first, -second, atol=1e-6 * np.abs(half).max())
        assert 10 * np.log10((half**2).mean() / (first**2).mean()) == pytest.approx(12, abs=0.1)
        top, bottom = np.split(first, 2, 2)
        assert not np.allclose(top, bottom)  # each copy that is written has noise of its own
    for path in ("tokens/table", "blocks/mlp_norm/scale", "head/kernel"):
        assert np.array_equal(quiet[path], noisy[path])


@pytest.mark.parametrize("name", EXACT)
def test_gradients_are_those_of_the_source_divided_over_written_copies(name: str) -> None:
    config, operator = EXACT[name]
    step = operator(config)
    found, old = gradients(step.target, grown_weights(step)), source_gradients(config)
    for path, leaf in step.leaves.items():
        for power in (1, 2):
            wanted = np.asarray(leaf.moment(jnp.asarray(old[leaf.source]) ** power, power))
            # A bias of keys that do not turn has a gradient of zero: its rounding is held against that of queries.
            size = np.abs(np.asarray(found[path.replace("key/bias", "query/bias")]) ** power).max()
            error = np.abs(np.asarray(found[path]) ** power - wanted).max() / size
            assert error <= 1e-5, f"{path}, power {power}: {error:.1e}"
