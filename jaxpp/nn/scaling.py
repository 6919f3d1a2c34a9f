"""How rotary frequencies are stretched for longer sequences: one record for all rules."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

RopeKind = Literal["none", "linear", "dynamic", "llama3", "yarn", "longrope"]


@dataclass(frozen=True)
class RopeScaling:
    """A rule that stretches rotary positions; a kind reads the fields that name it.

    Raises:
        ValueError: a field that the kind needs is missing.
    """

    kind: RopeKind = "none"
    factor: float = 1.0  # linear dynamic llama3 yarn: by how much
    original_positions: int = 0  # dynamic llama3 yarn longrope: longest sequence before stretching
    low_frequency_factor: float = 1.0  # llama3
    high_frequency_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: round the ramp's ends to whole dims
    magnitude: float = 0.0  # yarn longrope: factor on cosine and sine; 0: yarn's own, or 1
    short_factors: tuple[float, ...] = ()  # longrope: one per frequency, up to original_positions
    long_factors: tuple[float, ...] = ()  # longrope: beyond

    def __post_init__(self) -> None:
        if self.kind in ("dynamic", "llama3", "yarn", "longrope") and self.original_positions < 1:
            raise ValueError(
                f"rope_scaling.original_positions = {self.original_positions}: rope_scaling.kind {self.kind} needs the "
                "longest sequence that the model was first trained on"
            )
        if self.kind in ("linear", "dynamic", "llama3", "yarn") and self.factor < 1:
            raise ValueError(f"rope_scaling.factor = {self.factor}: 1 or more is needed")

    def own_magnitude(self) -> float:
        """Return the factor on cosine and sine."""
        if self.kind == "yarn" and not self.magnitude:
            return 0.1 * math.log(self.factor) + 1
        return self.magnitude or 1.0


def _linear(frequencies: np.ndarray, base: float, scaling: RopeScaling) -> np.ndarray:
    return frequencies / scaling.factor


def _llama3(frequencies: np.ndarray, base: float, scaling: RopeScaling) -> np.ndarray:
    """Keep short wavelengths, stretch long ones, and blend in between."""
    turns = scaling.original_positions * frequencies / (2 * np.pi)  # within the original length
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return kept * frequencies + (1 - kept) * frequencies / scaling.factor


def _yarn(frequencies: np.ndarray, base: float, scaling: RopeScaling) -> np.ndarray:
    """Keep the dims that turn more than `beta_fast` times, stretch those below `beta_slow`, ramp in between.

    Source: Peng, Quesnelle, Fan, Shippole, YaRN, 2023, section 3.2.
    """
    size = 2 * len(frequencies)

    def dim_of(turns: float) -> float:
        return size * math.log(scaling.original_positions / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = dim_of(scaling.beta_fast), dim_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    ramp = np.clip((np.arange(len(frequencies)) - low) / (high - low if high > low else 0.001), 0, 1)
    return frequencies * (1 - ramp) + frequencies / scaling.factor * ramp


_RULES: dict[str, Callable[[np.ndarray, float, RopeScaling], np.ndarray]] = {
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}


def scaled_frequencies(rotary_dim: int, base: float, scaling: RopeScaling, beyond: bool = False) -> np.ndarray:
    """Return the angle per position of each pair of dims, float64.

    Args:
        rotary_dim: dims that are rotated, even.
        base: wavelength base.
        scaling: the rule.
        beyond: longrope: of a sequence longer than ``original_positions``.

    Raises:
        ValueError: longrope has not one factor per pair.
    """
    frequencies = np.float64(base) ** (-np.arange(0, rotary_dim, 2) / rotary_dim)
    if scaling.kind == "longrope":
        factors = scaling.long_factors if beyond else scaling.short_factors
        if len(factors) != len(frequencies):
            name = "long_factors" if beyond else "short_factors"
            raise ValueError(f"rope_scaling.{name} has {len(factors)} numbers; {len(frequencies)} are needed")
        return frequencies / np.asarray(factors, np.float64)
    rule = _RULES.get(scaling.kind)
    return rule(frequencies, base, scaling) if rule else frequencies


def dynamic_base(length: Any, rotary_dim: int, base: float, scaling: RopeScaling) -> Any:
    """Return the base that ``dynamic`` takes for sequences of `length` beyond the original one."""
    stretch = scaling.factor * length / scaling.original_positions - (scaling.factor - 1)
    return base * stretch ** (rotary_dim / (rotary_dim - 2))
