"""A larger vocabulary: rows for new tokens, each the mean of the old ones."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from jaxpp.grow.leaf import Leaf
from jaxpp.grow.spread import NONE, Spread
from jaxpp.grow.step import Step, by_dims
from jaxpp.models import DecoderConfig

ROWS = {"tokens/table": 0, "head/kernel": 1}  # weights with a row for each token, and the axis


def vocab(config: DecoderConfig, *, vocab_size: int) -> Step:
    """Add tokens behind the old ones; rows that only filled a table up (``vocab_rows``) go.

    What is preserved are the logits of the old tokens, for texts of old tokens. Probabilities are not: new tokens take
    some of the mass, all of them together at most their share of the vocabulary where logits have no soft cap, because
    the exponential of a mean logit is at most the mean of the exponentials. New rows begin equal and separate at once,
    as each is read, and predicted, where its own token stands.

    Args:
        config: of the model.
        vocab_size: the new number of tokens.

    Raises:
        ValueError: fewer tokens than there are.

    Source: Hewitt, Initializing New Word Embeddings for Pretrained Language Models, 2021.
    """
    old = config.vocab_size
    if vocab_size < old:
        raise ValueError(f"vocab_size {vocab_size}: {old} or more are needed, models only grow")
    spread = Spread(old, np.concatenate([np.arange(old), np.full(vocab_size - old, NONE)]))
    whole = replace(config, vocab_rows=0)
    changes = {path: dict(tail="mean") for path in ROWS}
    step = by_dims("vocab", whole, replace(whole, vocab_size=vocab_size), {("vocab", old): spread}, changes=changes)
    if config.table_rows == old:
        return replace(step, source=config)
    real = {path: _Real(step.leaves[path], old, axis) for path, axis in ROWS.items() if path in step.leaves}
    return replace(step, source=config, leaves={**step.leaves, **real})


@dataclass(frozen=True, eq=False)
class _Real:
    """A leaf over the rows that stand for tokens."""

    leaf: Leaf
    num_rows: int
    axis: int

    @property
    def source(self) -> str:
        return self.leaf.source

    def _cut(self, x: jax.Array) -> jax.Array:
        return jax.lax.slice_in_dim(x, 0, self.num_rows, axis=self.axis)

    def weight(self, x: jax.Array, dtype: jnp.dtype) -> jax.Array:
        return self.leaf.weight(self._cut(x), dtype)

    def moment(self, x: jax.Array, power: int) -> jax.Array:
        return self.leaf.moment(self._cut(x), power)

    def rate(self) -> float:
        return self.leaf.rate()
