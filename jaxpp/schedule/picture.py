"""The picture of a timeline: what is drawn where, as plain shapes. How they reach a file: `svg`, `png`.

Ranks are rows, time runs to the right. A colour is a kind of operation; a lighter shade is a later stage of the same
rank (or the second direction, where microbatches enter at both ends); the number is the microbatch. Hatched: idle.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from jaxpp.quantities import show_share, show_time
from jaxpp.schedule.held import single_events
from jaxpp.schedule.simulate import Event, Timeline
from jaxpp.schedule.table import Kind, Op, Schedule

Colour = tuple[int, int, int]

# Apart for colour-blind eyes too; the fused backward is between its two halves.
COLOURS: dict[Kind, Colour] = {
    "F": (49, 104, 172), "D": (216, 122, 38), "B": (201, 79, 60), "W": (42, 138, 112), "R": (142, 95, 168),
}  # fmt: skip
NAMES: dict[Kind, str] = {
    "F": "forward",
    "D": "backward",
    "B": "input gradient",
    "W": "weight gradient",
    "R": "recompute",
}
WHITE, INK, GREY, LINE, IDLE = (255, 255, 255), (33, 37, 41), (108, 117, 125), (206, 212, 218), (241, 243, 245)
ROW, GAP, LEFT, RIGHT, TOP = 34, 8, 76, 152, 84
NARROWEST, WIDEST, WANTED = 620, 2600, 24  # of the plot, and of its shortest operation, in points
FONT = 12.0


@dataclass(frozen=True)
class Box:
    """A filled rectangle, from its upper left corner; ``tip`` is what it says when pointed at."""

    x: float
    y: float
    width: float
    height: float
    fill: Colour
    edge: Colour | None = None
    hatched: bool = False
    tip: str = ""


@dataclass(frozen=True)
class Line:
    """A straight line."""

    x: float
    y: float
    x_end: float
    y_end: float
    colour: Colour


@dataclass(frozen=True)
class Label:
    """One line of text; ``x`` is its start, middle or end, ``y`` its middle."""

    x: float
    y: float
    text: str
    size: float = FONT
    colour: Colour = INK
    anchor: Literal["start", "middle", "end"] = "start"
    bold: bool = False


@dataclass(frozen=True)
class Picture:
    """Shapes on a white sheet, the later ones on top; lengths in points, ``y`` downwards."""

    width: float
    height: float
    title: str
    shapes: tuple[Box | Line | Label, ...]


def title_of(timeline: Timeline, unit: str = "") -> str:
    """Say in one line which schedule it is, how long it takes, and what share of that is idle."""
    schedule = timeline.schedule
    return (
        f"{schedule.name}: {schedule.num_ranks} ranks, {schedule.num_stages} stages, "
        f"{schedule.num_microbatches} microbatches; makespan {show_time(timeline.makespan_s, unit)}, "
        f"bubble {show_share(timeline.bubble_ratio)}"
    )


def shade_of(schedule: Schedule, op: Op) -> tuple[int, int]:
    """Return which shade of its colour an operation has, and how many shades its rank uses."""
    if len(schedule.placement) > 1:
        return schedule.directions[op.microbatch], num_shades(schedule)
    held = schedule.held_by(schedule.rank_of(op.stage, op.microbatch))
    return held.index(op.stage), num_shades(schedule)


def num_shades(schedule: Schedule) -> int:
    """Return how many shades of a colour there are: one for each direction, or for each stage of a rank."""
    return len(schedule.placement) if len(schedule.placement) > 1 else schedule.chunks


def kinds_of(schedule: Schedule) -> list[Kind]:
    """Return the kinds of operations that occur, in the order of the legend."""
    kinds: list[Kind] = [kind for kind in COLOURS if kind in schedule.kinds]
    return kinds


def colour_of(kind: Kind, shade: int, shades: int) -> Colour:
    """Return a kind's colour, lighter for each shade after the first."""
    light = 0.62 * shade / max(shades - 1, 1)
    red, green, blue = (round(part + (255 - part) * light) for part in COLOURS[kind])
    return red, green, blue


def ink_on(colour: Colour) -> Colour:
    """Return the colour, dark or white, in which text on a background reads best."""
    red, green, blue = colour
    return INK if 0.299 * red + 0.587 * green + 0.114 * blue > 150 else WHITE


def axis_ticks(makespan: float, wanted: int = 12) -> list[float]:
    """Return round times from 0 to a makespan, about as many as wanted.

    Example:
        >>> axis_ticks(33, 8)
        [0.0, 5.0, 10.0, 15.0, 20.0, 25.0, 30.0]
    """
    if makespan <= 0:
        return [0.0]
    rough = makespan / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))
    return [i * step for i in range(int(makespan / step * (1 + 1e-9)) + 1)]


