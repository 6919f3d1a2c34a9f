"""From what a user names to a run: families, presets, overrides, checkpoints."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from jaxpp import config as configs
from jaxpp.models import SIZES, DecoderConfig
from jaxpp.parallel import Plan
from jaxpp.runs import build_model, build_run, find_checkpoint, read_run
from jaxpp.train import OptimizerConfig, Run
from jaxpp.train.config import CheckpointConfig, TrainConfig, resolved

OUTSIDE = "jaxpp.models.decoder:DecoderConfig"


def test_a_model_from_a_family_a_preset_and_fields():
    assert build_model({}) == DecoderConfig()
    assert build_model({"preset": "1m"}) == DecoderConfig(**SIZES["1m"])
    assert build_model({"family": "decoder", "embed_dim": 64}) == DecoderConfig(embed_dim=64)
    assert build_model({"preset": "1m", "num_layers": 2}) == DecoderConfig(**{**SIZES["1m"], "num_layers": 2})
    assert build_model({"family": OUTSIDE, "num_layers": 2}) == DecoderConfig(num_layers=2)


def test_sections_of_a_preset_are_changed_field_by_field():
    moe = build_model({"preset": "moe-4m", "moe": {"num_experts": 4}}).moe
    assert moe == dataclasses.replace(SIZES["moe-4m"]["moe"], num_experts=4)
    scaling = build_model({"family": "llama", "preset": "llama-3.2-1b", "rope_scaling": {"factor": 8.0}}).rope_scaling
    assert (scaling.kind, scaling.factor, scaling.original_positions) == ("llama3", 8.0, 8192)


@pytest.mark.parametrize("preset", SIZES)
def test_every_preset_builds(preset):
    assert build_model({"preset": preset}).vocab_size == SIZES[preset]["vocab_size"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"preset": "1mm"}, 'model.preset: unknown "1mm"; did you mean "1m"? known: 1m 4m moe-4m 15m'),
        ({"family": "qwen3"}, "model.family qwen3 needs a model.preset, which holds what sets it apart: qwen3-0.6b"),
        ({"family": "decodr"}, 'model.family: unknown "decodr"; did you mean "decoder"? known: decoder'),
        (
            {"family": "nowhere.at.all:Config"},
            'model.family "nowhere.at.all:Config" cannot be imported (No module named',
        ),
        (
            {"family": "jaxpp.models.decoder:Confg"},
            "cannot be imported (module 'jaxpp.models.decoder' has no attribute 'Confg')",
        ),
        ({"family": OUTSIDE, "preset": "1m"}, 'model.preset: unknown "1m"'),
        ({"embed_dm": 64}, "model.embed_dm"),
        ({"embed_dim": "wide"}, "model.embed_dim"),
        ({"num_heads": 3}, "model.embed_dim 256 does not split into num_heads 3"),
    ],
)
def test_a_wrong_model_is_refused_with_the_fix(values, message):
    with pytest.raises(ValueError) as error:
        build_model(values)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_resolved_run_builds_an_equal_run():
    run = build_run({
        "model": {"preset": "1m", "tied": True},
        "plan": {"mesh": "data:2 fsdp:4", "rules": {"mlp": ["fsdp"]}, "microbatches": 2},
        "optimizer": {"name": "muon", "schedule": "wsd"},
        "train": {"num_steps": 7},
        "cpu_devices": 8,
    })  # fmt: skip
    assert run.plan == Plan(mesh="data:2 fsdp:4", rules={"mlp": ("fsdp",)}, microbatches=2)
    values = resolved(run)
    assert values["model"]["family"] == "decoder" and values["model"]["tied"] is True
    assert build_run(values) == run
    assert build_run(configs.parse(configs.dump(values), "dumped")) == run


@dataclasses.dataclass(frozen=True)
class Unregistered:
    vocab_size: int = 8
    max_positions: int = 8

    def build(self, rngs):
        raise NotImplementedError


def test_a_model_of_no_family_is_named_by_its_class():
    family = resolved(Run(Unregistered()))["model"]["family"]
    assert family == f"{Unregistered.__module__}:Unregistered"


def test_sections_have_defaults():
    run = build_run({})
    assert run == Run(DecoderConfig()) and run.optimizer == OptimizerConfig()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"optimiser": {}}, "optimizer"),
        ({"plan": {"mesh": "dta:8"}}, 'did you mean "data"'),
        ({"plan": {"microbatches": 0}}, "plan.microbatches = 0: 1 or more are needed"),
        ({"train": {"num_steps": 0}}, "train.num_steps = 0: 1 or more are needed"),
        ({"train": {"evaluate_every": -1}}, "train.evaluate_every = -1: 0 or more are needed"),
        ({"checkpoint": {"keep": 0}}, "checkpoint.keep = 0: 1 or more are needed"),
        ({"checkpoint": {"every": 0}}, "checkpoint.every = 0: 1 or more are needed"),
    ],
)
def test_a_wrong_run_is_refused_with_the_fix(values, message):
    with pytest.raises(ValueError) as error:
        build_run(values)
    assert message in str(error.value)


def test_a_run_is_read_from_its_file_and_overrides(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("model:\n  preset: 4m\ntrain:\n  num_steps: 5\n")
    run = read_run(file, ["train.num_steps=9", "plan.mesh=fsdp:-1"])
    assert run.model == DecoderConfig(**SIZES["4m"])
    assert (run.train, run.plan) == (TrainConfig(num_steps=9), Plan(mesh="fsdp:-1"))
    assert read_run(file).checkpoint == CheckpointConfig()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A run's directory: steps 2 and 10 whole, 30 not."""
    for step in (2, 10):
        place = tmp_path / "run" / "checkpoints" / str(step)
        place.mkdir(parents=True)
        (place / "config.yaml").write_text(configs.dump(resolved(Run(DecoderConfig(num_layers=step)))))
    (tmp_path / "run" / "checkpoints" / "30").mkdir()
    (tmp_path / "run" / "checkpoints" / "notes").mkdir()
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("below", "step"), [("", 10), ("checkpoints", 10), ("checkpoints/2", 2), ("checkpoints/10", 10)]
)
def test_a_checkpoint_is_found_by_run_by_directory_and_by_step(below, step, directory):
    found = find_checkpoint(directory / below)
    assert (found.directory, found.step) == (directory / "checkpoints", step)
    assert found.run(["train.num_steps=3"]) == Run(DecoderConfig(num_layers=step), train=TrainConfig(num_steps=3))


@pytest.mark.parametrize("below", ["nowhere", "checkpoints/30", "checkpoints/notes"])
def test_where_there_is_no_checkpoint_it_says_what_to_name(below, directory):
    with pytest.raises(
        ValueError, match="holds no checkpoint: name a run's directory, its checkpoints/ or one step in it"
    ):
        find_checkpoint(directory / below)
