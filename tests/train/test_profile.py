"""A run's model is measured layer by layer; the oracle of the bytes is the executor itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from jaxpp.data import CorpusConfig
from jaxpp.data.config import DataConfig
from jaxpp.models import DecoderConfig
from jaxpp.parallel import PipelineConfig, Plan
from jaxpp.pipeline import cut_model, make_pipeline, make_places
from jaxpp.pipeline.timing import measure
from jaxpp.schedule import Costs, StageCosts, build
from jaxpp.schedule.costs_file import read_costs, write_costs
from jaxpp.schedule.layer_costs import LayerCosts, ModelCosts, Transfer, costs_of
from jaxpp.train import Run
from jaxpp.train import profile as profiles
from jaxpp.train.optimizer import OptimizerConfig
from jaxpp.train.profile import advised_cuts, profile

MODEL = DecoderConfig(num_layers=3, embed_dim=16, num_heads=2, mlp_dim=32, vocab_size=64, max_positions=16)
RUN = Run(
    MODEL, data=DataConfig((CorpusConfig("none"),), tokenizer="bytes", seq_len=16, batch_size=8),
    plan=Plan(mesh="data:1", microbatches=2, pipeline=PipelineConfig(microbatches=2)),
    optimizer=OptimizerConfig(name="adamw"),
)  # fmt: skip
DEVICES = jax.devices()
ROWS, KINDS = 2, ("forward_s", "input_gradient_s", "weight_gradient_s", "recompute_s", "fused_s")


@pytest.fixture(autouse=True)
def one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a run see one device."""
    monkeypatch.setattr(jax, "devices", lambda: DEVICES[:1])


@cache
def _profiled() -> tuple[ModelCosts, Costs]:
    """Return what is measured of the run, and of the stages that stand for it."""
    found: list[Costs] = []

    def watched(*arguments: Any, **named: Any) -> Costs:
        found.append(measure(*arguments, **named))
        return found[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profiles, "measure", watched)
        return profile(RUN, repeats=1), found[0]


def test_every_kind_is_measured() -> None:
    costs, measured = _profiled()
    assert costs.num_layers == MODEL.num_layers
    assert all(getattr(stage, kind) > 0 for stage in measured.stages for kind in KINDS)
    assert all(getattr(part, kind) >= 0 for part in (*costs.layers, costs.embedding, costs.head) for kind in KINDS)


def test_the_file_gives_them_back(tmp_path: Path) -> None:
    costs = _profiled()[0]
    write_costs(tmp_path / "costs.yaml", costs)
    assert read_costs(tmp_path / "costs.yaml") == costs


def test_where_they_come_from_is_said() -> None:
    measured = _profiled()[0].measured
    assert measured["device"] == "1 x cpu" and measured["jax"] == jax.__version__
    assert measured["microbatch"] == "2 rows x 16 tokens"
    assert measured["transfer"] == "not measured: there is one device"
    assert _profiled()[0].transfer == Transfer(ROWS * 16 * MODEL.embed_dim * 4)


def test_state_is_weights_gradients_and_moments() -> None:
    assert _profiled()[0].state_per_weight == pytest.approx(4, rel=1e-2)  # AdamW in fp32
    lighter = replace(RUN, optimizer=OptimizerConfig(name="sgd"))  # its momentum alone
    assert profiles._state_per_weight(lighter) == pytest.approx(3, rel=1e-2)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_bytes_of_layers_add_up_to_what_the_executor_keeps(name: str) -> None:
    table = build(name, 2, 2)
    cut = cut_model(nnx.eval_shape(lambda: MODEL.build(nnx.Rngs(0))), (1, 2))
    pipeline = make_pipeline(cut.stages, table, make_places("stage:2", 2, DEVICES[:2]))
    params = jax.jit(lambda: nnx.split(MODEL.build(nnx.Rngs(0)), nnx.Param, ...)[1])()
    real = measure(pipeline, pipeline.lay_out(cut.split(params)), profiles._batch(RUN, 2 * ROWS), repeats=1)
    sums = costs_of(table, _profiled()[0], (1, 2))
    for ours, executed in zip(sums.stages, real.stages, strict=True):
        assert (ours.activation_bytes, ours.weight_bytes) == (executed.activation_bytes, executed.weight_bytes)
    assert sums.transfer_bytes == real.transfer_bytes


