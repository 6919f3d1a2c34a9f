"""Compared schedules as a table to be printed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jaxpp.quantities import show_bytes, show_share, show_time
from jaxpp.schedule.compare import Measures, Row, best

COLUMNS = ("schedule", "makespan", "bubble", "peak act.", "weights", "messages", "memory", "sent")
"""What is printed of each schedule; the last two only where costs are in bytes."""


def compared(rows: Sequence[Row], unit: str = "") -> str:
    """Return compared schedules as lines: a table, the schedules that cannot be, the best of them, and notes.

    Args:
        rows: as `compare` returns them.
        unit: ``s`` where costs are in seconds and bytes; nothing where they are in shares.
    """
    shown = COLUMNS if unit else COLUMNS[:-2]
    cells = [_cells(row, row.measures, unit)[: len(shown)] for row in rows if row.measures and not row.reason]
    refused = [row for row in rows if row.reason]
    width = max((len(row.label) for row in refused), default=0)
    blocks = [
        _aligned([shown, *cells]) if cells else [],
        ["not possible:", *(f"  {row.label:<{width}}  {row.reason}" for row in refused)] if refused else [],
        [f"best: {best(rows)[1]}"],
        list(_notes(rows, unit)),
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def _cells(row: Row, measures: Measures, unit: str) -> tuple[str, ...]:
    return (
        row.label, show_time(measures.makespan_s, unit), show_share(measures.bubble_ratio),
        f"{measures.activation_shares:.3g}", f"{measures.weight_shares:.3g}", f"{measures.messages:.3g}",
        show_bytes(measures.memory_bytes), show_bytes(measures.sent_bytes),
    )  # fmt: skip


def _notes(rows: Sequence[Row], unit: str) -> Iterator[str]:
    possible = [(row, row.measures) for row in rows if row.measures and not row.reason]
    if possible and not unit:
        yield "makespan: in forwards of a rank's share; each F, B, W and R of it takes 1, a transfer nothing"
    yield "peak act., weights: most that a rank holds, in those of its share (and one microbatch)"
    yield "messages: between ranks, for each microbatch and direction"
    if any(measures.recomputes for _, measures in possible):
        yield "merak: R is work, so a longer step has less bubble; inputs that wait for R do not count as activations"
    if any(measures.weight_shares > 1 for _, measures in possible):
        yield "weights 2: two ranks hold each stage and add up its gradients after the step: not in these times"


def _aligned(cells: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        for row in cells
    ]
