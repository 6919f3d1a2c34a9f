"""Continuous batching: requests come into slots and leave them while the others go on.

A step runs one chunk of a prompt (on each batch shard), one token of every request whose prompt is in, and draws. What
was drawn is read while the next step already runs, so the devices do not wait for the host; a request that turns out to
have ended has then computed one token for nothing.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxpp.serve.draws import Draws, Pending
from jaxpp.serve.handle import Request
from jaxpp.serve.pages import Holding, Pool, page_keys, reusable
from jaxpp.serve.program import Program, at_least
from jaxpp.serve.request import Delta, Finish, Token
from jaxpp.serve.text import TextStream


@dataclass(eq=False)
class Slot:
    """A request that runs.

    Args:
        request: which.
        index: row of the batch.
        holdings: its pages in each group of layers.
        keys: of the full pages of its prompt.
        stream: makes text of its tokens; None: there is no tokenizer.
        num_written: tokens that were sent into the cache.
        num_asked: draws that were asked for.
        answer: tokens that were drawn and read.
        has_ended: it is over; what is still drawn for it is not read.
    """

    request: Request
    index: int
    holdings: list[Holding]
    keys: list[bytes]
    stream: TextStream | None
    num_written: int = 0
    num_asked: int = 0
    answer: list[int] = field(default_factory=list)
    has_ended: bool = False

    @property
    def is_reading(self) -> bool:
        """Say whether a part of its prompt is still to come."""
        return self.num_written < len(self.request.prompt)

    @property
    def may_draw(self) -> bool:
        """Say whether it wants one more token."""
        return not self.has_ended and self.num_asked < self.request.sampling.max_tokens


class Batching:
    """The slots, the pages and the queue. One thread calls it.

    Args:
        program: the model on its devices.
        draws: the sampler of all slots.
        tokenizer: makes text; None: requests answer with ids alone.
        ends: ids that end an answer.
    """

    def __init__(self, program: Program, draws: Draws, tokenizer: Any, ends: Collection[int]):
        """Begin with empty slots."""
        self.program, self.draws, self.tokenizer, self.ends = program, draws, tokenizer, frozenset(ends)
        geometry = program.geometry
        self.waiting: deque[Request] = deque()
        self.slots: list[Slot | None] = [None] * geometry.slots
        self.pools = [[Pool(count) for count in geometry.pages] for _ in range(program.num_shards)]
        self.finished: Counter[Finish] = Counter()
        self.prompt_tokens = self.cached_tokens = self.new_tokens = self.steps = 0
        self._pending: Pending | None = None
        widths = [geometry.table_width(span, geometry.page_steps(1)[-1], 1) for span in program.spans]
        self._tables = [np.zeros((geometry.slots, width), np.int32) for width in widths]
        self._starts = [np.zeros(geometry.slots, np.int32) for _ in widths]

    def step(self) -> bool:
        """Run one step; say whether there is more to do."""
        self._give_up()
        self._admit()
        asked = self._run()
        before, self._pending = self._pending, asked
        if before is not None:
            self._read(before)
        return self.has_work()

    def has_work(self) -> bool:
        """Say whether a request runs or waits."""
        return bool(self.waiting or self._pending or any(self.slots))

    def fail(self, message: str) -> None:
        """End all requests with an error."""
        requests = [*self.waiting, *(slot.request for slot in self._running())]
        self.waiting.clear()
        self.slots, self._pending = [None] * len(self.slots), None
        for request in requests:
            self.finished["error"] += 1
            request.push(Delta(finish="error", error=message))

    def cancel_all(self) -> None:
        """Give up all that runs or waits."""
        for request in (*self.waiting, *(slot.request for slot in self._running())):
            request.cancel()

    def _running(self) -> Iterable[Slot]:
        return [slot for slot in self.slots if slot is not None]

    def _give_up(self) -> None:
        """End what was cancelled, or took too long."""
        now = time.monotonic()
        for slot in self._running():
            if why := _given_up(slot.request, now):
                self._end(slot, why)
        for request in [one for one in self.waiting if _given_up(one, now)]:
            self.waiting.remove(request)
            why = _given_up(request, now)
            assert why
            self.finished[why] += 1
            request.push(Delta(finish=why))

    def _admit(self) -> None:
        while self.waiting and (found := self._place(self.waiting[0])):
            self.waiting.popleft()
            index, keys, begin = found
            self._start(index, keys, begin)

    def _place(self, request: Request) -> tuple[int, list[bytes], Any] | None:
        """Return a free slot with room for all pages of a request, the keys of its prompt and what is known of it."""
        program, size = self.program, self.program.geometry.page
        keys = list(page_keys(request.prompt, size))
        num_tokens = len(request.prompt) + request.sampling.max_tokens
        per_shard = len(self.slots) // program.num_shards
        best = None
        for shard, pools in enumerate(self.pools):
            free = [i for i in range(shard * per_shard, (shard + 1) * per_shard) if self.slots[i] is None]
            # The last token of the prompt is always run: its logits are what the first draw needs.
            known = reusable(pools, program.spans, keys[: (len(request.prompt) - 1) // size])
            fits = all(
                pool.has_room(span, num_tokens, pages)
                for pool, span, (_, pages) in zip(pools, program.spans, known, strict=True)
            )
            rank = (len(known[0][1]) + known[0][0], len(free))
            if free and fits and (best is None or rank > best[0]):
                best = (rank, (free[0], keys, (request, pools, num_tokens, known)))
        return best and best[1]

    def _start(self, index: int, keys: list[bytes], begin: Any) -> None:
        request, pools, num_tokens, known = begin
        spans, size = self.program.spans, self.program.geometry.page
        holdings = [Holding(pool, span, num_tokens) for pool, span in zip(pools, spans, strict=True)]
        for holding, (first, pages) in zip(holdings, known, strict=True):
            holding.share(pages, first)
        stream = TextStream(self.tokenizer, request.prompt, request.sampling.stop) if self.tokenizer else None
        slot = Slot(request, index, holdings, keys, stream)
        slot.num_written = request.cached_tokens = size * (known[0][0] + len(known[0][1]))
        self.prompt_tokens += len(request.prompt)
        self.cached_tokens += request.cached_tokens
        self.slots[index] = slot
        self.draws.start(index, request)

    def _run(self) -> Pending | None:
        """Send the work of one step to the devices; return what will be drawn."""
        reading = [self._first_reader(shard) for shard in range(self.program.num_shards)]
        going = [slot for slot in self._running() if not slot.is_reading and slot.may_draw and slot.num_asked]
        chunk_logits = self._read_prompts(reading) if any(reading) else None
        logits = self._go_on(going) if going else None
        begun = [slot for slot in reading if slot is not None and not slot.is_reading]
        if not going and not begun:
            return None
        if begun:
            rows = np.full(len(reading), len(self.slots), np.int32)  # beyond the slots: dropped
            for shard, slot in enumerate(reading):
                if slot in begun:
                    rows[shard] = slot.index
            logits = self.draws.merge(logits, chunk_logits, rows)
        drawing = [*going, *begun]
        for slot in drawing:
            slot.num_asked += 1
        return self.draws.draw(logits, [(slot, slot.num_written, slot.num_asked - 1) for slot in drawing])

    def _first_reader(self, shard: int) -> Slot | None:
        per_shard = len(self.slots) // self.program.num_shards
        own = [slot for slot in self.slots[shard * per_shard : (shard + 1) * per_shard] if slot and slot.is_reading]
        return min(own, key=lambda slot: slot.request.submitted_s, default=None)

    def _read_prompts(self, reading: list[Slot | None]) -> Any:
        """Run the next chunk of one prompt on each batch shard."""
        program, geometry = self.program, self.program.geometry
        left = [0 if slot is None else len(slot.request.prompt) - slot.num_written for slot in reading]
        size = at_least(geometry.chunk_sizes(), min(max(left), geometry.chunk))
        tokens, positions = np.zeros((len(reading), size), np.int32), np.full((len(reading), size), -1, np.int32)
        lengths, most = np.ones(len(reading), np.int32), 1
        for row, slot in enumerate(reading):
            if slot is None:
                continue
            begin, end = slot.num_written, min(slot.num_written + size, len(slot.request.prompt))
            tokens[row, : end - begin] = slot.request.prompt[begin:end]
            positions[row, : end - begin] = np.arange(begin, end)
            lengths[row], most = len(slot.request.prompt), max(most, -(-end // geometry.page))
            for holding in slot.holdings:
                holding.extend(begin, end)
            self._know(slot, slot.keys, begin, end)
            slot.num_written = end
        step = at_least(geometry.page_steps(size), most)
        tables = []
        for group, span in enumerate(program.spans):
            pages = np.zeros((len(reading), geometry.table_width(span, step, size)), np.int32)
            start = np.zeros(len(reading), np.int32)
            for row, slot in enumerate(reading):
                if slot is not None:
                    _fill(pages, start, row, slot.holdings[group], geometry.page)
            tables.append((pages, start))
        return program.extend(tokens, positions, lengths, tables)

    def _go_on(self, going: list[Slot]) -> Any:
        """Run one token of every slot whose prompt is in."""
        program, geometry = self.program, self.program.geometry
        positions, most = np.full((len(self.slots), 1), -1, np.int32), 1
        for slot in going:
            at = slot.num_written
            positions[slot.index], most = at, max(most, at // geometry.page + 1)
            for group, holding in enumerate(slot.holdings):
                if at % geometry.page == 0 or slot.num_asked == 1:
                    holding.extend(at, at + 1)
                    _fill(self._tables[group], self._starts[group], slot.index, holding, geometry.page)
            slot.num_written += 1
        step = at_least(geometry.page_steps(1), most)
        tables = [
            (table[:, : geometry.table_width(span, step, 1)].copy(), start.copy())  # they change before they are read
            for span, table, start in zip(program.spans, self._tables, self._starts, strict=True)
        ]
        self.steps += 1
        return program.extend(self.draws.last, positions, positions[:, 0] + 1, tables)

    def _know(self, slot: Slot, keys: list[bytes], begin: int, end: int) -> None:
        """Make the pages known that are full with tokens up to `end`, and were not at `begin`."""
        size = self.program.geometry.page
        for number in range(begin // size, end // size):
            for holding in slot.holdings:
                holding.know(number, keys[number])

    def _read(self, pending: Pending) -> None:
        """Hand out what was drawn."""
        for slot, token in pending.tokens():
            if not slot.has_ended:
                self._receive(slot, token)

    def _receive(self, slot: Slot, token: Token | None) -> None:
        if token is None:
            self._end(slot, "error", error="the logits are not finite; look at the weights with jaxpp eval")
            return
        request, sampling = slot.request, slot.request.sampling
        if request.first_token_s is None:
            request.first_token_s = time.monotonic()
        self.new_tokens += 1
        slot.answer.append(token.id)
        if token.id in sampling.stop_ids or (token.id in self.ends and not sampling.ignore_ends):
            self._end(slot, "stop", slot.stream.flush() if slot.stream else "")
            return
        stream = slot.stream
        text = stream.push(token.id, heed=len(slot.answer) >= sampling.min_tokens) if stream else ""
        is_last = len(slot.answer) == sampling.max_tokens
        if stream and is_last:
            text += stream.flush()
        if stream and stream.stopped is not None:
            self._end(slot, "stop", text, token)
        elif is_last:
            self._end(slot, "length", text, token)
        else:
            request.push(Delta(text, (token,)))

    def _end(self, slot: Slot, why: Finish, text: str = "", *tokens: Token, error: str = "") -> None:
        """Free a slot; its full pages stay known, so that a conversation that goes on finds them."""
        if not slot.is_reading and len(slot.answer) > 1:
            held = [*slot.request.prompt, *slot.answer[:-1]]  # the last token was drawn, not run
            begin, size = len(slot.request.prompt), self.program.geometry.page
            self._know(slot, list(page_keys(held, size)), begin // size * size, len(held))
        for holding in slot.holdings:
            holding.close()
        slot.has_ended = True
        self.slots[slot.index] = None
        for table in self._tables:
            table[slot.index] = 0
        self.finished[why] += 1
        slot.request.push(Delta(text, tokens, why, error))


def _given_up(request: Request, now: float) -> Finish | None:
    if request.is_cancelled:
        return "cancelled"
    return "timeout" if request.deadline_s is not None and now > request.deadline_s else None


def _fill(tables: np.ndarray, start: np.ndarray, row: int, holding: Holding, size: int) -> None:
    tables[row] = 0
    tables[row, : len(holding.pages)] = list(holding.pages)
    start[row] = holding.first * size
