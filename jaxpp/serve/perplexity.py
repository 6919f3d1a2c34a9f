"""How well a model predicts texts: perplexity and bits per byte, in windows that overlap, batched on a mesh."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxpp import tree
from jaxpp.data import Tokenizer
from jaxpp.model import ModelConfig
from jaxpp.parallel import executing


@dataclass(frozen=True)
class Score:
    """What was predicted, and how well.

    Args:
        num_tokens: tokens predicted.
        num_bytes: bytes of text that they stand for.
        nats: sum of ``-log p`` over them.
    """

    num_tokens: int = 0
    num_bytes: int = 0
    nats: float = 0.0

    def __add__(self, other: Score) -> Score:
        """Add up two texts."""
        return Score(self.num_tokens + other.num_tokens, self.num_bytes + other.num_bytes, self.nats + other.nats)

    @property
    def loss(self) -> float:
        """Mean loss of a token, in nats."""
        return self.nats / max(self.num_tokens, 1)

    @property
    def perplexity(self) -> float:
        """``exp(loss)``."""
        return math.exp(min(self.loss, 700.0))

    @property
    def bits_per_byte(self) -> float:
        """Comparable between tokenizers."""
        return self.nats / math.log(2) / max(self.num_bytes, 1)


@dataclass(frozen=True)
class Windows:
    """How a text longer than the model's context is cut.

    Args:
        size: tokens that a window predicts at most, its context and its new ones together.
        stride: new tokens of each window after the first; the others before them are context, not counted again.
        batch_size: windows run at once.

    Raises:
        ValueError: a stride that is not between 1 and the window's size.
    """

    size: int = 512
    stride: int = 256
    batch_size: int = 8

    def __post_init__(self) -> None:
        if self.size < 1 or self.batch_size < 1:
            raise ValueError(f"window {self.size}, batch size {self.batch_size}: 1 or more are needed")
        if not 1 <= self.stride <= self.size:
            raise ValueError(f"stride {self.stride}: 1 to the window's {self.size} is needed")

    def cut(self, ids: np.ndarray) -> Iterator[dict[str, np.ndarray]]:
        """Yield one row for each window over the ids of a text: the arrays of a `jaxpp.model.Batch`, ``[size]``."""
        num_targets, done = len(ids) - 1, 0
        while done < num_targets:
            end = min(num_targets, self.size if not done else done + self.stride)
            begin = max(0, end - self.size)
            length = end - begin
            row: dict[str, np.ndarray] = {
                name: np.zeros(self.size, np.int32) for name in ("tokens", "targets", "positions", "segments")
            }
            row["tokens"][:length], row["targets"][:length] = ids[begin:end], ids[begin + 1 : end + 1]
            row["positions"][:length], row["segments"][:length] = np.arange(length), 1
            row["weights"] = np.zeros(self.size, np.float32)
            row["weights"][done - begin : length] = 1
            yield row
            done = end


def windows_for(config: ModelConfig, size: int = 0, stride: int = 0, batch_size: int = 8) -> Windows:
    """Return windows of the sizes given; 0 stands for 512 tokens, or all that the model takes, and for half of that.

    Raises:
        ValueError: as `Windows`.
    """
    size = size or min(512, config.max_positions)
    return Windows(size, stride or max(size // 2, 1), batch_size)


def check_windows(windows: Windows, config: ModelConfig) -> None:
    """Refuse windows that are longer than a model's context.

    Raises:
        ValueError: both numbers.
    """
    if windows.size > config.max_positions:
        raise ValueError(f"a window of {windows.size} tokens; this model takes {config.max_positions} or fewer")


def score_texts(
    model: Any, tokenizer: Tokenizer, texts: Sequence[str], windows: Windows, max_tokens: int = 0
) -> list[Score]:
    """Score each text, as a document of its own.

    Args:
        model: a language model with ``loaded.execution``, as `jaxpp.load` returns it.
        tokenizer: of that model; where the model expects a begin of text, each text gets one.
        texts: what to predict; the first token of a text without a begin of text is context alone.
        windows: how long texts are cut.
        max_tokens: tokens of each text that are read at most; 0: all.

    Returns:
        One `Score` per text.

    Raises:
        ValueError: the window is longer than the model's context, or a loss is no number: names the weights that are
            not, if any.
    """
    check_windows(windows, model.config)
    encoded = [tokenizer.encode(text, begin=True)[: max_tokens or None] for text in texts]
    run, nats = _losses(model), np.zeros(len(texts))
    rows = ((number, row) for number, ids in enumerate(encoded) for row in windows.cut(ids))
    while chosen := list(itertools.islice(rows, windows.batch_size)):  # of one text and the next: no batch half empty
        numbers, batch = zip(*chosen, strict=True)
        np.add.at(nats, list(numbers), run(batch, windows.batch_size))
        if not np.isfinite(nats).all():
            wrong = int(np.flatnonzero(~np.isfinite(nats))[0])
            raise ValueError(f"the loss of text {wrong + 1} is {nats[wrong]}; not finite: {_not_finite(model)}")
    return [
        Score(max(len(ids) - 1, 0), _num_bytes(tokenizer, ids), float(one))
        for ids, one in zip(encoded, nats, strict=True)
    ]


def _not_finite(model: Any) -> str:
    """Name the weights that hold a NaN or an infinity."""
    named = tree.named_leaves(nnx.split(model, nnx.Param, ...)[1])
    return ", ".join(path for path, leaf in named.items() if not jnp.isfinite(leaf).all()) or "no weight"


def _num_bytes(tokenizer: Tokenizer, ids: np.ndarray) -> int:
    """Count the bytes that the tokens after the first stand for; a begin of text stands for none."""
    try:
        return int(tokenizer.token_bytes[ids[1:]].sum())
    except ValueError:  # not byte-level: such a tokenizer may write a space in front of a text
        return len(tokenizer.decode(ids).encode()) - len(tokenizer.decode(ids[:1]).encode())


def _losses(model: Any) -> Callable[[Sequence[dict[str, np.ndarray]], int], np.ndarray]:
    """Return the function that gives the loss of each row; rows are filled up to a batch size."""
    graph, state = nnx.split(model)
    execution = model.loaded.execution
    layout = execution.layout
    shards = layout.num_shards("batch", "residual")

    @partial(jax.jit, out_shardings=layout.replicated())
    def losses(state: Any, batch: Any) -> jax.Array:
        with executing(execution):
            loaded = nnx.merge(graph, state)
            one_row = jnp.eye(len(batch["weights"]))[:, :, None] * batch["weights"]
            # The loss of a batch is a weighted sum: only that sum, not what it is of, is computed for each row.
            return jax.vmap(lambda weights: loaded.loss({**batch, "weights": weights})[0])(one_row)

    def run(rows: Sequence[dict[str, np.ndarray]], batch_size: int) -> np.ndarray:
        missing = max(batch_size, len(rows)) - len(rows)
        missing += -(len(rows) + missing) % shards
        empty = {name: np.zeros_like(x) for name, x in rows[0].items()}
        batch = {name: np.stack([row[name] for row in [*rows, *[empty] * missing]]) for name in empty}
        return np.asarray(losses(state, jax.device_put(batch, layout.batch_sharding(2))))[: len(rows)]

    return run
