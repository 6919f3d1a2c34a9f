"""Training that starts from a checkpoint of any format (``init``): its weights, its model, its documents."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from jaxpp import cli, runs
from jaxpp.checkpoint import Checkpoints
from jaxpp.conversion import convert, load
from jaxpp.data import open_data
from jaxpp.data.corpus import survey_corpus, tokenise_corpus
from jaxpp.data.published import KEPT_CONFIG
from jaxpp.initial import read_run
from jaxpp.pretrained import open_checkpoint
from jaxpp.train.loop import Trainer
from tests import command, formats

ONE = ("cpu_devices=8", "plan.mesh=data:8", "data.held_out=0")


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a directory with a corpus, a llama `in`, and `run.yaml`, which has neither a model nor a tokenizer."""
    command.write_run(tmp_path)
    values: dict[str, Any] = yaml.safe_load((tmp_path / "run.yaml").read_text())
    del values["model"], values["data"]["tokenizer"]
    values["optimizer"]["learning_rate"] = 0.001
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    formats.write(tmp_path / "in")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def fit(*settings: str) -> None:
    run, initial = read_run("run.yaml", [*ONE, *settings])
    Trainer(run, initial).fit()


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    before = command.contents(Path.cwd())
    assert cli.main(["train", "run.yaml", *ONE, *words]) == 2
    assert command.contents(Path.cwd()) == before
    out, err = capsys.readouterr()
    assert out == "" and re.fullmatch(r"jaxpp: [^\n]+\n", err), err
    return err


