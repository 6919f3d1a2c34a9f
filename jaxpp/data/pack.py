"""Rows of fixed length from a flat array of tokens, with nothing attending across documents.

tokens     The cat . END A   dog      one row of T = 6
targets    cat .   END A dog ran      the next token
segments   1   1   1   1  2   2       a token attends within its own segment only
positions  0   1   2   3  0   1       restart with each document, and with each row
weights    1   1   1   0  1   1       0 where the target belongs to another document
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

ROW_DTYPES = {
    "tokens": np.int32,
    "targets": np.int32,
    "segments": np.int32,
    "positions": np.int32,
    "weights": np.float32,
}
"""The arrays of a row, each [seq_len], and of a batch, each [rows, seq_len]."""

Row = dict[str, np.ndarray]


def padding(*shape: int) -> Row:
    """Return rows without any token: zeros of this shape, segment 0 and weight 0 throughout."""
    return {name: np.zeros(shape, dtype) for name, dtype in ROW_DTYPES.items()}


def stack_rows(rows: Iterable[Row], num_rows: int, seq_len: int) -> Row:
    """Return at most `num_rows` rows as one batch [num_rows, seq_len], filled up with padding."""
    batch = padding(num_rows, seq_len)
    for place, row in enumerate(rows):
        for name, values in row.items():
            batch[name][place] = values
    return batch


@dataclass(frozen=True)
class PackedRows:
    """Cut documents into rows: row i reads tokens [i T, (i + 1) T] with T = seq_len.

    A document that crosses a row's end goes on in the next row as a new segment; its first
    token there is still a target of the row before, so every token but the first of each
    document is a target exactly once.
    """

    tokens: np.ndarray  # integers [tokens], each document after the other
    offsets: np.ndarray  # integers [documents + 1], where each document starts, then the end
    seq_len: int  # tokens per row
    pad_last: bool = False  # keep the last incomplete row, padded, rather than drop it

    def __len__(self) -> int:
        """Return the number of rows; text shorter than one row is padded, never dropped."""
        full, rest = divmod(len(self.tokens), self.seq_len)
        return full + (rest > 0 and (self.pad_last or full == 0))

    def __getitem__(self, index: int) -> Row:
        """Return row `index` as arrays [seq_len]; see `ROW_DTYPES`."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        start = index * self.seq_len
        window = np.asarray(self.tokens[start : start + self.seq_len + 1])
        # Which document holds each token of the window, its target past the end included.
        first = np.searchsorted(self.offsets, start, side="right") - 1
        last = np.searchsorted(self.offsets, start + len(window), side="left")
        starts = np.maximum(self.offsets[first:last] - start, 0)
        places = np.arange(len(window))
        document = np.searchsorted(starts, places, side="right") - 1
        held = min(len(window), self.seq_len)  # tokens of the row proper
        row = padding(self.seq_len)
        row["tokens"][:held] = window[:held]
        row["targets"][: len(window) - 1] = window[1:]
        row["segments"][:held] = document[:held] + 1
        row["positions"][:held] = (places - starts[document])[:held]
        row["weights"][: len(window) - 1] = document[1:] == document[:-1]
        return row
