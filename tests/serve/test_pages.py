"""Who owns which page: shared beginnings, sliding windows, promises that are always kept."""

from __future__ import annotations

import random

import pytest

from jaxpp.serve.pages import Holding, Pool, Span, page_keys, reusable

SIZE = 4
FULL, SLIDING = Span(0, 8, SIZE), Span(6, 8, SIZE)


def hold(pool: Pool, span: Span, tokens: list[int], answer: int = 0) -> Holding:
    """Run a prompt and an answer of zeros through a holding, and know its full pages."""
    holding = Holding(pool, span, len(tokens) + answer)
    holding.extend(0, len(tokens))
    for number, key in enumerate(page_keys(tokens, SIZE)):
        holding.know(number, key)
    for at in range(len(tokens), len(tokens) + answer):
        holding.extend(at, at + 1)
    return holding


def test_a_key_stands_for_all_tokens_up_to_its_page() -> None:
    ours, theirs = list(page_keys(range(12), SIZE)), list(page_keys([9, *range(1, 12)], SIZE))
    assert len(ours) == 3 and not set(ours) & set(theirs)
    assert list(page_keys(range(11), SIZE)) == ours[:2]


def test_a_known_beginning_is_shared_and_outlives_its_request() -> None:
    pool = Pool(20)
    first = hold(pool, FULL, list(range(10)))
    keys = list(page_keys(range(10), SIZE))
    [(begin, pages)] = reusable([pool], [FULL], keys)
    assert (begin, pages) == (0, list(first.pages)[:2])
    first.close()
    assert pool.num_held == 0 and reusable([pool], [FULL], keys)[0][1] == pages
    second = Holding(pool, FULL, 12)
    second.share(pages, 0)
    assert pool.num_held == 2
    second.close()
    assert pool.promised == pool.reserved == pool.num_held == 0


def test_what_nobody_held_longest_goes_first() -> None:
    pool = Pool(5)  # four pages and the one that belongs to nobody
    for token in (1, 2):
        hold(pool, FULL, [token] * SIZE).close()
    kept = list(page_keys([2] * SIZE, SIZE))
    holding = hold(pool, FULL, list(range(3 * SIZE)))
    assert pool.find(next(page_keys([1] * SIZE, SIZE))) is None and pool.find(kept[0]) is not None
    assert 0 not in holding.pages


def test_a_window_lets_pages_go_and_needs_few() -> None:
    pool = Pool(40)
    holding = hold(pool, SLIDING, list(range(8)), answer=60)
    assert holding.first == (68 - 6) // SIZE and len(holding.pages) <= SLIDING.most(68) == 5
    holding.close()
    assert pool.promised == pool.reserved == pool.num_held == 0


def test_a_beginning_is_reused_only_if_every_group_still_has_what_is_to_be_seen() -> None:
    full, sliding = Pool(40), Pool(8)
    tokens = list(range(20))
    for pool, span in ((full, FULL), (sliding, SLIDING)):
        hold(pool, span, tokens).close()
    keys = list(page_keys(tokens, SIZE))
    found = reusable([full, sliding], [FULL, SLIDING], keys)
    assert [first for first, _ in found] == [0, SLIDING.first(20)]
    assert [first + len(pages) for first, pages in found] == [5, 5]
    for other in range(30, 36):  # the window's pages are taken for others
        hold(sliding, SLIDING, [other] * SIZE).close()
    assert reusable([full, sliding], [FULL, SLIDING], keys) == [(0, []), (0, [])]


@pytest.mark.parametrize("span", [FULL, SLIDING])
def test_an_admitted_request_never_lacks_a_page(span: Span) -> None:
    """Random requests with shared beginnings, whatever the pool allows; the sums come out even at the end."""
    draw = random.Random(0)
    pool, running = Pool(24), []
    admitted = 0
    for _ in range(4000):
        if draw.random() < 0.3:
            prompt = [draw.randrange(2)] * SIZE * draw.randrange(1, 4) + [draw.randrange(9)] * draw.randrange(1, 9)
            total = len(prompt) + draw.randrange(1, 30)
            [(first, pages)] = reusable([pool], [span], list(page_keys(prompt, SIZE))[: (len(prompt) - 1) // SIZE])
            if span.most(total) < pool.num_pages and pool.has_room(span, total, pages):
                holding = Holding(pool, span, total)
                holding.share(pages, first)
                running.append([holding, prompt, SIZE * (first + len(pages)), total])
                admitted += 1
        if running:
            one = draw.choice(running)
            holding, prompt, at, total = one
            end = min(at + 8, len(prompt)) if at < len(prompt) else at + 1
            holding.extend(at, end)  # pops from an empty pool if a promise was broken
            for number, key in enumerate(page_keys(prompt[:end], SIZE)):
                holding.know(number, key)
            one[2] = end
            if end == total or draw.random() < 0.05:
                holding.close()
                running.remove(one)
    assert admitted > 100
    for holding, *_ in running:
        holding.close()
    assert pool.promised == pool.reserved == pool.num_held == 0
