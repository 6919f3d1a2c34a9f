"""Decoding from pages equals the whole pass: for every family's traits, any page and any chunk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxpp.conversion import load
from jaxpp.parallel import Execution
from jaxpp.serve.pages import Holding, Pool, Span
from jaxpp.serve.program import Geometry, Program, windows_of
from tests.golden import reading


def decoder(directory: Path, case: str, mesh: str = "data:1") -> Any:
    return load(reading.write(case, directory), mesh)


class Cached:
    """One row, run in pieces through pages."""

    def __init__(self, model: Any, *, page: int, chunk: int, context: int, dtype: str = "float32"):
        spans = [Span(window, chunk, page) for window in sorted(set(windows_of(model.config)))]
        geometry = Geometry(1, context, page, chunk, tuple(span.most(context) + 1 for span in spans), dtype)
        self.program = Program(model, model.loaded.execution or Execution(), geometry)
        self.holdings = [Holding(Pool(count), span, context) for count, span in zip(geometry.pages, spans, strict=True)]

    def run(self, tokens: Sequence[int], at: int, length: int, width: int | None = None) -> np.ndarray:
        """Run tokens at positions from `at` on, filled up to `width`; return the logits of the last."""
        width = width or len(tokens)
        positions = np.full((1, width), -1, np.int32)
        positions[0, : len(tokens)] = np.arange(at, at + len(tokens))
        ids = np.full((1, width), 7, np.int32)
        ids[0, : len(tokens)] = tokens
        tables = []
        for holding in self.holdings:
            holding.extend(at, at + len(tokens))
            start = np.array([holding.first * holding.span.size], np.int32)
            tables.append((np.array([list(holding.pages)], np.int32), start))
        return np.asarray(self.program.extend(ids, positions, np.array([length], np.int32), tables))[0]


@pytest.mark.parametrize("case", ["llama_gqa", "gpt2", "gemma2", "gpt_neox"])
def test_the_logits_of_every_position_are_those_of_the_whole_pass(case: str, tmp_path: Path) -> None:
    golden = reading.load(case).arrays
    tokens = golden["tokens"][0].tolist()
    cached = Cached(decoder(tmp_path, case), page=4, chunk=1, context=24)
    found = [cached.run([token], at, at + 1) for at, token in enumerate(tokens)]
    np.testing.assert_allclose(found, golden["logits"][0], atol=1e-4)


@pytest.mark.parametrize("page", [1, 16])
def test_any_page_will_do(page: int, tmp_path: Path) -> None:
    golden = reading.load("llama_gqa").arrays
    cached = Cached(decoder(tmp_path, "llama_gqa"), page=page, chunk=8, context=32)
    tokens = golden["tokens"][0].tolist()
    cached.run(tokens[:8], 0, 24)
    cached.run(tokens[8:13], 8, 24, width=8)
    found = [cached.run([token], 13 + i, 14 + i) for i, token in enumerate(tokens[13:])]
    np.testing.assert_allclose(found, golden["logits"][0, 13:], atol=1e-4)


@pytest.mark.parametrize("case, chunk", [("llama_dynamic", 5), ("phi3_longrope", 16), ("phi4_mini", 47)])
def test_chunks_equal_one_pass_beyond_the_original_context(case: str, chunk: int, tmp_path: Path) -> None:
    """Rotary rules that depend on the length know the whole prompt's."""
    golden = reading.load(case).arrays
    tokens = golden["long_tokens"][0].tolist()
    cached = Cached(decoder(tmp_path, case), page=4, chunk=chunk, context=48)
    for at in range(0, 48, chunk):
        found = cached.run(tokens[at : at + chunk], at, 48, width=chunk)
    np.testing.assert_allclose(found, golden["long_logits"][0, -1], atol=2e-4)


@pytest.mark.parametrize("chunk", [1, 7])
def test_a_window_goes_by_positions_while_its_pages_are_let_go(chunk: int, tmp_path: Path) -> None:
    tokens = np.random.RandomState(1).randint(0, 200, 40)
    model = decoder(tmp_path, "mistral")
    whole = np.asarray(model(tokens[None]))[0, -1]
    cached = Cached(model, page=4, chunk=chunk, context=40)
    for at in range(0, 40, chunk):
        found = cached.run(tokens[at : at + chunk].tolist(), at, 40, width=chunk)
    np.testing.assert_allclose(found, whole, atol=1e-4)
    assert cached.holdings[0].first > 0 and model.config.window < 40


@pytest.mark.parametrize("length", [17, 32])
def test_a_padded_chunk_never_runs_past_the_cache(length: int, tmp_path: Path) -> None:
    """A write past the end would be clamped onto earlier keys."""
    tokens = np.random.RandomState(0).randint(0, 200, length)
    model = decoder(tmp_path, "llama_gqa")
    whole = np.asarray(model(tokens[None]))[0, -1]
    cached = Cached(model, page=4, chunk=16, context=32)
    cached.run(tokens[:16].tolist(), 0, length)
    np.testing.assert_allclose(cached.run(tokens[16:].tolist(), 16, length, width=16), whole, atol=1e-4)


def test_int8_keys_and_values_are_close(tmp_path: Path) -> None:
    golden = reading.load("llama_gqa").arrays
    tokens, logits = golden["tokens"][0].tolist(), golden["logits"][0]
    cached = Cached(decoder(tmp_path, "llama_gqa"), page=4, chunk=8, context=32, dtype="int8")
    assert {leaf.dtype.name for one in cached.program.pages for leaf in (one.keys, one.values)} == {"int8"}
    found = np.stack([cached.run([token], at, at + 1) for at, token in enumerate(tokens)])
    gap = np.abs(found - logits).max() / np.abs(logits).max()
    assert 1e-6 < gap < 0.02


@pytest.mark.parametrize("case, mesh", [("llama_gqa", "tensor:4"), ("llama_mqa", "tensor:2")])
def test_on_a_mesh_it_is_the_same(case: str, mesh: str, tmp_path: Path) -> None:
    """More parts than kv heads: each head is kept by several devices."""
    golden = reading.load(case).arrays
    model = decoder(tmp_path, case, mesh)
    cached = Cached(model, page=4, chunk=8, context=24)
    for at in range(0, 24, 8):
        found = cached.run(golden["tokens"][0, at : at + 8].tolist(), at, 24)
    np.testing.assert_allclose(found, golden["logits"][0, -1], atol=1e-4)
    keys = cached.program.pages[0].keys
    assert keys.sharding.shard_shape(keys.shape)[1] == 1
