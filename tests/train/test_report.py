"""`jaxpp inspect`: the table of weights, and predictions against real arrays and the compiler's own account."""

from __future__ import annotations

import dataclasses
import math
import re

import jax
import pytest

from jaxpp import runs, tree
from jaxpp.quantities import show_bytes
from jaxpp.schedule import simulate, unit_costs
from jaxpp.train.memory import memory
from jaxpp.train.optimizer import make_optimizer
from jaxpp.train.pipelined_memory import rank_memory
from jaxpp.train.program import Program
from jaxpp.train.programs import make_program
from jaxpp.train.report import BATCH_DTYPES, columns, report
from jaxpp.train.session import check


def run_of(preset: str = "1m", seq_len: int = 64, batch_size: int = 8, **plan):
    data = {"seq_len": seq_len, "batch_size": batch_size, "tokenizer": "bytes"}
    return runs.build_run({"model": {"preset": preset}, "plan": plan, "data": data})


def predicted(**settings):
    run = run_of(**settings)
    return memory(check(run), run.data.batch_size, run.data.seq_len)


@pytest.fixture
def no_arrays(monkeypatch):
    def refuse(*_):
        raise AssertionError("a report draws no weights and compiles nothing")

    monkeypatch.setattr(Program, "init", refuse)
    monkeypatch.setattr(Program, "step", property(refuse))


def test_every_weight_has_a_row(no_arrays):
    run = run_of(mesh="data:2 fsdp:2 tensor:2")
    text = report(run)
    rows = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    assert set(tree.named_nodes(check(run).params)) <= set(rows)
    query = rows["blocks/attention/query/kernel"]
    assert re.split(r"\s+", query, maxsplit=1)[1].split() == [
        *("layers", "|", "embed", "->", "heads", "head_dim"), "4x128x4x32", "f32",
        *("embed/fsdp", "heads/tensor"), "64.0", "KiB",
    ]  # fmt: skip
    assert "1,311,872" in rows["total"] and "1.25 MiB" in rows["total"]
    assert "mesh   data:2 fsdp:2 tensor:2 = 8 x cpu; schemes data fsdp tensor" in text


@pytest.mark.parametrize("mesh", ["data:-1", "fsdp:4 tensor:2"])
def test_eight_billion_parameters_take_no_arrays_and_120_columns(no_arrays, mesh):
    text = report(run_of("8b", 4096, 32, mesh=mesh, compute_dtype="bfloat16", remat="full"))
    assert "8,030,261,248 parameters" in text
    assert max(map(len, text.splitlines())) <= 120


def test_a_weight_that_no_axis_splits_is_noted():
    lines = report(run_of(mesh="data:4 tensor:2")).splitlines()
    assert lines[-2] == "note: axes tensor split no dim of 3 weights, 4.50 KiB on each device:"
    assert lines[-1].split(", ") == ["  blocks/attention_norm/scale", "blocks/mlp_norm/scale", "final_norm/scale"]
    assert "note" not in report(run_of(mesh="fsdp:8"))
    assert "note" not in report(run_of(mesh="data:8"))


def test_flops_and_tokens():
    text = report(run_of(mesh="data:8", microbatches=1))
    # 6 x the weights that multiply, and 12 x heads x head_dim x seq for each of 4 layers.
    per_token = 6 * (1_311_872 - 2048 * 128 - 9 * 128) + 4 * 12 * 128 * 64
    assert f"{per_token:.4g} per token, {per_token * 512:.4g} per step" in text
    assert "8 rows x 64 = 512 tokens\n" in text


@pytest.mark.parametrize("mesh, schemes", [("data:8", ("data", "zero1")), ("data:2 fsdp:2 tensor:2", ())])
def test_state_bytes_are_those_of_real_shards(mesh, schemes):
    run = run_of(mesh=mesh, schemes=list(schemes))
    program = check(run)
    found = memory(program, run.data.batch_size, run.data.seq_len)
    state = program.init(0)

    def held(part):
        return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(part))

    assert (found.weights_bytes, found.moments_bytes) == (held(state.params), held(state.optimizer))


def test_remat_policies_keep_less_in_order():
    kept = [predicted(mesh="data:8", remat=r).kept_bytes for r in ("none", "block", "full")]
    assert kept == sorted(kept, reverse=True) and len(set(kept)) == 3
    assert predicted(mesh="data:8", remat="full").scores_bytes == 0


def test_formulas_follow_the_layout():
    whole, halved = predicted(mesh="data:8"), predicted(mesh="data:8", microbatches=1, batch_size=16)
    assert halved.scores_bytes == 2 * whole.scores_bytes
    accumulated = predicted(mesh="data:8", microbatches=2, batch_size=16)
    assert accumulated.kept_bytes == whole.kept_bytes
    assert accumulated.gradients_bytes == 2 * whole.gradients_bytes
    zero1 = predicted(mesh="data:8", schemes=["data", "zero1"])
    assert zero1.gradients_bytes * 8 == whole.gradients_bytes and zero1.weights_bytes == whole.weights_bytes
    tensor, sequence = (predicted(mesh="data:4 tensor:2", schemes=["data", "tensor", *s]) for s in ([], ["sequence"]))
    assert sequence.kept_bytes < tensor.kept_bytes
    half = predicted(mesh="data:8", compute_dtype="bfloat16")
    assert whole.copy_bytes == 0 and half.copy_bytes * 2 == half.weights_bytes


