"""An engine without a model: a thread that says a script, a token at each step, through the real request handles."""

from __future__ import annotations

import codecs
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

from jaxpp.data import Tokenizer
from jaxpp.serve import Statistics
from jaxpp.serve.handle import Request
from jaxpp.serve.request import Delta, Finish, QueueFull, Sampling, Token

TEMPLATE = (
    "{% if tools %}[{{ tools | tojson }}]{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.arguments | tojson }}{% endfor %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}{{ mood or '' }}"
)
END = 256

Script = Callable[[tuple[int, ...], Sampling], Sequence[int]]


def byte_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer.bytes()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def upper(prompt: tuple[int, ...], sampling: Sampling) -> Sequence[int]:
    """Say the prompt in capitals and end; with a seed, some words that only the seed decides."""
    if sampling.seed is not None:
        draw = random.Random(sampling.seed)
        return [*(draw.choice(b"abcdefgh ") for _ in range(20)), END]
    return [*bytes(i for i in prompt if i < 256).decode().upper().encode(), END]


def endless(prompt: tuple[int, ...], sampling: Sampling) -> Sequence[int]:
    return b"la " * 2000


@dataclass
class _Slot:
    request: Request
    script: deque[int]
    decoder: codecs.IncrementalDecoder = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")())
    said: str = ""
    held: str = ""
    num_tokens: int = 0


class FakeEngine:
    def __init__(
        self,
        script: Script = upper,
        *,
        num_slots: int = 4,
        queue: int = 64,
        step_s: float = 0.0,
        max_context: int = 4096,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self.tokenizer = tokenizer or byte_tokenizer()
        self.config = SimpleNamespace(max_positions=max_context, vocab_size=300)
        self.max_context = max_context
        self.submitted: list[Request] = []
        self.most_running = 0
        self._script, self._num_slots, self._queue, self._step_s = script, num_slots, queue, step_s
        self._waiting: deque[Request] = deque()
        self._running: list[_Slot] = []
        self._lock = threading.RLock()
        self._stop_at: float | None = None
        self._seen: set[tuple[int, ...]] = set()
        self._totals: Counter[str] = Counter()
        self._finished: Counter[Finish] = Counter()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def warm_up(self) -> int:
        return 0

    @property
    def is_closed(self) -> bool:
        return self._stop_at is not None

    def check(self, prompt: Sequence[int], sampling: Sampling) -> None:
        if prompt[0] == 299:
            raise ValueError("prompt and answer take 9 pages of the cache; there are 8")

    def submit(self, prompt: Sequence[int], sampling: Sampling, *, timeout_s: float | None = None) -> Request:
        with self._lock:
            if self._stop_at is not None:
                raise ValueError("the engine is closed")
            if len(self._waiting) >= self._queue:
                raise QueueFull(f"the queue holds {len(self._waiting)} requests, its most")
            request = Request(tuple(prompt), sampling, sampling.seed or 0, timeout_s)
            self.submitted.append(request)
            self._waiting.append(request)
            return request

    def statistics(self) -> Statistics:
        with self._lock:
            return Statistics(
                len(self._waiting), len(self._running), self._num_slots, len(self._running), self._num_slots,
                self._totals["prompt"], self._totals["cached"], self._totals["new"], Counter(self._finished), 0,
            )  # fmt: skip

    def close(self, drain_s: float = 0.0) -> None:
        with self._lock:
            stop_at = time.monotonic() + drain_s
            self._stop_at = stop_at if self._stop_at is None else min(self._stop_at, stop_at)
        self._thread.join(timeout=60)

    @property
    def num_open(self) -> int:
        """Requests that wait or hold a slot."""
        now = self.statistics()
        return now.num_waiting + now.num_running

    def _run(self) -> None:
        while True:
            with self._lock:
                self._admit()
                for slot in list(self._running):
                    self._step(slot)
                idle = not self._waiting and not self._running
                if self._stop_at is not None:
                    if idle:
                        return
                    if time.monotonic() >= self._stop_at:
                        for request in (*self._waiting, *(slot.request for slot in self._running)):
                            request.cancel()
            time.sleep(max(self._step_s, 0.001 if idle else 0.0))

    def _admit(self) -> None:
        for request in list(self._waiting):
            if finish := _given_up(request):
                self._waiting.remove(request)
                self._end(request, finish)
            elif len(self._running) < self._num_slots:
                self._waiting.remove(request)
                request.cached_tokens = len(request.prompt) - 1 if request.prompt in self._seen else 0
                self._seen.add(request.prompt)
                self._totals["prompt"] += len(request.prompt)
                self._totals["cached"] += request.cached_tokens
                self._running.append(_Slot(request, deque(self._script(request.prompt, request.sampling))))
        self.most_running = max(self.most_running, len(self._running))

    def _step(self, slot: _Slot) -> None:
        request, sampling = slot.request, slot.request.sampling
        if finish := _given_up(request):
            self._free(slot, Delta(finish=finish))
            return
        if not slot.script:
            self._free(slot, Delta(finish="error", error="the script is over: secret details"))
            return
        index = slot.script.popleft()
        request.first_token_s = request.first_token_s or time.monotonic()
        slot.num_tokens += 1
        self._totals["new"] += 1
        tokens = (_token(index, sampling.logprobs),)
        ends = index == END and not sampling.ignore_ends or index in sampling.stop_ids
        slot.held += "" if ends or index >= 256 else slot.decoder.decode(bytes([index]))
        cut = min((at for stop in sampling.stop if (at := slot.held.find(stop)) >= 0), default=None)
        if cut is not None:
            self._free(slot, Delta(slot.held[:cut], tokens, "stop"))
        elif ends:
            self._free(slot, Delta(slot.held, (), "stop"))
        elif slot.num_tokens == sampling.max_tokens:
            self._free(slot, Delta(slot.held, tokens, "length"))
        else:
            kept = max((len(stop) for stop in sampling.stop), default=1) - 1  # it may be the beginning of a stop
            certain = len(slot.held) - kept
            text, slot.held = slot.held[: max(certain, 0)], slot.held[max(certain, 0) :]
            request.push(Delta(text, tokens))

    def _free(self, slot: _Slot, delta: Delta) -> None:
        self._running.remove(slot)
        self._end(slot.request, delta.finish, delta)

    def _end(self, request: Request, finish: Finish | None, delta: Delta | None = None) -> None:
        assert finish is not None
        self._finished[finish] += 1
        request.push(delta or Delta(finish=finish))


def _given_up(request: Request) -> Finish | None:
    if request.is_cancelled:
        return "cancelled"
    late = request.deadline_s is not None and time.monotonic() > request.deadline_s
    return "timeout" if late else None


def _token(index: int, logprobs: int | None) -> Token:
    if logprobs is None:
        return Token(index)
    return Token(index, -0.5, tuple(((index + i) % 256, -0.5 - i) for i in range(logprobs)))
