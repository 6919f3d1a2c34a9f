"""A picture as SVG, written by hand: sharp at any size, and each operation says what it is when pointed at."""

from __future__ import annotations

from collections.abc import Iterator
from xml.sax.saxutils import escape

from jaxpp.schedule.picture import Box, Colour, Label, Line, Picture

_HATCH = (
    '<defs><pattern id="idle" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="6" height="6" fill="#f6f7f8"/><line x1="0" y1="0" x2="0" y2="6" stroke="#dee2e6" stroke-width="2"/>'
    "</pattern></defs>"
)


def svg(picture: Picture) -> str:
    """Return a picture as the text of an SVG file."""
    width, height = _number(picture.width), _number(picture.height)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" role="img" font-family="Helvetica, Arial, DejaVu Sans, sans-serif">',
            f"<title>{escape(picture.title)}</title>",
            _HATCH,
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
            *_elements(picture),
            "</svg>\n",
        ]
    )


def _elements(picture: Picture) -> Iterator[str]:
    for shape in picture.shapes:
        match shape:
            case Box():
                yield _box(shape)
            case Line(x, y, x_end, y_end, colour):
                ends = (("x1", x), ("y1", y), ("x2", x_end), ("y2", y_end))
                yield f'<line {_attributes(ends)} stroke="{_hex(colour)}"/>'
            case Label(x, y, text, size, colour, anchor, bold):
                # The baseline is a third of the size below the middle; not every viewer knows `dominant-baseline`.
                places = (("x", x), ("y", y + 0.35 * size), ("font-size", size))
                weight = ' font-weight="bold"' if bold else ""
                yield (
                    f'<text {_attributes(places)} text-anchor="{anchor}" fill="{_hex(colour)}"{weight} '
                    f'pointer-events="none">{escape(text)}</text>'
                )


def _box(box: Box) -> str:
    places = (("x", box.x), ("y", box.y), ("width", box.width), ("height", box.height))
    fill = "url(#idle)" if box.hatched else _hex(box.fill)
    edge = f' stroke="{_hex(box.edge)}"' if box.edge else ""
    start = f'<rect {_attributes(places)} fill="{fill}"{edge}'
    return f"{start}><title>{escape(box.tip)}</title></rect>" if box.tip else f"{start}/>"


def _attributes(pairs: tuple[tuple[str, float], ...]) -> str:
    return " ".join(f'{name}="{_number(value)}"' for name, value in pairs)


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _hex(colour: Colour) -> str:
    return "#" + "".join(f"{part:02x}" for part in colour)
