"""How one weight grows, and its moments with it: by the spreads of the dims that its arrow names."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxpp.dims import Arrow
from jaxpp.grow import noise
from jaxpp.grow.split import Split
from jaxpp.grow.spread import Spread, same

Tail = Literal["zero", "mean", "factor"]


class Leaf(Protocol):
    """How a weight of the target comes from one of the source."""

    @property
    def source(self) -> str:
        """Path of the weight that it comes from."""
        ...

    def weight(self, x: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """Return the new weight, in `dtype` (fp32 or fp64 while it is made)."""
        ...

    def moment(self, x: jax.Array, power: int) -> jax.Array:
        """Return the new running mean of gradients to a power, 1 or 2."""
        ...

    def rate(self) -> float:
        """Return the factor on the learning rate with which the function moves as far as it did."""
        ...


@dataclass(frozen=True)
class ByDims:
    """A weight grown dim by dim.

    ``W'[r', w'] = factor x share(r') x W[source(r'), source(w')] +- noise``: written dims are copied, read dims are
    divided over the copies. A gradient of the new weight is ``share(w') / factor`` times the old one, where ``share``
    is what the readers of a written unit give to each of its copies; so the moments follow.

    Args:
        path: of the weight in the target; noise is drawn by it.
        source: its path in the source.
        arrow: its dims.
        spreads: one per axis, in the order of the arrow.
        split: how read dims are divided.
        factor: on the whole weight, such as on an embedding that the model multiplies by sqrt(width).
        offset: what the model adds to it (1 for norms that scale by ``1 + scale``): ``factor`` is on the sum.
        tail: what units that copy none hold where they are written: ``"zero"``, the ``"mean"`` over the old units, or
            `factor` (``"factor"``, a norm's scale).
        zeroed: indices of the first stacked dim whose weights become zero (with `offset`: minus it).
        fresh: indices of the first stacked dim whose gradients will be others: their first moments begin at zero.
    """

    path: str
    source: str
    arrow: Arrow
    spreads: tuple[Spread, ...]
    split: Split = field(default_factory=Split)
    factor: float = 1.0
    offset: float = 0.0
    tail: Tail = "zero"
    zeroed: tuple[int, ...] = ()
    fresh: tuple[int, ...] = ()

    @property
    def _stacked(self) -> range:
        return range(len(self.arrow.stacked))

    @property
    def _reads(self) -> range:
        return range(len(self.arrow.stacked), len(self.arrow.stacked) + len(self.arrow.reads))

    @property
    def _divided(self) -> list[int]:
        """Axes along which copies share a weight: none of a table's, which is read by a one-hot."""
        return [] if self.arrow.is_lookup() else [axis for axis in self._reads if self._changes(axis)]

    @property
    def _copied(self) -> list[int]:
        """Axes along which copies get the same weight."""
        first = self._reads.start if self.arrow.is_lookup() else self._reads.stop
        return [axis for axis in range(first, len(self.spreads)) if self._changes(axis)]

    def _changes(self, axis: int) -> bool:
        return not self.spreads[axis].is_identity

    def _along(self, values: np.ndarray, axis: int) -> jax.Array:
        return jnp.asarray(values).reshape([-1 if i == axis else 1 for i in range(len(self.spreads))])

    def _taken(self, x: jax.Array) -> jax.Array:
        for axis, spread in enumerate(self.spreads):
            x = spread.take(x, axis)
        return x

    @property
    def key(self) -> int:
        """What noise is drawn by: 32 bits of path and seed."""
        return noise.key_of(self.path, self.split.seed)

    def weight(self, x: jax.Array, dtype: jnp.dtype, key: jax.Array | int | None = None) -> jax.Array:
        """Return the new weight; `key` stands for the leaf's own, so that weights that grow alike compile once."""
        key = self.key if key is None else key
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        if self.factor != 1:
            wide = (wide + self.offset) * self.factor - self.offset
        y = self._with_read_tails(self._divide(wide, dtype, key), wide, key)
        y = self._with_written_tails(y, wide, dtype)
        if self.zeroed:
            y = jnp.where(self._is_one_of(self.zeroed), -self.offset, y)
        return y.astype(dtype)

    def _is_one_of(self, indices: Sequence[int]) -> jax.Array:
        return self._along(np.isin(np.arange(self.spreads[0].new), indices), 0)

    def _divide(self, x: jax.Array, dtype: jnp.dtype, key: jax.Array | int = 0) -> jax.Array:
        """Spread out, and divide what is read over its copies."""
        y = self._taken(x)
        if self.split.kind == "diagonal" and self._divided:
            y = jnp.where(self._on_diagonal(), y, 0)
        else:
            for axis in self._divided:
                y = y / self._along(self.spreads[axis].counts.astype(y.dtype), axis)
        axis = next((axis for axis in self._divided if self.spreads[axis].sign.any()), None)
        exact = "vocab" in self.arrow.writes or "experts" in self.arrow.writes  # logits, and where tokens go
        return y if axis is None or exact else self._paired(x, y, axis, dtype, key)

    def _on_diagonal(self) -> jax.Array:
        """Return True where the copy that is read is the copy that is written, counted modulo the copies there are."""
        read, counts = self._copy(self._divided)
        written, _ = self._copy(self._copied)
        return read == written % counts

    def _copy(self, axes: Sequence[int]) -> tuple[jax.Array, jax.Array]:
        """Number the copies over several axes, and count them."""
        copy, counts = jnp.zeros((), jnp.int32), jnp.ones((), jnp.int32)
        for axis in axes:
            own = self._along(self.spreads[axis].counts.astype(np.int32), axis)
            copy = copy * own + self._along(self.spreads[axis].copy.astype(np.int32), axis)
            counts = counts * own
        return copy, counts

    def _paired(self, x: jax.Array, y: jax.Array, axis: int, dtype: jnp.dtype, key: jax.Array | int) -> jax.Array:
        """Change the first copy of each pair, and give the second what is left of the two."""
        change = self._change(x, y, axis, key)
        if change is None:
            return y
        first = y + change
        # What is left, and not y - change: rounded to a narrow dtype the two would not sum to the old weight.
        second = (y + y) - first.astype(dtype).astype(y.dtype)
        sign = self._along(self.spreads[axis].sign, axis)
        return jnp.where(sign > 0, first, jnp.where(sign < 0, second, y))

    def _change(self, x: jax.Array, y: jax.Array, axis: int, key: jax.Array | int) -> jax.Array | None:
        if self.split.kind == "unequal":  # one number for all units of a copy: 10 bits times 11 is exact
            places = {a: self.spreads[a].copy - self.spreads[a].copy % 2 for a in self._divided}
            drawn = noise.integers(key, y.shape, places)
            return jax.lax.reduce_precision(y, 8, 9) * (drawn.astype(y.dtype) * 2.0**-10)
        if self.split.noise_db is None:
            return None
        mean = noise.root_mean_square(x, len(self._stacked)) / self._mean_counts()
        drawn = noise.integers(key, y.shape, {axis: self.spreads[axis].first})
        return noise.scaled(drawn, self._each(mean) * 10 ** (-self.split.noise_db / 20))

    def _mean_counts(self) -> float:
        """Return over how many copies a weight is divided, in the mean."""
        return math.prod(float(self.spreads[axis].counts.mean()) for axis in self._divided)

    def _each(self, values: jax.Array) -> jax.Array:
        """Spread one number for each stacked index out."""
        for axis in self._stacked:
            values = self.spreads[axis].take(values, axis)
        return values

    def _with_read_tails(self, y: jax.Array, x: jax.Array, key: jax.Array | int) -> jax.Array:
        """Draw what reads units that copy none: these are zero when they are read, so any number will do."""
        for axis in self._divided:
            if self.spreads[axis].has_tail:
                size = self._each(noise.root_mean_square(x, len(self._stacked)))
                drawn = noise.scaled(noise.integers(key ^ noise.OTHER, y.shape), size)
                y = jnp.where(self._along(self.spreads[axis].source < 0, axis), drawn, y)
        return y

    def _with_written_tails(self, y: jax.Array, x: jax.Array, dtype: jnp.dtype) -> jax.Array:
        for axis in self._copied:
            if self.spreads[axis].has_tail:
                value = self._tail(x, axis, dtype)
                y = jnp.where(self._along(self.spreads[axis].source < 0, axis), value, y)
        return y

    def _tail(self, x: jax.Array, axis: int, dtype: jnp.dtype) -> jax.Array | float:
        if self.tail == "mean":
            spreads = tuple(same(1) if a == axis else spread for a, spread in enumerate(self.spreads))
            narrow = replace(self, spreads=spreads, split=Split(self.split.kind))
            return narrow._divide(noise.mean(x, axis), dtype)
        return self.factor - self.offset if self.tail == "factor" else 0.0

    def moment(self, x: jax.Array, power: int) -> jax.Array:
        """Return the new moment: as gradients go, divided along written dims."""
        y = self._taken(x)
        for axis in self._copied:
            spread = self.spreads[axis]
            share = np.where(spread.source < 0, 0, spread.counts.astype(float) ** -power)
            y = y * self._along(share.astype(y.dtype), axis)
        for axis in self._divided:
            if self.spreads[axis].has_tail:
                y = jnp.where(self._along(self.spreads[axis].source < 0, axis), 0, y)
        if self.factor != 1:
            y = y * self.factor**-power
        return jnp.where(self._is_one_of(self.fresh), 0, y) if self.fresh and power == 1 else y

    def rate(self) -> float:
        """Return the factor on the learning rate."""
        return self.factor / self._mean_counts()
