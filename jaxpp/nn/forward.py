"""Run a language model on tokens: what a call of a model does, compiled once per shape."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxpp.model import Model
from jaxpp.parallel import Execution, current, executing

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int


def positions_within(segments: Int[Array, "batch seq"]) -> Int[Array, "batch seq"]:
    """Count the tokens of each run of equal segments from 0.

    Example:
        >>> positions_within(jnp.array([[0, 0, 1, 1, 1, 2]])).tolist()
        [[0, 1, 0, 1, 2, 0]]
    """
    at = jnp.broadcast_to(jnp.arange(segments.shape[1], dtype=jnp.int32), segments.shape)
    begins = jnp.concatenate([jnp.ones_like(segments[:, :1], bool), segments[:, 1:] != segments[:, :-1]], axis=1)
    return at - jax.lax.cummax(jnp.where(begins, at, 0), axis=1)


def forward(
    model: Model,
    tokens: Int[Array, "batch seq"],
    positions: Int[Array, "batch seq"] | None = None,
    segments: Int[Array, "batch seq"] | None = None,
    *,
    vocab_size: int,
    max_positions: int | None = None,
    execution: Execution | None = None,
) -> Float[Array, "batch seq vocab"]:
    """Return the logits of the next token at every position.

    Args:
        model: embeds, runs and reads out.
        tokens: ids.
        positions: of each token in its document; by default they are counted within each segment.
        segments: document of each token, 0 for padding; by default each row is one document.
        vocab_size: ids from here on are refused, where `tokens` lies on the host.
        max_positions: a longer sequence is refused (learned positions end there); None: any length.
        execution: layout and kernels; by default those in force. A batch that does not split over the layout's batch
            shards is filled up with copies of its first row, which are cut off again.

    Raises:
        ValueError: as said, with numbers.
    """
    if not isinstance(tokens, jax.Array):
        tokens = np.asarray(tokens, np.int32)
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < vocab_size:
            raise ValueError(f"token ids {tokens.min()} to {tokens.max()}; this model takes 0 to {vocab_size - 1}")
    if tokens.ndim != 2:
        raise ValueError(f"tokens of shape {tuple(tokens.shape)}; [batch, seq] is needed")
    if max_positions is not None and tokens.shape[1] > max_positions:
        raise ValueError(f"a sequence of {tokens.shape[1]} tokens; this model takes {max_positions}")
    batch = {"tokens": tokens, "positions": positions, "segments": segments}
    graph, state = nnx.split(model)
    given = {name: jnp.asarray(x) for name, x in batch.items() if x is not None}
    return _logits(graph, execution or current(), state, given)[..., :vocab_size]


@partial(jax.jit, static_argnums=(0, 1))
def _logits(graph: Any, execution: Execution, state: Any, batch: dict[str, jax.Array]) -> jax.Array:
    num_rows, seq = batch["tokens"].shape
    shards = execution.layout.num_shards("batch", "residual") if execution.layout else 1
    batch = {name: _filled_up(x, shards) for name, x in batch.items()}
    if "positions" not in batch:
        at = jnp.broadcast_to(jnp.arange(seq, dtype=jnp.int32), batch["tokens"].shape)
        batch["positions"] = positions_within(batch["segments"]) if "segments" in batch else at
    with executing(execution):
        model = nnx.merge(graph, state)
        return model.logits(model.run(model.embed(batch), batch))[:num_rows]


def _filled_up(x: jax.Array, multiple: int) -> jax.Array:
    missing = -len(x) % multiple
    return jnp.concatenate([x, jnp.repeat(x[:1], missing, axis=0)]) if missing else x
