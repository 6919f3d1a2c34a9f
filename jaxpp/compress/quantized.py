"""A quantised weight: as it is stored in a model, and as a product meets it.

Stored, it is a small module in the place of the ``nnx.Param``: integers and scales, each with an arrow, so that
whatever lays out, stacks or cuts weights by their arrows treats it as any. In use, it is what stands on the right of
``x @ w``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from jaxpp import dims
from jaxpp.compress.grid import from_grid, unpack

FORWARD_ONLY = "quantised weights run forward only; load the model without quantize to train it"

Place = Callable[[jax.Array, Sequence[str]], jax.Array]
"""Lays out an array of these dims for use."""


@jax.custom_jvp
def forward_only(x: jax.Array) -> jax.Array:
    """Return `x`; to differentiate through it is refused.

    Raises:
        ValueError: where a gradient is asked for.
    """
    return x


@forward_only.defjvp
def _refuse(primals: Any, tangents: Any) -> Any:
    raise ValueError(FORWARD_ONLY)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Quantized:
    """A quantised weight in use: ``x @ weight``, never the other way round.

    Letters: K what is read, N what is written, G groups of what is read.

    Args:
        values: int8, the shape of the weight; two integers in one where packed.
        scales: as many axes, each as long as there are groups along it.
        offsets: the same, or None.
        dtype: of the weight that it stands for.
        packed: axis along which two integers are in one, counted from the end (negative); 0: none is.
        grouped: there are scales along what is read.
    """

    values: jax.Array
    scales: jax.Array
    offsets: jax.Array | None
    dtype: str = field(metadata={"static": True})
    packed: int = field(default=0, metadata={"static": True})
    grouped: bool = field(default=False, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the weight."""
        axis = self.values.ndim + self.packed
        return tuple(2 * n if self.packed and i == axis else n for i, n in enumerate(self.values.shape))

    @property
    def T(self) -> Quantized:  # noqa: N802
        """A table ``[vocab, embed]``, read the other way."""
        assert not self.packed and self.offsets is None
        return replace(self, values=self.values.T, scales=self.scales.T)

    def astype(self, dtype: Any) -> Quantized:
        """Return it with another dtype for what it stands for; the stored integers stay."""
        return replace(self, dtype=jnp.dtype(dtype).name)

    def __getitem__(self, index: Any) -> Quantized:
        """Return one of a stack, or some."""
        return jax.tree.map(lambda part: part[index], self)

    def dequantized(self) -> jax.Array:
        """Return the weight that it stands for."""
        return from_grid(self._integers(), self.scales, self.offsets, jnp.dtype(self.dtype))

    def flat(self, num_reads: int) -> Quantized:
        """Return ``[*reads, *writes]`` as ``[K, N]``."""

        def two(part: jax.Array) -> jax.Array:
            reads = 1
            for size in part.shape[:num_reads]:
                reads *= size
            return part.reshape(reads, -1)

        return replace(jax.tree.map(two, self), packed=-2 if self.packed else 0)

    def __rmatmul__(self, x: jax.Array) -> jax.Array:
        """Multiply ``x[..., K]`` by the weight ``[K, N]``.

        One scale for each written element is applied to the product, so that no copy of the weight is made but the
        cast, which compilers for accelerators do inside the product. With groups the weight is made first.
        """
        x = forward_only(x)
        overflows = x.dtype == jnp.float16  # its range does not hold sums of integers
        if self.grouped or self.offsets is not None or overflows:
            return x @ self.astype(x.dtype).dequantized()
        return (x @ self._integers().astype(x.dtype)) * self.scales[0].astype(x.dtype)

    def gathered(self, gather: Callable[[jax.Array], jax.Array], axis: int) -> Quantized:
        """Return ``[experts, K, N]`` with an axis made whole by `gather`; scales that are not split stay."""
        if axis == 1 and not self.grouped:
            return replace(self, values=gather(self.values))
        return jax.tree.map(gather, self)

    def specs(self, spec: PartitionSpec) -> Quantized:
        """Return how each part is split, where the weight is split by `spec`."""

        def one(part: jax.Array) -> Any:
            return PartitionSpec(*(None if n == 1 else axes for n, axes in zip(part.shape, spec, strict=True)))

        return jax.tree.map(one, self)

    def _integers(self) -> jax.Array:
        return unpack(self.values, self.values.ndim + self.packed) if self.packed else self.values


class QuantizedPart(nnx.Variable):
    """Integers, scales or offsets of a weight, with an arrow. No ``nnx.Param``: nobody should train it."""


class QuantizedWeight(nnx.Module):
    """A quantised weight as it is stored, in the place of an ``nnx.Param``."""

    def __init__(
        self,
        values: QuantizedPart,
        scales: QuantizedPart,
        offsets: QuantizedPart | None,
        *,
        dtype: str,
        bits: int,
        grouped: bool,
    ):
        """Keep the parts.

        Args:
            values: integers, with the arrow of the weight; of 4 bits two in one along the last axis that is read.
            scales: with the arrow of the weight, where there are groups, else with the dims that have a scale each.
            offsets: the same, or None.
            dtype: of the weight.
            bits: of an integer.
            grouped: there are scales along what is read.
        """
        self.values, self.scales, self.offsets = values, scales, offsets
        self.dtype, self.bits, self.grouped = dtype, bits, grouped

    @property
    def arrow(self) -> dims.Arrow:
        """The arrow of the weight."""
        return _arrow(self.values)

    def in_use(self, place: Place | None = None) -> Quantized:
        """Return what a product takes.

        Args:
            place: lays out each part by its own dims; None leaves them where they are.
        """
        arrow = self.arrow

        def part(node: QuantizedPart) -> jax.Array:
            own, x = _arrow(node).dims, node.get_value()
            x = x if place is None else place(x, own)
            sizes = iter(x.shape)
            return x.reshape(tuple(next(sizes) if dim in own else 1 for dim in arrow.dims))

        values, scales = part(self.values), part(self.scales)
        offsets = None if self.offsets is None else part(self.offsets)
        packed = -len(arrow.writes) - 1 if self.bits == 4 else 0
        return Quantized(values, scales, offsets, self.dtype, packed, self.grouped)


def _arrow(node: QuantizedPart) -> dims.Arrow:
    text = node.get_metadata()["dims"]
    return dims.parse(text, tuple(dims.parse_words(text)))
