"""The ranking as text: a table for each phase, the choice, and the reason; at most 120 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from jaxpp.partition.candidates import Candidate, Phase
from jaxpp.partition.costs import USABLE
from jaxpp.quantities import show_bytes, show_time

if TYPE_CHECKING:
    from jaxpp.partition.rank import Ranking

COLUMNS = 120
MOST_ROWS = 12
HEAD = ("layout", "stored", "KV by", "step", "compute", "memory", "wire", "tok/s", "tok/s/dev", "weights", "KV", "act.",
        "batch", "context")  # fmt: skip
LEFT = 3  # columns that start at the same place; the others end there


def report(ranking: Ranking) -> str:
    """Print a ranking.

    The rows of a phase: the best layouts, and the best of each scheme and each split of the cache.
    """
    parts = [_title(ranking), _phase(ranking, "prefill"), _phase(ranking, "decode")]
    parts.append("\n".join(("choice", *(_wrapped(line) for line in ranking.choice.reason))))
    return "\n\n".join((*parts, "\n".join(_notes(ranking))))


def _wrapped(line: str) -> str:
    return textwrap.fill(line, COLUMNS, initial_indent="  ", subsequent_indent=" " * 12, break_on_hyphens=False)


def _title(ranking: Ranking) -> str:
    request = ranking.request
    sizes, device, mesh = request.sizes, request.device, request.mesh
    devices = mesh.data * mesh.group
    return (
        f"{sizes.num_parameters / 1e9:.3g} B weights ({request.dtype}), cache {request.kv_dtype}; {devices} x "
        f"{device.name} as {mesh}\n"
        f"batch {request.batch}, context {request.context}, prompt {request.prompt}; by {request.objective}; bounds at "
        f"peak rates, not forecasts"
    )


def _phase(ranking: Ranking, phase: Phase) -> str:
    every: Sequence[Candidate] = getattr(ranking, phase)
    chosen: Candidate = getattr(ranking.choice, phase)
    shown = _shown(every, chosen)
    rows = [HEAD, *(_row(ranking, one, one is chosen) for one in shown)]
    left = len(every) - len(shown)
    request = ranking.request
    tokens = request.batch * (request.prompt if phase == "prefill" else 1)
    title = f"{phase}: {tokens} token{'s' * (tokens != 1)} a step" + (f"; {left} more layouts" if left else "")
    return "\n".join((title, *_columns(rows)))


def _shown(every: Sequence[Candidate], chosen: Candidate) -> list[Candidate]:
    """Pick the rows: of layouts that differ in storage alone the first stands for the others."""
    first: dict[tuple[str, str], Candidate] = {}
    for one in every:
        first.setdefault((one.layout.name, one.layout.kv), one)
    schemes: dict[str, Candidate] = {}
    for one in every:
        schemes.setdefault(f"scheme {one.layout.scheme}", one)
        schemes.setdefault(f"kv {one.layout.kv}", one)
    kept = {id(one) for one in (chosen, *schemes.values())}
    for one in first.values():
        if len(kept) < MOST_ROWS:
            kept.add(id(one))
    return [one for one in every if id(one) in kept]


def _row(ranking: Ranking, one: Candidate, chosen: bool) -> tuple[str, ...]:
    layout, time, taken = one.layout, one.seconds, one.bytes
    stored = f"{layout.storage[1]}x{layout.storage[2]}" if layout.scheme != "replicas" else "whole"
    copies = f" x{layout.copies}" if layout.copies > 1 else ""
    name = f"gathered {layout.gather}" if layout.scheme == "gathered" else layout.name
    largest = ("does not fit",) if one.problem else (_count(one.max_batch), _count(one.max_context))
    return (
        f"{'>' if chosen else ' '} {name}", stored, f"{layout.kv}{copies}",
        *(show_time(value) for value in (one.total_s, time.compute_s, time.memory_s, time.wire_s)),
        _count(one.tokens_per_s), _count(one.tokens_per_device_s(ranking.request.objective)),
        *(_bytes(value) for value in (taken.weights, taken.kv, taken.activations)), *largest,
    )  # fmt: skip


def _count(number: float) -> str:
    """Write a number with three digits.

    Example:
        >>> _count(7), _count(12345), _count(2.5e6), _count(8192)
        ('7', '12.3k', '2.5M', '8192')
    """
    if number < 10_000:
        return f"{number:.3g}" if number < 1000 else f"{number:.0f}"
    return f"{number / 1e3:.3g}k" if number < 999.5e3 else f"{number / 1e6:.3g}M"


def _bytes(number: float) -> str:
    """Write bytes closely: 1.87G for GiB."""
    return show_bytes(number).replace(" ", "").replace("iB", "")


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Align a table; the last cell of a shorter row says why a layout does not fit, and runs on."""
    full = [row for row in rows if len(row) == len(HEAD)]
    widths = [max(len(row[i]) for row in (rows if i < len(HEAD) - 2 else full)) for i in range(len(HEAD))]

    def cell(word: str, i: int, row: Sequence[str]) -> str:
        return word.ljust(widths[i]) if i < LEFT or len(row) - 1 == i < len(HEAD) - 1 else word.rjust(widths[i])

    return [" ".join(cell(word, i, row) for i, word in enumerate(row)).rstrip() for row in rows]


def _notes(ranking: Ranking) -> Iterator[str]:
    request = ranking.request
    yield (
        f"step = max(compute, memory) + wire. weights, KV, act.: of one device, which has "
        f"{request.device.memory_bytes / 2**30:.1f} GiB; {USABLE:.0%} may be used."
    )
    yield "stored: parts of embed x parts of heads and mlp. xN after KV: each key lies on N devices."
    yield "gathered N: weights are all-gathered over N devices before use, and tokens split over them."
    yield "batch, context: the largest that fit, the other as given. > marks the choice."
    for storage, reason in ranking.refused.items():
        yield f"stored {storage} is impossible: {reason}"
    vocab, parts = request.sizes.vocab, ranking.choice.decode.layout.x * ranking.choice.decode.layout.m
    if vocab % parts:
        yield f"vocab {vocab} is filled up to {-(-vocab // parts) * parts} rows (model.vocab_rows)"
