"""Greedy decoding by the plain loop, which runs the whole sequence again for each token: the oracle of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxpp.parallel import Execution, executing


def greedy(model: Any, prompt: Sequence[int], count: int, execution: Execution | None = None) -> list[int]:
    """Return the `count` tokens with the largest logits, each after all before it; one compiled shape, no cache.

    Args:
        model: a language model; it is left as it is.
        prompt: token ids, at least one.
        count: tokens to add.
        execution: layout and kernels; none for a single device.
    """
    graph, state = nnx.split(model)
    execution, length = execution or Execution(), len(prompt) + count
    # One row for each batch shard, all alike: one row alone does not split over a data or fsdp axis.
    rows = execution.layout.num_shards("batch", "residual") if execution.layout else 1

    @jax.jit
    def following(state: Any, tokens: jax.Array, at: jax.Array) -> jax.Array:
        with executing(execution):
            batch = {
                "tokens": jnp.broadcast_to(tokens, (rows, length)),
                "positions": jnp.broadcast_to(jnp.arange(length), (rows, length)),
            }
            model = nnx.merge(graph, state)
            last = jax.lax.dynamic_slice_in_dim(model.run(model.embed(batch), batch), at, 1, axis=1)
            return jnp.argmax(model.logits(last)[0, 0, : model.config.vocab_size])

    tokens = np.zeros(length, np.int32)
    tokens[: len(prompt)] = prompt
    for at in range(len(prompt), length):
        tokens[at] = int(following(state, tokens, at - 1))
    return tokens[len(prompt) :].tolist()
