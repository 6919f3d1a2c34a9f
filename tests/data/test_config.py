"""Every field that is out of range is refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxpp.data import CorpusConfig, DataConfig


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0; 1 or more"),
        ({"batch_size": -4}, "batch_size is -4"),
        ({"seq_len": 1}, "seq_len is 1; 2 or more"),
        ({"held_out": 1.0}, "held_out is 1.0"),
        ({"held_out": -0.1}, "held_out is -0.1"),
        ({"held_out": float("nan")}, "held_out is nan"),
        ({"vocab_size": 256}, "vocab_size is 256; 257 or more"),
        ({"seed": -1}, "seed is -1"),
        ({"max_documents": 0}, "max_documents is 0"),
        ({"tokenizer": ""}, "tokenizer is empty"),
        ({"corpora": ()}, "corpora is empty"),
    ],
)
def test_out_of_range_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        DataConfig(**changes)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("weight", [0.0, -1.0, float("inf"), float("nan")])
def test_weight_must_be_positive(weight: float) -> None:
    with pytest.raises(ValueError, match="positive"):
        CorpusConfig("stdlib", weight)


def test_empty_source_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a source"):
        CorpusConfig("")


def test_cache_is_the_users_own_unless_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert DataConfig().cache_path == Path("/elsewhere/jaxpp")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert DataConfig().cache_path == Path.home() / ".cache" / "jaxpp"
    assert DataConfig(cache_dir="here").cache_path == Path("here")