def paint(timeline: Timeline, unit: str = "") -> Picture:
    """Lay out a timeline.

    Args:
        timeline: to be drawn.
        unit: ``s`` where its times are seconds; nothing where they are in units of one operation.
    """
    shortest = min((e.end_s - e.start_s for e in timeline.events if e.end_s > e.start_s), default=1.0)
    makespan = timeline.makespan_s or 1.0
    plot = min(max(WANTED * makespan / shortest, NARROWEST), WIDEST)
    bottom = TOP + timeline.schedule.num_ranks * (ROW + GAP)
    shapes = [
        *_heading(timeline, unit),
        *_axis(timeline, plot / makespan, bottom, unit),
        *_rows(timeline, plot / makespan),
        *_legend(timeline.schedule, bottom + 46),
    ]
    return Picture(LEFT + plot + RIGHT, bottom + 92, title_of(timeline, unit), tuple(shapes))


def _heading(timeline: Timeline, unit: str) -> Iterator[Label]:
    schedule = timeline.schedule
    what = f"{schedule.num_ranks} ranks, {schedule.num_stages} stages, {schedule.num_microbatches} microbatches"
    took = f"makespan {show_time(timeline.makespan_s, unit)}, bubble {show_share(timeline.bubble_ratio)}"
    yield Label(LEFT, 26, f"{schedule.name}: {took}", 18, bold=True)
    yield Label(LEFT, 50, what, 13, GREY)


def _axis(timeline: Timeline, scale: float, bottom: float, unit: str) -> Iterator[Line | Label]:
    end = timeline.makespan_s
    for time in axis_ticks(end, max(4, int(end * scale / 90))):
        x = LEFT + time * scale
        yield Line(x, TOP - 4, x, bottom - GAP + 5, LINE)
        yield Label(x, bottom + 8, show_time(time, unit), 11, GREY, "middle")
    yield Label(LEFT - 24, bottom + 8, "time", 11, GREY, "end")


def _rows(timeline: Timeline, scale: float) -> Iterator[Box | Label]:
    schedule, end = timeline.schedule, timeline.makespan_s
    beside = LEFT + end * scale
    yield Label(beside + 56, TOP - 12, "idle", 11, GREY, "end")
    yield Label(beside + 136, TOP - 12, "peak held", 11, GREY, "end")
    for rank in range(schedule.num_ranks):
        y = TOP + rank * (ROW + GAP)
        yield Label(LEFT - 12, y + ROW / 2, f"rank {rank}", anchor="end")
        yield Box(LEFT, y, end * scale, ROW, IDLE, LINE, hatched=True, tip=f"rank {rank} idle")
        for event in single_events(timeline, rank):
            if event.end_s > event.start_s:
                yield from _cell(schedule, event, scale, y)
        yield Label(beside + 56, y + ROW / 2, show_share(timeline.bubble_s[rank] / (end or 1.0)), anchor="end")
        yield Label(beside + 136, y + ROW / 2, str(timeline.peak_activations[rank]), anchor="end")


def _cell(schedule: Schedule, event: Event, scale: float, y: float) -> Iterator[Box | Label]:
    """Yield the boxes of a cell: one, or one above the other where operations overlap."""
    x, width, height = LEFT + event.start_s * scale, (event.end_s - event.start_s) * scale, ROW / len(event.cell)
    for i, op in enumerate(event.cell):
        fill = colour_of(op.kind, *shade_of(schedule, op))
        tip = (
            f"{NAMES[op.kind]}, stage {op.stage}, microbatch {op.microbatch}, rank {event.rank}: "
            f"{event.start_s:.6g} to {event.end_s:.6g}"
        )
        yield Box(x, y + i * height, width, height, fill, WHITE, tip=tip)
        text, size = str(op.microbatch), min(FONT, 0.8 * height)
        size = min(size, (width - 2) / (0.6 * len(text)))
        if size >= 7:
            yield Label(x + width / 2, y + (i + 0.5) * height, text, size, ink_on(fill), "middle")


def _legend(schedule: Schedule, y: float) -> Iterator[Box | Label]:
    shades, x = num_shades(schedule), float(LEFT)
    for kind in kinds_of(schedule):
        for shade in range(shades):
            yield Box(x + 12 * shade, y - 7, 12, 14, colour_of(kind, shade, shades))
        x += 12 * shades + 6
        yield Label(x, y, NAMES[kind], colour=INK)
        x += 6.4 * len(NAMES[kind]) + 22
    yield Box(x, y - 7, 18, 14, IDLE, LINE, hatched=True)
    yield Label(x + 24, y, "idle")
    note = f"; lighter: {lighter(schedule)}" if shades > 1 else ""
    yield Label(LEFT, y + 24, f"number: microbatch{note}", colour=GREY)


def lighter(schedule: Schedule) -> str:
    """Say what a later shade stands for."""
    return "the other direction" if len(schedule.placement) > 1 else "later stages of the same rank"
