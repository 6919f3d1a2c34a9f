"""``python -m tests.bench.ladder SRC``: the last third of a checkpoint's layers on the ladder, and a short adaptation.

Rows: the checkpoint as it is, and with its last layers on the ladder. Columns: loss in nats a token on held-out
documents of a corpus, before any step and after a few of AdamW on the other documents, in fp32, both rows on the same
batches (the standard wiring is trained too, as learning the corpus alone lowers the loss); seconds of a step.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

from jaxpp.conversion import load
from jaxpp.data import CorpusConfig, read_documents
from jaxpp.grow import Grown, Request
from jaxpp.pretrained import Checkpoint, open_checkpoint
from tests.bench.run import print_table

HELD_OUT = 0.1  # of the documents


@dataclass(frozen=True)
class Work:
    """What is trained, and scored.

    Args:
        rows: ``[num, seq + 1]`` ids to train on, each step on the next `batch` of them.
        held_out: ``[num, seq + 1]`` ids that are scored.
        batch: rows of a step.
        num_steps: updates.
        learning_rate: the highest; it rises over a tenth of the steps and falls to zero.
    """

    rows: np.ndarray
    held_out: np.ndarray
    batch: int
    num_steps: int
    learning_rate: float


def read_work(checkpoint: Checkpoint, options: argparse.Namespace) -> Work:
    """Cut the corpus into rows; whole documents are held out.

    Raises:
        ValueError: a checkpoint without a tokenizer, or a corpus that is too small.
    """
    tokenizer = checkpoint.tokenizer()
    if tokenizer is None:
        raise ValueError(f"{checkpoint.name} has no tokenizer, which the corpus needs")
    texts = [document.text for document in read_documents(CorpusConfig(options.corpus), 2000)]
    random.Random(0).shuffle(texts)
    at, size = int(len(texts) * HELD_OUT), options.seq_len + 1

    def rows(texts: Sequence[str], most: int) -> np.ndarray:
        ids: list[int] = []
        for text in texts:
            ids.extend(tokenizer.encode(text, begin=True))
            if len(ids) >= most * size:
                break
        if len(ids) < most * size:
            raise ValueError(f"{options.corpus} has {len(ids)} tokens here; {most * size} are needed")
        return np.asarray(ids[: most * size], np.int32).reshape(most, size)

    held_out, needed = rows(texts[:at], options.held_out), options.batch * options.steps
    drawn = np.random.default_rng(0).permutation(needed)
    return Work(rows(texts[at:], needed)[drawn], held_out, options.batch, options.steps, options.rate)


def as_batch(rows: np.ndarray) -> dict[str, np.ndarray]:
    """Shift rows into tokens and targets."""
    tokens = rows[:, :-1]
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    return dict(tokens=tokens, targets=rows[:, 1:], positions=positions, weights=np.ones(tokens.shape, np.float32))


def measure(checkpoint: Checkpoint, work: Work) -> Iterator[float]:
    """Yield the loss before, the loss after, and the seconds of a step."""
    graph, params, rest = nnx.split(load(checkpoint, dtype="float32"), nnx.Param, ...)
    warm = max(work.num_steps // 10, 1)
    rate = optax.warmup_cosine_decay_schedule(0.0, work.learning_rate, warm, work.num_steps + 1)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.95))

    def mean_loss(params: Any, batch: Any) -> jax.Array:
        total, count = nnx.merge(graph, params, rest).loss(batch)
        return total / count

    def step(params: Any, moments: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
        loss, grads = jax.value_and_grad(mean_loss)(params, batch)
        updates, moments = optimizer.update(grads, moments, params)
        return optax.apply_updates(params, updates), moments, loss

    train, score = jax.jit(step, donate_argnums=(0, 1)), jax.jit(mean_loss)

    def held_out_loss() -> float:
        parts = np.split(work.held_out, len(work.held_out) // work.batch)
        return float(np.mean([float(score(params, as_batch(part))) for part in parts]))

    yield held_out_loss()
    moments, seconds = jax.jit(optimizer.init)(params), []
    for part in np.split(work.rows, work.num_steps):
        start = time.perf_counter()
        params, moments, loss = train(params, moments, as_batch(part))
        jax.block_until_ready(loss)
        seconds.append(time.perf_counter() - start)
        print(f"step {len(seconds)}/{work.num_steps} loss {loss:.4f} {seconds[-1]:.1f} s", file=sys.stderr, flush=True)
    yield held_out_loss()
    yield float(np.median(seconds))


def rows(checkpoint: Checkpoint, num_ladder: int, work: Work) -> Iterable[Sequence[str]]:
    """Measure the checkpoint as it is, and converted."""
    growth = Request(ladder=num_ladder).growth(checkpoint.config)
    for name, one in (("standard", checkpoint), (f"last {num_ladder} on the ladder", Grown(checkpoint, growth))):
        before, after, seconds = measure(one, work)
        yield name, f"{before:.4f}", f"{after:.4f}", f"{seconds:.2f}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", metavar="SRC", help="a checkpoint of any format, with a tokenizer")
    parser.add_argument("--layers", type=int, default=0, help="on the ladder, the last of them; by default a third")
    parser.add_argument("--corpus", default="pydoc", help="pydoc, stdlib, or files")
    parser.add_argument("--steps", type=int, default=30, help="of the adaptation")
    parser.add_argument("--batch", type=int, default=2, help="rows of a step")
    parser.add_argument("--seq-len", type=int, default=128, help="tokens of a row")
    parser.add_argument("--held-out", type=int, default=16, help="rows that are scored, a multiple of the batch")
    parser.add_argument("--rate", type=float, default=1e-4, help="highest learning rate")
    options = parser.parse_args(arguments)
    checkpoint = open_checkpoint(options.source)
    work = read_work(checkpoint, options)
    num_layers = getattr(checkpoint.config, "num_layers", 0)
    print_table(
        f"{Path(options.source).name}: {options.steps} steps of {work.batch} x {options.seq_len} tokens of "
        f"{options.corpus}, {len(os.sched_getaffinity(0))} cores, jax {jax.__version__}",
        ("wiring", "loss before", "loss after", "s a step"),
        rows(checkpoint, options.layers or num_layers // 3, work),
    )


if __name__ == "__main__":
    main()
