"""A table walked in lock step by one program: the numbers of one device, beside every other axis, without a hang."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpp import tree
from jaxpp.models import Decoder, DecoderConfig
from jaxpp.nn.moe import MoeConfig
from jaxpp.parallel import Layout, Plan, executing, in_use
from jaxpp.pipeline.lockstep import check, summed_gradients
from jaxpp.pipeline.skeleton import Part, Skeleton
from jaxpp.pipeline.slots import pieces_of
from jaxpp.pipeline.stage import Stage
from jaxpp.pipeline.ticks import NOTHING, Ticks
from jaxpp.pipeline.traced import trace
from jaxpp.schedule import Op, Schedule, StageCosts, build, simulate, unit_costs
from jaxpp.schedule.table import singles

ROWS, SEQ, VOCAB = 48, 8, 64
SHAPE = dict(vocab_size=VOCAB, num_layers=4, embed_dim=32, num_heads=4, num_kv_heads=2, mlp_dim=64, max_positions=32)
SEQUENCE = ("stage", "fsdp", "tensor", "sequence")


class SharedScale(Decoder):
    """A decoder whose blocks read a weight that the head reads too."""

    def run(self, x: jax.Array, batch: Any, first_layer: Any = 0) -> jax.Array:
        """Scale what enters the first block."""
        return super().run(jnp.where(first_layer == 0, x * in_use(self.final_norm.scale), x), batch, first_layer)


MODELS = {
    "plain": lambda rngs: Decoder(DecoderConfig(**SHAPE), rngs),
    "mixed": lambda rngs: Decoder(
        DecoderConfig(**SHAPE, tied=True, window=3, window_layers=(True, False), rope_layers=(True, True, False)), rngs
    ),
    "shared": lambda rngs: SharedScale(DecoderConfig(**SHAPE), rngs),
    "experts": lambda rngs: Decoder(DecoderConfig(**SHAPE, moe=MoeConfig(4, 2)), rngs),
}


@functools.cache
def batch() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCAB, (ROWS, SEQ + 1), dtype=np.int32)
    cut, at = rng.integers(1, SEQ, (ROWS, 1)), np.arange(SEQ, dtype=np.int32)[None]
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "segments": (1 + (at >= cut)).astype(np.int32),
        "positions": np.where(at >= cut, at - cut, at).astype(np.int32),
        "weights": (rng.random((ROWS, SEQ)) < 0.8).astype(np.float32),
    }


@functools.cache
def skeleton(name: str, dtype: str = "float32") -> Skeleton:
    graph, params, _ = nnx.split(nnx.eval_shape(lambda: MODELS[name](nnx.Rngs(0))), nnx.Param, ...)
    return Skeleton(graph, params, lambda p: tree.map_named(lambda _, node: node.get_value().astype(dtype), p))


@functools.cache
def weights(name: str) -> Any:
    return jax.jit(lambda: nnx.split(MODELS[name](nnx.Rngs(0)), nnx.Param, ...)[1])()


@dataclass(frozen=True)
class Found:
    """Sums over the batch: of losses, of their weights, and of gradients by path."""

    loss: float
    weight: float
    gradients: dict[str, np.ndarray]


def found(sums: tuple[Any, Any, Any]) -> Found:
    loss, weight, gradients = sums
    return Found(float(loss), float(weight), {path: np.asarray(g) for path, g in tree.named_leaves(gradients).items()})


@functools.cache
def of_one_device(name: str, dtype: str = "float32") -> Found:
    def loss(params: Any) -> tuple[jax.Array, jax.Array]:
        return skeleton(name, dtype).model(params).loss(batch())

    (total, weight), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(weights(name))
    return found((total, weight, gradients))


@dataclass(frozen=True, eq=False)
class Case:
    """What is run how."""

    model: str
    plan: Plan
    schedule: str
    microbatches: int

    def table(self, layout: Layout) -> Schedule:
        return build(self.schedule, layout.mesh.shape["stage"], self.microbatches)

    def __str__(self) -> str:
        return f"{self.model} {self.schedule} {self.microbatches} {self.plan.mesh} {self.plan.remat}"


@functools.cache
def compiled(case: Case) -> tuple[Any, Any]:
    """Return the compiled step, and its arguments on the mesh."""
    layout, own = case.plan.layout(), skeleton(case.model, case.plan.compute_dtype)

    def run(params: Any, rows: Any) -> Any:
        with executing(case.plan.execution(layout)):
            return summed_gradients(own, params, rows, layout, case.table(layout))

    params = jax.device_put(weights(case.model), layout.param_shardings(own.params))
    arguments = params, jax.device_put(batch(), layout.batch_sharding())
    return jax.jit(run).lower(*arguments).compile(), arguments


def run(case: Case) -> Found:
    """Run a step, several times: what hangs need not do so at once."""
    step, arguments = compiled(case)
    results = [found(step(*arguments)) for _ in range(4)]
    assert len({result.loss for result in results}) == 1
    return results[-1]


def largest_error(one: Found, other: Found) -> float:
    """Return the largest difference of a gradient, each weight's in parts of its largest."""
    pairs = [(one.gradients[path], wanted) for path, wanted in other.gradients.items()]
    return max(float(np.abs(g.astype(np.float32) - wanted).max() / np.abs(wanted).max()) for g, wanted in pairs)


