"""One layout for each phase, so that both read the same stored weights; and why, in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jaxpp.partition.candidates import Candidate, Request
from jaxpp.partition.costs import kv_bytes
from jaxpp.quantities import show_bytes, show_share, show_time


@dataclass(frozen=True)
class Choice:
    """The layout of each phase.

    Args:
        prefill: for prompts.
        decode: for new tokens.
        shared: whether both read the same stored weights.
        reason: in words.
    """

    prefill: Candidate
    decode: Candidate
    shared: bool
    reason: tuple[str, ...]


def choose(request: Request, prefill: Sequence[Candidate], decode: Sequence[Candidate]) -> Choice:
    """Pick a layout for each phase.

    Among the pairs with one weight storage, that with the least product of slowdowns, each against the best of its own
    phase; moving the cache between the phases counts as prefill. Where no pair shares a storage, the best of each.
    """
    fits = [[one for one in phase if not one.problem] for phase in (prefill, decode)]
    pairs = [(p, d) for p in fits[0] for d in fits[1] if p.layout.storage == d.layout.storage]
    best = fits[0][0], fits[1][0]

    def slowdown(pair: tuple[Candidate, Candidate]) -> float:
        p, d = pair
        waiting = 1 + _move_s(request, p, d) / p.total_s
        return waiting * p.key(request.objective) / best[0].key(request.objective) * d.key(request.objective)

    p, d = min(pairs, key=slowdown) if pairs else best
    return Choice(p, d, bool(pairs), tuple(_reason(request, p, d, (prefill, decode), bool(pairs))))


def cache_moves(p: Candidate, d: Candidate) -> bool:
    """Say whether keys and values lie elsewhere after the prompt than decoding wants them."""
    return p.layout.num_devices > 1 and _place(p) != _place(d)


def _place(one: Candidate) -> list[int]:
    return [one.layout.cache_parts(dim) for dim in ("batch", "kv_heads", "seq")]


def _move_s(request: Request, p: Candidate, d: Candidate) -> float:
    return _move_bytes(request, d) / request.device.link_bytes_per_s if cache_moves(p, d) else 0.0


def _move_bytes(request: Request, d: Candidate) -> float:
    return kv_bytes(request.sizes, d.layout, request.work("decode", request.batch, request.context), request.prompt)


def _reason(
    request: Request, p: Candidate, d: Candidate, phases: Sequence[Sequence[Candidate]], shared: bool
) -> Iterator[str]:
    for one, others in zip((p, d), phases, strict=True):
        yield f"{one.phase:10}{_what(one)}{_next(request, one, others)}"
    yield f"weights   {_storage(p, d, shared)}"
    if p.layout.num_devices > 1:
        moved = f"moves once after the prompt, about {show_bytes(_move_bytes(request, d))} for each device"
        yield f"cache     {moved if cache_moves(p, d) else 'stays where the prompt put it'}{_copies(d)}"
    for one, others in zip((p, d), phases, strict=True):
        saved = 1 - others[0].key(request.objective) / one.key(request.objective)
        if saved > 5e-4:
            what = "time" if request.objective == "latency" else "device time for each token"
            yield f"given up  {one.phase} alone would take {described(others[0])}: {show_share(saved)} less {what}"


def described(one: Candidate) -> str:
    """Name a layout in words."""
    kv = "heads and batch" if one.layout.kv == "mixed" else one.layout.kv
    return f"{one.layout.name}, KV by {kv}" if one.layout.group > 1 else one.layout.name


def _what(one: Candidate) -> str:
    time = one.seconds
    parts = (("compute", time.compute_s), ("memory", time.memory_s), ("wire", time.wire_s))
    shares = ", ".join(f"{name} {show_time(value)}" for name, value in parts)
    return f"{described(one)}: {show_time(one.total_s)} a step, most of it {time.bound} ({shares})"


def _next(request: Request, one: Candidate, others: Sequence[Candidate]) -> str:
    """Compare with the best of another scheme, and with what would be faster if it did fit."""
    text, least = "", one.key(request.objective)
    fits = (o for o in others if not o.problem and o.layout.scheme != one.layout.scheme)
    if (other := next((o for o in fits if o.key(request.objective) >= least), None)) is not None:
        text += f"; {described(other)} would take {show_time(other.total_s)}, most of it {other.seconds.bound}"
    missed = min((o for o in others if o.problem), key=lambda o: o.total_s, default=None)
    if missed is not None and missed.total_s < one.total_s:
        text += f"; {described(missed)} would take {show_time(missed.total_s)} but {missed.problem}"
    return text


def _storage(p: Candidate, d: Candidate, shared: bool) -> str:
    if not shared:
        both = show_bytes(p.bytes.weights + d.bytes.weights)
        return f"no layout of one phase fits on the storage of the other: two copies, {both} for each device"
    return f"{stored(p)}, {show_bytes(p.bytes.weights)} for each device; both phases read them there"


def stored(one: Candidate) -> str:
    """Say how the weights lie."""
    data, x, yz, kv = one.layout.storage
    if x * yz == 1:
        return "whole on every device"
    parts = [f"embed over {x}"] if x > 1 else []
    if yz > 1:
        parts.append(
            f"heads, mlp and vocab over {yz}"
            + ("" if kv == yz else f", kv_heads over {kv}" if kv > 1 else ", kv_heads whole")
        )
    return ", ".join(parts) + (f" in each of {data} groups" if data > 1 else "")


def _copies(one: Candidate) -> str:
    copies = one.layout.copies
    return f"; each key lies on {copies} devices, for want of kv_heads" if copies > 1 else ""
