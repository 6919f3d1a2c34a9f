"""What a grown model asks of the run that trains it on: learning rates by weight, and the fading in of new units."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxpp import config as configs
from jaxpp.grow.masked import Masked, ramp_settings
from jaxpp.grow.step import Growth
from jaxpp.train.ramp import RampConfig
from jaxpp.train.rates import rate_of


@dataclass(frozen=True)
class Settings:
    """Settings of a run.

    Args:
        rates: ``optimizer.rates``, the factor on the learning rate of each weight where it is not 1.
        ramp: ``train.ramp``, or None where all units count at once.
    """

    rates: dict[str, float] = field(default_factory=dict)
    ramp: RampConfig | None = None

    def text(self, source: str, growth: Growth) -> str:
        """Write ``growth.yaml``: the source, the steps, and these settings as a run takes them."""
        steps = [{"operator": step.name, "dims": dict(step.maps), "preserves": step.preserves} for step in growth.steps]
        ramp: dict[str, Any] = {} if self.ramp is None else {"train": {"ramp": configs.to_dict(self.ramp)}}
        return configs.dump(
            {"source": source, "steps": steps, "run": {"optimizer": {"rates": dict(self.rates)}, **ramp}}
        )


def settings_of(growth: Growth, rates: Mapping[str, float] | None = None, start: int = 0) -> Settings:
    """Return what the target of a growth asks for.

    The rates are for optimizers whose step does not depend on the size of gradients (adamw, adafactor; muon roughly).

    Args:
        growth: the steps.
        rates: that the source's run had.
        start: the step at which new units begin to fade in.
    """
    before: Mapping[str, float] = rates or {}
    found: dict[str, float] = {}
    for path, leaf in growth.leaves().items():
        rate = leaf.rate() * rate_of(leaf.source, before)
        if rate != 1:
            found[path] = rate
    return Settings(found, ramp_of(growth, start))


def ramp_of(growth: Growth, start: int = 0) -> RampConfig | None:
    """Return how new units fade in; None where they need not.

    Raises:
        ValueError: masked growth before another step, which would grow the masks' dims.
    """
    masked = [i for i, step in enumerate(growth.steps) if isinstance(step, Masked)]
    if not masked:
        return None
    last = growth.steps[-1]
    if masked != [len(growth.steps) - 1] or not isinstance(last, Masked):
        raise ValueError("msg fades new units in while the model trains, so it can only be the last step, once")
    return RampConfig(**{**ramp_settings(last), "start": start})