ZB_H1 = [
    Case("plain", Plan("stage:2 data:2 tensor:2"), "zb-h1", 4),
    Case("plain", Plan("stage:2 fsdp:4", remat="dots"), "zb-h1", 4),
    Case("mixed", Plan("stage:4 tensor:2", remat="block"), "zb-h1", 8),
    Case("plain", Plan("stage:2 fsdp:2 tensor:2", schemes=SEQUENCE, remat="full"), "zb-h1", 6),
]
OTHERS = [
    Case("plain", Plan("stage:4 data:2", remat="full", layers="unroll"), "zb-h1", 12),
    Case("mixed", Plan("stage:2 data:4"), "zb-h2", 4),
    Case("shared", Plan("stage:4 data:2"), "1f1b", 4),
    Case("plain", Plan("stage:4 data:2"), "gpipe", 4),
]


def cases(some: list[Case]) -> list[Any]:
    """Return the cases as parameters; those that `make test` leaves out are slow."""
    quick = (ZB_H1[0],)
    return [pytest.param(case, id=str(case), marks=() if case in quick else pytest.mark.slow) for case in some]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("case", cases([*ZB_H1, *OTHERS]))
def test_sums_and_gradients_are_those_of_one_device(case: Case) -> None:
    result, wanted = run(case), of_one_device(case.model)
    assert result.loss == pytest.approx(wanted.loss, rel=1e-6)
    assert result.weight == wanted.weight
    assert result.gradients.keys() == wanted.gradients.keys()
    assert largest_error(result, wanted) < 5e-6


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_in_bfloat16_gradients_are_as_near_to_fp32_as_those_of_one_device() -> None:
    case = Case("mixed", Plan("stage:2 fsdp:4", compute_dtype="bfloat16"), "zb-h1", 4)
    result, exact, rounded = run(case), of_one_device("mixed"), of_one_device("mixed", "bfloat16")
    assert {gradient.dtype for gradient in result.gradients.values()} == {np.dtype(np.float32)}
    assert result.loss == pytest.approx(exact.loss, rel=1e-3)
    assert 0 < largest_error(result, exact) < 1.2 * largest_error(rounded, exact)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("case", cases(ZB_H1))
