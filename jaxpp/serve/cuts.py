"""Top-k, top-p and min-p, exact and without a sort of the vocabulary.

All three keep a prefix of the ids in one order: larger score first, lower id first among equals. So a cut is one place
in that order. Mostly it lies among the `MOST` first ids, which `lax.top_k` finds in a hundredth of a sort's time on a
CPU; where it does not, bisection over the bits of the scores finds it exactly.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

MOST = 256
"""Ids among which a cut is looked for first."""


def cut(scores: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array, most: int = MOST) -> jax.Array:
    """Return the scores with -inf where an id is cut off.

    - top-k keeps what equals the k-th largest, too.
    - top-p, over the softmax of what top-k left, keeps the fewest ids that reach the sum, in the order above: the one
      that crosses it counts, and one is always kept.
    - min-p drops what is less probable than its share of the most probable.

    Args:
        scores: fp32 ``[rows, vocab]``; the largest of each row is 0, -inf is ruled out already.
        top_k: int32 ``[rows]``; 0 or less, or the vocabulary or more: off.
        top_p: fp32 ``[rows]``; 1: off.
        min_p: fp32 ``[rows]``; 0: off.
        most: static; ids among which a cut is looked for first. No result depends on it but by rounding of sums.
    """
    vocab = scores.shape[1]
    weights = jnp.exp(scores)
    top_k = jnp.where((top_k < 1) | (top_k >= vocab), vocab, top_k)
    places = _places(scores, weights, top_k, top_p, min(most, vocab))
    distance, last = places
    magnitude = jnp.abs(scores)
    before = (magnitude < distance[:, None]) | ((magnitude == distance[:, None]) & (jnp.arange(vocab) <= last[:, None]))
    return jnp.where(before & (weights >= min_p[:, None]), scores, -jnp.inf)


def _places(
    scores: jax.Array, weights: jax.Array, top_k: jax.Array, top_p: jax.Array, most: int
) -> tuple[jax.Array, jax.Array]:
    """Return of the last id that is kept the distance to the largest score, and the id; ``[rows]`` each."""
    vocab = scores.shape[1]
    first, ids = lax.top_k(jnp.where(scores == 0, 0, scores), most)
    kth = jnp.take_along_axis(first, jnp.minimum(top_k, most)[:, None] - 1, axis=1)
    kth = jnp.where((top_k < vocab)[:, None], kth, -jnp.inf)
    goal = top_p * jnp.sum(jnp.where(scores >= kth, weights, 0), axis=1)
    sums = jnp.cumsum(jnp.where(first >= kth, jnp.exp(first), 0), axis=1)
    reached = sums >= goal[:, None]
    at = jnp.argmax(reached, axis=1)[:, None]
    nucleus = (top_p < 1) & reached[:, -1]
    distance = jnp.where(nucleus, -jnp.take_along_axis(first, at, axis=1)[:, 0], -kth[:, 0])
    last = jnp.where(nucleus, jnp.take_along_axis(ids, at, axis=1)[:, 0], vocab)
    if most == vocab:
        return jnp.abs(distance), last
    sure = (top_k == vocab) | (top_k <= most)
    found = sure & ((top_p == 1) | nucleus)

    def search() -> tuple[jax.Array, jax.Array]:
        bits = _bits(kth[:, 0])
        floor = lax.cond(sure.all(), lambda: bits, lambda: jnp.where(sure, bits, _kth(scores, top_k)))
        return _nucleus(scores, weights, floor, top_p)

    searched = lax.cond(found.all(), lambda: (distance, last), search)
    return jnp.abs(jnp.where(found, distance, searched[0])), jnp.where(found, last, searched[1])


def _bits(scores: jax.Array) -> jax.Array:
    """Return int32 that grow with the distance from the largest score, 0, as the bits of numbers above 0 do."""
    return lax.bitcast_convert_type(jnp.abs(scores), jnp.int32)


def _kth(scores: jax.Array, top_k: jax.Array) -> jax.Array:
    away = _bits(scores)
    return _least(31, top_k, lambda bits: jnp.sum(away <= bits[:, None], axis=1))


def _nucleus(scores: jax.Array, weights: jax.Array, floor: jax.Array, top_p: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return what `_places` does, by bisection: about 50 passes over the scores."""
    vocab = scores.shape[1]
    ids, away = jnp.arange(vocab), _bits(scores)

    def mass(of: jax.Array) -> jax.Array:  # more terms never give less, rounded as they are
        return jnp.sum(jnp.where(of, weights, 0), axis=1)

    left = away <= floor[:, None]
    goal = top_p * mass(left)
    place = _least(31, goal, lambda bits: mass(left & (away <= bits[:, None])))
    equal = away == place[:, None]
    weight = jnp.max(jnp.where(equal, weights, 0), axis=1)
    missing = jnp.ceil((goal - mass(left & (away < place[:, None]))) / weight).astype(jnp.int32)
    missing = jnp.clip(missing, 1, jnp.sum(equal, axis=1))
    last = _least(vocab.bit_length(), missing, lambda most: jnp.sum(equal & (ids <= most[:, None]), axis=1))
    off = top_p == 1
    return lax.bitcast_convert_type(jnp.where(off, floor, place), jnp.float32), jnp.where(off, vocab, last)


def _least(num_bits: int, goal: jax.Array, measure: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Return the least int32 of `num_bits` bits whose measure, which grows with it, reaches the goal; ``[rows]``."""

    def halve(step: jax.Array, low: jax.Array) -> jax.Array:
        half = jnp.int32(1) << (num_bits - 1 - step)
        return jnp.where(measure(low + half - 1) >= goal, low, low + half)

    return lax.fori_loop(0, num_bits, halve, jnp.zeros(goal.shape, jnp.int32))
