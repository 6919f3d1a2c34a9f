"""Costs of layers: the file, and their sum over stages."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxpp.schedule import Costs, StageCosts, build, simulate
from jaxpp.schedule.costs_file import read_costs, write_costs
from jaxpp.schedule.layer_costs import LayerCosts, ModelCosts, Transfer, costs_of, even_cuts

LAYER = "{forward_s: 0.5, input_gradient_s: 1.0, weight_gradient_s: 0.25, activation_bytes: 100, weight_bytes: 9}"
WHOLE = f"""
measured: {{device: two cores}}
layers:
  - {LAYER}
  - {{repeat: 3, forward_s: 2, input_gradient_s: 4.0, weight_gradient_s: 1.0, recompute_s: 1.5, fused_s: 4.5,
     activation_bytes: 10, weight_bytes: 20}}
embedding: {{forward_s: 0.125, input_gradient_s: 0, weight_gradient_s: 0.5, weight_bytes: 1000}}
head: {{forward_s: 0.25, input_gradient_s: 0.25, weight_gradient_s: 0.25, activation_bytes: 3, weight_bytes: 2000}}
transfer: {{latency_s: 0.5, bytes_per_s: 200, bytes: 50}}
overlap: 0.75
state_per_weight: 3
"""


def read(text: str, directory: Path) -> ModelCosts:
    path = directory / "costs.yaml"
    path.write_text(text)
    return read_costs(path)


def test_a_file_is_summed_into_stages(tmp_path: Path) -> None:
    model = read(WHOLE, tmp_path)
    assert (model.num_layers, model.state_per_weight, model.measured) == (4, 3.0, {"device": "two cores"})
    assert costs_of(build("gpipe", 2, 2), model) == Costs(
        stages=(
            StageCosts(2.625, 5.0, 1.75, 2.125, 6.25, activation_bytes=110, weight_bytes=1029),
            StageCosts(4.25, 8.25, 2.25, 3.25, 9.5, activation_bytes=23, weight_bytes=2040),
        ),
        transfer_s=(0.75,),
        transfer_bytes=(50,),
        overlap=0.75,
    )


@pytest.mark.parametrize("cuts", [(1, 3), (3, 1), (2, 2)])
def test_cuts_move_layers_and_lose_none(cuts: tuple[int, int], tmp_path: Path) -> None:
    model = read(WHOLE, tmp_path)
    first, second = costs_of(build("gpipe", 2, 2), model, cuts).stages
    assert first.forward_s == 0.125 + 0.5 + 2 * (cuts[0] - 1)
    assert second.forward_s == 2 * cuts[1] + 0.25
    assert first.weight_bytes + second.weight_bytes == 9 + 3 * 20 + 3000


@pytest.mark.parametrize("name, num_stages", [("gpipe", 4), ("zb-v", 8), ("chimera", 4), ("hanayo", 8)])
def test_the_whole_model_costs_the_same_however_it_is_cut(name: str, num_stages: int) -> None:
    one = LayerCosts(1.0, 2.0, 3.0, activation_bytes=4, weight_bytes=5, repeat=13)
    schedule = build(name, 4, 8)
    costs = costs_of(schedule, ModelCosts((one,)))
    assert len(costs.stages) == schedule.num_stages == num_stages
    assert sum(stage.seconds("D") for stage in costs.stages) == 65
    assert sum(stage.seconds("R") for stage in costs.stages) == 13  # as F, where nothing is said
    busy = simulate(schedule, costs).busy_s  # a layer takes 6, and 8 microbatches go through each
    assert sum(busy) == 13 * 6 * 8 and max(busy) - min(busy) <= 6 * 8


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "chimera", "zb-v", "hanayo"])
def test_even_cuts_are_even_for_stages_and_for_ranks(name: str) -> None:
    schedule = build(name, 4, 8)
    for num_layers in range(schedule.num_stages, 40):
        cuts = even_cuts(num_layers, schedule)
        assert sum(cuts) == num_layers and len(cuts) == schedule.num_stages and max(cuts) - min(cuts) <= 1
        held = [sum(cuts[stage] for stage in schedule.held_by(rank)) for rank in range(4)]
        assert max(held) - min(held) <= len(schedule.placement), (num_layers, cuts)


def test_even_cuts_leave_the_ends_light() -> None:
    schedule = build("1f1b", 4, 8)
    assert [even_cuts(n, schedule) for n in (8, 10, 11)] == [(2, 2, 2, 2), (2, 3, 3, 2), (3, 3, 3, 2)]


def test_a_file_that_is_written_reads_the_same(tmp_path: Path) -> None:
    model = read(WHOLE, tmp_path)
    write_costs(tmp_path / "again.yaml", model)
    assert read_costs(tmp_path / "again.yaml") == model
    plain = ModelCosts((LayerCosts(1e-9, 2e-9, 3e-9),))  # YAML writes such numbers in its own way
    write_costs(tmp_path / "again.yaml", plain)
    assert read_costs(tmp_path / "again.yaml") == plain


def test_transfer_is_latency_and_rate() -> None:
    assert Transfer(100, 50.0, 0.5).seconds == 2.5
    assert Transfer().seconds == 0.0


@pytest.mark.parametrize(
    "text, message",
    [
        ("layers: []", "costs.yaml: layers is empty: one record or more is needed"),
        ("head: {}", 'missing "layers"'),
        (f"layers: [{LAYER}]\nhaed: {{}}", 'unknown key "haed": did you mean "head"?'),
        ("layers: [{forward: 1}]", 'unknown key "layers[0].forward": did you mean "layers[0].forward_s"?'),
        (f"layers: [{LAYER.replace('0.5', '-0.5')}]", "layers[0]: forward_s = -0.5: 0 or more is needed"),
        (f"layers: [{LAYER.replace('0.5', '.nan')}]", "layers[0]: forward_s = nan: 0 or more is needed"),
        (f"layers: [{LAYER.replace('100', 'many')}]", 'layers[0].activation_bytes = "many": a whole number is needed'),
        (f"layers: [{LAYER[:-1]}, repeat: 0}}]", "layers[0]: repeat = 0: 1 or more is needed"),
        (f"layers: [{LAYER}]\ntransfer: {{bytes_per_s: 0}}", "transfer: bytes = 0, bytes_per_s = 0.0"),
        (f"layers: [{LAYER}]\noverlap: 0.3", "overlap = 0.3: from 0.5 (all of it) to 1 (nothing) is needed"),
        (f"layers: [{LAYER}]\nstate_per_weight: 0", "state_per_weight = 0.0: 1 (weights alone) or more is needed"),
    ],
)
def test_what_is_no_costs_file(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as raised:
        read(text, tmp_path)
    assert message in str(raised.value) and "\n" not in str(raised.value)
    assert str(raised.value).startswith(str(tmp_path / "costs.yaml"))


@pytest.mark.parametrize("cuts", [(1, 2), (0, 4), (1, 1, 2), (5, -1)])
def test_cuts_that_do_not_add_up(cuts: tuple[int, ...]) -> None:
    model = ModelCosts((LayerCosts(1.0, 1.0, 1.0, repeat=4),))
    with pytest.raises(ValueError, match=r"needed are 4 layers on 2 stages, one each at least, e\.g\. 2\+2"):
        costs_of(build("gpipe", 2, 2), model, cuts)


def test_more_stages_than_layers() -> None:
    with pytest.raises(ValueError, match="3 layers do not fill 4 stages; at most 3 stages do"):
        costs_of(build("gpipe", 4, 4), ModelCosts((LayerCosts(1.0, 1.0, 1.0, repeat=3),)))
