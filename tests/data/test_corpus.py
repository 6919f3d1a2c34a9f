"""Tokenised corpora: the split, the tokens, and what the cache does when it is not whole."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from jaxpp.data import CorpusConfig, DataConfig, Tokenizer, open_data, read_documents
from jaxpp.data import corpus as corpus_module
from jaxpp.data.corpus import TokenSplit, held_out_documents, text_pieces


def split_texts(split: TokenSplit, tokenizer: Tokenizer) -> list[str]:
    """Return the documents of a split, each checked to end with the end of text."""
    bounds = split.offsets.tolist()
    documents = [split.tokens[start:end] for start, end in pairwise(bounds)]
    assert all(document[-1] == tokenizer.end_of_text for document in documents)
    return [tokenizer.decode(document[:-1]) for document in documents]


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_splits_are_disjoint_and_lose_nothing(data_config: Callable[..., DataConfig], tokenizer: str) -> None:
    config = data_config(tokenizer=tokenizer, vocab_size=300)
    data = open_data(config)
    (corpus,) = data.corpora
    texts = [document.text for document in read_documents(config.corpora[0])]
    is_held_out = corpus.survey.held_out
    train = [text for text, held in zip(texts, is_held_out, strict=True) if not held]
    held_out = [text for text, held in zip(texts, is_held_out, strict=True) if held]
    assert train and held_out
    assert split_texts(corpus.train, data.tokenizer) == train
    assert split_texts(corpus.held_out, data.tokenizer) == held_out
    assert data.num_train_tokens == sum(len(data.tokenizer.encode(t)) + 1 for t in train)
    assert data.num_held_out_tokens == sum(len(data.tokenizer.encode(t)) + 1 for t in held_out)
    assert isinstance(corpus.train.tokens, np.memmap) and corpus.train.tokens.dtype == np.uint16


def test_split_is_stable_and_about_the_fraction() -> None:
    names = [f"{number}.txt" for number in range(2000)]
    chosen = held_out_documents(names, 0.1, seed=0)
    assert 150 < chosen.sum() < 250
    assert np.array_equal(held_out_documents(names[500:], 0.1, seed=0), chosen[500:])
    assert not np.array_equal(held_out_documents(names, 0.1, seed=1), chosen)


def test_each_side_gets_a_document() -> None:
    for seed in range(20):
        for fraction in (1e-9, 0.5, 0.999999):
            assert sorted(held_out_documents(["a", "b"], fraction, seed)) == [False, True]
        assert not held_out_documents(["a", "b"], 0.0, seed).any()


def test_one_document_cannot_be_held_out(tmp_path: Path, data_config: Callable[..., DataConfig]) -> None:
    (tmp_path / "a.txt").write_text("only one")
    source = str(tmp_path / "a.txt")
    with pytest.raises(ValueError, match=r"holds 1 document.*or held_out: 0"):
        open_data(data_config((source,)))
    data = open_data(data_config((source,), held_out=0.0))
    assert data.num_train_tokens == 9 and data.num_held_out_tokens == 0
    assert data.num_held_out_batches(4) == 0 and not list(data.held_out_batches(4))


def test_tokenizer_is_trained_on_training_documents_only(
    tmp_path: Path, data_config: Callable[..., DataConfig]
) -> None:
    (tmp_path / "two").mkdir()
    for name in ("a", "b"):
        (tmp_path / "two" / name).write_text(f"word{name} " * 50)
    data = open_data(data_config((str(tmp_path / "two"),), tokenizer="bpe", vocab_size=300))
    trained, unseen = ("b", "a") if data.corpora[0].survey.held_out[0] else ("a", "b")
    assert len(data.tokenizer.encode(f"word{trained}")) < len(data.tokenizer.encode(f"word{unseen}"))


def test_max_documents_counts_each_corpus(
    corpus_dir: Callable[..., str], data_config: Callable[..., DataConfig]
) -> None:
    sources = (corpus_dir("one"), corpus_dir("two"))
    data = open_data(data_config(sources, max_documents=5))
    assert [len(corpus.survey.held_out) for corpus in data.corpora] == [5, 5]


def test_long_documents_are_encoded_in_pieces(
    tmp_path: Path, data_config: Callable[..., DataConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus_module, "PIECE_CHARACTERS", 50)
    monkeypatch.setattr(corpus_module, "_BATCH_CHARACTERS", 120)
    text = "\n".join("x" * (number % 70) for number in range(80))
    pieces = list(text_pieces(text))
    assert "".join(pieces) == text and max(map(len, pieces)) == 50 and len(pieces) > 40
    (tmp_path / "long").mkdir()
    for name in ("a", "b"):
        (tmp_path / "long" / name).write_text(text)
    data = open_data(data_config((str(tmp_path / "long"),), tokenizer="bpe", vocab_size=270))
    (corpus,) = data.corpora
    assert split_texts(corpus.train, data.tokenizer) == [text]
    assert split_texts(corpus.held_out, data.tokenizer) == [text]


def contents(directory: Path) -> dict[Path, tuple[int, bytes]]:
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {path: (path.stat().st_ino, path.read_bytes()) for path in files}


def test_second_open_reuses_the_cache(data_config: Callable[..., DataConfig], tmp_path: Path) -> None:
    config = data_config(tokenizer="bpe", vocab_size=300)
    first = open_data(config)
    before = contents(tmp_path / "cache")
    second = open_data(config)
    assert contents(tmp_path / "cache") == before
    assert first.fingerprint == second.fingerprint
    assert first.tokenizer.to_json() == second.tokenizer.to_json()


def test_changed_text_is_not_served_from_the_cache(data_config: Callable[..., DataConfig]) -> None:
    config = data_config()
    first = open_data(config)
    path = next(Path(config.corpora[0].source).iterdir())
    text = path.read_text()
    path.write_text(text.swapcase())
    second = open_data(config)
    assert second.fingerprint["corpora"] != first.fingerprint["corpora"]
    sides = [split_texts(s, second.tokenizer) for s in (second.corpora[0].train, second.corpora[0].held_out)]
    assert text.swapcase() in sides[0] + sides[1]


@pytest.mark.parametrize("changes", [{"seed": 3}, {"held_out": 0.6}])
def test_another_split_is_not_served_from_the_cache(data_config: Callable[..., DataConfig], changes: dict) -> None:
    config = data_config(tokenizer="bpe", vocab_size=300)
    first = open_data(config)
    second = open_data(replace(config, **changes))
    (corpus,) = second.corpora
    pairs = zip(read_documents(config.corpora[0]), corpus.survey.held_out, strict=True)
    expected = [document.text for document, held_out in pairs if held_out]
    assert split_texts(corpus.held_out, second.tokenizer) == expected
    assert expected != split_texts(first.corpora[0].held_out, first.tokenizer)
    assert second.tokenizer.to_json() != first.tokenizer.to_json()


@pytest.mark.parametrize("name", ["train.npy", "held_out.npy", "train_offsets.npy", "tokenizer.json"])
@pytest.mark.parametrize("left", [0, 0.5, None])
def test_damaged_cache_is_rebuilt(
    data_config: Callable[..., DataConfig], tmp_path: Path, name: str, left: float | None
) -> None:
    config = data_config(tokenizer="bpe", vocab_size=300)
    open_data(config)
    before = {path: data for path, (_, data) in contents(tmp_path / "cache").items()}
    (damaged,) = (tmp_path / "cache").rglob(name)
    if left is None:
        damaged.unlink()
    else:
        damaged.write_bytes(damaged.read_bytes()[: int(left * damaged.stat().st_size)])
    open_data(config)
    assert {path: data for path, (_, data) in contents(tmp_path / "cache").items()} == before


RACE = """
import sys
from pathlib import Path
from jaxpp.data import CorpusConfig, DataConfig, open_data
config = DataConfig(
    (CorpusConfig(sys.argv[1]),), 16, 4, "bpe", vocab_size=300, held_out=0.25, cache_dir=sys.argv[2]
)
print("ready", flush=True)
while not Path(sys.argv[3]).exists():
    pass
