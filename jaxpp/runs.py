"""From what a user names (a YAML file, a run's directory, a checkpoint) to a `Run`.

The one place that knows both the families and the trainer.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxpp import config as configs
from jaxpp.model import ModelConfig
from jaxpp.models import FAMILIES, PUBLISHED
from jaxpp.names import unknown
from jaxpp.train.config import Run


def build_model(values: Mapping[str, Any]) -> ModelConfig:
    """Build a model config from the section ``model`` of a run.

    Args:
        values: ``family`` (a name in ``jaxpp.models.FAMILIES`` or ``package.module:Config``), ``preset`` (a size of
            that family), and any field of the config, which wins over the preset.

    Raises:
        ValueError: an unknown family, preset or field.
    """
    values = dict(values)
    family, preset = values.pop("family", "decoder"), values.pop("preset", None)
    cls, sizes = _outside(family) if ":" in str(family) else _inside(family)
    if family in PUBLISHED and preset is None:
        raise ValueError(
            f"model.family {family} needs a model.preset, which holds what sets it apart: {', '.join(sizes)}; a shape "
            'of your own is of family "decoder", and a checkpoint (init=...) brings its model along'
        )
    if preset is not None:
        if str(preset) not in sizes:
            raise ValueError(unknown("model.preset: unknown", str(preset), sizes))
        values = _over(sizes[str(preset)], values)
    return configs.build(cls, values, at="model")


def _over(preset: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Lay values over those of a preset, field by field where a field is a section (``moe``, ``rope_scaling``)."""
    plain = {k: configs.to_dict(v) if dataclasses.is_dataclass(v) else v for k, v in preset.items()}
    sections = {k: {**plain[k], **v} for k, v in values.items() if isinstance(v, Mapping) and k in plain}
    return {**plain, **values, **sections}


def _inside(family: str) -> tuple[type, Mapping[str, Mapping[str, Any]]]:
    if family not in FAMILIES:
        raise ValueError(unknown("model.family: unknown", family, FAMILIES))
    return FAMILIES[family]


def _outside(name: str) -> tuple[type, Mapping[str, Mapping[str, Any]]]:
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute), {}
    except (ImportError, AttributeError) as error:
        raise ValueError(f'model.family "{name}" cannot be imported ({error}); write package.module:Config') from None


def build_run(values: Mapping[str, Any]) -> Run:
    """Build a run from its nested values.

    Raises:
        ValueError: an unknown key, a wrong type, a value out of range.
    """
    values = dict(values)
    model = build_model(values.pop("model", None) or {})
    return configs.build(Run, values, given={"model": model})


def read_run(path: str | Path, overrides: Sequence[str] = ()) -> Run:
    """Read a run from its YAML file and dotted overrides.

    Raises:
        ValueError: as `build_run`, or the file cannot be read.
    """
    return build_run(configs.read(path, overrides))


@dataclass(frozen=True)
class Source:
    """A checkpoint on disk.

    Args:
        directory: that holds the steps.
        step: which one.
    """

    directory: Path
    step: int

    def run(self, overrides: Sequence[str] = ()) -> Run:
        """Return the run that wrote it, overrides laid over."""
        return read_run(self.directory / str(self.step) / "config.yaml", overrides)


def find_checkpoint(path: str | Path) -> Source:
    """Find the checkpoint that a path means: a run's directory (its newest step), its ``checkpoints/`` or one step.

    Raises:
        ValueError: there is none.
    """
    path = Path(path)
    if path.name.isdigit() and (path / "config.yaml").exists():
        return Source(path.parent, int(path.name))
    for directory in (path / "checkpoints", path):
        steps = [int(p.name) for p in directory.glob("*") if p.name.isdigit() and (p / "config.yaml").exists()]
        if steps:
            return Source(directory, max(steps))
    raise ValueError(f"{path} holds no checkpoint: name a run's directory, its checkpoints/ or one step in it")
