"""Published and verified numbers: makespans and peaks in units of a rank's share, F = B = W = 1."""

from __future__ import annotations

from typing import Any

import pytest

from jaxpp.schedule import Schedule, Timeline, build, simulate, unit_costs

DOWN = tuple(range(8, 0, -1))

# name, options; then makespan and peaks (in activations of a stage) of 4 ranks and 8 microbatches, and of 8 and 16
TABLE = [
    ("gpipe", {}, 33, (8,) * 4, 69, (16,) * 8),
    ("1f1b", {}, 33, (4, 3, 2, 1), 69, DOWN),
    ("eager-1f1b", {}, 33, (7, 5, 3, 1), 69, tuple(range(15, 0, -2))),
    ("interleaved", {"chunks": 2}, 28.5, (11, 9, 7, 5), 58.5, (23, 21, 19, 17, 15, 13, 11, 9)),
    ("interleaved", {"chunks": 3}, 27, (15, 13, 11, 9), 55, (31, 29, 27, 25, 23, 21, 19, 17)),
    ("zb-h1", {}, 27, (4,) * 4, 55, (8,) * 8),
    ("zb-h2", {}, 27, (7,) * 4, 55, (15,) * 8),
    ("zb-v", {}, 25.5, (8,) * 4, 51.5, (16,) * 8),
    ("chimera", {}, 30, (3, 4, 4, 3), 66, (5, 6, 7, 8, 8, 7, 6, 5)),
    ("dualpipe", {}, 26, (5,) * 4, 54, (9,) * 8),
    ("dualpipe-v", {}, 27, (9,) * 4, 55, (17,) * 8),
    ("hanayo", {"waves": 1}, 33, (5, 6, 7, 8), 69, tuple(range(9, 17))),
    ("hanayo", {"waves": 2}, 28.5, (13, 14, 15, 16), 58.5, tuple(range(25, 33))),
    ("hanayo", {"waves": 4}, 26.25, (29, 30, 31, 32), 53.25, tuple(range(57, 65))),
]


def played(name: str, ranks: int, microbatches: int, *costs: float, **options: Any) -> Timeline:
    schedule = build(name, ranks, microbatches, **options)
    return simulate(schedule, unit_costs(schedule, *costs))


@pytest.mark.parametrize(("name", "options", "small", "small_peaks", "large", "large_peaks"), TABLE)
def test_makespans_and_peaks(name, options, small, small_peaks, large, large_peaks) -> None:
    timeline = played(name, 4, 8, **options)
    assert (timeline.makespan_s, timeline.peak_activations) == (pytest.approx(small, abs=1e-9), small_peaks)
    timeline = played(name, 8, 16, **options)
    assert (timeline.makespan_s, timeline.peak_activations) == (pytest.approx(large, abs=1e-9), large_peaks)


@pytest.mark.parametrize(
    ("variant", "small", "large"),
    [("plain", 44, 92), ("pre-recompute", 41, 85), ("last-no-remat", 39, 83), ("shifted", 38, 82)],
)
def test_merak_with_recomputation_as_long_as_forward(variant: str, small: float, large: float) -> None:
    for ranks, microbatches, makespan in ((4, 8, small), (8, 16, large)):
        schedule = build("merak", ranks, microbatches, variant=variant)
        timeline = simulate(schedule, unit_costs(schedule, recompute=1.0))
        assert timeline.makespan_s == makespan
        peaks = list(range(ranks, 0, -1))
        peaks[-2] += variant == "shifted"
        assert timeline.peak_activations == tuple(peaks)


@pytest.mark.parametrize("name", ["zb-h2", "zb-v"])
def test_no_rank_idles_between_its_first_start_and_its_last_end(name: str) -> None:
    for ranks, microbatches in ((4, 8), (8, 16), (3, 12)):
        assert played(name, ranks, microbatches).idle_s == (0.0,) * ranks


def test_idle_time_of_zb_h1_is_a_third_of_the_bubble_of_1f1b() -> None:
    assert 3 * max(played("zb-h1", 8, 16).idle_s) == max(played("1f1b", 8, 16).idle_s) == 21


