"""How one dim becomes a larger one: which unit of the old dim each unit of the new one copies."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

import jax
import jax.numpy as jnp
import numpy as np

NONE = -1  # source of a unit that copies no other


@dataclass(frozen=True, eq=False)
class Spread:
    """A map from the units of a new dim to those of an old one.

    A weight that writes the dim gives each unit its source's values; one that reads it divides its source's values over
    the copies, so that what it sums stays the same.

    Args:
        old: number of units before.
        source: ``[new]`` integers, the old unit that each new one copies; `NONE`: the unit is new.
    """

    old: int
    source: np.ndarray

    @property
    def new(self) -> int:
        """Number of units after."""
        return len(self.source)

    @cached_property
    def counts(self) -> np.ndarray:
        """``[new]`` integers: how many copies the source of each unit has; 1 for units without one."""
        found = np.bincount(self.source[self.source >= 0], minlength=self.old)
        return np.where(self.source >= 0, found[self.source], 1)

    @cached_property
    def copy(self) -> np.ndarray:
        """``[new]`` integers: which copy of its source each unit is, from 0 on."""
        order = np.argsort(self.source, kind="stable")
        ranked = self.source[order]
        first = np.searchsorted(ranked, ranked, side="left")
        found = np.empty(self.new, np.int64)
        found[order] = np.arange(self.new) - first
        return found

    @cached_property
    def _pairs(self) -> tuple[np.ndarray, np.ndarray]:
        first, sign = np.arange(self.new), np.zeros(self.new, np.int64)
        at = {(unit, copy): i for i, (unit, copy) in enumerate(zip(self.source, self.copy, strict=True))}
        for i, (unit, copy) in enumerate(zip(self.source, self.copy, strict=True)):
            if unit >= 0 and (unit, copy ^ 1) in at:
                first[i], sign[i] = at[(unit, copy - copy % 2)], 1 - 2 * (copy % 2)
        return first, sign

    @property
    def first(self) -> np.ndarray:
        """``[new]`` integers: the first of the two copies that form a pair; the unit itself where it has no partner."""
        return self._pairs[0]

    @property
    def sign(self) -> np.ndarray:
        """``[new]`` integers: 1 for the first of a pair of copies, -1 for the second, 0 for a unit without partner."""
        return self._pairs[1]

    @property
    def has_tail(self) -> bool:
        """Whether some units copy none."""
        return bool((self.source < 0).any())

    @property
    def is_even(self) -> bool:
        """Whether all units have equally many copies, and none is new: then means over the dim are as before."""
        return not self.has_tail and len(set(self.counts.tolist())) == 1 and self.new % self.old == 0

    @property
    def is_identity(self) -> bool:
        """Whether nothing changes."""
        return self.new == self.old and bool((self.source == np.arange(self.old)).all())

    def take(self, x: jax.Array, axis: int) -> jax.Array:
        """Return `x` with the axis spread out; units without a source get values of old ones, to be overwritten."""
        if self.is_identity:
            return x
        times = self.new // self.old
        shape = x.shape[:axis] + (self.new,) + x.shape[axis + 1 :]
        if self.new == times * self.old and (self.source == np.tile(np.arange(self.old), times)).all():
            wide = jnp.broadcast_to(jnp.expand_dims(x, axis), (*x.shape[:axis], times, *x.shape[axis:]))
            return wide.reshape(shape)
        return jnp.take(x, jnp.asarray(self.source % self.old), axis=axis, unique_indices=False, mode="clip")

    def __str__(self) -> str:
        """Say it in a few words: ``64 x 2 = 128``."""
        if self.is_identity:
            return f"{self.old}"
        if self.is_even:
            return f"{self.old} x {self.new // self.old} = {self.new}"
        tail = int((self.source < 0).sum())
        copied = self.new - tail
        return f"{self.old} -> {self.new}" + (f" ({copied} copies, {tail} new)" if tail else "")


@cache
def same(size: int) -> Spread:
    """Leave a dim as it is."""
    return Spread(size, np.arange(size))


def cyclic(old: int, new: int) -> Spread:
    """Copy the units in order, again and again: ``0 1 2 0 1 2 0``.

    Example:
        >>> cyclic(3, 5).source.tolist(), str(cyclic(3, 6))
        ([0, 1, 2, 0, 1], '3 x 2 = 6')
    """
    return Spread(old, np.arange(new) % old)


def grouped(old: int, new: int, groups: int) -> Spread:
    """Copy units inside each of `groups` equal groups: ``0 1 0 1 | 2 3 2 3``."""
    inside = np.arange(new).reshape(groups, -1) % (new // groups) % (old // groups)
    return Spread(old, (inside + np.arange(groups)[:, None] * (old // groups)).reshape(-1))


def with_tail(old: int, new: int) -> Spread:
    """Copy all units as often as they fit; what is left over is new."""
    whole = new // old * old
    return Spread(old, np.concatenate([np.arange(whole) % old, np.full(new - whole, NONE)]))


def random_copies(old: int, new: int, seed: int) -> Spread:
    """Keep the old units, and copy units drawn at random.

    Source: Chen, Goodfellow, Shlens, Net2Net, 2016, section 2.3.
    """
    drawn = np.random.default_rng(seed).integers(old, size=new - old)
    return Spread(old, np.concatenate([np.arange(old), drawn]))
