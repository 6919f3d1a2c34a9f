"""The engine: a loaded model that answers many requests at once, in Python or behind the server.

engine = Engine(jaxpp.load("org/model", mesh="tensor:4"), slots=16)
answers = engine.generate(["Once upon", "The answer is"], max_tokens=50, seed=1)
for delta in engine.submit(engine.encode("Once upon"), Sampling(max_tokens=50)): ...
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from jaxpp.serve.batching import Batching
from jaxpp.serve.draws import Draws
from jaxpp.serve.handle import Request
from jaxpp.serve.limits import batch_shards, check_draft, check_layout, check_length, context_of, execution_of
from jaxpp.serve.pages import Span
from jaxpp.serve.program import Geometry, Program, windows_of
from jaxpp.serve.request import Delta, Finish, QueueFull, Sampling, Token
from jaxpp.serve.sampler import require_ids
from jaxpp.serve.speculate import Speculation

KvSplit = Literal["heads", "batch"]
KvDtype = Literal["", "float32", "bfloat16", "float16", "int8"]


@dataclass(frozen=True)
class Answer:
    """What a request came to.

    Args:
        text: of the answer; empty where the model has no tokenizer.
        tokens: of the answer.
        finish: why it ended.
        cached_tokens: tokens of the prompt that were in the cache already.
    """

    text: str
    tokens: tuple[Token, ...]
    finish: Finish
    cached_tokens: int

    @property
    def ids(self) -> list[int]:
        """The ids of the tokens."""
        return [token.id for token in self.tokens]


@dataclass(frozen=True)
class Statistics:
    """What the engine holds now, and what it did since it started.

    Args:
        num_waiting: requests in the queue.
        num_running: requests in slots.
        num_slots: requests that can run at once.
        pages_used: pages that running requests hold.
        num_pages: pages that there are.
        prompt_tokens: tokens of all prompts that came to run.
        cached_prompt_tokens: those of them that were in the cache already.
        new_tokens: tokens that were drawn and handed out.
        finished: requests that ended, by why.
        num_compiled: shapes that were compiled.
        guessed_tokens: that a draft guessed.
        right_tokens: those of them that the model drew, too.
    """

    num_waiting: int
    num_running: int
    num_slots: int
    pages_used: int
    num_pages: int
    prompt_tokens: int
    cached_prompt_tokens: int
    new_tokens: int
    finished: Mapping[Finish, int]
    num_compiled: int
    guessed_tokens: int = 0
    right_tokens: int = 0


class Engine:
    """A model that answers requests in slots, with a paged cache.

    The model is taken over: its blocks are cut apart, so load it again to save or convert it.

    Args:
        model: as `jaxpp.load` returns it.
        slots: requests that run at once; a multiple of the mesh's batch shards. No result depends on what else runs.
        max_context: most tokens of prompt and answer together; 0: all that the model takes, up to 2,048.
        max_queue: most requests that wait; 0: no bound.
        page: tokens of a page of the cache.
        chunk: tokens of a prompt that are run at once, between the tokens of the others.
        num_pages: pages of each batch shard; 0: enough for every slot to be full, and as many for prefixes to stay.
        kv_split: how the axes of the mesh that split heads split keys and values: by ``"heads"``, or by ``"batch"``,
            where heads are fewer than devices: each then keeps its own requests', and nothing twice.
        kv_dtype: of keys and values; ``""``: that of the weights; ``"int8"``: a quarter to a half of the room.
        seed: from which requests without one draw theirs.
        draft: a smaller model of the same tokens, loaded on the same mesh, that guesses tokens ahead
            (`jaxpp.serve.speculate`); answers stay what they are. It is taken over, too.
        draft_tokens: tokens that it guesses at a time.

    Raises:
        ValueError: a context that the model does not take, sizes that do not divide, a model that is no decoder.
    """

    def __init__(
        self,
        model: Any,
        *,
        slots: int = 8,
        max_context: int = 0,
        max_queue: int = 0,
        page: int = 32,
        chunk: int = 256,
        num_pages: int = 0,
        kv_split: KvSplit = "heads",
        kv_dtype: KvDtype = "",
        seed: int = 0,
        draft: Any = None,
        draft_tokens: int = 4,
    ):
        """Lay out the cache; nothing is compiled yet."""
        self.config, self.tokenizer = model.config, model.tokenizer
        self.max_context = context_of(model.config, max_context)
        execution = execution_of(model, kv_split)
        shards = batch_shards(execution)
        check_layout(execution, slots, shards)
        chunk = min(chunk, self.max_context)

        def program(model: Any) -> Program:
            dtype = kv_dtype or str(np.dtype(model.final_norm.scale.get_value().dtype))
            spans = [Span(window, chunk, page) for window in sorted(set(windows_of(model.config)))]
            usual = (_pages(span, self.max_context, slots // shards) for span in spans)
            counts = tuple(num_pages + 1 if num_pages else count for count in usual)
            return Program(model, execution, Geometry(slots, self.max_context, page, chunk, counts, dtype))

        self._speculation = None
        if draft is not None:
            check_draft(model, draft, draft_tokens, self.max_context)
            self._speculation = Speculation(program(draft), draft_tokens)
        self._program = program(model)
        num_tokens = self.tokenizer.vocab_size if self.tokenizer else model.config.vocab_size
        draws = Draws(slots, model.config.table_rows, num_tokens, self._ends(), execution.layout)
        self._batching = Batching(self._program, draws, self.tokenizer, self._ends(), self._speculation)
        self._max_queue, self._seed, self._num_requests = max_queue or math.inf, seed, 0
        self._inbox = deque[Request]()  # handed in, and not seen by the batching yet
        self._changed, self._working = threading.Condition(), threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_closed = self._gives_up = False

    def _ends(self) -> tuple[int, ...]:
        return tuple(self.tokenizer.ends) if self.tokenizer else ()

    def encode(self, text: str) -> list[int]:
        """Return the ids of a prompt, with a begin of text where the model expects one.

        Raises:
            ValueError: the checkpoint has no tokenizer.
        """
        if self.tokenizer is None:
            raise ValueError("the checkpoint has no tokenizer; put its tokenizer.json beside the weights, or give ids")
        return [int(index) for index in self.tokenizer.encode(text, begin=True)]

    def check(self, prompt: Sequence[int], sampling: Sampling) -> None:
        """Refuse a request that could never run.

        Raises:
            ValueError: an empty prompt, ids that the model has not, prompt and answer longer than the context, more
                pages than there are; with the numbers.
        """
        check_length(prompt, sampling, self.max_context, self.config.vocab_size)
        require_ids(sampling, self.config.vocab_size)
        if sampling.stop and self.tokenizer is None:
            raise ValueError("stop names texts, but the checkpoint has no tokenizer; use stop_ids")
        for span, pool in zip(self._batching.spans, self._batching.pools[0], strict=True):
            if (most := span.most(len(prompt) + sampling.max_tokens)) >= pool.num_pages:
                raise ValueError(f"prompt and answer take {most} pages of the cache; there are {pool.num_pages - 1}")

    def submit(self, prompt: Sequence[int], sampling: Sampling, *, timeout_s: float | None = None) -> Request:
        """Hand in a request; it is worked on in the background.

        Args:
            prompt: ids, at least one.
            sampling: how tokens are drawn.
            timeout_s: after which it is given up.

        Returns:
            A handle: iterate over it for deltas (``for`` or ``async for``), or cancel it.

        Raises:
            ValueError: as `check`; `QueueFull` where too many wait.
        """
        self.check(prompt, sampling)
        with self._changed:
            if self._is_closed:
                raise ValueError("the engine is closed")
            if (waiting := len(self._inbox) + len(self._batching.waiting)) >= self._max_queue:
                raise QueueFull(f"{waiting} requests wait, as many as the queue takes; try again later")
            request = self._enqueue(prompt, sampling, timeout_s)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return request

    def _enqueue(self, prompt: Sequence[int], sampling: Sampling, timeout_s: float | None = None) -> Request:
        own = np.random.SeedSequence([self._seed, self._num_requests]).generate_state(1)[0]
        self._num_requests += 1
        seed = sampling.seed if sampling.seed is not None else int(own)
        request = Request(tuple(int(index) for index in prompt), sampling, seed, timeout_s)
        self._inbox.append(request)
        return request

    def stream(self, prompt: Sequence[int], sampling: Sampling) -> AsyncIterator[Delta]:
        """Hand in a request and iterate over its deltas on an asyncio loop; leaving the loop early gives it up."""
        request = self.submit(prompt, sampling)

        async def deltas() -> AsyncIterator[Delta]:
            try:
                async for delta in request:
                    yield delta
            finally:
                request.cancel()

        return deltas()

    def generate(
        self, prompts: Sequence[str | Sequence[int]], sampling: Sampling | None = None, **settings: Any
    ) -> list[Answer]:
        """Answer prompts, all at once, and wait for the answers.

        On several processes all make the same call.

        Args:
            prompts: texts, or lists of ids.
            sampling: how tokens are drawn; by default `Sampling()`.
            settings: fields of `Sampling` that differ: ``max_tokens=50, temperature=0``. With a seed, prompt number i
                draws from seed + i.

        Returns:
            One answer for each prompt, in their order.

        Raises:
            ValueError: as `check`.
        """
        deltas: list[list[Delta]] = [[] for _ in prompts]
        requests = self._requests(prompts, replace(sampling or Sampling(), **settings))
        for index, delta in self._deltas(requests):
            deltas[index].append(delta)
        return [_answer(request, own) for request, own in zip(requests, deltas, strict=True)]

    def deltas(
        self, prompts: Sequence[str | Sequence[int]], sampling: Sampling | None = None, **settings: Any
    ) -> Iterator[tuple[int, Delta]]:
        """Answer prompts as `generate` does, and yield what comes as it comes: the prompt's number and a delta.

        Raises:
            ValueError: as `check`.
        """
        return self._deltas(self._requests(prompts, replace(sampling or Sampling(), **settings)))

    def _requests(self, prompts: Sequence[str | Sequence[int]], sampling: Sampling) -> list[Request]:
        ids = [self.encode(prompt) if isinstance(prompt, str) else list(prompt) for prompt in prompts]
        for prompt in ids:
            self.check(prompt, sampling)
        seed = sampling.seed
        each = [sampling if seed is None else replace(sampling, seed=seed + i) for i in range(len(ids))]
        with self._changed:
            if self._is_closed:
                raise ValueError("the engine is closed")
            self._changed.notify_all()
            return [self._enqueue(prompt, one) for prompt, one in zip(ids, each, strict=True)]

    def _deltas(self, requests: Sequence[Request]) -> Iterator[tuple[int, Delta]]:
        try:
            if self._thread is not None:
                yield from ((index, delta) for index, request in enumerate(requests) for delta in request)
                return
            left = dict(enumerate(requests))  # nobody else asks: work here, in the same order on every process
            while left:
                self._turn()
                for index, request in list(left.items()):
                    for delta in request.ready():
                        yield index, delta
                        if delta.finish:
                            del left[index]
        finally:
            for request in requests:
                request.cancel()

    def _turn(self) -> bool:
        """Take in what was handed in, and run a step; say whether there is more to do."""
        with self._working:
            try:
                with self._changed:
                    self._batching.waiting.extend(self._inbox)
                    self._inbox.clear()
                if self._gives_up:
                    self._batching.cancel_all()
                return self._batching.step()
            except Exception as error:  # every request learns of it, and no more are taken
                with self._changed:
                    self._is_closed = True
                self._batching.fail(f"{type(error).__name__}: {error}")
                raise

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.notify_all()  # those who wait for the end of all work
                self._changed.wait_for(lambda: self._has_work() or self._is_closed)
                if not self._has_work():
                    return
            self._turn()

    def _has_work(self) -> bool:
        return bool(self._inbox) or self._batching.has_work()

    @property
    def is_closed(self) -> bool:
        """Whether it takes no more requests: it was closed, or it failed."""
        return self._is_closed

    def warm_up(self) -> int:
        """Compile all shapes, so that no request waits for it; return how many there are."""
        with self._working:
            draws, guesses = self._batching.draws, self._speculation.count if self._speculation else 0
            draws.warm_up(self._program.warm_up_chunks(), guesses)
            self._program.warm_up_tokens(draws.last, guesses and guesses + 1)
            if self._speculation:
                self._speculation.draft.warm_up_chunks()
                self._speculation.draft.warm_up_tokens(draws.last)
        return self._num_compiled()

    def _num_compiled(self) -> int:
        return self._program.num_compiled + (self._speculation.draft.num_compiled if self._speculation else 0)

    def statistics(self) -> Statistics:
        """Return what is held now and what was done."""
        batching, speculation = self._batching, self._speculation
        pools = [pool for shard in batching.pools for pool in shard]
        return Statistics(
            num_waiting=len(self._inbox) + len(batching.waiting),
            num_running=sum(slot is not None for slot in batching.slots),
            num_slots=len(batching.slots), pages_used=sum(pool.num_held for pool in pools),
            num_pages=sum(pool.num_pages - 1 for pool in pools), prompt_tokens=batching.prompt_tokens,
            cached_prompt_tokens=batching.cached_tokens, new_tokens=batching.new_tokens,
            finished=dict(batching.finished), num_compiled=self._num_compiled(),
            guessed_tokens=speculation.guessed if speculation else 0,
            right_tokens=speculation.right if speculation else 0,
        )  # fmt: skip

    def close(self, drain_s: float = 0.0) -> None:
        """Take no more requests; wait for those that run or wait, then give them up.

        Args:
            drain_s: how long to wait.
        """
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            if self._thread is not None and drain_s > 0:
                self._changed.wait_for(lambda: not self._has_work(), timeout=drain_s)
            self._gives_up = True
        if self._thread is not None:
            self._thread.join(timeout=60)


def _pages(span: Span, max_context: int, slots: int) -> int:
    return 1 + slots * (span.most(max_context) + -(-max_context // span.size))


def _answer(request: Request, deltas: Sequence[Delta]) -> Answer:
    text, tokens = "".join(delta.text for delta in deltas), [token for delta in deltas for token in delta.tokens]
    finish = deltas[-1].finish
    assert finish is not None
    if finish == "error":
        raise ValueError(deltas[-1].error)
    return Answer(text, tuple(tokens), finish, request.cached_tokens)
