"""The config reader: round trips through YAML and the command line, every refusal by its words."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from jaxpp import config


@dataclass(frozen=True)
class Source:
    """One corpus."""

    path: str
    weight: float = 1.0


@dataclass(frozen=True)
class Data:
    """Several corpora."""

    sources: tuple[Source, ...] = (Source("stdlib"),)
    seq: int = 128
    counts: dict[str, int] = field(default_factory=dict)
    split: tuple[int, float] | None = None


@dataclass(frozen=True)
class Optimizer:
    """A nested section with a choice."""

    name: Literal["adamw", "muon", "sgd"] = "adamw"
    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise ValueError(f"lr={self.lr} does not descend:\n  give a positive one")


@dataclass(frozen=True)
class Train:
    """Scalars of every kind."""

    num_steps: int = 10
    bf16: bool = False
    note: str | None = None
    clip: float | None = 1.0
    out: Path = Path("runs")
    optimizer: Optimizer = Optimizer()


@dataclass(frozen=True)
class Run:
    """The top."""

    train: Train = Train()
    data: Data = Data()
    model: Any = None
    warmup: int | Literal["auto"] = "auto"
    held_out: Source | None = None


def run_from(text: str, tmp_path: Path, *overrides: str) -> Run:
    file = tmp_path / "run.yaml"
    file.write_text(text, encoding="utf-8")
    return config.build(Run, config.read(file, overrides))


EVERYTHING = """
train:
  num_steps: 20
  bf16: yes
  note: "null"
  clip: null
  out: a/b
  optimizer: {name: muon, lr: 1e-3, betas: [0.8, 1]}
data:
  sources:
    - {path: stdlib}
    - {path: "1e-3", weight: 2}
  counts: {one: 1, two: 2}
  split: [3, 1e-1]
