"""Write a timeline to a file, in the format that its name asks for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from jaxpp.schedule.picture import paint
from jaxpp.schedule.png import write_png
from jaxpp.schedule.simulate import Timeline
from jaxpp.schedule.svg import svg
from jaxpp.schedule.text import text
from jaxpp.schedule.trace import trace_json

TEXT_WIDTH = 200


def _write_svg(timeline: Timeline, path: Path, unit: str) -> None:
    path.write_text(svg(paint(timeline, unit)), encoding="utf-8")


def _write_png(timeline: Timeline, path: Path, unit: str) -> None:
    write_png(paint(timeline, unit), path)


def _write_text(timeline: Timeline, path: Path, unit: str) -> None:
    path.write_text(text(timeline, width=TEXT_WIDTH, unit=unit), encoding="utf-8")


def _write_trace(timeline: Timeline, path: Path, unit: str) -> None:
    path.write_text(trace_json(timeline, unit), encoding="utf-8")


FORMATS: dict[str, Callable[[Timeline, Path, str], None]] = {
    ".svg": _write_svg,
    ".png": _write_png,
    ".txt": _write_text,
    ".json": _write_trace,
}


def save(timeline: Timeline, path: str | Path, unit: str = "") -> Path:
    """Write a timeline as a picture (``.svg``, ``.png``), as text (``.txt``) or as a trace (``.json``).

    Args:
        timeline: to be written.
        path: of the file; its suffix is the format.
        unit: ``s`` where times are seconds; nothing where they are in units of one operation.

    Returns:
        The path.

    Raises:
        ValueError: another suffix, a directory that is not there, or a PNG without matplotlib.
    """
    path = Path(path)
    if (write := FORMATS.get(path.suffix.lower())) is None:
        raise ValueError(f'{path}: "{path.suffix}" is no format of a timeline; {", ".join(FORMATS)} are')
    if not path.parent.is_dir():
        raise ValueError(f"{path}: the directory {path.parent} does not exist; make it first")
    write(timeline, path, unit)
    return path
