"""What operations cost is measured: every kind that the table uses, and the bytes that the executor keeps."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import jax
import pytest

from jaxpp.pipeline import Pipeline, make_pipeline, make_places
from jaxpp.pipeline.mpmd import Walk
from jaxpp.pipeline.timing import measure
from jaxpp.schedule import Costs, build, simulate
from jaxpp.schedule.table import LAST
from tests.pipeline import functions
from tests.test_launch import start

FLOAT_BYTES = 4


@cache
def _pipeline(name: str, microbatches: int = 4) -> Pipeline:
    table = build(name, 2, microbatches)
    return make_pipeline(functions.stages(table.num_stages), table, functions.places(2))


@cache
def _costs(name: str) -> Costs:
    pipeline = _pipeline(name)
    params = [params for _, params in functions.stages(pipeline.executor.schedule.num_stages)]
    return measure(pipeline, pipeline.lay_out(params), functions.batch(8), functions.KEY, repeats=1)


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "merak", "chimera"])
def test_each_kind_that_the_table_uses_has_a_cost(name: str) -> None:
    schedule, costs = _pipeline(name).executor.schedule, _costs(name)
    assert len(costs.stages) == schedule.num_stages
    for stage, record in enumerate(costs.stages):
        used = {op.kind for _, op in schedule.ops() if op.stage == stage}
        own = dict(zip("FBWRD", (record.forward_s, record.input_gradient_s, record.weight_gradient_s,
                                 record.recompute_s, record.fused_s), strict=True))  # fmt: skip
        assert {kind for kind, seconds in own.items() if seconds > 0} == used
    assert simulate(schedule, costs).makespan_s > 0


def test_boundaries_cost_where_they_are_between_ranks() -> None:
    assert [seconds > 0 for seconds in _costs("1f1b").transfer_s] == [True]
    assert [seconds > 0 for seconds in _costs("zb-v").transfer_s] == [True, False, True]
    row = (functions.WIDTH + 1) * FLOAT_BYTES  # an integer goes along
    assert _costs("zb-v").transfer_bytes == (row * functions.ROWS,) * 3


def test_weights_are_counted() -> None:
    matrix, bias = functions.WIDTH**2 * FLOAT_BYTES, functions.WIDTH * FLOAT_BYTES
    assert [stage.weight_bytes for stage in _costs("1f1b").stages] == [matrix, matrix + bias]


class Watched(Walk):
    """A walk that counts, after each operation, what it holds from microbatch to microbatch."""

    def run(self) -> None:
        """Run and count."""
        self.most = [0, 0]
        step = {"F": self._f, "D": self._d, "B": self._b, "W": self._w, "R": self._r}
        for rank, op in self.executor.order:
            step[op.kind](rank, op)
            there = {id(leaf) for part in (*self.parts.values(), self.keys) for leaf in part.values()}
            own = {id(leaf): leaf for one in self.live[rank].values() for leaf in one.values()}
            held = sum(own[name].nbytes for name in own.keys() - there if isinstance(own[name], jax.Array))
            if op.kind in "FR":
                self.most[rank] = max(self.most[rank], held)
            assert op.kind not in LAST or (op.stage, op.microbatch) not in self.live[rank]


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "merak"])
def test_the_simulated_peak_is_what_the_executor_holds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    costs, pipeline, walks = _costs(name), _pipeline(name), []

    def watched(*arguments: object) -> Walk:
        walks.append(Watched(*arguments))  # type: ignore[arg-type]
        return walks[-1]

    monkeypatch.setattr("jaxpp.pipeline.pipeline.Walk", watched)
    params = [params for _, params in functions.stages(2)]
    pipeline.sums(pipeline.lay_out(params), functions.batch(8), functions.KEY)
    assert tuple(walks[0].most) == simulate(pipeline.executor.schedule, costs).peak_activation_bytes


def test_nothing_is_compiled_twice() -> None:
    table, places = build("1f1b", 2, 4), make_places("stage:2", 2, jax.devices()[:2])  # nobody else's
    made = make_pipeline(functions.stages(2), table, places)
    measure(made, made.lay_out([params for _, params in functions.stages(2)]), functions.batch(8), repeats=1)
    operations = [one for place in places for one in place.memo.values()]
    jitted = [own.call for one in operations for kind in ("forward", "fused") if (own := vars(one).get(kind))]
    assert jitted and all(call._cache_size() == 1 for call in jitted)


def test_repeats_of_none_are_refused() -> None:
    pipeline = _pipeline("1f1b")
    with pytest.raises(ValueError, match="repeats = 0: 1 or more are needed"):
        measure(pipeline, [], functions.batch(8), repeats=0)


PROGRAM = """
import os
os.environ["NPROC"] = "16"
os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0"
from jaxpp import runtime
runtime.initialize()
import dataclasses, json
from jaxpp import pipeline, schedule
from jaxpp.pipeline.timing import measure
from tests.pipeline import functions

table = schedule.build("zb-h1", 2, 4)
known = functions.stages(table.num_stages)
made = pipeline.make_pipeline(known, table, "stage:2")
costs = measure(made, made.lay_out([params for _, params in known]), functions.batch(16), functions.KEY, repeats=2)
with open(f"told{rank}", "w") as file:
    json.dump(dataclasses.asdict(costs), file)
"""


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_processes_agree(tmp_path: Path) -> None:
    process = start(tmp_path, PROGRAM)
    _, err = process.communicate()
    assert process.returncode == 0, err
    told = [json.loads((tmp_path / f"told{rank}").read_text()) for rank in range(2)]
    assert told[0] == told[1]
    for stage in told[0]["stages"]:
        assert min(stage["forward_s"], stage["input_gradient_s"], stage["weight_gradient_s"]) > 0
        assert stage["activation_bytes"] > 0
    assert told[0]["transfer_s"][0] > 0
