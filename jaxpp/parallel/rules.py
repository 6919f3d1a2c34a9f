"""Rules: which mesh axes split a dim, for each place where an array lives.

A scheme contributes one `Rules`; a layout is the sum of its schemes' rules. Knows no mesh and no array.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Protocol

DimRules = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Rules:
    """Dim to mesh axes, one map per place.

    Args:
        weights: as stored between steps.
        compute: as used by a block: what is in `weights` and not here is gathered just before use.
        moments: optimizer state, and the gradients that feed it.
        inside: activations inside a block (heads, mlp, vocab).
        residual: activations between blocks, ``"batch seq embed"``.
        cache: keys and values that decoding keeps, and the attention over them; pages are split as ``batch``.
    """

    weights: DimRules = field(default_factory=dict)
    compute: DimRules = field(default_factory=dict)
    moments: DimRules = field(default_factory=dict)
    inside: DimRules = field(default_factory=dict)
    residual: DimRules = field(default_factory=dict)
    cache: DimRules = field(default_factory=dict)

    def __add__(self, other: Rules) -> Rules:
        """Append the axes of `other` to those of each dim."""
        return Rules(*(_merge(getattr(self, f.name), getattr(other, f.name)) for f in fields(self)))


def _merge(left: DimRules, right: DimRules) -> DimRules:
    merged = {dim: tuple(axes) for dim, axes in left.items()}
    for dim, axes in right.items():
        merged[dim] = (*merged.get(dim, ()), *axes)
    return merged


class Scheme(Protocol):
    """One parallel method: its name, the axes and schemes it needs, the rules it adds."""

    @property
    def name(self) -> str:
        """The word by which plans name the scheme."""
        ...

    @property
    def axis(self) -> str:
        """The mesh axis it works over."""
        ...

    @property
    def needs(self) -> tuple[str, ...]:
        """Schemes without which it makes no sense."""
        ...

    def rules(self) -> Rules:
        """The rules it contributes."""
        ...