def test_nothing_in_which_all_devices_take_part_depends_on_the_rank(case: Case) -> None:
    """Devices of other ranks do not come to it: with them it would hang."""
    ranks = case.plan.layout().mesh.shape["stage"]
    lines = list(lines_in_dynamic_loops(compiled(case)[0].as_text()))
    assert sum(" dot(" in line or "custom-call" in line for line in lines) > 10, "the operations stand there"
    assert not [line for line in lines if re.search(r" (collective-permute|all-to-all)(-start)?\(", line)]
    found = [line for line in lines if re.search(r" (all-reduce|all-gather|reduce-scatter)(-start)?\(", line)]
    assert found
    for line in found:
        assert all(len({device // (8 // ranks) for device in group}) == 1 for group in groups(line)), line


def lines_in_dynamic_loops(text: str) -> Iterator[str]:
    """Yield the lines of a compiled program that stand in loops of no known count: here, of one round or none."""
    bodies: dict[str, list[str]] = {}
    name = ""
    for line in text.splitlines():
        if start := re.match(r"(?:ENTRY )?%?([\w.\-]+) .*\{$", line):
            name = start[1]
        bodies.setdefault(name, []).append(line)
    loops = [line for line in text.splitlines() if " while(" in line and "known_trip_count" not in line]
    assert len(loops) == 4, "F, B, W and the loss"
    todo, seen = [called for line in loops for called in calls(line)], set[str]()
    while todo:
        if (name := todo.pop()) in seen or name not in bodies:
            continue
        seen.add(name)
        yield from bodies[name]
        todo += [called for line in bodies[name] for called in calls(line)]


def calls(line: str) -> list[str]:
    names = re.findall(r"(?:to_apply|body|condition|calls|true_computation|false_computation)=%?([\w.\-]+)", line)
    for branches in re.findall(r"branch_computations=\{([^}]*)\}", line):
        names += [name.strip().lstrip("%") for name in branches.split(",")]
    return names


def groups(line: str) -> list[list[int]]:
    """Return the groups of devices of a collective, written in any of the three ways."""
    if listed := re.search(r"replica_groups=\{(\{[0-9,{}]*\})\}", line):
        return [[int(n) for n in group.split(",")] for group in re.findall(r"\{([0-9,]+)\}", listed[1])]
    if iota := re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line):
        sizes = [int(n) for n in iota[3].split(",")]
        order = [int(n) for n in iota[4].split(",")] if iota[4] else range(len(sizes))
        return np.arange(8).reshape(sizes).transpose(order).reshape(int(iota[1]), int(iota[2])).tolist()
    mesh = re.search(r"replica_groups=mesh\[([^\]]*)\] *\{([^}]*)\}", line)
    assert mesh, line
    axes = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
    used = re.findall(r"'(\w+)'", mesh[2])
    order = [list(axes).index(axis) for axis in (*(axis for axis in axes if axis not in used), *used)]
    size = int(np.prod([int(axes[axis]) for axis in used]))
    return np.arange(8).reshape([*map(int, axes.values())]).transpose(order).reshape(-1, size).tolist()


def test_forward_and_both_halves_of_a_decoder_cost_the_same() -> None:
    config = DecoderConfig(**{**SHAPE, "num_layers": 1, "embed_dim": 256, "num_kv_heads": 4, "mlp_dim": 1024})
    graph, params, _ = nnx.split(nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0))), nnx.Param, ...)
    part = Part(Skeleton(graph, params, lambda p: p), 0, False)
    rows = {name: jax.ShapeDtypeStruct((8, SEQ), value.dtype) for name, value in batch().items()}
    x = jax.ShapeDtypeStruct((8, SEQ, 256), jnp.float32)
    traced = trace(Stage(part, params), False, params, x, rows, None)
    pieces = pieces_of(traced, Ticks(build("zb-h1", 2, 4)))
    given = (*jax.tree.leaves(params), *jax.tree.leaves(rows), x, x)
    places = (*traced.params, *traced.batch, *traced.x, *traced.cotangents)
    shapes, flops = pieces.shapes(dict(zip(places, given, strict=True))), []
    for kind, piece in pieces.run.items():
        step = jax.jit(functools.partial(pieces.operate, kind))
        flops.append(step.lower({n: shapes[n] for n in piece.inputs}).compile().cost_analysis()["flops"])
    assert max(flops) < 1.1 * min(flops), flops


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches", "seconds"),
    [
        ("gpipe", 4, 8, 33), ("1f1b", 4, 8, 40), ("zb-h1", 4, 8, 27), ("zb-h2", 4, 8, 27),
        ("gpipe", 8, 16, 69), ("1f1b", 8, 16, 84), ("zb-h1", 8, 16, 55),
        ("gpipe", 8, 32, 117), ("1f1b", 8, 32, 148), ("zb-h1", 8, 32, 103),
    ],
)  # fmt: skip
def test_a_tick_lasts_as_long_as_its_longest_operation(name: str, ranks: int, microbatches: int, seconds: int) -> None:
    ticks = Ticks(build(name, ranks, microbatches))
    assert ticks.seconds(StageCosts(1, 1, 1)) == seconds
    if name.startswith("zb"):
        assert ticks.num_ticks == seconds