def _made_up(seconds: Callable[[int, bool, bool], float]) -> Callable[..., Costs]:
    """Return a `measure` whose stages cost what a function of layers, embedding and head says."""

    def measured(pipeline: Any, *arguments: Any, **named: Any) -> Costs:
        counts = [jax.tree.leaves(stage.params)[0].shape[0] for stage in pipeline.executor.stages]
        times = [seconds(n, i == 0, i == len(counts) - 1) for i, n in enumerate(counts)]
        return Costs(tuple(StageCosts(t, 2 * t, 3 * t, 4 * t, 5 * t, 7, 7) for t in times))

    return measured


def test_what_every_stage_takes_does_not_grow_with_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiles, "measure", _made_up(lambda n, first, last: 10 + n + 0.5 * first + 0.25 * last))
    costs = profile(RUN)
    for part, seconds in ((costs.layers[0], 1), (costs.embedding, 0.5), (costs.head, 0.25)):
        assert [getattr(part, kind) for kind in KINDS] == pytest.approx([seconds * f for f in (1, 2, 3, 4, 5)])


def test_noise_does_not_make_a_time_negative(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiles, "measure", _made_up(lambda n, first, last: 10 - n - first - last))
    costs = profile(RUN)
    for part in (costs.layers[0], costs.embedding, costs.head):
        assert [getattr(part, kind) for kind in KINDS] == [0] * 5


@dataclass(frozen=True)
class Fixed:
    """A model config of somebody else, whose depth cannot be set."""

    depth: int
    vocab_size: int = 64
    max_positions: int = 16

    def build(self, rngs: nnx.Rngs) -> nnx.Module:
        """Draw the decoder."""
        return replace(MODEL, num_layers=self.depth).build(rngs)


def test_a_depth_that_cannot_be_set_is_measured_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiles, "measure", _made_up(lambda n, first, last: 10 + n + 0.5 * first + 0.25 * last))
    costs = profile(replace(RUN, model=Fixed(7)))
    assert costs.num_layers == 7
    assert [part.forward_s for part in (*costs.layers, costs.embedding, costs.head)] == pytest.approx([1, 0.5, 0.25])
    with pytest.raises(ValueError, match="Fixed has 4 layers and no field num_layers to change"):
        profile(replace(RUN, model=Fixed(4)))


def test_a_large_model_is_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []

    def measured(pipeline: Any, params: Any, *arguments: Any, **named: Any) -> Costs:
        sizes.append(sum(leaf.shape[0] for one in params for leaf in jax.tree.leaves(one)[:1]))
        return _made_up(lambda n, first, last: n)(pipeline)

    monkeypatch.setattr(profiles, "measure", measured)
    deep = profile(replace(RUN, model=replace(MODEL, num_layers=10_000)))
    assert (sizes, deep.num_layers) == ([10], 10_000)


def test_one_rank_of_two_devices_sends_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "devices", lambda: DEVICES[:2])
    monkeypatch.setattr(profiles, "measure", _made_up(lambda n, first, last: n))
    costs = profile(replace(RUN, plan=replace(RUN.plan, mesh="data:2")), repeats=1)
    assert costs.measured["transfer"] == "between two devices of the one rank"
    assert costs.transfer.bytes == ROWS * 16 * MODEL.embed_dim * 4 // 2 and costs.transfer.seconds > 0


def test_tokens_are_of_the_vocabulary_and_all_count() -> None:
    batch = profiles._batch(RUN, 4)
    assert {name: leaf.shape for name, leaf in batch.items()} == dict.fromkeys(batch, (4, 16))
    assert batch["tokens"].max() < MODEL.vocab_size and batch["weights"].all()
    np.testing.assert_array_equal(batch["tokens"][:, 1:], batch["targets"][:, :-1])


def test_a_batch_that_does_not_split_is_refused_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiles, "measure", None)
    run = replace(RUN, plan=replace(RUN.plan, microbatches=1, pipeline=PipelineConfig(microbatches=3)))
    with pytest.raises(ValueError, match=r"data.batch_size 8 does not split into 3 microbatches .*; 6 or 9 rows would"):
        profile(run)


def test_cuts_that_balance_the_ranks_are_advised() -> None:
    layer, head = LayerCosts(1.0, 1.0, 1.0), LayerCosts(2.0, 2.0, 2.0)
    assert advised_cuts(ModelCosts((replace(layer, repeat=8),), head=head), 2) == (5, 3)
    assert advised_cuts(ModelCosts((replace(layer, repeat=8),), embedding=head, head=head), 4) == (1, 3, 3, 1)
