"""Evaluation on held-out documents: loss per token, and bits per byte, which does not depend on the tokenizer."""

from __future__ import annotations

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpp.data import Data
from jaxpp.train.programs import AnyProgram


def evaluate(program: AnyProgram, state: Any, data: Data, batch_size: int, num_batches: int = 0) -> dict[str, Any]:
    """Evaluate on held-out documents, each token with the context of its own document and row.

    Args:
        program: the training program.
        state: its state; it is not changed.
        data: corpora with held-out documents.
        batch_size: rows per batch; the last batch is filled up with rows of weight 0.
        num_batches: batches to use, always the same ones; 0: all.

    Returns:
        ``loss`` (nats per predicted token), ``tokens`` predicted, ``bits_per_byte`` and the ``bytes`` they stand for;
        these two are None where the tokenizer cannot say how many bytes a token stands for.

    Raises:
        ValueError: nothing is held out.
    """
    if data.num_held_out_tokens == 0:
        raise ValueError("there are no held-out documents to evaluate on; set data.held_out above 0")
    rows, count = program.rows(batch_size), _byte_counter(program, data)
    sums = np.zeros(3)
    for batch in itertools.islice(data.held_out_batches(batch_size, rows), num_batches or None):
        placed = program.place(dict(batch), rows, batch_size)
        total, weight = program.evaluate(state, placed)
        sums += [float(total), float(weight), float(count(placed)) if count else 0.0]
    total, weight, num_bytes = sums
    return {
        "loss": total / weight,
        "tokens": int(weight),
        "bits_per_byte": total / math.log(2) / num_bytes if count else None,
        "bytes": int(num_bytes) if count else None,
    }


def _byte_counter(program: AnyProgram, data: Data) -> Any:
    """Return a function from a placed batch to the number of bytes that its targets stand for; None if unknown."""
    try:
        table = np.asarray(data.tokenizer.token_bytes, np.int32)
    except ValueError:  # a tokenizer that rewrites the text: its tokens have no bytes of their own
        return None

    def count(batch: Any) -> jax.Array:
        return jnp.sum(jnp.where(batch["weights"] > 0, jnp.asarray(table)[batch["targets"]], 0))

    return jax.jit(count, out_shardings=program.layout.replicated())
