"""The proof: source and target on the same tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxpp.serve.generate import greedy
from jaxpp.serve.perplexity import Score, Windows, score_texts

NUM_GREEDY = 32
PROMPT = 32  # tokens that are continued


@dataclass(frozen=True, eq=False)
class Said:
    """What one model says of some tokens.

    Args:
        logits: ``[batch, seq, vocab]`` fp32.
        greedy: ids with which it continues the first tokens of the first row.
        score: of a text, if one was given.
    """

    logits: np.ndarray
    greedy: tuple[int, ...]
    score: Score | None = None


@dataclass(frozen=True)
class Proof:
    """How far two models are apart.

    Args:
        gap: largest difference of two logits.
        largest: largest logit of the source, in absolute value.
        bound: largest ``gap / largest`` that is promised; infinite where nothing is.
        before: score of the source on a text, if one was given.
        after: that of the target.
        greedy_before: what the source continues with.
        greedy_after: what the target does.
    """

    gap: float
    largest: float
    bound: float
    before: Score | None
    after: Score | None
    greedy_before: tuple[int, ...]
    greedy_after: tuple[int, ...]

    @property
    def relative(self) -> float:
        """The gap over the largest logit."""
        return self.gap / max(self.largest, 1e-30)

    @property
    def holds(self) -> bool:
        """Whether the gap is within the bound."""
        return self.relative <= self.bound

    @property
    def num_equal(self) -> int:
        """How many greedy tokens are equal before the first that is not."""
        pairs = zip(self.greedy_before, self.greedy_after, strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), len(self.greedy_before))


def ask(
    model: Any,
    tokens: Any,
    *,
    like: Said | None = None,
    text: str = "",
    num_greedy: int = NUM_GREEDY,
    max_tokens: int = 4096,
) -> Said:
    """Run one model: logits of the tokens, a greedy continuation, the loss on a text.

    Args:
        model: a decoder.
        tokens: ``[batch, seq]`` ids.
        like: what another model said; its continuation is then tried in one pass, up to the first token that this model
            would not have taken.
        text: to be scored; needs the model's tokenizer.
        num_greedy: tokens to continue the first tokens of the first row with, as far as the longest sequence allows.
        max_tokens: of the text.
    """
    rows = np.asarray(tokens, np.int32)
    prompt = rows[0, :PROMPT].tolist()
    continued = _continue(model, prompt, num_greedy) if like is None else _follow(model, prompt, like.greedy)
    score = None
    if text:
        size = min(256, model.config.max_positions)
        score = score_texts(model, model.tokenizer, [text], Windows(size, size, 1), max_tokens)[0]
    return Said(_whole(model(rows)), continued, score)


def _continue(model: Any, prompt: list[int], count: int) -> tuple[int, ...]:
    room = min(count, model.config.max_positions - len(prompt))
    if room < 1:
        return ()
    return tuple(greedy(model, prompt, room, model.loaded.execution if model.loaded else None))


def _follow(model: Any, prompt: list[int], continuation: tuple[int, ...]) -> tuple[int, ...]:
    """Return the greedy continuation as far as another model's goes along, and the first token that differs."""
    if not continuation:
        return ()
    logits = _whole(model(np.asarray([[*prompt, *continuation]], np.int32)))[0]
    own = logits[len(prompt) - 1 : -1].argmax(-1).tolist()
    equal = next((i for i, pair in enumerate(zip(own, continuation, strict=True)) if len(set(pair)) > 1), len(own))
    return tuple(own[: equal + 1])


def _whole(x: jax.Array) -> np.ndarray:
    """Return an array on every host."""
    if x.is_fully_addressable:
        return np.asarray(x)
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(x, tiled=True))


def compare(before: Said, after: Said, bound: float = math.inf) -> Proof:
    """Compare what two models said; of a larger vocabulary the old tokens."""
    vocab = before.logits.shape[-1]
    gap = float(np.abs(after.logits[..., :vocab] - before.logits).max())
    largest = float(np.abs(before.logits).max())
    return Proof(gap, largest, bound, before.score, after.score, before.greedy, after.greedy)


def check(source: Any, target: Any, tokens: Sequence[Sequence[int]] | Any, *, bound: float = 2e-6) -> Proof:
    """Compare two models on the same tokens.

    Args:
        source: a decoder.
        target: a decoder that should compute the same.
        tokens: ``[batch, seq]`` ids.
        bound: largest difference of logits that is accepted, over the largest logit.

    Returns:
        The proof; ``.holds``, ``.gap``, ``.relative``.

    Example:
        >>> from flax import nnx
        >>> from jaxpp.models import DecoderConfig
        >>> small = DecoderConfig(vocab_size=32, num_layers=1, embed_dim=16, num_heads=2).build(nnx.Rngs(0))
        >>> check(small, small, [[1, 2, 3]]).holds
        True
    """
    before = ask(source, tokens)
    return compare(before, ask(target, tokens, like=before), bound)
