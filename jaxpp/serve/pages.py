"""Who owns which page of the cache: shared prefixes, pages of a sliding window, promises. Host side; no arrays.

A page that is full is known by a digest of all tokens up to its end. Another request with the same beginning takes it
as it is. A page that nobody holds stays known until its room is needed.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

NOBODY = 0  # the page that padding is written to


def page_keys(tokens: Sequence[int], size: int) -> Iterator[bytes]:
    """Yield the key of each full page: a digest of all tokens from the first to the page's last."""
    digest = hashlib.blake2b(digest_size=16)
    for end in range(size, len(tokens) + 1, size):
        digest.update(np.asarray(tokens[end - size : end], np.int32).tobytes())
        yield digest.copy().digest()


class Pool:
    """The pages of one group of layers on one batch shard."""

    def __init__(self, num_pages: int):
        """All pages are free but the first, which belongs to nobody."""
        self.num_pages = num_pages
        self.promised = 0  # pages that running requests may still take
        self.reserved = 0  # pages that they hold at most, together, if none is shared
        self._free = deque(range(1, num_pages))
        self._holders = [0] * num_pages
        self._keys: dict[int, bytes] = {}
        self._known: dict[bytes, int] = {}
        self._unheld: OrderedDict[int, None] = OrderedDict()  # known, and held by nobody: longest ago first

    @property
    def num_held(self) -> int:
        """Pages that requests hold."""
        return self.num_pages - 1 - len(self._free) - len(self._unheld)

    def find(self, key: bytes) -> int | None:
        """Return the page that is known by a key."""
        return self._known.get(key)

    def has_room(self, span: Span, num_tokens: int, shared: Sequence[int]) -> bool:
        """Say whether one more request can never lack a page.

        Args:
            span: how far its layers see.
            num_tokens: of its prompt and answer.
            shared: pages that it would begin with.
        """
        most = span.most(num_tokens)
        if span.window:  # it lets a shared page go and takes another, while the page's other holders keep it
            return self.reserved + most < self.num_pages
        free = len(self._free) + len(self._unheld) - sum(not self._holders[page] for page in shared)
        return free - self.promised >= most - len(shared)

    def take(self) -> int:
        """Take a page for new tokens: a free one, or the one that nobody held for the longest time."""
        if self._free:
            page = self._free.popleft()
        else:
            page, _ = self._unheld.popitem(last=False)
            del self._known[self._keys.pop(page)]
        self._holders[page] = 1
        return page

    def share(self, page: int) -> None:
        """Hold a page that is known."""
        self._unheld.pop(page, None)
        self._holders[page] += 1

    def release(self, page: int) -> None:
        """Hold it no more; it stays known if it is."""
        self._holders[page] -= 1
        assert self._holders[page] >= 0
        if self._holders[page]:
            return
        if page in self._keys:
            self._unheld[page] = None
        else:
            self._free.append(page)

    def know(self, page: int, key: bytes) -> None:
        """Know a full page by its key, unless another is known by it."""
        if key not in self._known and page not in self._keys:
            self._known[key], self._keys[page] = page, key


@dataclass(frozen=True)
class Span:
    """How many tokens the pages of a group of layers reach back.

    Args:
        window: keys that a token sees, itself included; 0: all before it.
        chunk: most tokens written at once.
        size: tokens of a page.
    """

    window: int
    chunk: int
    size: int

    def first(self, position: int) -> int:
        """Return the number of the first page that a token at `position`, or one after it, can see."""
        return max(0, position - self.window + 1) // self.size if self.window else 0

    def most(self, num_tokens: int) -> int:
        """Return how many pages a row of so many tokens holds at most at a time."""
        pages = -(-num_tokens // self.size)
        return min(pages, -(-(self.window + self.chunk) // self.size) + 1) if self.window else pages


class Holding:
    """The pages that one request holds in one group of layers."""

    def __init__(self, pool: Pool, span: Span, num_tokens: int):
        """Promise what it may take, for `num_tokens` tokens of prompt and answer."""
        self.pool, self.span = pool, span
        self.first = 0  # number of the first page in `pages`
        self.pages: deque[int] = deque()
        self._most = span.most(num_tokens)
        pool.promised += self._most
        pool.reserved += self._most

    def share(self, pages: Sequence[int], first: int) -> None:
        """Begin with pages that are known, from number `first` on."""
        self.first = first
        for page in pages:
            self.pool.share(page)
        self.pages.extend(pages)
        self.pool.promised -= len(pages)

    def extend(self, begin: int, end: int) -> None:
        """Have pages for tokens from position `begin` up to `end`; let go what these no longer see."""
        wanted = self.span.first(begin)
        while self.pages and self.first < wanted:
            self.pool.release(self.pages.popleft())
            self.pool.promised += 1
            self.first += 1
        self.first = self.first if self.pages else max(self.first, wanted)
        while self.first + len(self.pages) < -(-end // self.span.size):
            self.pages.append(self.pool.take())
            self.pool.promised -= 1

    def know(self, number: int, key: bytes) -> None:
        """Know page `number`, which is full, by its key; nothing if it was let go."""
        if 0 <= number - self.first < len(self.pages):
            self.pool.know(self.pages[number - self.first], key)

    def close(self) -> None:
        """Let all go."""
        for page in self.pages:
            self.pool.release(page)
        self.pool.promised -= self._most - len(self.pages)
        self.pool.reserved -= self._most
        self.pages.clear()


def reusable(pools: Sequence[Pool], spans: Sequence[Span], keys: Sequence[bytes]) -> list[tuple[int, list[int]]]:
    """Find the longest known beginning: what every group of layers still has of it, all that is to be seen from there.

    Args:
        pools: of each group.
        spans: of each group.
        keys: of the prompt's full pages, in order.

    Returns:
        For each group the number of its first page and its pages; they end at the same token in all groups.
    """
    for count in range(len(keys), 0, -1):
        found = []
        for pool, span in zip(pools, spans, strict=True):
            first = span.first(count * span.size)
            pages = [pool.find(key) for key in keys[first:count]]
            found.append((first, [page for page in pages if page is not None]))
            if None in pages:
                break
        else:
            return found
    return [(0, []) for _ in pools]
