"""Arrows: the one annotation that every weight carries.

An arrow says which named dims a weight reads (contracts) and which it writes, after the dims it is stacked over::

    "embed -> heads head_dim"        attention query
    "-> embed"                       norm scale, bias
    "layers | embed -> mlp"          stacked in a block

It lives in the metadata of an ``nnx.Param`` (``nnx.Param(value, dims="embed -> mlp")``), survives ``nnx.split``,
``nnx.eval_shape`` and ``nnx.vmap``, and optax copies it onto its moments. Knows nothing of meshes or models.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxpp import tree
from jaxpp.names import unknown

DIMS = (
    "batch", "seq", "embed", "heads", "kv_heads", "head_dim", "mlp", "vocab", "layers", "experts", "rank", "positions",
)  # fmt: skip
STACKED = ("layers", "experts")  # dims a weight may be stacked over
LOOKUPS = ("vocab", "positions")  # read dims that stand for a one-hot: a gather, not a product


@dataclass(frozen=True)
class Arrow:
    """The dims of one weight, in the order of its shape: stacked, then read, then written."""

    stacked: tuple[str, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]

    @property
    def dims(self) -> tuple[str, ...]:
        """All dims, one per axis of the array."""
        return self.stacked + self.reads + self.writes

    def __str__(self) -> str:
        arrow = " ".join((*self.reads, "->", *self.writes))
        return f"{' '.join(self.stacked)} | {arrow}" if self.stacked else arrow

    def is_lookup(self) -> bool:
        """Say whether the weight is a table read by a one-hot (an embedding)."""
        return any(dim in LOOKUPS for dim in self.reads)

    def sizes(self, shape: Sequence[int]) -> tuple[int, int, int]:
        """Return the products of the (stacked, read, written) sizes of an array of this arrow."""
        a, b = len(self.stacked), len(self.stacked) + len(self.reads)
        return math.prod(shape[:a]), math.prod(shape[a:b]), math.prod(shape[b:])

    def fan_in(self, shape: Sequence[int]) -> int:
        """Return the number of inputs summed into one output: the product of the read sizes, 1 for a lookup."""
        return 1 if self.is_lookup() else max(1, self.sizes(shape)[1])

    def stack(self, dim: str) -> Arrow:
        """Return the arrow of this weight stacked over `dim`, as the first axis."""
        return Arrow((dim, *self.stacked), self.reads, self.writes)

    def unstack(self) -> Arrow:
        """Return the arrow of one slice along the first stacked dim."""
        return Arrow(self.stacked[1:], self.reads, self.writes)


def parse(text: str, dims: Sequence[str] = ()) -> Arrow:
    """Parse an arrow.

    Args:
        text: e.g. ``"layers | embed -> heads head_dim"``.
        dims: names of your own that are allowed beside `DIMS`.

    Raises:
        ValueError: no ``->``, an unknown dim (the nearest is named), a dim twice on one side.

    Example:
        >>> parse("layers | embed -> heads head_dim").writes
        ('heads', 'head_dim')
    """
    left, arrow, writes = text.partition("->")
    if not arrow or "->" in writes or left.count("|") > 1 or "|" in writes:
        raise ValueError(f'arrow "{text}": write it "stacked | reads -> writes", e.g. "layers | embed -> mlp"')
    stacked, bar, reads = left.partition("|")
    groups = (stacked.split() if bar else [], (reads if bar else stacked).split(), writes.split())
    _check_words(text, groups, dims)
    return Arrow(*(tuple(group) for group in groups))


def _check_words(text: str, groups: Sequence[Sequence[str]], dims: Sequence[str]) -> None:
    known = (*DIMS, *dims)
    for word in (word for group in groups for word in group):
        if word not in known:
            problem = unknown(f'arrow "{text}": unknown dim', word, known)
            raise ValueError(f"{problem}; declare your own in the plan's dims")
    stacked, reads, writes = groups
    for side in ([*stacked, *reads], [*stacked, *writes]):
        twice = sorted({word for word in side if side.count(word) > 1})
        if twice:
            raise ValueError(f'arrow "{text}": dim "{twice[0]}" stands twice on one side; each may stand once')


def of(node: Any, path: str = "?", dims: Sequence[str] = ()) -> Arrow:
    """Read and check the arrow of one parameter.

    Args:
        node: an ``nnx.Variable`` that holds an array (or abstract array).
        path: its path, for the message.
        dims: names of your own beside `DIMS`.

    Raises:
        ValueError: no arrow, an arrow that does not parse, or one whose rank differs from the shape's.
    """
    text = node.get_metadata().get("dims") if tree.is_variable(node) else None
    shape = tuple(node.shape)
    if text is None:
        raise ValueError(
            f"parameter {path} of shape {shape} has no arrow; "
            'write nnx.Param(value, dims="reads -> writes") with one dim per axis'
        )
    try:
        arrow = parse(text, dims)
    except ValueError as error:
        raise ValueError(f"parameter {path}: {error}") from None
    if len(arrow.dims) != len(shape):
        raise ValueError(
            f'parameter {path}: arrow "{text}" names {len(arrow.dims)} dims, but the shape {shape} has {len(shape)}'
        )
    return arrow


def arrows(state: Any, dims: Sequence[str] = ()) -> dict[str, Arrow]:
    """Read the arrow of every parameter of a state.

    Args:
        state: an ``nnx.State`` or ``nnx.Module`` state of Params, concrete or abstract.
        dims: names of your own beside `DIMS`.

    Returns:
        Path to arrow, in the order of the state.

    Raises:
        ValueError: a weight without an arrow or with a wrong one; the message names its path.
    """
    return {path: of(node, path, dims) for path, node in tree.named_nodes(state).items()}


def moment_arrows(state: Any, params: Any, dims: Sequence[str] = ()) -> dict[str, Arrow | None]:
    """Read the arrows that optax copied onto its state.

    Args:
        state: an optax state over `params`, concrete or abstract.
        params: ``nnx.State`` of the weights.
        dims: names of your own beside `DIMS`.

    Returns:
        Path to arrow for every leaf of `state`; None for what has not its weight's shape: counters, and the factored
        moments of Adafactor, which carry their weight's arrow but not its dims.
    """
    shapes = {path: tuple(node.shape) for path, node in tree.named_nodes(params).items()}
    found: dict[str, Arrow | None] = {}
    for path, node in tree.named_nodes(state).items():
        words = path.split("/")
        weight = next((p for p in ("/".join(words[i:]) for i in range(len(words))) if p in shapes), None)
        fits = weight is not None and tree.is_variable(node) and tuple(node.shape) == shapes[weight]
        found[path] = of(node, path, dims) if fits else None
    return found


def param(value: Any, arrow: str | Arrow, **metadata: Any) -> nnx.Param:
    """Make an ``nnx.Param`` with its arrow, checked against the shape at once."""
    node = nnx.Param(value, dims=str(arrow), **metadata)
    of(node, "?", tuple(word for word in parse_words(str(arrow)) if word not in DIMS))
    return node


def parse_words(text: str) -> list[str]:
    """List the words of an arrow, known or not, in order."""
    return [word for word in text.replace("->", " ").replace("|", " ").split()]


def normal(
    key: jax.Array, arrow: str | Arrow, sizes: Mapping[str, int], scale: float = 1.0, dtype: Any = jnp.float32
) -> nnx.Param:
    """Draw a weight from a normal of standard deviation ``scale / sqrt(fan_in)``.

    Args:
        key: PRNG key.
        arrow: the weight's arrow.
        sizes: size of each dim.
        scale: factor on the fan-in deviation; for a lookup table it is the deviation itself.
        dtype: of the stored weight.

    Source: LeCun, Bottou, Orr, Mueller, Efficient BackProp, 1998, section 4.6.
    """
    arrow = parse(arrow, tuple(sizes)) if isinstance(arrow, str) else arrow
    shape = tuple(sizes[dim] for dim in arrow.dims)
    deviation = scale / np.sqrt(arrow.fan_in(shape))
    return nnx.Param((deviation * jax.random.normal(key, shape)).astype(dtype), dims=str(arrow))


def num_parameters(state: Any) -> int:
    """Count the parameters of a state, concrete or abstract."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state))


