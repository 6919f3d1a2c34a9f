"""A run that starts from a checkpoint (``init``): whose model it takes, and when it no longer needs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxpp import config as configs
from jaxpp import runs
from jaxpp.model import ModelConfig
from jaxpp.models import DecoderConfig
from jaxpp.models.canonical import canonical
from jaxpp.pretrained import Checkpoint, open_checkpoint
from jaxpp.train.config import Run

_OPEN = ("moe.balance_loss:", "moe.z_loss:", "vocab_rows:")  # of the model's settings, what no checkpoint decides


def read_run(path: str | Path, overrides: Sequence[str] = ()) -> tuple[Run, Checkpoint | None]:
    """Read a run, and open the checkpoint that it starts from, if it names one (``init``) and has none of its own yet.

    Such a run takes the checkpoint's model; its section ``model`` may repeat it, and set the losses of its experts.

    Raises:
        ValueError: as `jaxpp.runs.build_run` and `open_checkpoint`; the section ``model`` is of another model; or the
            run's directory holds a run that began elsewhere.
    """
    values = configs.read(path, overrides)
    name = str(values.get("init") or "")
    if not name:
        return runs.build_run(values), None
    begun = _begun(str(values.get("directory") or Run.directory), name)
    checkpoint = open_checkpoint(name) if begun is None else None
    source = checkpoint.config if checkpoint is not None else begun.model if begun is not None else None
    assert source is not None
    model = _model_of(source, values.get("model") or {}, name)
    return configs.build(Run, {**values, "model": None}, given={"model": model}), checkpoint


def find_run(path: str | Path, overrides: Sequence[str] = ()) -> Run:
    """Return the run of a YAML file, or that whose checkpoints lie in a directory.

    Raises:
        ValueError: as `read_run`, or the directory holds no checkpoint.
    """
    if Path(path).is_dir():
        return runs.find_checkpoint(path).run(overrides)
    return read_run(path, overrides)[0]


def _model_of(source: ModelConfig, section: Mapping[str, Any], name: str) -> ModelConfig:
    """Return the checkpoint's model with the section ``model`` laid over it, which may change its losses only."""
    if "family" in section or "preset" in section:
        model = runs.build_model(section)
    else:
        model = configs.build(type(source), _laid_over(configs.to_dict(source), section), at="model")
    changes = configs.difference(_comparable(source), _comparable(model))
    lines = [f"model.{line}" for line in changes if not line.startswith(_OPEN)]
    if lines:
        raise ValueError(
            f"the run's model is not that of init={name}: {'; '.join(lines)}; leave these out to take the checkpoint's"
        )
    return model


def _laid_over(values: Mapping[str, Any], section: Mapping[str, Any]) -> dict[str, Any]:
    nested = {k: _laid_over(values[k], v) for k, v in section.items() if isinstance(v, Mapping) and k in values}
    return {**values, **section, **nested}


def _comparable(model: ModelConfig) -> dict[str, Any]:
    return configs.to_dict(canonical(model) if isinstance(model, DecoderConfig) else model)


def _begun(directory: str, name: str) -> Run | None:
    """Return the run whose checkpoints lie in a directory, if any: it goes on without the one that it began from."""
    try:
        run = runs.find_checkpoint(directory).run()
    except ValueError:
        return None
    if run.init != name:
        began = f"began from init={run.init}" if run.init else "began without init"
        raise ValueError(f"the run in {directory} {began}, not from {name}; name another directory= to start from it")
    return run
