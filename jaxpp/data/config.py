"""What to read, how to cut it, how to feed it: the data part of a run."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

BYTE_TOKENS = 256
"""Number of tokens that every byte-level vocabulary holds before its first merge."""


@dataclass(frozen=True)
class CorpusConfig:
    """Name one corpus of a mixture.

    Raises:
        ValueError: the source is empty, or the weight is not a positive finite number.
    """

    source: str = "stdlib"  # "stdlib", "pydoc", a file, a directory or a glob; *.jsonl is JSONL
    weight: float = 1.0  # share of the training rows, relative to the other corpora
    text_field: str = "text"  # key of the text in a JSONL line

    def __post_init__(self) -> None:
        if not self.source:
            raise ValueError("a corpus needs a source: stdlib, pydoc, a file, directory or glob")
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise ValueError(
                f"corpus {self.source!r} has weight {self.weight}; a weight is a positive number, "
                "so remove the corpus to leave it out"
            )


@dataclass(frozen=True)
class DataConfig:
    """Describe the data of a run.

    Raises:
        ValueError: a field is out of its range.
    """

    corpora: tuple[CorpusConfig, ...] = (CorpusConfig(),)  # the mixture
    seq_len: int = 512  # tokens per row
    batch_size: int = 32  # rows per step, over all processes
    tokenizer: str = "bpe"  # "bpe" (train one), "bytes", or the path of a tokenizer.json
    vocab_size: int = 4096  # tokens, the upper bound for a tokenizer trained here
    held_out: float = 0.05  # fraction of the documents kept for evaluation, in [0, 1)
    seed: int = 0  # of the held-out split and the row order, in [0, 2**32)
    max_documents: int | None = None  # documents read of each corpus; None reads all
    cache_dir: str | None = None  # directory of tokenised corpora; None is the user's cache

    def __post_init__(self) -> None:
        if not self.corpora:
            raise ValueError("data.corpora is empty; name at least one corpus, such as stdlib")
        _at_least("seq_len", self.seq_len, 2)
        _at_least("batch_size", self.batch_size, 1)
        if self.tokenizer == "bpe":
            _at_least("vocab_size", self.vocab_size, BYTE_TOKENS + 1)
        if self.max_documents is not None:
            _at_least("max_documents", self.max_documents, 1)
        if not self.tokenizer:
            raise ValueError("data.tokenizer is empty; give bpe, bytes or a tokenizer.json")
        if not 0 <= self.held_out < 1:
            raise ValueError(f"data.held_out is {self.held_out}; a fraction in [0, 1) is needed")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"data.seed is {self.seed}; a number in [0, {2**32}) is needed")

    @property
    def cache_path(self) -> Path:
        """Return the directory that holds tokenised corpora."""
        if self.cache_dir is not None:
            return Path(self.cache_dir).expanduser()
        root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        return Path(root) / "jaxpp"


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"data.{name} is {value}; {least} or more is needed")