def flops_per_token(state: Any, seq_len: int, dims: Sequence[str] = (), active_experts: int = 0) -> int:
    """Count the floating-point operations of one token's forward and backward pass.

    ``6 x reads x writes`` for each weight that multiplies (2 forward, 4 backward), plus ``12 x heads x head_dim x
    seq_len`` per attention layer for scores and values, not halved for causality. A weight that is read a second way
    (a tied table: metadata ``also="embed -> vocab"``) counts for each. Recomputation does not count.

    Args:
        state: ``nnx.State`` of Params, concrete or abstract.
        seq_len: tokens that each token attends over.
        dims: names of your own beside `DIMS`.
        active_experts: experts that each token visits, where weights are stacked over ``experts``.

    Source: Chowdhery et al., PaLM, 2022, appendix B.
    """
    total = 0
    for path, node in tree.named_nodes(state).items():
        arrow, shape = of(node, path, dims), node.shape
        uses = [arrow, *([parse(node.get_metadata()["also"], dims)] if "also" in node.get_metadata() else [])]
        stacked = math.prod(
            active_experts if dim == "experts" and active_experts else size
            for dim, size in zip(arrow.stacked, shape, strict=False)
        )
        _, reads, writes = arrow.sizes(shape)
        total += sum(6 * stacked * reads * writes for use in uses if use.reads and not use.is_lookup())
        if arrow.reads == ("heads", "head_dim"):
            total += 12 * stacked * reads * seq_len
    return total
