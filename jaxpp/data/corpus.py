"""A corpus as token ids on disk: tokenised once, split by document, memory-mapped ever after.

Each document is followed by the end-of-text token, and each side of the held-out split is one
flat array of tokens beside the offsets of its documents. The files are keyed by everything
that decides their content, so a stale one is never read.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxpp.data.cache import NpyWriter, cache_key, cached
from jaxpp.data.config import CorpusConfig, DataConfig
from jaxpp.data.source import read_documents
from jaxpp.data.tokenizer import Tokenizer

PIECE_CHARACTERS = 1 << 20
"""Longer documents are encoded in pieces cut after a line, so that memory stays bounded."""

_BATCH_CHARACTERS = 4 * PIECE_CHARACTERS
_SPLITS = ("train", "held_out")


@dataclass(frozen=True)
class Survey:
    """Hold what one pass over the text of a corpus tells."""

    corpus: CorpusConfig
    held_out: np.ndarray  # bool [documents]
    digest: str  # of all names and texts, in order


@dataclass(frozen=True)
class TokenSplit:
    """Hold one side of a corpus."""

    tokens: np.ndarray  # uint16 or int32 [tokens], memory-mapped
    offsets: np.ndarray  # int64 [documents + 1], where each document starts, then the end


@dataclass(frozen=True)
class Corpus:
    """Hold a tokenised corpus."""

    survey: Survey
    train: TokenSplit
    held_out: TokenSplit


def survey_corpus(corpus: CorpusConfig, config: DataConfig) -> Survey:
    """Read a corpus once: check every document, hash the content and split it.

    Raises:
        ValueError: the corpus is missing, empty or malformed.
    """
    digest = hashlib.blake2b(digest_size=16)
    names = []
    for name, text in read_documents(corpus, config.max_documents):
        data = text.encode()
        digest.update(f"{name}\0{len(data)}\0".encode())
        digest.update(data)
        names.append(name)
    held_out = held_out_documents(names, config.held_out, config.seed)
    return Survey(corpus, held_out, digest.hexdigest())


def held_out_documents(names: list[str], fraction: float, seed: int) -> np.ndarray:
    """Choose the held-out documents by a hash of their names, bool [documents].

    A document keeps its side when others come or go; each side gets at least one document
    where there are two.

    Args:
        names: one for each document.
        fraction: expected share held out, in [0, 1).
        seed: another seed is another split.
    """
    digests = (hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=8) for name in names)
    scores = np.array([int.from_bytes(digest.digest()) for digest in digests], np.uint64)
    held_out = scores < int(fraction * 2**64)
    if fraction > 0 and len(names) > 1:
        held_out[np.argmin(scores)] = True
        held_out[np.argmax(scores)] = False
    return held_out


def find_tokenizer(config: DataConfig, surveys: list[Survey]) -> Tokenizer:
    """Load the tokenizer of a run, or train it on the training documents of all corpora.

    Raises:
        ValueError: the tokenizer file is missing or malformed.
    """
    if config.tokenizer == "bytes":
        return Tokenizer.bytes()
    if config.tokenizer != "bpe":
        return Tokenizer.load(config.tokenizer)
    key = cache_key(
        tokenizers=importlib.metadata.version("tokenizers"),
        vocab_size=config.vocab_size,
        held_out=[config.held_out, config.seed],
        corpora=[survey.digest for survey in surveys],
    )

    def build(directory: Path) -> None:
        pieces = chain.from_iterable(_pieces(config, survey) for survey in surveys)
        texts = (piece.text for piece in pieces if not piece.is_held_out)
        tokenizer = Tokenizer.train(texts, config.vocab_size)
        (directory / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")

    return cached(config.cache_path / f"tokenizer-{key}", build, _read_tokenizer)


def tokenise_corpus(config: DataConfig, survey: Survey, tokenizer: Tokenizer) -> Corpus:
    """Return the tokens of a corpus, from the cache where it holds them.

    Raises:
        ValueError: the cache cannot be written.
    """
    key = cache_key(
        tokenizers=importlib.metadata.version("tokenizers"),
        tokenizer=[tokenizer.to_json(), tokenizer.end_of_text, tokenizer.begin_of_text, tokenizer.add_bos],
        held_out=[config.held_out, config.seed],
        corpus=survey.digest,
    )

    def build(directory: Path) -> None:
        _write_splits(directory, config, survey, tokenizer)

    splits = cached(config.cache_path / f"tokens-{key}", build, _read_splits)
    return Corpus(survey, *splits)


def _read_tokenizer(directory: Path) -> Tokenizer | None:
    try:
        return Tokenizer.load(directory / "tokenizer.json")
    except ValueError:
        return None


class _Piece(NamedTuple):
    text: str
    is_held_out: bool
    is_start: bool  # of its document
    is_end: bool


def _pieces(config: DataConfig, survey: Survey) -> Iterator[_Piece]:
    documents = read_documents(survey.corpus, config.max_documents)
    for document, is_held_out in zip(documents, survey.held_out.tolist(), strict=True):
        texts = list(text_pieces(document.text))
        for number, text in enumerate(texts, start=1):
            yield _Piece(text, is_held_out, is_start=number == 1, is_end=number == len(texts))


def _piece_batches(pieces: Iterator[_Piece]) -> Iterator[list[_Piece]]:
    batch: list[_Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text)
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    yield batch


def text_pieces(text: str) -> Iterator[str]:
    """Cut a long text after line ends into pieces of about `PIECE_CHARACTERS`."""
    start = 0
    while len(text) - start > PIECE_CHARACTERS:
        end = text.rfind("\n", start, start + PIECE_CHARACTERS) + 1 or start + PIECE_CHARACTERS
        yield text[start:end]
        start = end
    yield text[start:]


def _write_splits(directory: Path, config: DataConfig, survey: Survey, tokenizer: Tokenizer) -> None:
    dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.int32
    offsets: dict[str, list[int]] = {split: [0] for split in _SPLITS}
    with (
        NpyWriter(directory / "train.npy", dtype) as train,
        NpyWriter(directory / "held_out.npy", dtype) as held_out,
    ):
        writers = {"train": train, "held_out": held_out}
        for pieces in _piece_batches(_pieces(config, survey)):
            encoded = tokenizer.encode_batch([piece.text for piece in pieces])
            for piece, ids in zip(pieces, encoded, strict=True):
                split = _SPLITS[piece.is_held_out]
                if piece.is_start and tokenizer.add_bos:
                    writers[split].append(np.array([tokenizer.begin_of_text]))
                writers[split].append(ids)
                if piece.is_end:
                    writers[split].append(np.array([tokenizer.end_of_text]))
                    offsets[split].append(writers[split].length)
    for split in _SPLITS:
        np.save(directory / f"{split}_offsets.npy", np.array(offsets[split], np.int64))
    facts = {"corpus": asdict(survey.corpus), "digest": survey.digest}
    (directory / "corpus.json").write_text(json.dumps(facts, indent=1), encoding="utf-8")


def _read_splits(directory: Path) -> tuple[TokenSplit, TokenSplit] | None:
    """Map both splits, or return None where a file is missing, truncated or disagrees."""
    try:
        train, held_out = (_read_split(directory, split) for split in _SPLITS)
    except (OSError, ValueError, EOFError):
        return None
    return train, held_out


def _read_split(directory: Path, split: str) -> TokenSplit:
    path = directory / f"{split}.npy"
    offsets = np.load(directory / f"{split}_offsets.npy")
    # A file without elements cannot be memory-mapped.
    tokens = np.load(path, mmap_mode="r" if offsets[-1] else None)
    if tokens.shape != (offsets[-1],):
        raise ValueError(f"{path} holds {tokens.shape} tokens, its offsets end at {offsets[-1]}")
    return TokenSplit(tokens, offsets)
