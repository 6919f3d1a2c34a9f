"""Names and numbers for which there is no schedule are refused in one line that says what would do."""

from __future__ import annotations

import pytest

from jaxpp.schedule import SCHEDULES, build, recompute_ratios, unit_costs, with_recomputation
from tests.house import source

REFUSED = [
    ("gpip", {}, 'unknown schedule "gpip"; did you mean "gpipe"?'),
    ("gpipe", {"microbatches": 0}, "schedule gpipe: microbatches = 0; a whole number of 1 or more is needed"),
    ("1f1b", {"ranks": 2.0}, "schedule 1f1b: ranks = 2.0; a whole number of 1 or more is needed"),
    ("1f1b", {"chunks": 2}, "schedule 1f1b: chunks = 2; 1 would do"),
    ("zb-v", {"chunks": 1}, "schedule zb-v: chunks = 1; 2 would do"),
    ("1f1b", {"waves": 2}, 'schedule 1f1b: unknown option "waves"; known: ranks microbatches'),
    ("hanayo", {"wave": 2}, 'schedule hanayo: unknown option "wave"; did you mean "waves"?'),
    ("interleaved", {"microbatches": 6}, "microbatches = 6 is no multiple of ranks = 4; 4 or 8 would do"),
    ("interleaved", {"microbatches": 3}, "microbatches = 3 is no multiple of ranks = 4; 4 would do"),
    ("interleaved", {"group": 3}, "group = 3, ranks = 4 or more are needed"),
    ("interleaved", {"group": 6}, "microbatches = 8 is no multiple of group = 6; 6 or 12 would do"),
    ("interleaved", {"chunks": 0}, "chunks = 0; a whole number of 1 or more is needed"),
    ("zb-v", {"microbatches": 6}, "microbatches = 6, 2 * ranks - 1 = 7 or more are needed"),
    ("chimera", {"ranks": 3, "microbatches": 9}, "ranks = 3 is no multiple of directions = 2; 2 or 4 would do"),
    ("chimera", {"microbatches": 10}, "microbatches = 10 is no multiple of ranks = 4; 8 or 12 would do"),
    ("dualpipe", {"ranks": 3}, "ranks = 3 is no multiple of directions = 2; 2 or 4 would do"),
    ("dualpipe", {"microbatches": 6}, "microbatches = 6, 2 * ranks = 8 or more are needed"),
    ("dualpipe", {"microbatches": 9}, "microbatches = 9 is no multiple of directions = 2; 8 or 10 would do"),
    ("dualpipe-v", {"microbatches": 7}, "microbatches = 7, 2 * ranks = 8 or more are needed"),
    ("hanayo", {"chunks": 3}, "chunks = 3 is no multiple of stages in a wave = 2; 2 or 4 would do"),
    ("hanayo", {"chunks": 2, "waves": 2}, "chunks = 2 and waves = 2; 4 chunks would do"),
    ("hanayo", {"waves": 0}, "waves = 0; a whole number of 1 or more is needed"),
    ("hanayo", {"order": "hand"}, "order = hand with microbatches = 8; 4 microbatches"),
    ("hanayo", {"order": "greedy"}, 'unknown order "greedy"; bounded or hand'),
    ("merak", {"variant": "shift"}, 'unknown variant "shift"; did you mean "shifted"?'),
    ("merak", {"microbatches": 3}, "microbatches = 3, max(ranks, 4) = 4 or more are needed"),
]


@pytest.mark.parametrize(("name", "numbers", "message"), REFUSED)
def test_refused_with_what_would_do(name: str, numbers: dict, message: str) -> None:
    with pytest.raises(ValueError) as refusal:
        build(name, **{"ranks": 4, "microbatches": 8, **numbers})
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_names() -> None:
    names = "gpipe 1f1b eager-1f1b interleaved zb-h1 zb-h2 zb-v chimera dualpipe dualpipe-v hanayo merak"
    assert list(SCHEDULES) == names.split()
    assert all(build(name, 4, 8).name == name for name in SCHEDULES)


def test_chunks_are_what_the_schedule_needs_if_not_given() -> None:
    needed = {"interleaved": 2, "zb-v": 2, "dualpipe-v": 2, "hanayo": 2}
    for name in SCHEDULES:
        schedule = build(name, 4, 8)
        assert schedule.num_stages == 4 * needed.get(name, 1)
        assert build(name, 4, 8, chunks=needed.get(name, 1)) == schedule
    assert build("hanayo", 4, 8, chunks=4) == build("hanayo", 4, 8, waves=2)


def test_interleaved_with_one_chunk_is_1f1b_with_more_warm_up() -> None:
    assert build("interleaved", 4, 8, chunks=1).orders == build("eager-1f1b", 4, 8).orders


def test_shares_that_stages_recompute() -> None:
    stages, first = 6, 0.7
    ratios = recompute_ratios(stages, first)
    assert ratios[0] == pytest.approx(first) and ratios[-1] == 0.0
    for stage, ratio in enumerate(ratios[:-1]):
        kept = (stages - 1 - stage) * (1 - ratio)  # of the waiting microbatches, in shares of the stage's layers
        assert kept <= (stages - 1) * (1 - first) + 1e-9
        assert ratio == 0 or kept == pytest.approx((stages - 1) * (1 - first))
    assert recompute_ratios(stages, first, "shifted") == (*ratios[:4], ratios[3], 0.0)
    assert recompute_ratios(4, 1.0) == (1.0, 1.0, 1.0, 0.0)
    assert recompute_ratios(1, 0.5) == (0.0,)
    with pytest.raises(ValueError, match="first stage recomputes 1.5 of its layers; a share from 0 to 1 is needed"):
        recompute_ratios(4, 1.5)


def test_costs_of_stages_that_recompute_a_share() -> None:
    costs = unit_costs(build("merak", 4, 8), 2.0)
    shared = with_recomputation(costs, recompute_ratios(4, 0.5))
    assert [stage.recompute_s for stage in shared.stages] == pytest.approx([1.0, 0.5, 0.0, 0.0])
    with pytest.raises(ValueError, match="3 ratios of recomputation; 4, one for each stage, are needed"):
        with_recomputation(costs, [0.5] * 3)


def test_schedules_import_no_jax() -> None:
    modules = [module for module in source.modules() if module.area == "schedule"]
    assert len(modules) > 10
    packages = {imported.target.partition(".")[0] for module in modules for imported in source.imports(module)}
    assert not packages & {"jax", "jaxlib", "flax", "optax", "numpy"}
