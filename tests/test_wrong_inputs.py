"""What a newcomer gets wrong: one line with what was given, what is needed and the fix; nothing on disk changes."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from jaxpp import cli
from tests import command

# In this process there are eight devices, so that is what a run must ask for.
HERE = ("cpu_devices=8", "plan.mesh=data:8")


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    command.write_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("trained")
    command.write_run(directory)
    command.jaxpp("train", "run.yaml", "train.num_steps=2", "checkpoint.every=1", cwd=directory)
    return directory


def one_line(err: str) -> str:
    assert re.fullmatch(r"jaxpp: [^\n]+\n", err), err
    return err


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    before = command.contents(Path.cwd())
    assert cli.main(words) == 2
    assert command.contents(Path.cwd()) == before
    out, err = capsys.readouterr()
    assert out == ""
    return one_line(err)


WRONG = {
    "a typo in a key": (
        ["train.num_step=20"],
        r'unknown key "train.num_step": did you mean "train.num_steps"\?',
    ),
    "a section that does not exist": (["trian.num_steps=20"], r'unknown key "trian": did you mean "train"\?'),
    "indivisible heads": (
        ["model.num_heads=5"],
        "model.embed_dim 32 does not split into num_heads 5; 1, 2, 4, 8 heads do",
    ),
    "heads that do not split over the mesh": (
        ["plan.mesh=data:2 tensor:4"],
        "heads 2 does not split over tensor=4; .* 1, 2",
    ),
    "a wrong device count": (
        ["plan.mesh=data:2 tensor:2"],
        'mesh "data:2 tensor:2" makes 4 devices, but there are 8; "data:4 tensor:2" does, or set cpu_devices=4',
    ),
    "a missing corpus": (
        ["data.corpora=[{source: corpse}]"],
        "corpus 'corpse' does not exist: .* built-in corpora are stdlib, pydoc",
    ),
    "an empty corpus": (["data.corpora=[{source: empty.txt}]"], "corpus 'empty.txt' holds no text"),
    "a directory under a file": (
        ["directory=run.yaml/out"],
        r"directory run.yaml/out cannot be written \(Not a directory\); choose another with directory=",
    ),
    "a directory that the system refuses": (["directory=/proc/out"], "directory /proc/out cannot be written"),
    "a sequence longer than the positions": (
        ["data.seq_len=128"],
        "data.seq_len 128 is longer than model.max_positions 64; set data.seq_len=64 or model.max_positions=128",
    ),
    "a vocabulary that is too small": (
        ["model.vocab_size=200"],
        "the tokenizer has 257 tokens, but model.vocab_size is 200; set model.vocab_size=257",
    ),
    "a vocabulary that is too small for the BPE to come": (
        ["data.tokenizer=bpe", "data.vocab_size=512"],
        "the tokenizer has 512 tokens, but model.vocab_size is 300; set model.vocab_size=512",
    ),
    "zero microbatches": (["plan.microbatches=0"], "plan.microbatches = 0: 1 or more are needed"),
    "microbatches that do not divide": (
        ["plan.microbatches=2"],
        "data.batch_size 8 does not split into 2 microbatches over 8 batch shards; size 16 would",
    ),
    "an unknown optimizer": (
        ["optimizer.name=adamv"],
        'optimizer.name: unknown "adamv"; did you mean "adamw"\\? known: adamw muon',
    ),
    "an unknown preset": (["model.preset=2m"], 'model.preset: unknown "2m"; known: 1m 4m moe-4m 15m'),
    "a word for a number": (["train.num_steps=many"], 'train.num_steps = "many": a whole number is needed'),
    "no value": (["--train.num_steps"], 'override "--train.num_steps" has no key or no value'),
    "a step to go back to in a new run": (["checkpoint.step=3"], "checkpoint.step 3 is not in out/checkpoints; .*none"),
}


@pytest.mark.parametrize("settings, message", WRONG.values(), ids=[name.replace(" ", "-") for name in WRONG])
def test_wrong_settings(settings: list[str], message: str, workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (workspace / "empty.txt").touch()
    assert re.search(message, refused(capsys, "train", "run.yaml", *HERE, *settings))


def test_wrong_files(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (workspace / "empty.yaml").touch()
    (workspace / "broken.yaml").write_text("train: {num_steps: 3\n")
    for name, message in {
        "ran.yaml": 'ran.yaml: no such file: did you mean "run.yaml"?',
        "empty.yaml": "empty.yaml holds nothing: a mapping is needed",
        "broken.yaml": "not YAML",
        "corpus": "corpus cannot be read (Is a directory): give a YAML file",
    }.items():
        assert message in refused(capsys, "train", name), name


def copied(trained: Path, workspace: Path) -> Path:
    shutil.copytree(trained / "out", workspace / "out")
    return workspace / "out" / "checkpoints"


def test_the_checkpoint_of_another_model(trained: Path, workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copied(trained, workspace)
    line = refused(capsys, "train", "run.yaml", *HERE, "model.embed_dim=64")
    assert line.startswith("jaxpp: not the model of the checkpoint: model.embed_dim: 32 -> 64")
    assert "set it back, or start anew with another directory= than out;" in line
    assert line.count("found float32[") == 1 and "1,64" in line.partition("needed float32[")[2]
    line = refused(capsys, "train", "run.yaml", *HERE, "optimizer.name=sgd")
    assert 'optimizer.name: "adamw" -> "sgd"' in line


def test_another_tokenizer_than_the_checkpoint(
    trained: Path, workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copied(trained, workspace)
    line = refused(capsys, "train", "run.yaml", *HERE, "data.tokenizer=bpe", "data.vocab_size=300")
    assert 'not the tokenizer of the checkpoint: data.tokenizer: "bytes" -> "bpe"' in line


def test_a_truncated_checkpoint(trained: Path, workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoints = copied(trained, workspace)
    largest = max((p for p in (checkpoints / "2" / "state").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    whole = largest.read_bytes()
    largest.write_bytes(whole[: len(whole) // 2])
    line = refused(capsys, "train", "run.yaml", *HERE)
    assert f"bytes, needed {len(whole)}; checkpoint.step=1 restores the newest intact step before it" in line
    assert "is damaged" in refused(capsys, "generate", "out", "--prompt", "the")


def test_the_step_that_a_truncated_checkpoint_names_restores(trained: Path, workspace: Path) -> None:
    checkpoints = copied(trained, workspace)
    data = next(path for path in (checkpoints / "2" / "state" / "d").iterdir())
    data.write_bytes(b"")
    told = command.jaxpp("train", "run.yaml", "train.num_steps=2", "checkpoint.step=1", cwd=workspace).stdout
    assert "resumed from step 1" in told
    assert command.losses(workspace / "out") == command.losses(trained / "out")
    assert (checkpoints / "aside-1" / "2" / "state").exists() and command.steps(workspace / "out") == [1, 2]


def test_a_step_that_is_not_there(trained: Path, workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copied(trained, workspace)
    line = refused(capsys, "train", "run.yaml", *HERE, "checkpoint.step=7")
    assert "checkpoint.step 7 is not in out/checkpoints; steps there: 1, 2" in line


@pytest.mark.parametrize(
    "words, message",
    [
        (["train", "run.yaml", "optimiser.name=sgd"], 'did you mean "optimizer"?'),
        (["train", "run.yaml", "cpu_devices=6", "plan.mesh=data:4"], 'but there are 6; "data:6" does, or set'),
        (["generate", "out", "--prompt", "x"], "out: there is no such file or directory"),
    ],
)
def test_in_a_process_of_its_own(words: list[str], message: str, workspace: Path) -> None:
    before = command.contents(workspace)
    done = command.jaxpp(*words, cwd=workspace, code=2)
    assert message in one_line(done.stderr) and done.stdout == ""
    assert command.contents(workspace) == before


def test_the_run_that_the_wrong_ones_differ_from_is_right(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", "run.yaml", *HERE]) == 0
    assert "8 rows x 32 = 256 tokens" in capsys.readouterr().out
