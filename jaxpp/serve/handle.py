"""A request that was handed in: what comes of it, to read from a thread or from an asyncio loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator

from jaxpp.serve.request import Delta, Sampling


class Request:
    """A request: iterate over its deltas, or cancel it.

    Attributes:
        prompt: ids.
        sampling: how its tokens are drawn.
        deadline_s: ``time.monotonic()`` at which it is given up; None: never.
        submitted_s: when it was handed in; so are the next two.
        first_token_s: when its first token was there; None: not yet.
        finished_s: when it ended; None: not yet.
        cached_tokens: tokens of the prompt that were in the cache already.
    """

    def __init__(self, prompt: tuple[int, ...], sampling: Sampling, seed: int, timeout_s: float | None = None):
        """Hand it to the engine: users call ``engine.submit``."""
        self.prompt, self.sampling, self.seed = prompt, sampling, seed
        self.submitted_s = time.monotonic()
        self.deadline_s = None if timeout_s is None else self.submitted_s + timeout_s
        self.first_token_s: float | None = None
        self.finished_s: float | None = None
        self.cached_tokens = 0
        self.is_cancelled = False
        self._deltas: deque[Delta] = deque()
        self._changed = threading.Condition()
        self._listeners: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    def cancel(self) -> None:
        """Give it up; its last delta says so. Harmless where it has ended."""
        self.is_cancelled = True

    def push(self, delta: Delta) -> None:
        """Add a delta; the engine calls it."""
        with self._changed:
            self._deltas.append(delta)
            if delta.finish:
                self.finished_s = time.monotonic()
            self._changed.notify_all()
            for loop, event in self._listeners:
                with contextlib.suppress(RuntimeError):  # a loop that has closed listens no more
                    loop.call_soon_threadsafe(event.set)

    def __iter__(self) -> Iterator[Delta]:
        """Yield deltas as they come, to the one that has a finish."""
        finish = None
        while not finish:
            with self._changed:
                self._changed.wait_for(lambda: self._deltas)
                delta = self._deltas.popleft()
            finish = delta.finish
            yield delta

    def ready(self) -> Iterator[Delta]:
        """Yield the deltas that are there, without waiting."""
        while self._deltas:
            yield self._deltas.popleft()

    async def __aiter__(self) -> AsyncIterator[Delta]:
        """Yield deltas as they come, to the one that has a finish."""
        event = asyncio.Event()
        listener = (asyncio.get_running_loop(), event)
        with self._changed:
            self._listeners.append(listener)
        try:
            finish = None
            while not finish:
                if not self._deltas:
                    event.clear()
                    if not self._deltas:
                        await event.wait()
                    continue
                delta = self._deltas.popleft()
                finish = delta.finish
                yield delta
        finally:
            with self._changed:
                self._listeners.remove(listener)
