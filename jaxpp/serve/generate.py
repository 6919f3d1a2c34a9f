"""Sampling by a plain loop: the whole sequence is run again for each token, at one compiled shape."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
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
    model: Any,
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    max_positions: int,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
    ends: Collection[int] = (),
    num_tokens: int | None = None,
    execution: Execution | None = None,
) -> Iterator[int]:
    """Continue a prompt, token by token.

    Args:
        model: a language model.
        prompt: token ids, at least one.
        max_new_tokens: most tokens to add.
        max_positions: longest sequence the model takes.
        temperature: 0 is greedy.
        top_k: 0: no cut.
        seed: of the draws; the key of a token is folded by its position.
        ends: stop at any of these ids.
        num_tokens: ids from here on, rows that only fill the table up, are never drawn; None: all may be.
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
            model = nnx.merge(graph, state)
            last = jax.lax.dynamic_slice_in_dim(model.run(model.embed(batch), batch), at, 1, axis=1)
            logits = model.logits(last)[0, 0]
            logits = logits if num_tokens is None else jnp.where(jnp.arange(logits.size) < num_tokens, logits, -jnp.inf)
            return choose(logits, jax.random.fold_in(jax.random.key(seed), at), temperature, top_k)

    tokens = np.zeros(length, np.int32)
    tokens[: len(prompt)] = prompt
    return _continue(following, state, tokens, len(prompt), ends)


def _continue(following: Any, state: Any, tokens: np.ndarray, start: int, ends: Collection[int]) -> Iterator[int]:
    for at in range(start, len(tokens)):
        token = int(following(state, tokens, at - 1))
        if token in ends:
            return
        tokens[at] = token
        yield token
