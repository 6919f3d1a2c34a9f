"""Packing against a token-by-token oracle."""

from __future__ import annotations

import numpy as np
import pytest

from jaxpp.data import PackedRows
from jaxpp.data.pack import ROW_DTYPES, Row, padding, stack_rows


def random_documents(random: np.random.Generator) -> list[list[int]]:
    lengths = random.integers(1, 15, random.integers(1, 9))
    return [random.integers(1, 1000, length).tolist() for length in lengths]


def packed(documents: list[list[int]], seq_len: int, pad_last: bool = False) -> PackedRows:
    tokens = np.array([token for document in documents for token in document], np.uint16)
    offsets = np.cumsum([0, *map(len, documents)])
    return PackedRows(tokens, offsets, seq_len, pad_last)


def oracle(documents: list[list[int]], seq_len: int) -> list[Row]:
    """Walk over the tokens one at a time; the last row is padded."""
    flat = [(d, token) for d, document in enumerate(documents) for token in document]
    rows = []
    for start in range(0, len(flat), seq_len):
        row = padding(seq_len)
        segment, position = 0, 0
        for place, index in enumerate(range(start, min(start + seq_len, len(flat)))):
            document, token = flat[index]
            new = place == 0 or flat[index - 1][0] != document
            segment, position = (segment + 1, 0) if new else (segment, position + 1)
            row["tokens"][place], row["segments"][place] = token, segment
            row["positions"][place] = position
            if index + 1 < len(flat):
                row["targets"][place] = flat[index + 1][1]
                row["weights"][place] = flat[index + 1][0] == document
        rows.append(row)
    return rows


def assert_rows_equal(ours: Row, theirs: Row) -> None:
    assert ours.keys() == theirs.keys() == ROW_DTYPES.keys()
    for name, dtype in ROW_DTYPES.items():
        assert ours[name].dtype == dtype
        np.testing.assert_array_equal(ours[name], theirs[name], name)


@pytest.mark.parametrize("seed", range(60))
def test_rows_equal_the_oracle(seed: int) -> None:
    random = np.random.default_rng(seed)
    documents, seq_len = random_documents(random), int(random.integers(2, 20))
    expected = oracle(documents, seq_len)
    rows = packed(documents, seq_len, pad_last=True)
    assert len(rows) == len(expected)
    for index, row in enumerate(expected):
        assert_rows_equal(rows[index], row)
    num_tokens = sum(map(len, documents))
    training = packed(documents, seq_len)
    assert len(training) == max(1, num_tokens // seq_len)
    for index in range(len(training)):
        assert_rows_equal(training[index], expected[index])


@pytest.mark.parametrize("seed", range(10))
def test_every_token_but_a_documents_first_is_a_target_once(seed: int) -> None:
    documents = random_documents(np.random.default_rng(seed))
    rows = packed(documents, 7, pad_last=True)
    found = [t for row in rows for t in row["targets"][row["weights"] == 1].tolist()]
    assert found == [token for document in documents for token in document[1:]]


def test_two_documents_packed_equal_two_apart() -> None:
    one, two = [5, 6, 7], [8, 9]
    (together,) = packed([one, two], 5)
    apart = [packed([document], len(document))[0] for document in (one, two)]
    for name in ("tokens", "positions", "weights"):
        separate = np.concatenate([row[name] for row in apart])
        np.testing.assert_array_equal(together[name], separate, name)
    assert together["segments"].tolist() == [1, 1, 1, 2, 2]
    assert together["targets"][together["weights"] == 1].tolist() == [6, 7, 9]


def test_short_text_is_padded_and_no_text_has_no_rows() -> None:
    (row,) = packed([[1, 2, 3]], 5)
    assert row["segments"].tolist() == [1, 1, 1, 0, 0]
    assert row["weights"].tolist() == [1, 1, 0, 0, 0]
    assert len(packed([], 5)) == len(packed([], 5, pad_last=True)) == 0


def test_rows_outside_are_an_index_error() -> None:
    rows = packed([[1, 2, 3, 4]], 2)
    with pytest.raises(IndexError, match="row 2 of 2"):
        rows[2]
    assert len(list(rows)) == 2


def test_stack_fills_up_with_padding() -> None:
    rows = packed([[1, 2, 3, 4]], 2)
    batch = stack_rows(rows, 3, 2)
    assert batch["tokens"].tolist() == [[1, 2], [3, 4], [0, 0]]
    assert batch["segments"].tolist() == [[1, 1], [1, 1], [0, 0]]
    assert stack_rows([], 0, 2)["weights"].shape == (0, 2)
