"""A timeline as text: one row per rank, as many columns per unit of time as the width allows."""

from __future__ import annotations

import string
from collections.abc import Callable

from jaxpp.quantities import show_time
from jaxpp.schedule.held import single_events
from jaxpp.schedule.picture import (
    NAMES,
    axis_ticks,
    colour_of,
    ink_on,
    kinds_of,
    lighter,
    num_shades,
    shade_of,
    title_of,
)
from jaxpp.schedule.simulate import Event, Timeline
from jaxpp.schedule.table import Op, Schedule

IDLE = "."
_RESET = "\x1b[0m"


def text(timeline: Timeline, *, width: int = 120, colour: bool = False, unit: str = "") -> str:
    """Draw a timeline as text.

    ``F3`` is the forward pass of microbatch 3, ``f3`` that of a later stage of the same rank (``f3b``, ``f3c`` where it
    has more than two). Where there is no room the microbatch, and then the shorter operations, are left out.

    Args:
        timeline: to be drawn.
        width: most columns of a line.
        colour: colour the operations by kind, for a terminal.
        unit: ``s`` where times are seconds; nothing where they are in units of one operation.
    """
    schedule = timeline.schedule
    names = [f"rank {rank}" for rank in range(schedule.num_ranks)]
    margin = max(map(len, names)) + 2
    columns = _columns(timeline, max(width - margin - 1, 20))
    scale = columns / (timeline.makespan_s or 1.0)
    rows = [f"{name:>{margin - 2}} |{_row(timeline, rank, columns, scale, colour)}|" for rank, name in enumerate(names)]
    axis = " " * margin + _axis(timeline, columns, scale, unit)
    return "\n".join([title_of(timeline, unit), *rows, axis.rstrip(), *_legend(schedule)]) + "\n"


def tick_of(timeline: Timeline) -> float | None:
    """Return the longest time of which all starts and ends are multiples, if there is one that is not tiny."""
    events = _events(timeline)
    times = {time for event in events for time in (event.start_s, event.end_s)}
    shortest = min((event.end_s - event.start_s for event in events), default=0.0)
    for parts in range(1, 7) if shortest else ():
        tick = shortest / parts
        if all(abs(time / tick - round(time / tick)) < 1e-6 for time in times):
            return tick
    return None


def _events(timeline: Timeline) -> list[Event]:
    ranks = range(timeline.schedule.num_ranks)
    return [event for rank in ranks for event in single_events(timeline, rank) if event.end_s > event.start_s]


def _columns(timeline: Timeline, room: int) -> int:
    """Return the width of the rows: a whole number of columns per tick where that fits, all the room where not."""
    tick = tick_of(timeline)
    ticks = round(timeline.makespan_s / tick) if tick else 0
    if not tick or ticks > room:
        return room
    events = _events(timeline)
    shortest = min(round((event.end_s - event.start_s) / tick) for event in events)
    longest = max(len(_names(timeline.schedule, event)[0]) for event in events)
    wanted = -(-(longest + 1) // shortest)  # so that a label and a gap fit into the shortest operation
    return ticks * min(wanted, room // ticks)


def _names(schedule: Schedule, event: Event) -> tuple[str, str, str]:
    """Return what a cell may be called, the most telling first."""
    ops = event.cell
    kinds = "".join(_kind(schedule, op) for op in ops)
    shorter = [f"{_kind(schedule, op)}{op.microbatch}" for op in ops]
    chunks = [shade_of(schedule, op) for op in ops]
    letters = [string.ascii_lowercase[shade % 26] if shades > 2 else "" for shade, shades in chunks]
    full = "&".join(name + letter for name, letter in zip(shorter, letters, strict=True))
    return full, "&".join(shorter) if len(ops) == 1 else kinds, kinds[0] if len(ops) == 1 else "&"


def _kind(schedule: Schedule, op: Op) -> str:
    return op.kind.lower() if shade_of(schedule, op)[0] else op.kind


def _row(timeline: Timeline, rank: int, columns: int, scale: float, colour: bool) -> str:
    paint: Callable[[Timeline, Event, str], str] = _painted if colour else lambda timeline, event, cell: cell
    row, at = "", 0
    for event in single_events(timeline, rank):
        start, end = max(round(event.start_s * scale), at), round(event.end_s * scale)
        if end > start:
            row += IDLE * (start - at) + paint(timeline, event, _cell(_names(timeline.schedule, event), end - start))
            at = end
    return row + IDLE * (columns - at)


def _cell(names: tuple[str, str, str], width: int) -> str:
    """Return a name that fits, drawn out to the width, with a gap behind it where there is room."""
    name = next((name for name in names if len(name) <= width), names[-1])
    gap = 1 if width > len(name) and width > 2 else 0
    return name + "-" * (width - gap - len(name)) + " " * gap


def _painted(timeline: Timeline, event: Event, cell: str) -> str:
    op = event.cell[0]
    fill = colour_of(op.kind, *shade_of(timeline.schedule, op))
    body = cell.rstrip(" ").replace("-", " ")
    back, ink = _number(fill), _number(ink_on(fill))
    return f"\x1b[48;5;{back};38;5;{ink}m{body}{_RESET}{' ' * (len(cell) - len(body))}"


def _number(colour: tuple[int, int, int]) -> int:
    """Return the nearest of the 6 x 6 x 6 colours that every terminal with colours has."""
    red, green, blue = (min(5, max(0, round((part - 35) / 40))) for part in colour)
    return 16 + 36 * red + 6 * green + blue


def _axis(timeline: Timeline, columns: int, scale: float, unit: str) -> str:
    line = ""
    for time in axis_ticks(timeline.makespan_s, max(2, columns // 12)):
        at = round(time * scale)
        if at >= len(line) + bool(line):
            line = line.ljust(at) + show_time(time, unit)
    return line


def _legend(schedule: Schedule) -> list[str]:
    kinds = [f"{kind} {NAMES[kind]}" for kind in kinds_of(schedule)]
    lines, shades = ["  ".join([*kinds, f"{IDLE} idle", "number: microbatch"])], num_shades(schedule)
    if shades > 1:
        letters = f"; {' '.join(string.ascii_lowercase[:shades])}: which one" if shades > 2 else ""
        lines.append(f"lower case: {lighter(schedule)}{letters}")
    return lines
