"""Layers put on the ladder: the weights stay bit for bit, the gap is printed, and the checkpoint trains on."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from jaxpp import cli
from jaxpp.conversion import convert, load
from jaxpp.data import open_data
from jaxpp.grow.depth import depth, identity, interpolate
from jaxpp.grow.ladder import ladder
from jaxpp.grow.masked import masked
from jaxpp.grow.request import Request
from jaxpp.initial import read_run
from jaxpp.models.published import PUBLISHED
from jaxpp.pretrained import open_checkpoint
from jaxpp.train.loop import Trainer
from tests import command, formats
from tests.grow.growing import LLAMA, NEOX, grown_weights, weights  # fmt: skip
from tests.grow.growing import difference as gap

HALF = replace(LLAMA, ladder_layers=1)  # of three layers


def test_no_weight_changes_and_the_gap_is_said():
    step = ladder(LLAMA, num_layers=2)
    assert step.target == replace(LLAMA, ladder_layers=2) and not step.preserves
    assert step.gap == "2 layers read the stream one branch earlier"
    found = grown_weights(step)
    assert all((found[path] == x).all() for path, x in weights(LLAMA).items())
    assert gap(LLAMA, lambda config: ladder(config, num_layers=2)) > 1e-3


@pytest.mark.parametrize(
    ("config", "num_layers", "message"),
    [
        (LLAMA, 4, "ladder_layers 4: 0 to num_layers 3"),
        (LLAMA, 0, "ladder 0: 1 to 3 are needed, as 0 of the 3 layers are on the ladder"),
        (LLAMA, -1, "ladder -1: 1 to 3 are needed"),
        (HALF, 1, "ladder 1: 2 to 3 are needed, as 1 of the 3"),
        (NEOX, 1, "ladder_layers 1 with model.parallel"),
    ],
    ids=lambda x: str(x) if isinstance(x, int) else "",
)
def test_what_does_not_fit_is_refused(config, num_layers, message):
    with pytest.raises(ValueError, match=message):
        ladder(config, num_layers=num_layers)


def test_it_comes_last_of_what_is_asked_for():
    growth = Request(width=2, depth=4, ladder=2).growth(LLAMA)
    assert [step.name for step in growth.steps] == ["hypercloning", "identity", "ladder"]
    with pytest.raises(ValueError, match="a target says all sizes: leave out ladder"):
        Request(target="llama-3.2-1b", ladder=2)
    with pytest.raises(ValueError, match="msg grows embed_dim, mlp, heads and depth, not ladder"):
        Request(operator="msg", embed_dim=96, ladder=2).growth(LLAMA)


@pytest.mark.parametrize(
    ("layers", "identities", "num_ladder", "exact"),
    [
        ([0, 0, 1, 2], [1], 1, True),
        ([2, 0, 1, 2], [0], 1, True),  # a copy of one on the ladder that stands before it, adding nothing
        ([0, 1, 1, 2], [2], 1, False),  # the first on the ladder would read behind the mlp of layer 1
        ([0, 1, 2, 2], [2], 2, False),
        ([0, 1, 2, 2], [3], 2, True),  # behind all of them
        ([0, 1, 2, 0], [3], 0, False),  # the ladder ends, so that no layer stands on it
    ],
    ids=str,
)
def test_a_deeper_ladder_says_truly_whether_it_is_the_same_function(layers, identities, num_ladder, exact):
    step = depth(HALF, layers=layers, identities=identities)
    assert step.target.ladder_layers == num_ladder and step.preserves is exact
    assert (gap(HALF, lambda config: depth(config, layers=layers, identities=identities)) < 2e-6) is exact


def test_the_other_operators_keep_the_ladder():
    assert interpolate(HALF, num_layers=6).target.ladder_layers == 2
    assert not identity(replace(LLAMA, ladder_layers=3), num_layers=6).preserves
    assert gap(HALF, lambda config: Request(width=2).growth(config).steps[0]) < 2e-6
    assert masked(HALF, num_layers=5).target.ladder_layers == 3


@pytest.mark.parametrize("family", sorted({*PUBLISHED} - {"qwen2_moe"}))  # that one asks for a shared expert first
def test_no_published_family_holds_it(family):
    with pytest.raises(ValueError, match=rf"a {family} checkpoint cannot hold .*ladder_layers 1 \(it would be 0\)"):
        PUBLISHED[family].write(HALF)


def test_a_converted_checkpoint_is_ours_and_trains_on(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command.write_run(tmp_path)
    formats.write(tmp_path / "in")
    assert cli.main(["grow", "in", "out", "--ladder", "1", "--to", "hf"]) == 2
    message = capsys.readouterr().err
    assert re.search(r"cannot hold ladder_layers 1 \(it would be 0\)", message) and not Path("out").exists()
    assert cli.main(["grow", "in", "half", "--ladder", "1"]) == 0
    out = capsys.readouterr().out
    assert "no promise" in out and "perplexity" in out and "half (orbax, " in out
    assert open_checkpoint("half").config == replace(open_checkpoint("in").config, ladder_layers=1)
    with pytest.raises(ValueError, match=r"cannot hold ladder_layers 1 \(it would be 0\)"):
        convert("half", "back", "hf")
    tokens = np.arange(12)[None] % 200
    model = load("half")
    assert np.abs(np.asarray(model(tokens)) - np.asarray(load("in")(tokens))).max() > 1e-3
    values = yaml.safe_load(Path("run.yaml").read_text())
    del values["model"], values["data"]["tokenizer"]
    Path("run.yaml").write_text(yaml.safe_dump(values))
    settings = ("cpu_devices=8", "plan.mesh=data:4 tensor:2", "data.held_out=0", "init=half", "train.num_steps=1")
    run, initial = read_run("run.yaml", settings)
    Trainer(run, initial).fit()
    batch = next(open_data(run.data, model.tokenizer).train(range(8)))
    total, weight = model.loss({name: np.asarray(x) for name, x in batch.items()})
    assert command.losses(Path("out"))[1] == pytest.approx(float(total / weight), rel=1e-4)
    assert open_checkpoint("out").config.ladder_layers == 1