@pytest.mark.parametrize(
    ("ranks", "waves", "ratio"),
    [(4, 1, 1 / 3), (4, 2, 1 / 5), (4, 4, 1 / 9), (8, 1, 7 / 19), (8, 2, 7 / 31), (8, 4, 7 / 55)],
)
@pytest.mark.parametrize("order", ["bounded", "hand"])
def test_hanayo_with_as_many_microbatches_as_ranks(ranks: int, waves: int, ratio: float, order: str) -> None:
    timeline = played("hanayo", ranks, ranks, waves=waves, order=order)
    assert timeline.bubble_ratio == pytest.approx(ratio)
    assert timeline.bubble_ratio <= (2 * ranks - 2) / (3 * ranks * waves + ranks - 1)  # the published closed form
    assert timeline.peak_activations == tuple(ranks * (2 * waves - 1) + 1 + rank for rank in range(ranks))


@pytest.mark.parametrize(("microbatches", "bubble"), [(4, 6), (8, 9), (16, 15)])
def test_the_bubble_of_hanayo_grows_with_the_microbatches_where_backward_is_twice_forward(microbatches, bubble) -> None:
    assert max(played("hanayo", 4, microbatches, waves=1).bubble_s) == bubble


def test_hanayo_against_chimera_and_1f1b() -> None:
    chimera, fold = played("chimera", 8, 8).makespan_s, played("hanayo", 8, 8, waves=4).makespan_s
    assert (chimera, fold) == (36, 27.5)
    straight = played("1f1b", 8, 8).makespan_s
    speedups = [straight / played("hanayo", 8, 8, waves=waves).makespan_s for waves in (1, 2, 4)]
    assert speedups == pytest.approx([1.18, 1.45, 1.64], abs=0.005)


@pytest.mark.parametrize(("microbatches", "bubble"), [(8, 12), (16, 18), (32, 30)])
def test_chimera_with_backward_twice_forward(microbatches: int, bubble: float) -> None:
    timeline = played("chimera", 8, microbatches)
    assert timeline.bubble_s == (bubble,) * 8
    if microbatches == 8:
        assert timeline.bubble_ratio == pytest.approx((8 - 2) / (1.5 * 8 + 8 - 2))


@pytest.mark.parametrize("microbatches", [8, 16, 32])
def test_chimera_with_backward_as_long_as_forward(microbatches: int) -> None:
    timeline = played("chimera", 8, microbatches, 1.0, 0.5, 0.5)
    assert timeline.bubble_s == (6,) * 8
    assert timeline.bubble_ratio == pytest.approx((8 - 2) / (2 * microbatches + 8 - 2))


def test_dualpipe_with_uneven_costs_is_below_its_formula() -> None:
    schedule = build("dualpipe", 8, 16)
    timeline = simulate(schedule, unit_costs(schedule, 1.0, 1.2, 0.8))
    assert max(timeline.bubble_s) == pytest.approx(7.2) and (8 / 2 - 1) * (3 + 2 - 3 * 0.8) == pytest.approx(7.8)


HELD_AND_SENT = [
    ("gpipe", {}, 1, 2 * 8 * 3),
    ("1f1b", {}, 1, 2 * 8 * 3),
    ("eager-1f1b", {}, 1, 2 * 8 * 3),
    ("interleaved", {"chunks": 3}, 1, 2 * 8 * 11),
    ("zb-h1", {}, 1, 2 * 8 * 3),
    ("zb-h2", {}, 1, 2 * 8 * 3),
    ("zb-v", {}, 1, 2 * 8 * 6),
    ("chimera", {}, 2, 2 * 8 * 3),
    ("dualpipe", {}, 2, 2 * 8 * 3),
    ("dualpipe-v", {}, 1, 2 * 8 * 6),
    ("hanayo", {"waves": 2}, 1, 2 * 8 * 12),
    ("merak", {}, 1, 2 * 8 * 3),
]


@pytest.mark.parametrize(("name", "options", "replicas", "messages"), HELD_AND_SENT)
def test_weights_held_and_messages(name: str, options: dict[str, int], replicas: int, messages: int) -> None:
    schedule: Schedule = build(name, 4, 8, **options)
    held = [stage for rank in range(4) for stage in schedule.held_by(rank)]
    assert sorted(held) == sorted(list(range(schedule.num_stages)) * replicas)
    assert len(list(schedule.messages())) == messages
