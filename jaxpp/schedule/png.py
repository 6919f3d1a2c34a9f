"""A picture as PNG, through matplotlib where it is installed."""

from __future__ import annotations

from pathlib import Path

from jaxpp.schedule.picture import Box, Label, Line, Picture

_POINTS_PER_INCH = 72


def write_png(picture: Picture, path: str | Path, dots_per_inch: float = 150.0) -> None:
    """Write a picture as a PNG file.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("a PNG needs matplotlib: pip install 'jaxpp-toolkit[plot]', or write .svg") from error
    figure = Figure(figsize=(picture.width / _POINTS_PER_INCH, picture.height / _POINTS_PER_INCH), dpi=dots_per_inch)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, picture.width), ylim=(picture.height, 0))
    axes.axis("off")
    for order, shape in enumerate(picture.shapes, start=1):
        _add(axes, shape, order)
    figure.savefig(path, format="png", facecolor="white")


def _add(axes, shape: Box | Line | Label, order: int) -> None:
    match shape:
        case Box():
            _add_box(axes, shape, order)
        case Line(x, y, x_end, y_end, colour):
            axes.plot((x, x_end), (y, y_end), color=_unit(colour), linewidth=1, zorder=order)
        case Label(x, y, text, size, colour, anchor, bold):
            sides = {"start": "left", "middle": "center", "end": "right"}
            weight = "bold" if bold else "normal"
            axes.text(
                x, y, text, size=size, color=_unit(colour), ha=sides[anchor], va="center_baseline", weight=weight,
                zorder=order,
            )  # fmt: skip


def _add_box(axes, box: Box, order: int) -> None:
    from matplotlib.patches import Rectangle

    # The colour of the edge is the colour of the hatch too, so a hatched box takes a fainter one.
    edge = _unit((222, 226, 230)) if box.hatched else _unit(box.edge) if box.edge else "none"
    patch = Rectangle(
        (box.x, box.y), box.width, box.height, facecolor=_unit(box.fill), edgecolor=edge, linewidth=0.8, zorder=order,
        hatch="////" if box.hatched else None,
    )  # fmt: skip
    axes.add_patch(patch)


def _unit(colour: tuple[int, int, int]) -> tuple[float, float, float]:
    red, green, blue = colour
    return red / 255, green / 255, blue / 255
