"""What is asked of the engine and what it answers: plain data, no arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Literal

MAX_STOPS = 16
"""Most stop strings of a request, and most stop ids; each is looked for at every token."""

MAX_LOGPROBS = 20
"""Most alternatives whose log-probabilities a request may ask for."""

MAX_BIASES = 1024
"""Most tokens whose logits a request may shift."""

Finish = Literal["stop", "length", "cancelled", "timeout", "error"]


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn, and when to stop.

    In the order of the reference sampler: biases and penalties, temperature, top-k, top-p, min-p.

    Raises:
        ValueError: a value out of its range, with the range.
    """

    max_tokens: int = 100  # most tokens to add
    temperature: float = 1.0  # 0: the largest logit, the lowest id among equals
    top_k: int = 0  # draw among the largest k, and what equals the k-th; 0 or -1: all
    top_p: float = 1.0  # draw among the fewest whose probabilities reach this sum; the one that crosses it counts
    min_p: float = 0.0  # drop what is less probable than this share of the most probable
    repetition_penalty: float = 1.0  # of ids in prompt or answer: positive logits divided, negative multiplied, once
    presence_penalty: float = 0.0  # subtracted from the logits of ids in the answer, once
    frequency_penalty: float = 0.0  # subtracted for each time an id is in the answer
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # added to the logits of single ids
    seed: int | None = None  # of the draws; they do not depend on what else runs. None: one is drawn
    min_tokens: int = 0  # ends and stops are not heeded before
    stop: tuple[str, ...] = ()  # texts that end the answer; they are not part of it
    stop_ids: tuple[int, ...] = ()  # ids that end it, beside the tokenizer's own
    ignore_ends: bool = False  # go on after the tokenizer's end of text
    logprobs: int | None = None  # with each token its log-probability, and this many alternatives; None: neither

    def __post_init__(self) -> None:
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if not (isinstance(value, int | float) and math.isfinite(value) and low <= value <= high):
                most = f"to {high:g}" if math.isfinite(high) else "or more"
                raise ValueError(f"{name} {value}: {low:g} {most} is needed")
        if self.repetition_penalty <= 0:
            raise ValueError(
                f"repetition_penalty {self.repetition_penalty}: more than 0 is needed; 1 penalises nothing"
            )
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise ValueError(f"logprobs {self.logprobs}: 0 to {MAX_LOGPROBS} is needed")
        if len(self.stop) > MAX_STOPS:
            raise ValueError(f"stop holds {len(self.stop)} texts; {MAX_STOPS} or fewer are taken")
        if len(self.stop_ids) > MAX_STOPS:
            raise ValueError(f"stop_ids holds {len(self.stop_ids)} ids; {MAX_STOPS} or fewer are taken")
        if "" in self.stop:
            raise ValueError("stop holds an empty text, which would end every answer; leave it out")
        if len(self.logit_bias) > MAX_BIASES:
            raise ValueError(f"logit_bias names {len(self.logit_bias)} tokens; {MAX_BIASES} or fewer are taken")
        for index, bias in self.logit_bias.items():
            if not -100 <= bias <= 100:
                raise ValueError(f"logit_bias of token {index} is {bias}: -100 to 100 is needed")
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} is more than max_tokens {self.max_tokens}")


_RANGES: tuple[tuple[str, float, float], ...] = (
    ("max_tokens", 1, math.inf),
    ("min_tokens", 0, math.inf),
    ("temperature", 0, 100),
    ("top_k", -1, math.inf),
    ("top_p", 0, 1),
    ("min_p", 0, 1),
    ("repetition_penalty", 0, 100),
    ("presence_penalty", -2, 2),
    ("frequency_penalty", -2, 2),
)
assert {name for name, *_ in _RANGES} <= {one.name for one in fields(Sampling)}


@dataclass(frozen=True)
class Token:
    """One token of an answer.

    Args:
        id: of the vocabulary.
        logprob: natural logarithm of its probability under the model, before temperature and cuts; None: not asked.
        top: the most probable ids and theirs, most probable first.
    """

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Delta:
    """What a request has become since the last one.

    Args:
        text: whole characters that are certain to belong to the answer.
        tokens: drawn since the last one; their text may come later.
        finish: why it ended; None: it has not.
        error: what went wrong, where `finish` is ``"error"``.
    """

    text: str = ""
    tokens: tuple[Token, ...] = ()
    finish: Finish | None = None
    error: str = ""


class QueueFull(ValueError):
    """There is no room in the queue; try again later."""
