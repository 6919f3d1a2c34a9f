"""Decoding against transformers on torch, continuous against static batching, and what the engine adds to its programs.

    python -m tests.bench.decoding --torch PYTHON   # PYTHON has torch and transformers, in an environment of its own

The same weights (a Llama of 28 M parameters), prompts, threads and minute: whole calls of `generate`, ours and theirs
in turn. Batch 1 reads every weight once a token, so its limit is the memory: the share of it is printed.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxpp
from jaxpp.models import DecoderConfig
from jaxpp.serve import Engine, Sampling

CONFIG = DecoderConfig(
    vocab_size=8192, num_layers=8, embed_dim=512, num_heads=8, num_kv_heads=4, mlp_dim=1408, tied=True,
    max_positions=512,
)  # fmt: skip
PROMPT, NEW = 64, 64


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", default="", metavar="PYTHON", help="compare with transformers there")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model"
        jaxpp.save(CONFIG.build(nnx.Rngs(0)), path, family="llama")
        num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(jaxpp.load(path), nnx.Param)))
        speed = bandwidth()
        print(f"memory {speed / 1e9:.1f} GB/s, weights {num_bytes / 1e6:.0f} MB")
        for batch in (1, 8):
            against(path, batch, arguments, num_bytes / speed)
        print(f"continuous over static batching: {batching(path):.2f} x tokens/s")
        print(f"engine beside its programs, batch 8: {overhead(path):.1%} more time")


def bandwidth() -> float:
    """Measure bytes/s of reading an array that no cache holds, on all cores."""
    x = jnp.ones(64 * 2**20)
    total = jax.jit(lambda x: x.sum())
    return x.nbytes / min(timed(lambda: total(x).block_until_ready()) for _ in range(10))


def timed(call: Callable[[], Any]) -> float:
    """Return the seconds of a call."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def prompts(batch: int) -> list[list[int]]:
    """Return random prompts."""
    return np.random.RandomState(0).randint(0, CONFIG.vocab_size, (batch, PROMPT)).tolist()


def against(path: Path, batch: int, arguments: argparse.Namespace, limit_s: float) -> None:
    """Time greedy decoding, ours and theirs in turn."""
    engine = Engine(jaxpp.load(path), slots=batch, max_context=PROMPT + NEW, chunk=PROMPT)
    sampling = Sampling(max_tokens=NEW, temperature=0, ignore_ends=True)
    asked = prompts(batch)
    # Each round asks anew: a prompt that is known would be free.
    rounds = [
        [[(token + i) % CONFIG.vocab_size for token in prompt] for prompt in asked] for i in range(arguments.rounds + 1)
    ]
    said = engine.generate(rounds[0], sampling)
    ours, theirs, peer = [], [], Peer(arguments.torch, path) if arguments.torch else None
    if peer:
        answer = peer.ask(rounds[0], NEW)
        equal = sum(a.ids == b for a, b in zip(said, answer["ids"], strict=True))
        print(f"batch {batch}: {equal} of {batch} answers equal theirs")
    for one in rounds[1:]:
        ours.append(timed(lambda one=one: engine.generate(one, sampling)))
        if peer:
            theirs.append(peer.ask(one, NEW)["seconds"])
    mine = statistics.median(ours)
    line = f"batch {batch}: {mine * 1e3:.0f} ms, {batch * NEW / mine:.0f} tokens/s"
    if batch == 1:
        line += f", {NEW * limit_s / mine:.0%} of the memory's speed"
    if peer:
        line += f"; transformers {statistics.median(theirs) * 1e3:.0f} ms: {statistics.median(theirs) / mine:.2f} x"
        peer.close()
    print(line, flush=True)


class Peer:
    """transformers in a process of its own, that answers when asked."""

    def __init__(self, python: str, path: Path):
        """Start it and let it load."""
        command = [python, str(Path(__file__).with_name("transformers_peer.py")), str(path)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, prompts: list[list[int]], new: int) -> Any:
        """Return the ids and the seconds of one call of `generate`."""
        assert self._process.stdin and self._process.stdout
        print(json.dumps({"prompts": prompts, "new": new}), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        """End it."""
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(timeout=60)


def batching(path: Path) -> float:
    """Return tokens/s of slots that are filled as they come free, over those of batches that wait for their longest."""
    engine = Engine(jaxpp.load(path), slots=8, max_context=256)
    engine.warm_up()
    draw = random.Random(0)

    def trace() -> list[tuple[list[int], Sampling]]:
        lengths = [min(192, int(draw.expovariate(1 / 40)) + 4) for _ in range(64)]
        asked = [[draw.randrange(CONFIG.vocab_size) for _ in range(draw.randrange(8, 64))] for _ in lengths]
        return [
            (p, Sampling(max_tokens=n, temperature=0, ignore_ends=True)) for p, n in zip(asked, lengths, strict=True)
        ]

    def static(requests: list[tuple[list[int], Sampling]]) -> None:
        for first in range(0, len(requests), 8):
            for one in [engine.submit(*request) for request in requests[first : first + 8]]:
                list(one)

    def continuous(requests: list[tuple[list[int], Sampling]]) -> None:
        for one in [engine.submit(*request) for request in requests]:
            list(one)

    ratios = []
    for _ in range(3):
        requests = trace()
        again = [([token ^ 1 for token in prompt], sampling) for prompt, sampling in requests]
        ratios.append(timed(lambda r=requests: static(r)) / timed(lambda r=again: continuous(r)))
    engine.close()
    return statistics.median(ratios)


def overhead(path: Path) -> float:
    """Return by how much a step of the engine is longer than its compiled programs alone, at batch 8."""
    engine = Engine(jaxpp.load(path), slots=8, max_context=PROMPT + NEW, chunk=PROMPT)
    sampling = Sampling(max_tokens=NEW, temperature=0, ignore_ends=True)
    program, draws, ratios = engine._program, engine._batching.draws, []
    calls: list[Any] = []
    extend, draw = program.extend, draws.draw

    def kept_extend(*given: Any, **named: Any) -> Any:
        calls.append(("extend", given, named))
        return extend(*given, **named)

    def kept_draw(*given: Any) -> Any:
        calls.append(("draw", given, {}))
        return draw(*given)

    def alone() -> None:
        """Make the same calls without the engine around them."""
        logits: Any = None
        for name, given, named in calls:
            if name == "extend":
                logits = extend(draws.last if given[0].ndim == 1 else given[0], *given[1:], **named)
            else:
                draw(logits if logits.shape[0] == 8 else given[0], *given[1:])
        jax.block_until_ready(draws.last)

    engine.generate(prompts(8), sampling)
    program.extend, draws.draw = kept_extend, kept_draw
    engine.generate([[token ^ 1 for token in prompt] for prompt in prompts(8)], sampling)
    program.extend, draws.draw = extend, draw
    for i in range(2, 9):
        fresh = [[token ^ i for token in prompt] for prompt in prompts(8)]
        whole = timed(lambda fresh=fresh: engine.generate(fresh, sampling))
        ratios.append(whole / timed(alone) - 1)
    return statistics.median(ratios)


if __name__ == "__main__":
    sys.exit(main())
