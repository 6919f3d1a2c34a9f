"""The mixed stream: order, epochs and proportions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from jaxpp.data import PackedRows
from jaxpp.data.mixture import StepBatches, mix_rows


def corpus(first_id: int, rows: int) -> PackedRows:
    """Return rows of two tokens, each row known by its first token."""
    tokens = np.arange(first_id, first_id + 2 * rows, dtype=np.int32)
    return PackedRows(tokens, np.array([0, 2 * rows]), 2)


def ids(corpora: list[PackedRows], weights: Sequence[float], seed: int, number: int) -> list[int]:
    stream = mix_rows(corpora, weights, seed)
    return [int(stream[row]["tokens"][0]) for row in range(number)]


@pytest.mark.parametrize("rows", [1, 2, 3, 17])
def test_an_epoch_holds_each_row_once(rows: int) -> None:
    stream = np.array(ids([corpus(0, rows)], [1.0], 0, 4 * rows)).reshape(4, rows)
    for epoch in stream:
        assert sorted(epoch.tolist()) == list(range(0, 2 * rows, 2))
    if rows == 17:
        assert len({tuple(epoch) for epoch in stream.tolist()}) == 4


def test_neighbouring_seeds_share_no_epoch() -> None:
    orders = [tuple(ids([corpus(0, 17)], [1.0], seed, 68)[17 * e :][:17]) for seed in (0, 1) for e in range(4)]
    assert len(set(orders)) == 8


@pytest.mark.parametrize("weights", [(0.3, 0.1), (1.0, 1.0), (1.0, 2.0, 3.3, 0.4), (7.0, 1.0)])
def test_proportions_hold_in_every_prefix(weights: tuple[float, ...]) -> None:
    corpora = [corpus(1000 * number, 200 + number) for number in range(len(weights))]
    which = np.array(ids(corpora, weights, 0, 400)) // 1000
    counts = np.cumsum(which[:, None] == np.arange(len(weights)), axis=0)
    expected = np.arange(1, 401)[:, None] * np.array(weights) / sum(weights)
    assert np.abs(counts - expected).max() < 2


def test_proportions_do_not_drift() -> None:
    which = np.array(ids([corpus(0, 2000), corpus(10_000, 2000)], [1.0, 0.29], 0, 8000)) // 10_000
    assert abs((which == 0).sum() - 8000 / 1.29) < 2


def test_a_mixture_reads_each_corpus_in_whole_epochs() -> None:
    stream = ids([corpus(0, 3), corpus(1000, 4)], [1.0, 2.0], 0, 36)
    small = [token for token in stream if token < 1000]
    large = [token for token in stream if token >= 1000]
    assert len(small) == 12 and len(large) == 24
    assert all(sorted(small[i : i + 3]) == [0, 2, 4] for i in range(0, 12, 3))
    assert all(sorted(large[i : i + 4]) == [1000, 1002, 1004, 1006] for i in range(0, 24, 4))


def test_rows_depend_on_the_seed_alone() -> None:
    corpora = [corpus(0, 9), corpus(1000, 9)]
    first = ids(corpora, [1.0, 2.0], 3, 60)
    assert first == ids(corpora, [1.0, 2.0], 3, 60) != ids(corpora, [1.0, 2.0], 4, 60)
    stream = mix_rows(corpora, [1.0, 2.0], 3)
    backwards = [int(stream[row]["tokens"][0]) for row in reversed(range(60))]
    assert backwards[::-1] == first


def test_a_step_is_its_rows_of_the_stream() -> None:
    stream = mix_rows([corpus(0, 9)], [1.0], 0)
    batch = StepBatches(stream, [3, 1], batch_size=4, seq_len=2)[5]
    expected = [stream[5 * 4 + 3]["tokens"], stream[5 * 4 + 1]["tokens"]]
    np.testing.assert_array_equal(batch["tokens"], expected)