def test_the_first_loss_is_that_of_the_loaded_model(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And so on: what the run writes can be read as the checkpoint could, documents and all."""
    fit("init=in", "train.num_steps=1")
    assert "started from in" in capsys.readouterr().out
    run = runs.read_run("out/config.yaml")
    assert run.model == open_checkpoint("in").config and run.init == "in"
    model = load("in")
    batch = next(open_data(run.data, model.tokenizer).train(range(8)))
    total, weight = model.loss({name: np.asarray(x) for name, x in batch.items()})
    assert command.losses(Path("out"))[1] == pytest.approx(float(total / weight), rel=1e-4)

    texts = Checkpoints("out/checkpoints", writable=False).texts(1)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert texts[name] == Path("in", name).read_text()
    assert texts[KEPT_CONFIG] == Path("in/config.json").read_text()
    convert("out", "back", "hf")
    for name in ("tokenizer_config.json", "generation_config.json", "config.json"):
        assert json.loads(Path("back", name).read_text()) == json.loads(Path("in", name).read_text()), name
    before, after = formats.tensors(Path("in")), formats.tensors(Path("back"))
    assert before.keys() == after.keys() and not formats.same(before, after)
    change = max(float(np.abs(after[name] - x).max()) for name, x in before.items())
    assert 0 < change < 0.01, "one small step away"


def test_resumed_is_as_uninterrupted(workspace: Path) -> None:
    """B22: also where the model is tied; the checkpoint that it began from is needed no more."""
    formats.write(workspace / "in", "llama32")
    fit("init=in", "train.num_steps=4", "directory=whole")
    fit("init=in", "train.num_steps=2")
    (workspace / "in").rename(workspace / "gone")
    fit("init=in", "train.num_steps=4")
    assert command.losses(Path("out")) == command.losses(Path("whole"))
    left, right = (Checkpoints(f"{name}/checkpoints", writable=False).restore_numpy(4) for name in ("out", "whole"))
    assert formats.same(left, right)


def test_any_format_and_mesh(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """B32: also where the mesh does not split the vocabulary; the rows that are added are not exported."""
    formats.write(workspace / "in", vocab=261)
    convert("in", "ours", "orbax")
    fit("init=in", "train.num_steps=1", "directory=one")
    other = ("plan.mesh=fsdp:4 tensor:2", "directory=two")
    capsys.readouterr()
    assert "model.vocab_rows=262 fills the table up" in refused(capsys, "--init", "ours", *other)
    fit("init=ours", "train.num_steps=1", "model.vocab_rows=264", *other)
    losses = [command.losses(Path(name))[1] for name in ("one", "two")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    for name in ("one", "two"):
        convert(name, f"{name}-hf", "hf")
    left, right = (formats.tensors(Path(f"{name}-hf")) for name in ("one", "two"))
    assert left.keys() == right.keys() and left["lm_head.weight"].shape == right["lm_head.weight"].shape == (261, 64)
    for name, tensor in left.items():
        np.testing.assert_allclose(right[name], tensor, rtol=0, atol=2e-3, err_msg=name)  # Adam's first step: a sign


def test_experts_on_an_axis(workspace: Path) -> None:
    """The losses of the experts may be set: no checkpoint decides them."""
    formats.write(workspace / "in", "mixtral")
    fit("init=in", "train.num_steps=2", "plan.mesh=expert:4 data:2", "model.moe.balance_loss=0.01")
    assert np.isfinite(list(command.losses(Path("out")).values())).all()
    run = runs.read_run("out/config.yaml")
    assert (run.model.moe.num_experts, run.model.moe.balance_loss) == (4, 0.01)  # pyright: ignore
    convert("out", "back", "hf")
    assert json.loads(Path("back/config.json").read_text())["model_type"] == "mixtral"
    assert formats.tensors(Path("back")).keys() == formats.tensors(Path("in")).keys()


def test_a_begin_of_text_is_fed_where_the_model_expects_it(workspace: Path) -> None:
    settings = {**formats.TOKENIZER_CONFIG, "bos_token": "!", "add_bos_token": True}
    (workspace / "in" / "tokenizer_config.json").write_text(json.dumps(settings))
    run, initial = read_run("run.yaml", ["init=in"])
    assert initial is not None
    tokenizer = initial.tokenizer()
    assert tokenizer is not None and tokenizer.add_bos
    corpus = tokenise_corpus(run.data, survey_corpus(run.data.corpora[0], run.data), tokenizer)
    tokens, offsets = np.asarray(corpus.train.tokens), corpus.train.offsets
    assert len(offsets) > 6 and np.flatnonzero(tokens == ord("!")).tolist() == offsets[:-1].tolist()


def test_a_model_section_that_agrees_or_differs(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--init", "in", "model.num_layers=2", "model.vocab_size=264", "--print_config")
    assert cli.main(["train", "run.yaml", *words]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["model"]["mlp_dim"] == 96
    line = refused(capsys, "--init", "in", "model.num_layers=3", "model.tied=true")
    assert "not that of init=in: model.num_layers: 2 -> 3; model.tied: false -> true; leave these out" in line
    line = refused(capsys, "--init", "in", "model.preset=1m")
    assert "not that of init=in: " in line and "model.embed_dim: 64 -> 128" in line
    assert 'unknown key "model.num_layer"' in refused(capsys, "--init", "in", "model.num_layer=3")


def test_another_tokenizer_wins(workspace: Path) -> None:
    """The one that the run names; the documents of the other do not travel on, nor the ids that its config names."""
    fit("init=in", "train.num_steps=1", "data.tokenizer=bytes")
    texts = Checkpoints("out/checkpoints", writable=False).texts(1)
    assert "kept word for word" not in texts["tokenizer_config.json"]
    assert json.loads(texts[KEPT_CONFIG])["eos_token_id"] == 2
    convert("out", "back", "hf")
    for path in ("out", "back"):
        tokenizer = open_checkpoint(path).tokenizer()
        assert tokenizer is not None and (tokenizer.end_of_text, tokenizer.ends) == (256, {256}), path


def test_what_is_refused(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    formats.write(workspace / "bare", vocab=None)
    line = refused(capsys, "--init", "bare")
    assert "bare has no tokenizer, and one trained here would not be its own; name it, as in data.tokenizer=" in line
    line = refused(capsys, "--init", "bare", "data.tokenizer=bytes")
    assert "the tokenizer has 257 tokens, but model.vocab_size is 256" in line
    assert "nowhere: there is no such file or directory" in refused(capsys, "--init", "nowhere")
    assert "data.seq_len 256 is longer than model.max_positions 128" in refused(
        capsys, "--init", "in", "data.seq_len=256"
    )
    fit("init=in", "train.num_steps=1")
    capsys.readouterr()
    line = refused(capsys, "--init", "bare")
    assert "the run in out began from init=in, not from bare; name another directory= to start from it" in line
