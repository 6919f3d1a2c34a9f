"""The arrays that a step sends to the devices: positions of new tokens, and the pages of each row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from jaxpp.serve.pages import Holding, Span
from jaxpp.serve.program import Geometry, at_least

Tables = list[tuple[np.ndarray, np.ndarray]]


def positions_of(num_rows: int, width: int, ranges: Mapping[int, tuple[int, int]]) -> np.ndarray:
    """Return int32 ``[rows, width]``: of each row its positions from the first up to the second; -1 elsewhere."""
    positions = np.full((num_rows, width), -1, np.int32)
    for row, (begin, end) in ranges.items():
        positions[row, : end - begin] = np.arange(begin, end)
    return positions


def tables_of(
    geometry: Geometry, spans: Sequence[Span], positions: np.ndarray, holdings: Mapping[int, Sequence[Holding]]
) -> Tables:
    """Return the pages of each row in each group of layers, as `Program.extend` takes them.

    Args:
        geometry: from whose sizes the tables' are chosen.
        spans: of the groups.
        positions: of the new tokens.
        holdings: of the rows that have new tokens, one for each group.
    """
    num_rows, width = positions.shape
    step = at_least(geometry.page_steps(width), int(positions.max()) // geometry.page + 1)
    tables = []
    for group, span in enumerate(spans):
        pages = np.zeros((num_rows, geometry.table_width(span, step, width)), np.int32)
        start = np.zeros(num_rows, np.int32)
        for row, own in holdings.items():
            holding = own[group]
            pages[row, : len(holding.pages)] = holding.pages
            start[row] = holding.first * geometry.page
        tables.append((pages, start))
    return tables