model: {anything: [1, two]}
warmup: 5
held_out: {path: pydoc}
"""


def test_every_type_is_read(tmp_path: Path) -> None:
    run = run_from(EVERYTHING, tmp_path)
    optimizer = Optimizer("muon", 0.001, (0.8, 1.0))
    assert run == Run(
        train=Train(20, True, "null", None, Path("a/b"), optimizer),
        data=Data((Source("stdlib"), Source("1e-3", 2.0)), 128, {"one": 1, "two": 2}, (3, 0.1)),
        model={"anything": [1, "two"]},
        warmup=5,
        held_out=Source("pydoc"),
    )
    assert [type(beta) for beta in run.train.optimizer.betas] == [float, float]


@pytest.mark.parametrize("text", ["data:\n", EVERYTHING])
def test_round_trip(text: str, tmp_path: Path) -> None:
    run = run_from(text, tmp_path)
    written = config.dump(run)
    assert run_from(written, tmp_path) == run
    tops = [line.split(":")[0] for line in written.splitlines() if not line.startswith((" ", "-"))]
    assert tops == ["train", "data", "model", "warmup", "held_out"]


def test_awkward_values_round_trip(tmp_path: Path) -> None:
    odd = ("no", "0755", "é: #", "1:30", "", "two\nlines", "null")
    run = Run(
        train=Train(note=" - x", clip=float("inf"), optimizer=Optimizer(lr=1e-30)),
        data=Data(sources=tuple(Source(path) for path in odd)),
    )
    assert run_from(config.dump(run), tmp_path) == run


@pytest.mark.parametrize(
    "overrides",
    [
        ["train.num_steps=7", "train.optimizer.lr=1e-2", "held_out.path=x=y"],
        ["--train.num_steps=7", "--train.optimizer.lr=1e-2", "--held_out.path=x=y"],
        ["--train.num_steps", "7", "--train.optimizer.lr", "1e-2", "--held_out.path", "x=y"],
    ],
)
def test_overrides(overrides: list[str], tmp_path: Path) -> None:
    run = run_from("train: {num_steps: 3, bf16: true}\nheld_out:\n", tmp_path, *overrides)
    assert run.train == Train(7, True, optimizer=Optimizer(lr=0.01))
    assert run.held_out == Source("x=y")


def test_overrides_replace_lists_as_a_whole_and_take_negative_numbers(tmp_path: Path) -> None:
    text = "data: {sources: [{path: a}, {path: b}]}"
    run = run_from(text, tmp_path, "data.sources=[{path: c}]", "--data.seq", "-1")
    assert run.data == Data(sources=(Source("c"),), seq=-1)
    with pytest.raises(ValueError, match="data.sources = .* is no section: replace all of it"):
        run_from(text, tmp_path, "data.sources.0.path=c")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "train: {num_stepz: 3}",
            'unknown key "train.num_stepz": did you mean "train.num_steps"? known keys of train: '
            "num_steps, bf16, note, clip, out, optimizer",
        ),
        (
            "train: {optimizer: {zzz: 3}}",
            'unknown key "train.optimizer.zzz"; known keys of train.optimizer: name, lr, betas',
        ),
        (
            "num_steps: 3",
            'unknown key "num_steps": did you mean "train.num_steps"? known keys: train, data, model, warmup, held_out',
        ),
        (
            "data: {sources: [{path: a}, {pth: b}]}",
            'unknown key "data.sources[1].pth": did you mean "data.sources[1].path"? '
            "known keys of data.sources[1]: path, weight",
        ),
        (
            "held_out: {weight: 1}",
            'missing "held_out.path" (text): give it in the file or as key=value',
        ),
        ("train: {num_steps: many}", 'train.num_steps = "many": a whole number is needed'),
        ("train: {num_steps: 1.5}", "train.num_steps = 1.5: a whole number is needed"),
        ("train: {num_steps: true}", "train.num_steps = true: a whole number is needed"),
        ("train: {num_steps: null}", "train.num_steps = null: a whole number is needed"),
        ("train: {num_steps: [1]}", "train.num_steps = [1]: a whole number is needed"),
        ("train: {bf16: 1}", "train.bf16 = 1: true or false is needed"),
        ("train: {clip: high}", 'train.clip = "high": a number or null is needed'),
        ("train: {note: 5}", "train.note = 5: text or null is needed; put it in quotes"),
        ("train: 3", "train = 3: a mapping is needed"),
        ("held_out: a", 'held_out = "a": a mapping or null is needed'),
        (
            "train: {optimizer: {name: adamv}}",
            'train.optimizer.name = "adamv": one of adamw, muon, sgd is needed; did you mean "adamw"?',
        ),
        (
            "warmup: atuo",
            'warmup = "atuo": a whole number or one of auto is needed; did you mean "auto"?',
        ),
        (
            "train: {optimizer: {betas: [1]}}",
            "train.optimizer.betas = [1]: a list (a number, a number) is needed",
        ),
        (
            "train: {optimizer: {betas: [1, x]}}",
            'train.optimizer.betas[1] = "x": a number is needed',
        ),
        ("data: {sources: stdlib}", 'data.sources = "stdlib": a list (a mapping, ...) is needed'),
        ("data: {counts: {a: b}}", 'data.counts.a = "b": a whole number is needed'),
        (
            "train: {optimizer: {lr: 0}}",
            "train.optimizer: lr=0.0 does not descend: give a positive one",
        ),
    ],
)
def test_refusals_name_key_value_need_and_fix(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as caught:
        run_from(text, tmp_path)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds nothing: a mapping is needed"),
        (b"- 1\n", "holds [1]: a mapping is needed"),
        (b"a: [1\nb: 2\n", "run.yaml, line 2, column 2: not YAML: "),
        (b"a:\n  b: 1\n  b: 2\n", 'line 3, column 3: not YAML: the key "b" is there twice'),
        (b"\xff\xfe\x00", "run.yaml is not text: a YAML file in UTF-8 is needed"),
        (b"a: !!python/object:os.system {}", "not YAML: could not determine a constructor"),
    ],
)
def test_files_that_are_no_config(content: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_bytes(content)
    with pytest.raises(ValueError) as caught:
        config.read(file)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_files_name_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "quickstart.yaml").write_text("a: 1")
    with pytest.raises(ValueError, match=r'quikstart.yaml: no such file: did you mean ".*/quick'):
        config.read(tmp_path / "quikstart.yaml")
    with pytest.raises(ValueError, match=r"no such file; .* holds quickstart\.yaml$"):
        config.read(tmp_path / "zzz")
    with pytest.raises(ValueError, match="the directory .*nowhere does not exist either"):
        config.read(tmp_path / "nowhere" / "run.yaml")
    with pytest.raises(ValueError, match="cannot be read"):
        config.read(tmp_path)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.num_steps"], 'override "train.num_steps" has no key or no value'),
        (["train.num_steps="], "write train.num_steps=1"),
        (["--train.num_steps"], 'override "--train.num_steps" has no key or no value'),
        (["--train.num_steps", "--train.bf16=1"], 'override "--train.num_steps" has no key'),
        (["=3"], 'override "=3" has no key or no value: write a.b=1'),
        (["a..b=3"], 'override "a..b=3" has no key'),
        (["a=[1"], 'override "a=[1", line 1, column 3: not YAML'),
        (
            ["train.num_steps.x=3"],
            'override "train.num_steps.x": train.num_steps = 3 is no section',
        ),
    ],
)
def test_bad_overrides(overrides: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as caught:
        run_from("train: {num_steps: 3}", tmp_path, *overrides)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_given_fields_are_taken_as_they_are() -> None:
    model = object()
    run = config.build(Run, {"model": {"unread": 1}, "warmup": 3}, given={"model": model})
    assert run.model is model
    assert run.warmup == 3


def test_the_section_name_stands_in_front() -> None:
    with pytest.raises(ValueError, match=r'^unknown key "train\.lr": did you mean "train\.opti'):
        config.build(Train, {"lr": 1}, at="train")
    with pytest.raises(ValueError, match=r"^train\.optimizer: lr=-1\.0 does not descend"):
        config.build(Optimizer, {"lr": -1}, at="train.optimizer")


def test_what_yaml_cannot_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="model = <object .*: YAML holds only"):
        config.dump(Run(model=object()))


def test_keys_are_dotted_in_order() -> None:
    assert config.keys(Run) == [
        *("train.num_steps", "train.bf16", "train.note", "train.clip", "train.out"),
        *("train.optimizer.name", "train.optimizer.lr", "train.optimizer.betas"),
        *("data.sources", "data.seq", "data.counts", "data.split"),
        *("model", "warmup", "held_out.path", "held_out.weight"),
    ]


def test_difference_lists_what_changed_and_only_that() -> None:
    old = config.to_dict(Run())
    new = config.to_dict(Run(train=Train(num_steps=20), held_out=Source("x")))
    assert config.difference(old, old) == []
    assert config.difference(old, new) == [
        "train.num_steps: 10 -> 20",
        "held_out: null -> (not set)",
        'held_out.path: (not set) -> "x"',
        "held_out.weight: (not set) -> 1.0",
    ]
