"""Pictures of timelines: what stands where, in text, SVG and PNG."""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from jaxpp.schedule import SCHEDULES, Costs, StageCosts, Timeline, build, simulate, unit_costs
from jaxpp.schedule.draw import FORMATS, save
from jaxpp.schedule.picture import COLOURS, Box, Label, axis_ticks, colour_of, ink_on, paint, shade_of
from jaxpp.schedule.svg import svg
from jaxpp.schedule.table import Op
from jaxpp.schedule.text import text, tick_of

SVG = "{http://www.w3.org/2000/svg}"
ANSI = re.compile(r"\x1b\[[\d;]*m")


def timeline_of(name: str, ranks: int = 4, microbatches: int = 8, **options) -> Timeline:
    schedule = build(name, ranks, microbatches, **options)
    return simulate(schedule, unit_costs(schedule, recompute=1.0))


def in_seconds(name: str) -> Timeline:
    schedule = build(name, 4, 8)
    stages = tuple(StageCosts(1e-3 + s * 1e-5, 1.1e-3, 0.7e-3, 1e-3) for s in range(schedule.num_stages))
    return simulate(schedule, Costs(stages, (1.3e-4,)))


def rows_of(drawn: str) -> list[str]:
    return [line.partition("|")[2][:-1] for line in drawn.splitlines() if re.match(r" *rank ", line)]


def test_text_of_a_small_pipeline() -> None:
    assert text(timeline_of("gpipe", 2, 2)) == (
        "gpipe: 2 ranks, 2 stages, 2 microbatches; makespan 9, bubble 33.3 %\n"
        "rank 0 |F0 F1 .........D0--- D1--- |\n"
        "rank 1 |...F0 F1 D0--- D1--- ......|\n"
        "        0              5\n"
        "F forward  D backward  . idle  number: microbatch\n"
    )


def test_text_of_later_stages_is_in_lower_case() -> None:
    lines = text(timeline_of("interleaved", 2, 2, chunks=2)).splitlines()
    assert lines[1] == "rank 0 |F0 F1 f0 f1 ......d0--- ...d1--- D0--- D1--- |"
    assert lines[-1] == "lower case: later stages of the same rank"


def test_text_of_three_stages_says_which() -> None:
    drawn = text(timeline_of("interleaved", 2, 2, chunks=3), width=200)
    assert rows_of(drawn)[0].startswith("F0a F1a f0b f1b f0c f1c ")


def test_recomputation_and_backward_in_one_cell_are_drawn_apart() -> None:
    assert rows_of(text(timeline_of("merak", 2, 2, variant="plain")))[1] == "...F0 R0 D0--- F1 R1 D1--- ........."


def test_operations_that_overlap_are_named_together() -> None:
    assert "F3&D5" in rows_of(text(timeline_of("dualpipe"), width=200))[0].replace("d", "D").replace("f", "F")


@pytest.mark.parametrize("width", [40, 79, 120, 300])
@pytest.mark.parametrize("name", SCHEDULES)
def test_text_is_idle_where_the_rank_is(name: str, width: int) -> None:
    for timeline in (timeline_of(name), in_seconds(name)):
        drawn = text(timeline, width=width)
        rows = rows_of(drawn)
        assert len(rows) == 4 and len({len(row) for row in rows}) == 1
        columns = len(rows[0])
        assert columns + len("rank 0 ||") <= width
        step = timeline.makespan_s / columns
        for rank, row in enumerate(rows):
            busy = [(event.start_s, event.end_s) for event in timeline.of(rank)]
            for column, character in enumerate(row):
                # A column may show what holds of either half of it; where both agree there is no choice.
                early, late = ((column + share) * step for share in (0.01, 0.99))
                idle = not any(start < late and early < end for start, end in busy)
                working = any(start <= early and late <= end for start, end in busy)
                assert not (idle and character != "."), (rank, column)
                assert not (working and character == "."), (rank, column)


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "dualpipe", "merak"])
def test_colours_change_no_column(name: str) -> None:
    timeline = timeline_of(name)
    plain, coloured = text(timeline, width=150), text(timeline, width=150, colour=True)
    assert ANSI.sub("", coloured) == "\n".join(
        line.replace("-", " ") if line.startswith("rank") else line for line in plain.split("\n")
    )
    colours = set(re.findall(r"48;5;(\d+)", coloured))
    assert len(colours) >= len(timeline.schedule.kinds)


def test_tick() -> None:
    assert tick_of(timeline_of("1f1b")) == 1
    assert tick_of(timeline_of("interleaved", chunks=2)) == 0.5
    schedule = build("1f1b", 2, 2)
    assert tick_of(simulate(schedule, unit_costs(schedule, transfer_s=0.5))) == 0.5
    assert tick_of(simulate(schedule, unit_costs(schedule, input_gradient=3**0.5))) is None


def test_axis_is_round_and_ends_before_the_end() -> None:
    assert axis_ticks(33, 7) == [0, 5, 10, 15, 20, 25, 30]
    assert axis_ticks(0.033, 7)[-1] == pytest.approx(0.03)
    assert axis_ticks(0.0) == [0.0]
    for makespan in (1e-6, 0.7, 30.0, 51.5, 12345.0):
        ticks = axis_ticks(makespan)
        assert 5 <= len(ticks) <= 13 and makespan * 0.8 <= ticks[-1] <= makespan * (1 + 1e-9)