data = open_data(config)
print(data.fingerprint, data.corpora[0].train.tokens.sum(), data.num_held_out_tokens)
"""


def test_two_processes_build_one_cache(corpus_dir: Callable[..., str], tmp_path: Path) -> None:
    source = corpus_dir(documents=60, words=400)
    arguments = [source, str(tmp_path / "cache"), str(tmp_path / "go")]
    racers = [
        subprocess.Popen([sys.executable, "-c", RACE, *arguments], stdout=-1, stderr=-1, text=True) for _ in range(2)
    ]
    assert [racer.stdout.readline() for racer in racers if racer.stdout] == ["ready\n"] * 2
    (tmp_path / "go").touch()
    outputs = [racer.communicate(timeout=60) for racer in racers]
    assert [racer.returncode for racer in racers] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0] != ""
    kinds = sorted(path.name.split("-")[0] for path in (tmp_path / "cache").iterdir() if path.is_dir())
    assert kinds == ["tokenizer", "tokens"]


def test_a_given_tokenizer_wins(data_config: Callable[..., DataConfig]) -> None:
    tokenizer = Tokenizer.train(["abc abc abc"], 260)
    data = open_data(data_config(tokenizer="missing.json"), tokenizer)
    assert data.tokenizer is tokenizer and data.vocab_size == tokenizer.vocab_size


def test_tokenizer_file_is_loaded_or_refused(
    tmp_path: Path, corpus_dir: Callable[..., str], data_config: Callable[..., DataConfig]
) -> None:
    sources = (corpus_dir(),)
    (tmp_path / "tokenizer.json").write_text(Tokenizer.bytes().to_json())
    data = open_data(data_config(sources, tokenizer=str(tmp_path / "tokenizer.json")))
    assert data.tokenizer.fingerprint == Tokenizer.bytes().fingerprint
    with pytest.raises(ValueError, match=r"missing\.json' cannot be read"):
        open_data(data_config(sources, tokenizer="missing.json"))


def test_missing_corpus_leaves_no_cache(tmp_path: Path, data_config: Callable[..., DataConfig]) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        open_data(data_config((str(tmp_path / "none"),)))
    assert not (tmp_path / "cache").exists()


def test_built_in_corpus_opens(tmp_path: Path) -> None:
    corpora = (CorpusConfig("stdlib"),)
    config = DataConfig(corpora, 64, 2, vocab_size=300, held_out=0.2, max_documents=8, cache_dir=str(tmp_path))
    data = open_data(config)
    assert data.num_train_tokens > 1000 and data.vocab_size == 300
