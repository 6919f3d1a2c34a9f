"""Continuous batching: requests come into slots and leave them while the others go on.

A step runs one chunk of a prompt (on each batch shard), one token of every request whose prompt is in, and draws. What
was drawn is read while the next step already runs, so the devices do not wait for the host; a request that turns out to
have ended has then computed one token for nothing.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxpp.serve.draws import Draws, Pending, PendingMany
from jaxpp.serve.handle import Request
from jaxpp.serve.pages import Holding, Pool, page_keys, reusable
from jaxpp.serve.program import Program, at_least
from jaxpp.serve.request import Delta, Finish, Token
from jaxpp.serve.rows import Tables, positions_of, tables_of
from jaxpp.serve.speculate import Speculation
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
        num_guessed: tokens that a draft guessed in the last step.
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
    num_guessed: int = 0
    answer: list[int] = field(default_factory=list)
    has_ended: bool = False

    @property
    def is_reading(self) -> bool:
        """Say whether a part of its prompt is still to come."""
        return self.num_written < len(self.request.prompt)

    def extend(self, begin: int, end: int) -> None:
        """Have pages for tokens from position `begin` up to `end`."""
        for holding in self.holdings:
            holding.extend(begin, end)

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
        speculation: a draft that guesses tokens; None: there is none.
    """

    def __init__(
        self,
        program: Program,
        draws: Draws,
        tokenizer: Any,
        ends: Collection[int],
        speculation: Speculation | None = None,
    ):
        """Begin with empty slots."""
        self.program, self.draws, self.tokenizer, self.ends = program, draws, tokenizer, frozenset(ends)
        self.speculation = speculation
        programs = [program, *([speculation.draft] if speculation else [])]
        self.spans = [span for one in programs for span in one.spans]
        geometry = program.geometry
        self.waiting: deque[Request] = deque()
        self.slots: list[Slot | None] = [None] * geometry.slots
        counts = [count for one in programs for count in one.geometry.pages]
        self.pools = [[Pool(count) for count in counts] for _ in range(program.num_shards)]
        self.finished: Counter[Finish] = Counter()
        self.prompt_tokens = self.cached_tokens = self.new_tokens = self.steps = 0
        self._pending: list[Pending | PendingMany] = []

    def step(self) -> bool:
        """Run one step; say whether there is more to do."""
        self._give_up()
        self._admit()
        before, self._pending = self._pending, self._run()
        if self.speculation:  # where the next step begins depends on what this one draws
            before, self._pending = [*before, *self._pending], []
        for pending in before:
            self._read(pending)
        return self.has_work()

    def has_work(self) -> bool:
        """Say whether a request runs or waits."""
        return bool(self.waiting or self._pending or any(self.slots))

    def fail(self, message: str) -> None:
        """End all requests with an error."""
        requests = [*self.waiting, *(slot.request for slot in self._running())]
        self.waiting.clear()
        self.slots, self._pending = [None] * len(self.slots), []
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
            known = reusable(pools, self.spans, keys[: (len(request.prompt) - 1) // size])
            fits = all(
                pool.has_room(span, num_tokens, pages)
                for pool, span, (_, pages) in zip(pools, self.spans, known, strict=True)
            )
            rank = (len(known[0][1]) + known[0][0], len(free))
            if free and fits and (best is None or rank > best[0]):
                best = (rank, (free[0], keys, (request, pools, num_tokens, known)))
        return best and best[1]

    def _start(self, index: int, keys: list[bytes], begin: Any) -> None:
        request, pools, num_tokens, known = begin
        size = self.program.geometry.page
        holdings = [Holding(pool, span, num_tokens) for pool, span in zip(pools, self.spans, strict=True)]
        for holding, (first, pages) in zip(holdings, known, strict=True):
            holding.share(pages, first)
        stream = TextStream(self.tokenizer, request.prompt, request.sampling.stop) if self.tokenizer else None
        slot = Slot(request, index, holdings, keys, stream)
        slot.num_written = request.cached_tokens = size * (known[0][0] + len(known[0][1]))
        self.prompt_tokens += len(request.prompt)
        self.cached_tokens += request.cached_tokens
        self.slots[index] = slot
        self.draws.start(index, request)

    def _run(self) -> list[Pending | PendingMany]:
        """Send the work of one step to the devices; return what will be drawn."""
        going = [slot for slot in self._running() if not slot.is_reading and slot.may_draw and slot.num_asked]
        reading = [self._first_reader(shard) for shard in range(self.program.num_shards)]
        chunk_logits: Any = self._read_prompts(reading) if any(reading) else None
        begun = {row: slot for row, slot in enumerate(reading) if slot is not None and not slot.is_reading}
        asked: list[Pending | PendingMany] = []
        logits: Any = None
        if going and self.speculation:
            asked.append(self._speculate(going, self.speculation))
            going = []
        elif going:
            logits = self._go_on(going)
        if begun:
            rows = np.full(len(reading), len(self.slots), np.int32)  # beyond the slots: dropped
            rows[list(begun)] = [slot.index for slot in begun.values()]
            logits = self.draws.merge(logits, chunk_logits, rows)
        if drawing := [*going, *begun.values()]:
            asked.append(self.draws.draw(logits, [(slot, slot.num_written, slot.num_asked) for slot in drawing]))
        for slot in drawing:
            slot.num_asked += 1
        return asked

    def _first_reader(self, shard: int) -> Slot | None:
        per_shard = len(self.slots) // self.program.num_shards
        own = [slot for slot in self.slots[shard * per_shard : (shard + 1) * per_shard] if slot and slot.is_reading]
        return min(own, key=lambda slot: slot.request.submitted_s, default=None)

    def _read_prompts(self, reading: Sequence[Slot | None]) -> Any:
        """Run the next chunk of one prompt on each batch shard."""
        geometry = self.program.geometry
        left = [0 if slot is None else len(slot.request.prompt) - slot.num_written for slot in reading]
        size = at_least(geometry.chunk_sizes(), min(max(left), geometry.chunk))
        tokens, lengths, ranges = np.zeros((len(reading), size), np.int32), np.ones(len(reading), np.int32), {}
        rows = {row: slot for row, slot in enumerate(reading) if slot is not None}
        for row, slot in rows.items():
            prompt, begin = slot.request.prompt, slot.num_written
            end = min(begin + size, len(prompt))
            tokens[row, : end - begin], lengths[row], ranges[row] = prompt[begin:end], len(prompt), (begin, end)
            slot.extend(begin, end)
            self._know(slot, slot.keys, begin, end)
            slot.num_written = end
        positions = positions_of(len(reading), size, ranges)
        own, drafts = self._tables(positions, rows)
        if self.speculation:
            self.speculation.draft.extend(tokens, positions, lengths, drafts)
        return self.program.extend(tokens, positions, lengths, own)

    def _go_on(self, going: Sequence[Slot]) -> Any:
        """Run one token of every slot whose prompt is in."""
        for slot in going:
            slot.extend(slot.num_written, slot.num_written + 1)
        ranges = {slot.index: (slot.num_written, slot.num_written + 1) for slot in going}
        positions = positions_of(len(self.slots), 1, ranges)
        for slot in going:
            slot.num_written += 1
        self.steps += 1
        tables, _ = self._tables(positions, {slot.index: slot for slot in going})
        return self.program.extend(self.draws.last, positions, positions[:, 0] + 1, tables)

    def _speculate(self, going: Sequence[Slot], speculation: Speculation) -> PendingMany:
        """Guess and run some tokens of every slot whose prompt is in."""
        ranges = {}
        for slot in going:
            count = min(speculation.count + 1, slot.request.sampling.max_tokens - slot.num_asked)
            ranges[slot.index] = (slot.num_written, slot.num_written + count)
            slot.extend(*ranges[slot.index])
            slot.num_guessed = count - 1
        positions = positions_of(len(self.slots), speculation.count + 1, ranges)
        self.steps += 1
        tables = self._tables(positions, {slot.index: slot for slot in going})
        return speculation.step(self.program, self.draws, going, positions, tables)

    def _tables(self, positions: np.ndarray, rows: Mapping[int, Slot]) -> tuple[Tables, Tables]:
        """Return the tables of the model and of the draft."""
        holdings = {row: slot.holdings for row, slot in rows.items()}
        tables = tables_of(self.program.geometry, self.spans, positions, holdings)
        return tables[: len(self.program.spans)], tables[len(self.program.spans) :]

    def _know(self, slot: Slot, keys: list[bytes], begin: int, end: int) -> None:
        """Make the pages known that are full with tokens up to `end`, and were not at `begin`."""
        size = self.program.geometry.page
        for number in range(begin // size, end // size):
            for holding in slot.holdings:
                holding.know(number, keys[number])

    def _read(self, pending: Pending | PendingMany) -> None:
        """Hand out what was drawn."""
        for slot, tokens in pending.tokens():
            if isinstance(pending, PendingMany) and not slot.has_ended:
                slot.num_written += len(tokens)
                slot.num_asked += len(tokens)
                self._count_right(slot.num_guessed, len(tokens) - 1)
            for token in tokens:
                if not slot.has_ended:
                    self._receive(slot, token)

    def _count_right(self, guessed: int, right: int) -> None:
        assert self.speculation
        self.speculation.guessed += guessed
        self.speculation.right += right

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
        self.finished[why] += 1
        slot.request.push(Delta(text, tokens, why, error))


def _given_up(request: Request, now: float) -> Finish | None:
    if request.is_cancelled:
        return "cancelled"
    return "timeout" if request.deadline_s is not None and now > request.deadline_s else None
