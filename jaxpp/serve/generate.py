"""Sampling by a plain loop: the whole sequence is run again for each token, at one compiled shape."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxpp.parallel import Execution, executing


def choose(logits: jax.Array, key: jax.Array, temperature: float, top_k: int) -> jax.Array:
    """Draw one token.

    Args:
        logits: ``[vocab]``, fp32.
        key: PRNG key.
        temperature: 0 takes the largest logit (the lowest id among equals).
        top_k: draw among the `top_k` largest; 0: among all.
    """
    if temperature == 0:
        return jnp.argmax(logits)
    if top_k:
        logits = jnp.where(logits < jax.lax.top_k(logits, min(top_k, logits.size))[0][-1], -jnp.inf, logits)
    return jax.random.categorical(key, logits / temperature)


def generate(
    model: nnx.Module,
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    max_positions: int,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
    end_of_text: int | None = None,
    execution: Execution | None = None,
) -> Iterator[int]:
    """Continue a prompt, token by token.

    Args:
        model: anything that maps a batch to logits ``[batch, seq, vocab]``.
        prompt: token ids, at least one.
        max_new_tokens: most tokens to add.
        max_positions: longest sequence the model takes.
        temperature: 0 is greedy.
        top_k: 0: no cut.
        seed: of the draws; the key of a token is folded by its position.
        end_of_text: stop at this id.
        execution: layout and kernels; none for a single device.

    Raises:
        ValueError: an empty prompt, or a prompt and continuation longer than the model takes.
    """
    if not prompt:
        raise ValueError("the prompt is empty; give at least one token")
    length, room = len(prompt) + max_new_tokens, max_positions - len(prompt)
    if room < 1:
        raise ValueError(
            f"the prompt has {len(prompt)} tokens, but the model takes {max_positions} with what it adds; "
            f"cut the prompt to {max_positions - 1} tokens or fewer"
        )
    if not 1 <= max_new_tokens <= room:
        raise ValueError(
            f"max_new_tokens {max_new_tokens} after a prompt of {len(prompt)} tokens; the model's {max_positions} "
            f"positions leave room for 1 to {room}"
        )
    graph, state = nnx.split(model)
    execution = execution or Execution()
    # One row for each batch shard, all alike: one row alone does not split over a data or fsdp axis.
    rows = execution.layout.num_shards("batch", "residual") if execution.layout else 1

    @jax.jit
    def following(state: Any, tokens: jax.Array, at: jax.Array) -> jax.Array:
        with executing(execution):
            batch = {
                "tokens": jnp.broadcast_to(tokens, (rows, length)),
                "positions": jnp.broadcast_to(jnp.arange(length), (rows, length)),
            }
            logits = nnx.merge(graph, state)(batch)[0, at]
            return choose(logits, jax.random.fold_in(jax.random.key(seed), at), temperature, top_k)

    tokens = np.zeros(length, np.int32)
    tokens[: len(prompt)] = prompt
    return _continue(following, state, tokens, len(prompt), end_of_text)


def _continue(following: Any, state: Any, tokens: np.ndarray, start: int, end: int | None) -> Iterator[int]:
    for at in range(start, len(tokens)):
        token = int(following(state, tokens, at - 1))
        if token == end:
            return
        tokens[at] = token
        yield token
