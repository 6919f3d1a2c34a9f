"""An order on the engine: its requests are handed in together, read as one stream and given up together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

from jaxpp.serve.request import Delta, QueueFull
from jaxpp.server.answer import Chunk, Writer
from jaxpp.server.api import Order
from jaxpp.server.fields import ApiError
from jaxpp.server.metrics import Metrics

RETRY_AFTER_S = 1
CLIENT_GONE = 499  # nginx's; nobody reads it but the metrics


class Exchange:
    """The requests of an order; each prompt in turn gets its n answers.

    Args:
        engine: takes requests.
        order: what is asked.
        timeout_s: of each answer; None: no limit.
        metrics: learn of its times.

    Raises:
        ApiError: 429: the queue has no room for all of them, and none was handed in; 400: the engine refuses one;
            503: it takes no more.
    """

    def __init__(self, engine: Any, order: Order, timeout_s: float | None, metrics: Metrics) -> None:
        self._order, self._metrics = order, metrics
        self._requests: list[Any] = []
        self._is_gone = False
        each = [(prompt, sampling) for prompt in order.prompts for sampling in order.samplings]
        try:
            for prompt, sampling in each:
                engine.check(prompt, sampling)
        except ValueError as error:
            raise ApiError(400, str(error), param="messages" if order.chat else "prompt") from error
        try:
            for prompt, sampling in each:
                self._requests.append(engine.submit(prompt, sampling, timeout_s=timeout_s))
        except QueueFull as error:
            self.cancel()
            raise ApiError(429, f"{error}", kind="rate_limit_error", code="queue_full",
                           headers={"retry-after": str(RETRY_AFTER_S)}) from error  # fmt: skip
        except ValueError as error:  # it was checked: the engine takes no more
            self.cancel()
            raise closing() from error

    def cancel(self) -> None:
        """Give up what has not ended."""
        for request in self._requests:
            request.cancel()

    def leave(self) -> None:
        """Give it up because the client is gone."""
        self._is_gone = True
        self.cancel()

    async def chunks(self, writer: Writer) -> AsyncIterator[Chunk]:
        """Yield the chunks of the answer, usage last.

        Raises:
            ApiError: an answer ended without being one; the others are given up.
        """
        async for index, delta in self._deltas():
            if delta.finish not in (None, "stop", "length"):
                raise self._failure(delta)
            for chunk in writer.write(index, delta):
                yield chunk
        yield writer.usage(self._cached_tokens())

    async def _deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        queue: asyncio.Queue[tuple[int, Delta | Exception]] = asyncio.Queue()
        pumps = [asyncio.create_task(self._pump(i, queue)) for i in range(len(self._requests))]
        left = len(pumps)
        try:
            while left:
                index, delta = await queue.get()
                if isinstance(delta, Exception):
                    raise delta
                left -= delta.finish is not None
                yield index, delta
        finally:
            self.cancel()
            for pump in pumps:
                pump.cancel()

    async def _pump(self, index: int, queue: asyncio.Queue[tuple[int, Delta | Exception]]) -> None:
        request, before_s = self._requests[index], None
        try:
            async for delta in request:
                before_s = self._observe(request, delta, before_s)
                queue.put_nowait((index, delta))
        except Exception as error:  # else its reader would wait for ever
            queue.put_nowait((index, error))

    def _observe(self, request: Any, delta: Delta, before_s: float | None) -> float | None:
        now_s = time.monotonic()
        if delta.tokens and before_s is None:
            self._metrics.first_token(now_s - request.submitted_s)
            before_s = now_s
        elif delta.tokens and before_s is not None:
            self._metrics.next_tokens(now_s - before_s, len(delta.tokens))
            before_s = now_s
        if delta.finish:
            self._metrics.whole(now_s - request.submitted_s, delta.finish)
        return before_s

    def _cached_tokens(self) -> int:
        """Of the answers to one prompt, the first pays for it and the others reuse what it left."""
        n = len(self._order.samplings)
        groups = [self._requests[i : i + n] for i in range(0, len(self._requests), n)]
        return sum(min(request.cached_tokens for request in group) for group in groups)

    def _failure(self, delta: Delta) -> ApiError:
        if delta.finish == "timeout":
            # 504, not 408: the client was not slow, we were. It may ask again, but not at once by itself: it would
            # only lengthen the queue.
            return ApiError(504, "the answer took longer than this server allows; ask for fewer tokens, or later",
                            kind="timeout_error", code="timeout", headers={"x-should-retry": "false"})  # fmt: skip
        if delta.finish == "cancelled" and self._is_gone:
            return ApiError(CLIENT_GONE, "the client is gone", kind="client_gone")
        if delta.finish == "cancelled":
            return closing()
        raise RuntimeError(delta.error or "the engine failed")


def closing() -> ApiError:
    """Return what clients are told once the server closes."""
    return ApiError(503, "this server is closing; ask another, or later", kind="server_error", code="closing",
                    headers={"retry-after": str(RETRY_AFTER_S), "connection": "close"})  # fmt: skip
