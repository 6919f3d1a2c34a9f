"""The loader: steps that depend on the config alone, resuming, evaluation."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import jaxpp.data as data_package
from jaxpp.data import CorpusConfig, DataConfig, open_data, read_documents
from jaxpp.data.pack import ROW_DTYPES, Row


def assert_batches_equal(ours: Iterable[Row], theirs: Iterable[Row]) -> None:
    for one, two in zip(ours, theirs, strict=True):
        assert one.keys() == two.keys()
        for name in one:
            np.testing.assert_array_equal(one[name], two[name], name)


def test_batches_have_the_promised_shape(data_config: Callable[..., DataConfig]) -> None:
    with open_data(data_config()).train(steps=3) as loader:
        batches = list(loader)
    assert len(batches) == 3
    for batch in batches:
        assert {name: array.dtype for name, array in batch.items()} == ROW_DTYPES
        assert all(array.shape == (4, 16) for array in batch.values())
        assert (batch["segments"] >= 1).all()


@pytest.mark.parametrize("steps", [0, 1, 7])
def test_resume_gives_exactly_the_next_batch(data_config: Callable[..., DataConfig], steps: int) -> None:
    config = data_config()
    whole = list(open_data(config).train(steps=12))
    interrupted = open_data(config).train()
    for _ in range(steps):
        next(interrupted)
    state = json.loads(json.dumps(interrupted.state()))
    interrupted.close()
    resumed = open_data(config).train(steps=12)
    next(resumed)
    resumed.restore(state)
    assert resumed.state() == state
    assert_batches_equal(list(resumed), whole[steps:])
    assert_batches_equal(list(open_data(config).train(start_step=steps, steps=2)), whole[steps:][:2])


@pytest.mark.parametrize("processes", [2, 4])
def test_processes_together_hold_the_global_batch(data_config: Callable[..., DataConfig], processes: int) -> None:
    data = open_data(data_config())
    whole = list(data.train(steps=6))
    shares = np.arange(4).reshape(-1, processes).T  # strided, so that order is tested too
    joined = [{name: np.zeros_like(array) for name, array in b.items()} for b in whole]
    for rows in shares:
        for step, batch in enumerate(data.train(rows=rows.tolist(), steps=6)):
            for name, array in batch.items():
                joined[step][name][rows] = array
    assert_batches_equal(joined, whole)


def test_resume_on_another_number_of_processes(data_config: Callable[..., DataConfig]) -> None:
    data = open_data(data_config())
    whole = list(data.train(steps=5))
    two = [data.train(rows=[0, 1]), data.train(rows=[2, 3])]
    for loader in two:
        next(loader), next(loader)
    assert two[0].state() == two[1].state()
    one = data.train(steps=5)
    one.restore(two[0].state())
    assert_batches_equal(list(one), whole[2:])


def test_an_epoch_holds_every_full_row_once(data_config: Callable[..., DataConfig]) -> None:
    config = data_config(batch_size=1)
    data = open_data(config)
    rows = data.num_train_tokens // config.seq_len
    batches = list(data.train(steps=2 * rows))
    flat = data.corpora[0].train.tokens[: rows * config.seq_len].reshape(rows, -1).tolist()
    for epoch in (batches[:rows], batches[rows:]):
        assert sorted(batch["tokens"][0].tolist() for batch in epoch) == sorted(flat)


def test_seed_changes_the_order(corpus_dir: Callable[..., str], data_config: Callable[..., DataConfig]) -> None:
    sources = (corpus_dir(),)
    orders = []
    for seed in (0, 1):
        data = open_data(data_config(sources, seed=seed, held_out=0.0))
        orders.append(np.concatenate([batch["tokens"] for batch in data.train(steps=4)]).tolist())
    assert orders[0] != orders[1]


def test_mixture_follows_the_weights(corpus_dir: Callable[..., str], data_config: Callable[..., DataConfig]) -> None:
    paths = [corpus_dir("one", seed=1), corpus_dir("two", seed=2)]
    corpora = (CorpusConfig(paths[0], 3.0), CorpusConfig(paths[1], 1.0))
    data = open_data(data_config(corpora=corpora, seq_len=64))
    seen = [set(), set()]
    for found, corpus in zip(seen, data.corpora, strict=True):
        tokens = corpus.train.tokens[: len(corpus.train.tokens) // 64 * 64].reshape(-1, 64)
        found.update(map(tuple, tokens.tolist()))
    rows = np.concatenate([batch["tokens"] for batch in data.train(steps=50)]).tolist()
    first = sum(tuple(row) in seen[0] for row in rows)
    assert not seen[0] & seen[1] and abs(first - 150) <= 2


@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_held_out_loses_nothing(
    corpus_dir: Callable[..., str], data_config: Callable[..., DataConfig], batch_size: int
) -> None:
    sources = (corpus_dir("one", seed=1), corpus_dir("two", seed=2))
    data = open_data(data_config(sources, tokenizer="bpe", vocab_size=300))
    batches = list(data.held_out_batches(batch_size))
    assert len(batches) == data.num_held_out_batches(batch_size) > 0
    assert all(array.shape == (batch_size, 16) for b in batches for array in b.values())
    tokens = np.concatenate([batch["tokens"][batch["segments"] > 0] for batch in batches])
    expected = np.concatenate([corpus.held_out.tokens for corpus in data.corpora])
    np.testing.assert_array_equal(tokens, expected)
    assert_batches_equal(data.held_out_batches(batch_size), batches)


def test_held_out_bytes_are_those_of_the_documents(data_config: Callable[..., DataConfig]) -> None:
    config = data_config(tokenizer="bpe", vocab_size=300)
    data = open_data(config)
    token_bytes = data.tokenizer.token_bytes
    scored = sum(int((token_bytes[batch["targets"]] * batch["weights"]).sum()) for batch in data.held_out_batches(3))
    documents = read_documents(config.corpora[0])
    pairs = zip(documents, data.corpora[0].survey.held_out, strict=True)
    texts = [document.text for document, held_out in pairs if held_out]
    firsts = sum(int(token_bytes[data.tokenizer.encode(text)[0]]) for text in texts)
    assert scored == sum(len(text.encode()) for text in texts) - firsts > 0


def test_held_out_rows_split_over_processes(data_config: Callable[..., DataConfig]) -> None:
    data = open_data(data_config())
    halves = [list(data.held_out_batches(4, rows=rows)) for rows in ([0, 1], [2, 3])]
    joined = [{name: np.concatenate([one[name], two[name]]) for name in one} for one, two in zip(*halves, strict=True)]
    assert_batches_equal(joined, data.held_out_batches(4))


def test_text_shorter_than_a_batch_still_trains(data_config: Callable[..., DataConfig]) -> None:
    config = data_config(seq_len=8192)
    data = open_data(config)
    (batch,) = data.train(steps=1)
    assert data.num_train_tokens < 8192
    assert ((batch["segments"] > 0).sum(axis=1) == data.num_train_tokens).all()
    assert (batch["weights"][batch["segments"] == 0] == 0).all()


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"batch_size": 8}, "batch_size was 4, is 8"),
        ({"seq_len": 8}, "seq_len was 16, is 8"),
        ({"seed": 1}, "seed was 0, is 1"),
        ({"held_out": 0.5}, "held_out was 0.25, is 0.5"),
        ({"tokenizer": "bpe", "vocab_size": 300}, "tokenizer was"),
        ({"max_documents": 5}, "corpora was"),
    ],
)
def test_state_of_other_data_is_refused(data_config: Callable[..., DataConfig], changes: dict, name: str) -> None:
    config = data_config()
    with open_data(config).train() as loader:
        next(loader)
        state = loader.state()
    with open_data(replace(config, **changes)).train() as other:
        with pytest.raises(ValueError, match=name) as error:
            other.restore(state)
        assert "\n" not in str(error.value)
        assert other.state()["step"] == 0
        next(other)


def test_state_without_a_fingerprint_is_refused(data_config: Callable[..., DataConfig]) -> None:
    with open_data(data_config()).train() as loader, pytest.raises(ValueError, match="was None"):
        loader.restore({})


def test_rows_outside_the_batch_are_refused(data_config: Callable[..., DataConfig]) -> None:
    data = open_data(data_config())
    with pytest.raises(ValueError, match="row 4 lies outside the global batch of 4 rows"):
        data.train(rows=[3, 4])
    with pytest.raises(ValueError, match="row -1"):
        data.held_out_batches(4, rows=[-1])
    with pytest.raises(ValueError, match="batch size is 0"):
        data.held_out_batches(0)
    with pytest.raises(ValueError, match="must not be negative"):
        data.train(start_step=-1)


def test_a_process_may_supply_no_rows(data_config: Callable[..., DataConfig]) -> None:
    (batch,) = open_data(data_config()).train(rows=[], steps=1)
    assert batch["tokens"].shape == (0, 16)


def test_a_closed_loader_yields_no_more(data_config: Callable[..., DataConfig]) -> None:
    loader = open_data(data_config()).train()
    next(loader)
    loader.close()
    loader.close()
    with pytest.raises(ValueError, match="closed"):
        next(loader)


FORGETFUL = """
import sys
from jaxpp.data import CorpusConfig, DataConfig, open_data
config = DataConfig((CorpusConfig(sys.argv[1]),), 16, 4, "bytes", cache_dir=sys.argv[2])
loader = open_data(config).train()
print(next(loader)["tokens"].shape)
{ending}
"""


@pytest.mark.parametrize("ending", ["", "raise SystemExit(0)"])
def test_an_open_loader_does_not_keep_the_interpreter(
    corpus_dir: Callable[..., str], tmp_path: object, ending: str
) -> None:
    program = FORGETFUL.format(ending=ending)
    command = [sys.executable, "-c", program, corpus_dir(), f"{tmp_path}/cache"]
    result = subprocess.run(command, timeout=30, capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, "(4, 16)\n", "")


ALONE = """
import sys, types
sys.modules["jaxpp"] = root = types.ModuleType("jaxpp")  # the package's own front door imports JAX
root.__path__ = [sys.argv[1]]
import jaxpp.data
print({"jax", "grain", "tokenizers"} & set(sys.modules))
"""


def test_data_imports_no_jax_of_its_own() -> None:
    command = [sys.executable, "-c", ALONE, str(Path(data_package.__file__).parents[1])]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.stdout == "set()\n", result.stderr
