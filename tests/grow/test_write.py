"""``jaxpp grow``: what it prints, what it writes, what it refuses, and that nothing is lost when it fails."""

from __future__ import annotations

import errno
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from jaxpp import cli, runs
from jaxpp.checkpoint import Checkpoints
from jaxpp.grow import Growth, Request
from jaxpp.grow.leaf import ByDims
from jaxpp.grow.write import Exam, NotPreserved, grow, some_tokens
from jaxpp.pretrained import open_checkpoint
from tests import command, formats


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return formats.write(tmp_path_factory.mktemp("write") / "in")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("trained")
    command.write_run(directory)
    command.jaxpp("train", "run.yaml", "train.num_steps=8", "train.evaluate_every=0", cwd=directory)
    return directory / "out"


def jaxpp(*words: Any) -> int:
    return cli.main([str(word) for word in words])


def test_the_proof_is_printed_and_the_checkpoint_written(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert jaxpp("grow", source, tmp_path / "out", "--width", 2, "--depth", 3) == 0
    out, err = capsys.readouterr()
    assert re.search(r"logits +differ by \S+ of \S+: \S+ relative, promised 2e-06\n", out)
    before, after = re.search(r"perplexity +(\S+) -> (\S+) on 2,047 tokens", out).groups()  # type: ignore[union-attr]
    assert float(after) == pytest.approx(float(before), rel=1e-5)
    assert "greedy" in out and "both say" in out
    assert err.splitlines() == [
        f"running the source, {source}",
        f"growing into {tmp_path / 'out'}",
        "running the target",
    ]
    assert open_checkpoint(tmp_path / "out").config.embed_dim == 2 * open_checkpoint(source).config.embed_dim
    assert os.listdir(tmp_path) == ["out"]
    written = yaml.safe_load((tmp_path / "out" / "growth.yaml").read_text())
    assert [step["operator"] for step in written["steps"]] == ["hypercloning", "identity"]
    assert written["run"]["optimizer"]["rates"]["blocks/mlp/down/kernel"] == 0.5


def test_a_dry_run_reads_no_weight(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxpp.pretrained.load_onto", lambda *_, **__: pytest.fail("a weight was read"))
    assert jaxpp("grow", source, tmp_path / "out", "--width", 2, "--experts", 4, "--dry-run") == 0
    out = capsys.readouterr().out
    assert "hypercloning  exact" in out and "upcycle       exact" in out
    assert re.search(r"parameters +[\d,]+ -> [\d,]+ \(", out) and "function    the same" in out
    assert not (tmp_path / "out").exists()


def test_one_that_does_not_preserve_prints_its_gap(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert jaxpp("grow", source, tmp_path / "out", "--depth", 4, "--depth-op", "stack", "--check", "on") == 0
    out = capsys.readouterr().out
    assert "no promise" in out and "source" in out and "target" in out


def test_a_broken_promise_is_an_error_and_the_old_target_stays(source: Path, tmp_path: Path) -> None:
    growth = Request(width=2).growth(open_checkpoint(source).config)
    assert jaxpp("grow", source, tmp_path / "out", "--width", 2, "--check", "off") == 0
    before = command.contents(tmp_path)
    step = growth.steps[0]
    path = "blocks/mlp/down/kernel"
    leaf = step.leaves[path]
    assert isinstance(leaf, ByDims)
    broken = Growth((replace(step, leaves={**step.leaves, path: replace(leaf, factor=1.01)}),))
    exam = Exam(some_tokens(256))
    with pytest.raises(NotPreserved, match="hypercloning should compute the same function, but logits differ by"):
        grow(source, tmp_path / "out", broken, "hf", exam=exam, overwrite=True)
    assert command.contents(tmp_path) == before
    assert grow(source, tmp_path / "out", growth, "hf", exam=exam, overwrite=True) is not None


@pytest.mark.parametrize("place", ["posix_fallocate", "fsync"])
def test_a_full_disk_leaves_the_old_target_whole(
    place: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert jaxpp("grow", source, tmp_path / "out", "--width", 2, "--check", "off") == 0
    (tmp_path / "out" / "README.md").write_text("mine")
    before = command.contents(tmp_path)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, place, full)
    again = ("grow", source, tmp_path / "out", "--width", 3, "--check", "off", "--overwrite")
    capsys.readouterr()
    assert jaxpp(*again) == 1
    assert "No space left on device" in capsys.readouterr().err
    assert command.contents(tmp_path) == before
    monkeypatch.undo()
    assert jaxpp(*again) == 0
    assert (tmp_path / "out" / "README.md").read_text() == "mine"
    assert open_checkpoint(tmp_path / "out").config.embed_dim == 3 * open_checkpoint(source).config.embed_dim


def test_a_run_grows_with_its_optimizer_and_trains_on(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(trained.parent)
    assert jaxpp("grow", trained, tmp_path / "big", "--width", 2, "--mesh", "fsdp:8") == 0
    assert "train on with jaxpp train" in capsys.readouterr().out
    run = runs.find_checkpoint(tmp_path / "big").run()
    assert run.optimizer.rates["blocks/mlp/up/kernel"] == 0.5 and run.directory == str(tmp_path / "big")
    old, new = (
        Checkpoints(path / "checkpoints", writable=False).restore_numpy(8) for path in (trained, tmp_path / "big")
    )
    assert old["step"] == new["step"] == 8
    counts = [name for name in old if name.endswith("count")]
    assert counts and all(old[name] == new[name] for name in counts)
    for field, power in (("mu", 1), ("nu", 2)):
        names = [name for name in old if f"/{field}/" in name]
        up = next(name for name in names if name.endswith("mlp/up/kernel"))
        np.testing.assert_allclose(new[up], np.tile(old[up], (1, 2, 2)) / 2**power, rtol=1e-6)
    words = ("train.num_steps=10", "train.evaluate_every=0")
    done = command.jaxpp("train", str(tmp_path / "big" / "config.yaml"), *words, cwd=trained.parent)
    printed = done.stdout + done.stderr
    assert "resumed from step 8" in printed and "step 10/10" in printed
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", printed)]
    assert losses[0] < 4.0  # a model that had not learned would be at log 300 = 5.7


def test_an_optimizer_that_does_not_grow_is_reset_on_demand(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert jaxpp("grow", trained, tmp_path / "big", "--width", 2, "--optimizer", "reset", "--check", "off") == 0
    assert "the optimizer starts anew" in capsys.readouterr().out
    assert not any(name.startswith("optimizer") for name in Checkpoints(tmp_path / "big", writable=False).contents(0))


WRONG = {
    "a width that is no whole factor": (["--width", 1.5], "width 1.5: hypercloning copies a whole number.*lemon"),
    "a smaller mlp": (["--mlp", 8], "mlp_dim 8: 96 or more are needed, models only grow"),
    "kv heads that do not fit": (["--heads", 8, "--kv-heads", 3], "8 heads on 3 kv heads: 4 heads in 2 groups of 2"),
    "heads that fit no group": (["--heads", 7], "7 heads: 4 heads in 2 groups of 2 grow by.*4, 6, 8"),
    "nothing to grow": ([], "nothing to grow: name a width"),
    "an unknown target": (["--target", "lama-3.2-1b"], "lama-3.2-1b.*llama-3.2-1b"),
    "a target beside sizes": (["--target", "llama-3.2-1b", "--width", 2], "leave out width"),
    "noise that is no number": (["--width", 2, "--noise-db", "loud"], '--noise-db "loud": a number is needed, or none'),
    "layers that are not there": (["--layers", "0,1,9"], "9"),
    "a depth and layers": (["--layers", "0,1", "--depth", 4], "give one of them"),
    "a target that is a file": (["--width", 2], "is a file; a directory is needed"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_refused(
    what: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxpp.pretrained.load_onto", lambda *_, **__: pytest.fail("a weight was read"))
    (tmp_path / "file").write_text("")
    words, message = WRONG[what]
    before = command.contents(tmp_path)
    target = tmp_path / ("file" if what == "a target that is a file" else "out")
    assert jaxpp("grow", source, target, *words) == 2
    err = capsys.readouterr().err
    assert re.fullmatch(r"jaxpp: [^\n]+\n", err) and re.search(message, err), err
    assert command.contents(tmp_path) == before


def test_plain_mlps_have_no_experts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gpt2 = formats.write(tmp_path / "in", "gpt2", vocab=None)
    assert jaxpp("grow", gpt2, tmp_path / "out", "--experts", 4) == 2
    assert "gated" in capsys.readouterr().err


def test_a_target_of_another_family_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gpt2 = formats.write(tmp_path / "in", "gpt2", vocab=None)
    assert jaxpp("grow", gpt2, tmp_path / "out", "--target", "llama-3.2-1b") == 2
    assert "different families" in capsys.readouterr().err


def test_masked_growth_is_proved_where_its_ramp_begins(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--operator", "msg", "--embed-dim", 96, "--mlp", 128, "--ramp-steps", 10, "--to", "orbax")
    assert jaxpp("grow", source, tmp_path / "out", *words) == 0
    assert "promised 2e-06" in capsys.readouterr().out
    written = yaml.safe_load(open_checkpoint(tmp_path / "out").texts["growth.yaml"])
    assert written["run"]["train"]["ramp"] == {"dims": {"embed": 64, "mlp": 96}, "num_steps": 10, "start": 0}


@pytest.mark.timeout(300)
def test_two_processes_write_the_bytes_of_one(source: Path, tmp_path: Path) -> None:
    words = ("grow", str(source), "out", "--width", "2", "--depth", "3", "--mesh", "fsdp:2")
    command.jaxpp(*words, "--cpu_devices", "2", "--check", "off", cwd=tmp_path)
    (tmp_path / "out").rename(tmp_path / "one")
    done = command.jaxpp("launch", "--processes", "2", "--", *words, cwd=tmp_path)
    assert "promised 2e-06" in done.stdout and done.stdout.count("is now out") == 1
    assert command.contents(tmp_path / "out") == command.contents(tmp_path / "one")
