"""An endless stream of rows from several corpora, in proportion to their weights, by the step."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np

from jaxpp.data.pack import PackedRows, Row, stack_rows

if TYPE_CHECKING:
    import grain


def mix_rows(corpora: Sequence[PackedRows], weights: Sequence[float], seed: int) -> grain.MapDataset[Row]:
    """Mix corpora into one stream whose row r depends on the seed and r alone.

    Each corpus is read in a new order every epoch, and each of its rows once before any of
    them again. Any prefix of the stream holds the corpora in their proportions, to within
    two rows.

    Args:
        corpora: the rows of each corpus, none of them empty.
        weights: their shares of the stream; the ratio to the smallest is kept to 0.5%.
        seed: of the order, in [0, 2**32).

    Cost: grain walks a permutation of 2**16 places for fewer rows than that, so a row costs
    about 65536 / rows steps: nothing from 1000 rows on, 2 ms for a corpus of 5.
    """
    import grain

    streams = [
        grain.MapDataset.source(rows).shuffle(seed=_order_seed(seed, number)).repeat(None)
        for number, rows in enumerate(corpora)
    ]
    if len(streams) == 1:
        return streams[0]
    # grain counts a cycle in whole rows, 100 for the smallest weight, and cuts the rest: 0.29 to 1
    # would become 100 to 344. Rounded here to 345, its own scaling finds nothing left to cut.
    shares = [round(100 * weight / min(weights)) for weight in weights]
    return grain.MapDataset.mix(streams, weights=shares)


@dataclass(frozen=True)
class StepBatches:
    """Map a step to its batch: step s holds rows `s * batch_size + r` of the stream."""

    stream: grain.MapDataset[Row]  # endless
    rows: Sequence[int]  # positions within the global batch
    batch_size: int  # rows per step, over all processes
    seq_len: int  # tokens per row

    def __len__(self) -> int:
        """Return the number of steps that an index can reach: practically endless."""
        return sys.maxsize // self.batch_size

    def __getitem__(self, step: int) -> Row:
        """Return the batch of a step, arrays [len(rows), seq_len]."""
        first = step * self.batch_size
        wanted = (cast("Row", self.stream[first + row]) for row in self.rows)
        return stack_rows(wanted, len(self.rows), self.seq_len)


def _order_seed(seed: int, corpus: int) -> int:
    # grain adds the epoch to the seed, so neighbouring seeds would share their epochs.
    return int(np.random.SeedSequence((seed, corpus)).generate_state(1)[0])