def test_the_peak_counts_the_larger_of_block_and_loss():
    found = predicted(mesh="data:8")
    grown = dataclasses.replace(found, loss_bytes=found.block_bytes + found.loss_bytes)
    assert grown.total_bytes - found.total_bytes == grown.loss_bytes - max(found.block_bytes, found.loss_bytes)


@pytest.mark.parametrize(
    "mesh, remat, microbatches",
    [("data:8", "none", 1), ("fsdp:8", "full", 2), ("data:2 fsdp:2 tensor:2", "block", 1)],
)
def test_the_prediction_is_near_the_compilers_account(mesh, remat, microbatches):
    text = report(run_of("1m", 256, 16, mesh=mesh, remat=remat, microbatches=microbatches), compiled=True)
    ratio = re.search(r"predicted / compiled = (\d+\.\d+)", text)
    assert ratio and 0.7 <= float(ratio[1]) <= 1.3, text


def test_sizes_and_columns():
    assert [show_bytes(n) for n in (0, 1023, 1024, 999 * 1024, 2**30, 5 * 2**40)] == [
        *("0 B", "1023 B", "1.00 KiB", "999 KiB", "1.00 GiB", "5.00 TiB"),
    ]  # fmt: skip
    assert columns([("a", "1"), ("bcd", "22")], right=(1,)) == ["a     1", "bcd  22"]


PIPELINE = {"schedule": "1f1b", "microbatches": 4, "cuts": [1, 3]}


def test_a_pipeline_is_told_rank_by_rank(no_arrays):
    text = report(run_of(mesh="stage:2 data:2 tensor:2", pipeline=PIPELINE))
    assert "pipeline  1f1b on 2 ranks, 4 microbatches, layers 1+3, a program for each stage and operation" in text
    lines = text.splitlines()
    table = lines[lines.index(next(line for line in lines if line.startswith("ranks of the pipeline"))) + 1 :][:3]
    assert [row.split()[:3] for row in table] == [["rank", "stages", "layers"], ["0", "0", "1"], ["1", "1", "3"]]
    assert "bubble 20%" in text and table[1].endswith("20%")
    gpipe = report(run_of(mesh="stage:2 data:4", batch_size=16, pipeline={"microbatches": 4}))
    assert "pipeline  gpipe on 2 ranks, 4 microbatches, one program for all; bubble 20%" in gpipe
    with pytest.raises(ValueError, match="runs a program for each stage and operation, which have no common account"):
        report(run_of(mesh="stage:2 data:4", batch_size=16, pipeline=PIPELINE), compiled=True)


def test_state_bytes_of_each_rank_are_those_of_real_shards():
    run = run_of(mesh="stage:2 fsdp:4", batch_size=16, pipeline={**PIPELINE, "cuts": [3, 1]})
    program = check(run)
    state = program.init(0)
    for rank, found in enumerate(rank_memory(program, 16, 64)):
        parts = (state.params[rank], state.optimizer[rank])
        held = [sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(part)) for part in parts]
        assert [found.weights_bytes, found.moments_bytes] == held, rank


@pytest.mark.parametrize("pipeline", [PIPELINE, {"schedule": "gpipe", "executor": "mpmd", "microbatches": 4}])
def test_what_a_rank_keeps_is_near_what_its_operations_hand_on(pipeline):
    run = run_of(mesh="stage:2", pipeline=pipeline)
    program = make_program(run.model, make_optimizer(run.optimizer), run.plan, devices=jax.devices()[:2])
    shapes = {name: jax.ShapeDtypeStruct((2, 64), dtype) for name, dtype in BATCH_DTYPES.items()}
    executor, found = program.pipeline.executor, rank_memory(program, 8, 64)
    for (_, rank), own in executor.operations(shapes, None).items():
        held = sum(math.prod(s.shape) * s.dtype.itemsize for s in kept_by(own))
        most = held * simulate(program.schedule, unit_costs(program.schedule)).peak_activations[rank]
        assert 0.7 <= found[rank].kept_bytes / most <= 1.3, rank


def kept_by(own):
    """Shapes of what F leaves for D, without weights and without the microbatch."""
    later = set(own.after_forward["D"]) - set(own.traced.params) - set(own.traced.batch)
    values = {n: jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for n, v in outputs_of(own)}
    return [values[number] for number in later if number in values]


def outputs_of(own):
    for step in own.traced.forward:
        yield from zip(step.outputs, step.equation.outvars, strict=True)
