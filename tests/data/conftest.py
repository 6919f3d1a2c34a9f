"""Tiny corpora for the data tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from jaxpp.data import CorpusConfig, DataConfig

WORDS = ["the", "cat", "sat", "on", "a mat", "while", "günther", "naïvely", "drank", "東京", "🙂\n"]


def random_text(random: np.random.Generator, num_words: int) -> str:
    """Return words in random order."""
    return " ".join(random.choice(WORDS, num_words))


@pytest.fixture
def corpus_dir(tmp_path: Path) -> Callable[..., str]:
    """Return a writer of directories with random text files of uneven length."""

    def write(name: str = "corpus", documents: int = 12, words: int = 60, seed: int = 0) -> str:
        random = np.random.default_rng(seed)
        (tmp_path / name).mkdir()
        for number in range(documents):
            text = random_text(random, int(random.integers(1, words)))
            (tmp_path / name / f"{number:03}.txt").write_text(text, encoding="utf-8")
        return str(tmp_path / name)

    return write


@pytest.fixture
def data_config(tmp_path: Path, corpus_dir: Callable[..., str]) -> Callable[..., DataConfig]:
    """Return a maker of small configs with a cache of their own."""

    def make(sources: tuple[str, ...] = (), **changes: object) -> DataConfig:
        corpora = tuple(map(CorpusConfig, sources)) or (CorpusConfig(corpus_dir()),)
        settings = {"seq_len": 16, "batch_size": 4, "tokenizer": "bytes", "held_out": 0.25}
        settings |= {"cache_dir": str(tmp_path / "cache"), "corpora": corpora}
        return DataConfig(**(settings | changes))

    return make