def test_shades() -> None:
    v = build("zb-v", 4, 8)
    assert [shade_of(v, Op("F", stage, 0)) for stage in (0, 3, 4, 7)] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    both = build("chimera", 4, 4)
    assert {shade_of(both, Op("F", 0, j))[0] for j in range(4)} == {0, 1}
    lights = [sum(colour_of("F", shade, 3)) for shade in range(3)]
    assert lights == sorted(lights) and len(set(lights)) == 3
    for kind in COLOURS:
        for shade in range(4):
            fill = colour_of(kind, shade, 4)
            assert _contrast(fill, ink_on(fill)) > 3, (kind, shade)


def _contrast(one: tuple[int, int, int], other: tuple[int, int, int]) -> float:
    """WCAG's contrast ratio."""

    def luminance(colour: tuple[int, int, int]) -> float:
        parts = [part / 255 for part in colour]
        red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_picture_shows_each_operation_once_in_its_place(name: str) -> None:
    timeline = timeline_of(name)
    picture = paint(timeline)
    tips = [box for box in picture.shapes if isinstance(box, Box) and ", stage " in box.tip]
    assert len({box.tip for box in tips}) == len(tips) == sum(1 for _ in timeline.schedule.ops())
    rows = [box for box in picture.shapes if isinstance(box, Box) and box.hatched and box.tip]
    assert len(rows) == 4
    for rank, row in enumerate(rows):
        inside = [box for box in tips if row.y <= box.y < row.y + row.height]
        drawn = sum(box.width * box.height for box in inside) / (row.width * row.height)
        assert drawn == pytest.approx(timeline.busy_s[rank] / timeline.makespan_s)
    for shape in picture.shapes:
        assert 0 <= shape.x <= picture.width and 0 <= shape.y <= picture.height
        if isinstance(shape, Label):
            length = 0.6 * shape.size * len(shape.text) * {"start": 1, "middle": 0.5, "end": 0}[shape.anchor]
            assert shape.x + length <= picture.width, shape.text


def test_overlapped_operations_share_the_row() -> None:
    boxes = [box for box in paint(timeline_of("dualpipe")).shapes if isinstance(box, Box) and ", stage " in box.tip]
    heights = {round(box.height, 6) for box in boxes}
    assert len(heights) == 2 and max(heights) == 2 * min(heights)


def test_svg_is_xml_and_holds_the_picture() -> None:
    timeline = timeline_of("1f1b")
    root = ElementTree.fromstring(svg(paint(timeline)))
    titles = [title.text or "" for title in root.iter(f"{SVG}title")]
    assert titles[0] == "1f1b: 4 ranks, 4 stages, 8 microbatches; makespan 33, bubble 27.3 %"
    assert "backward, stage 3, microbatch 0, rank 3: 4 to 6" in titles
    written = [element.text for element in root.iter(f"{SVG}text")]
    assert "1f1b: makespan 33, bubble 27.3 %" in written
    for words in ("forward", "backward", "idle", "rank 3", "27.3 %", "time", "30"):
        assert words in written, words
    for box in root.iter(f"{SVG}rect"):
        assert float(box.get("x", 0)) + float(box.get("width", 0)) <= float(root.get("width", 0))


def test_svg_times_have_units_where_they_are_seconds() -> None:
    written = [element.text for element in ElementTree.fromstring(svg(paint(in_seconds("gpipe"), "s"))).iter()]
    assert "10 ms" in written


def test_tiny_operations_have_no_label() -> None:
    timeline = timeline_of("gpipe", 2, 400)
    numbers = [shape for shape in paint(timeline).shapes if isinstance(shape, Label) and shape.anchor == "middle"]
    assert len(numbers) < 100


@pytest.mark.parametrize("suffix", FORMATS)
def test_save_by_suffix(suffix: str, tmp_path: Path) -> None:
    path = save(timeline_of("hanayo", waves=1), tmp_path / f"t{suffix.upper()}")
    start = {".svg": b"<svg", ".png": b"\x89PNG", ".txt": b"hanayo: 4 ranks", ".json": b'{"traceEvents"'}[suffix]
    assert path.read_bytes().startswith(start)


def test_png_is_as_large_as_the_picture(tmp_path: Path) -> None:
    picture = paint(timeline_of("1f1b"))
    header = save(timeline_of("1f1b"), tmp_path / "t.png").read_bytes()[16:24]
    width, height = int.from_bytes(header[:4], "big"), int.from_bytes(header[4:], "big")
    assert width / height == pytest.approx(picture.width / picture.height, rel=0.01)


def test_another_suffix_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r't\.pdf: "\.pdf" is no format of a timeline; \.svg, \.png, \.txt, \.json are'
    ):
        save(timeline_of("gpipe"), tmp_path / "t.pdf")
    assert not list(tmp_path.iterdir())


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist; make it first"):
        save(timeline_of("gpipe"), tmp_path / "there" / "t.svg")


def test_png_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match=r"pip install 'jaxpp-toolkit\[plot\]', or write \.svg"):
        save(timeline_of("gpipe"), tmp_path / "t.png")
