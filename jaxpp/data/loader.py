"""Batches for training and evaluation, and the position that a checkpoint keeps.

The rows of a step depend on the config and the step alone. A process asks for the positions
within the global batch that its devices hold; how many processes there are changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any

from jaxpp.data.config import DataConfig
from jaxpp.data.corpus import Corpus, find_tokenizer, survey_corpus, tokenise_corpus
from jaxpp.data.mixture import StepBatches, mix_rows
from jaxpp.data.pack import PackedRows, Row, stack_rows
from jaxpp.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    import grain

PREFETCHED_STEPS = 4
"""Batches that a training loader prepares ahead, in two threads."""


def open_data(config: DataConfig, tokenizer: Tokenizer | None = None) -> Data:
    """Read, tokenise and split the corpora of a run, or find them in the cache.

    Args:
        config: what to read.
        tokenizer: use this one, such as a checkpoint's, whatever `config.tokenizer` says.

    Raises:
        ValueError: a corpus or the tokenizer is missing or malformed, or there is nothing to
            hold out.
    """
    surveys = [survey_corpus(corpus, config) for corpus in config.corpora]
    if config.held_out > 0 and not any(survey.held_out.any() for survey in surveys):
        raise ValueError(
            f"data.held_out is {config.held_out}, but {config.corpora[0].source!r} holds 1 "
            "document, and whole documents are held out; give 2 documents or more, or held_out: 0"
        )
    tokenizer = find_tokenizer(config, surveys) if tokenizer is None else tokenizer
    corpora = tuple(tokenise_corpus(config, survey, tokenizer) for survey in surveys)
    return Data(config, tokenizer, corpora)


@dataclass(frozen=True)
class Data:
    """Hold the tokenised corpora of a run."""

    config: DataConfig
    tokenizer: Tokenizer
    corpora: tuple[Corpus, ...]

    @property
    def vocab_size(self) -> int:
        """Return the number of token ids, end of text included."""
        return self.tokenizer.vocab_size

    @property
    def num_train_tokens(self) -> int:
        """Return the tokens of one epoch of all corpora, ends of text included."""
        return sum(len(corpus.train.tokens) for corpus in self.corpora)

    @property
    def num_held_out_tokens(self) -> int:
        """Return the held-out tokens, ends of text included."""
        return sum(len(corpus.held_out.tokens) for corpus in self.corpora)

    @cached_property
    def fingerprint(self) -> dict[str, Any]:
        """Return what decides the rows of each step, JSON-able, for `TrainLoader.restore`."""
        corpora = [[c.survey.digest, c.survey.corpus.weight] for c in self.corpora]
        names = ("seq_len", "batch_size", "seed", "held_out")
        settings = {name: getattr(self.config, name) for name in names}
        return {"corpora": corpora, "tokenizer": self.tokenizer.fingerprint, **settings}

    def train(self, rows: Sequence[int] | None = None, start_step: int = 0, steps: int | None = None) -> TrainLoader:
        """Open the endless training stream.

        Args:
            rows: positions within the global batch to supply; None supplies all of them.
            start_step: the first step.
            steps: stop before step `start_step + steps`; None never stops.

        Raises:
            ValueError: a position lies outside the batch, or a step is negative.
        """
        if start_step < 0 or (steps is not None and steps < 0):
            raise ValueError(f"start_step {start_step} and steps {steps} must not be negative")
        chosen = _check_rows(rows, self.config.batch_size)
        packed = [self._pack(corpus, held_out=False) for corpus in self.corpora]
        weights = [corpus.survey.corpus.weight for corpus in self.corpora]
        stream = mix_rows(packed, weights, self.config.seed)
        batches = StepBatches(stream, chosen, self.config.batch_size, self.config.seq_len)
        stop = len(batches) if steps is None else start_step + steps
        return TrainLoader(batches, self.fingerprint, start_step, stop)

    def num_held_out_batches(self, batch_size: int) -> int:
        """Return how many batches `held_out_batches` yields."""
        return -(-sum(map(len, self._held_out_rows())) // batch_size)

    def held_out_batches(self, batch_size: int, rows: Sequence[int] | None = None) -> Iterator[Row]:
        """Return every held-out row once, in a fixed order, in batches of one shape.

        Args:
            batch_size: rows per batch over all processes; the last batch is filled up with rows
                of weight 0.
            rows: positions within the batch to supply; None supplies all of them.

        Returns:
            Batches of arrays [len(rows), seq_len]; see `pack.ROW_DTYPES`.

        Raises:
            ValueError: the batch size is not positive, or a position lies outside the batch.
        """
        if batch_size < 1:
            raise ValueError(f"the evaluation batch size is {batch_size}; 1 or more is needed")
        return self._held_out_batches(batch_size, _check_rows(rows, batch_size))

    def _held_out_batches(self, batch_size: int, rows: Sequence[int]) -> Iterator[Row]:
        index = [(packed, i) for packed in self._held_out_rows() for i in range(len(packed))]
        for start in range(0, len(index), batch_size):
            chosen = [index[start + row] for row in rows if start + row < len(index)]
            yield stack_rows((packed[i] for packed, i in chosen), len(rows), self.config.seq_len)

    def _held_out_rows(self) -> list[PackedRows]:
        return [self._pack(corpus, held_out=True) for corpus in self.corpora]

    def _pack(self, corpus: Corpus, held_out: bool) -> PackedRows:
        split = corpus.held_out if held_out else corpus.train
        return PackedRows(split.tokens, split.offsets, self.config.seq_len, pad_last=held_out)


class TrainLoader(Iterator[Row]):
    """Iterate over training batches, prepared ahead in threads.

    Yields arrays [len(rows), seq_len]; see `pack.ROW_DTYPES`. Close it, or use it in a `with`.
    """

    def __init__(self, batches: StepBatches, fingerprint: Mapping[str, Any], start_step: int, stop: int) -> None:
        """Start at a step and end before another; `Data.train` is the way to make one."""
        self._batches = batches
        self._fingerprint = dict(fingerprint)
        self._stop = stop
        self._step = start_step
        self._iterator = self._open()

    def __next__(self) -> Row:
        """Return the batch of the next step."""
        batch = next(self._iterator)
        self._step += 1
        return batch

    def state(self) -> dict[str, Any]:
        """Return the position and what it belongs to, JSON-able, for a checkpoint."""
        return {"step": self._step, "fingerprint": self._fingerprint}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on at the step where a state was taken, by any number of processes.

        Raises:
            ValueError: the state belongs to other data; the message names what differs.
        """
        saved = state.get("fingerprint", {})
        ours = self._fingerprint
        different = [name for name in ours if saved.get(name) != ours[name]]
        if different:
            details = "; ".join(f"{n} was {saved.get(n)}, is {ours[n]}" for n in different)
            raise ValueError(
                f"the data position of this checkpoint belongs to other data: {details}; "
                "set it back, or start anew with another directory="
            )
        self._iterator.close()
        self._step = state["step"]
        self._iterator = self._open()

    def close(self) -> None:
        """Stop the threads; a closed loader yields no more."""
        self._iterator.close()

    def __enter__(self) -> TrainLoader:
        """Return the loader itself."""
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close the loader."""
        self.close()

    def _open(self) -> grain.DatasetIterator[Row]:
        import grain

        options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=PREFETCHED_STEPS)
        steps = grain.MapDataset.source(range(self._step, self._stop)).map(self._batches.__getitem__)
        return iter(steps.to_iter_dataset(options))


def _check_rows(rows: Sequence[int] | None, batch_size: int) -> Sequence[int]:
    chosen = range(batch_size) if rows is None else tuple(int(row) for row in rows)
    outside = [row for row in chosen if not 0 <= row < batch_size]
    if outside:
        raise ValueError(
            f"row {outside[0]} lies outside the global batch of {batch_size} rows; 0 to {batch_size - 1} do"
        )
    return chosen