TABLES = [
    build(name, ranks, m) for name in ("gpipe", "1f1b", "eager-1f1b", "zb-h1", "zb-h2") for ranks, m in ((2, 3), (4, 8))
]


@pytest.mark.parametrize("table", TABLES, ids=lambda table: f"{table.name} {table.num_ranks}")
def test_slots_are_as_many_as_activations_are_held_at_once(table: Schedule) -> None:
    last = "W" if "W" in table.kinds else "D"
    assert Ticks(table).slots("F", (last,)) == max(simulate(table, unit_costs(table)).peak_activations)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: f"{table.name} {table.num_ranks}")
def test_what_waits_is_there_when_it_is_read(table: Schedule) -> None:
    ticks = Ticks(table)
    order = ["F", "D", "B", "W"]
    rows = zip(
        ticks.kinds(order), ticks.microbatches(), ticks.activations(), ticks.gradients(), ticks.ends(), strict=True
    )
    waiting = [({}, {}) for _ in range(table.num_ranks)]  # for each rank slots to microbatches
    left = []
    for kinds, microbatches, activations, gradients, end in rows:
        for rank, (kind, j) in enumerate(zip(kinds, microbatches, strict=True)):
            if kind and order[kind - 1] == "F" and rank:
                assert waiting[rank][0][j % ticks.activation_slots] == j
            if kind and order[kind - 1] in "DB":
                assert waiting[rank][1][j % ticks.gradient_slots] == j
        for rank in range(table.num_ranks):
            for slots, j, count in zip(
                waiting[rank], (activations[rank], gradients[rank]), (ticks.activation_slots, ticks.gradient_slots),
                strict=True,
            ):  # fmt: skip
                if j != NOTHING:
                    slots[j % count] = j
        left += [end] if end != NOTHING else []
    assert sorted(left) == list(range(table.num_microbatches))


def test_what_does_not_run_in_lock_step_is_refused() -> None:
    layout = Plan("stage:2 data:4").layout()
    for name in ("interleaved", "zb-v", "chimera", "dualpipe-v", "merak"):
        with pytest.raises(ValueError, match=f"schedule {name} does not run in one program.* zb-h1 zb-h2 do"):
            check(build(name, 2, 4), layout, 4)
    backwards = Schedule(
        "own", 2, 1, singles([[Op("F", 1, 0), Op("D", 1, 0)], [Op("F", 0, 0), Op("D", 0, 0)]]), ((1, 0),)
    )
    with pytest.raises(ValueError, match="rank s runs stage s"):
        check(backwards, layout, 4)
    with pytest.raises(ValueError, match="schedule zb-h1 has 4 ranks, mesh axis stage has 2"):
        check(build("zb-h1", 4, 8), layout, 4)
    with pytest.raises(ValueError, match="5 layers do not split into 2 stages; 1, 5 do"):
        check(build("zb-h1", 2, 4), layout, 5)


def test_rows_that_do_not_split_are_refused() -> None:
    with pytest.raises(
        ValueError, match="a batch of 48 does not split into 5 pipeline microbatches over 4 batch shards"
    ):
        compiled(Case("plain", Plan("stage:2 data:4"), "zb-h1", 5))


def test_experts_are_refused() -> None:
    with pytest.raises(ValueError, match="a mixture of experts does not run inside of a pipeline over axis stage"):
        compiled(Case("experts", Plan("stage:2 data:4"), "zb-h1", 4))
