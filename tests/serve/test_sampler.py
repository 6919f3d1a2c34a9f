"""The compiled sampler against one written dumbly in numpy, and each row against itself alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxpp.serve import cuts, noise
from jaxpp.serve.request import MAX_LOGPROBS, Sampling
from jaxpp.serve.sampler import (
    Controls,
    Drawn,
    History,
    Needs,
    admit,
    log_weights,
    require_ids,
    sample,
)

EVERYTHING = Needs(draws=True, cuts=True, history=True, logprobs=True)
compiled = jax.jit(sample, static_argnames=("needs", "num_tokens"))
compiled_weights = jax.jit(log_weights, static_argnames=("needs", "num_tokens"))


def reference(
    logits: np.ndarray, one: Sampling, prompt: Sequence[int] = (), answer: Sequence[int] = (), ends: Sequence[int] = ()
) -> np.ndarray:
    """Return the probabilities of one row, by loops in double precision."""
    scores = [float(x) for x in logits]
    for index, bias in one.logit_bias.items():
        scores[index] += bias
    for index in set(prompt) | set(answer):
        scores[index] *= 1 / one.repetition_penalty if scores[index] > 0 else one.repetition_penalty
    for index, count in Counter(answer).items():
        scores[index] -= one.presence_penalty + count * one.frequency_penalty
    if len(answer) < one.min_tokens:
        for index in {*ends, *one.stop_ids}:
            scores[index] = -np.inf
    order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
    if one.temperature == 0:
        return np.eye(len(scores))[order[0]]
    probabilities = np.exp((np.array(scores) - scores[order[0]]) / one.temperature)
    if 0 < one.top_k < len(scores):
        smallest = scores[order[one.top_k - 1]]
        probabilities = np.array([0 if scores[i] < smallest else p for i, p in enumerate(probabilities)])
    probabilities /= probabilities.sum()
    if one.top_p < 1:
        kept, total = set[int](), 0.0
        for index in order:
            kept.add(index)
            total += probabilities[index]
            if total >= one.top_p:
                break
        probabilities = np.array([p if i in kept else 0 for i, p in enumerate(probabilities)])
    probabilities[probabilities < one.min_p * probabilities.max()] = 0
    return probabilities / probabilities.sum()


def rows_of(samplings: Sequence[Sampling], seeds: Sequence[int] | None = None, ends: Sequence[int] = ()) -> Controls:
    controls = Controls.idle(len(samplings))
    for row, one in enumerate(samplings):
        controls = controls.with_row(row, one, row if seeds is None else seeds[row], ends)
    return controls


def histories(
    samplings: Sequence[Sampling], vocab: int, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> History:
    each = [History.of(*of) for of in zip(samplings, [vocab] * len(samplings), prompts, answers, strict=True)]
    return jax.tree.map(lambda *rows: np.stack(rows), *each)


def draw(
    logits: Any, samplings: Sequence[Sampling], *, history: History | None = None, positions: Any = None,
    num_new: Any = None, active: Any = None, needs: Needs | None = None, seeds: Sequence[int] | None = None,
    ends: Sequence[int] = (), num_tokens: int | None = None,
) -> tuple[Drawn, Any]:  # fmt: skip
    logits = jnp.asarray(logits, jnp.float32)
    rows, vocab = logits.shape
    needs = needs or Needs.of(samplings)
    return compiled(
        logits,
        rows_of(samplings, seeds, ends),
        histories(samplings, vocab, [()] * rows, [()] * rows) if needs.history and history is None else history,
        jnp.zeros(rows, jnp.int32) if positions is None else positions,
        jnp.zeros(rows, jnp.int32) if num_new is None else num_new,
        jnp.ones(rows, bool) if active is None else active,
        needs=needs,
        num_tokens=num_tokens,
    )


def kept(logits: Sequence[float], **settings: Any) -> list[int]:
    """Return the ids that can be drawn."""
    one = Sampling(**settings)
    args = rows_of([one]), None, jnp.zeros(1, jnp.int32), jnp.ones(1, bool)
    weights = compiled_weights(jnp.asarray([logits], jnp.float32), *args, needs=Needs.of([one]))
    return np.flatnonzero(np.isfinite(weights[0])).tolist()


def settings(rng: np.random.Generator, vocab: int) -> Sampling:
    """Return random settings, each of them off in a part of the cases."""

    def maybe(value: Any, off: Any) -> Any:
        return value if rng.random() < 0.5 else off

    return Sampling(
        temperature=maybe(rng.uniform(0.2, 3), rng.choice([0.0, 1.0])),
        top_k=int(maybe(rng.integers(-1, vocab + 3), 0)),
        top_p=maybe(rng.uniform(0, 1), 1.0),
        min_p=maybe(rng.uniform(0, 0.5), 0.0),
        repetition_penalty=maybe(rng.uniform(0.5, 2), 1.0),
        presence_penalty=maybe(rng.uniform(-2, 2), 0.0),
        frequency_penalty=maybe(rng.uniform(-2, 2), 0.0),
        logit_bias=maybe({int(rng.integers(vocab)): rng.uniform(-3, 3)}, {}),
        min_tokens=int(maybe(rng.integers(0, 8), 0)),
        stop_ids=maybe((int(rng.integers(vocab)),), ()),
    )


@pytest.mark.parametrize("vocab", [24, 700])  # fewer, and more, than the ids among which a cut is looked for first
def test_any_settings_give_the_probabilities_of_the_dumb_sampler(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    rows, differing = 16, 0
    for _ in range(12):
        samplings = [settings(rng, vocab) for _ in range(rows)]
        # Coarse, so that scores are equal often; flat, so that many are in a nucleus.
        logits = np.round(rng.normal(0, rng.choice([0.3, 1, 4], (rows, 1)), (rows, vocab)) * 4) / 4
        prompts, answers = (rng.integers(0, vocab, (rows, 6)).tolist() for _ in range(2))
        weights = compiled_weights(
            jnp.asarray(logits, jnp.float32), rows_of(samplings, ends=[1]),
            histories(samplings, vocab, prompts, answers), jnp.full(rows, 6), jnp.ones(rows, bool), needs=EVERYTHING,
        )  # fmt: skip
        for row, one in enumerate(samplings):
            expected = reference(logits[row], one, prompts[row], answers[row], ends=[1])
            if one.temperature == 0:
                found = np.eye(vocab)[np.asarray(weights[row]).argmax()]
            else:
                found = np.asarray(jax.nn.softmax(weights[row]), np.float64)
            differing += not ((found > 0) == (expected > 0)).all()
            if ((found > 0) == (expected > 0)).all():
                np.testing.assert_allclose(found, expected, rtol=2e-4, atol=1e-9)
    # Where a sum meets p, or a share meets min-p, but for rounding, fp32 and fp64 may differ by an id.
    assert differing <= 1, f"{differing} of {12 * rows} rows keep other ids"


@pytest.mark.parametrize("case", range(4))
def test_draws_have_the_frequencies_of_the_dumb_sampler(case: int) -> None:
    rng, vocab, count = np.random.default_rng(case), 12, 20_000
    one = Sampling(
        temperature=[1, 0.7, 2, 1][case],
        top_k=[0, 7, 0, 0][case],
        top_p=[1, 1, 0.9, 1][case],
        min_p=[0, 0, 0, 0.1][case],
    )
    logits = rng.normal(0, 1.5, vocab).astype(np.float32)
    controls = jax.tree.map(lambda row: np.repeat(row, count, axis=0), rows_of([one], seeds=[case]))
    args = jnp.tile(logits, (count, 1)), controls, None, jnp.arange(count), jnp.zeros(count, jnp.int32)
    drawn, _ = compiled(*args, jnp.ones(count, bool), needs=Needs.of([one]))
    found, expected = np.bincount(drawn.tokens, minlength=vocab), reference(logits, one) * count
    possible = expected > 0
    assert not found[~possible].any()
    assert stats.chisquare(found[possible], expected[possible]).pvalue > 1e-3
    assert stats.chisquare(found[possible], np.full(possible.sum(), count / possible.sum())).pvalue < 1e-9


def test_top_p_takes_the_largest_first() -> None:  # B154
    logits = [5.0, 4, 3, 2, 1]
    plain = np.exp(logits) / np.exp(logits).sum()
    np.testing.assert_allclose(plain, [0.6364, 0.2341, 0.0861, 0.0317, 0.0117], atol=5e-5)
    assert kept(logits, top_p=0.5) == [0] and kept(logits[::-1], top_p=0.5) == [4]
    assert kept(logits, top_p=0.9) == [0, 1, 2]


def test_top_p_keeps_the_token_that_crosses_it_and_at_least_one() -> None:  # B155
    logits = [1.0, 3, 2, 3]
    assert kept(logits, top_p=1e-6) == [1] == kept(logits, top_p=0)
    assert kept([0.0, 0, 0, 0], top_p=0.51) == [0, 1, 2], "among equals the lowest ids are first"
    assert kept([0.0, 0, 0, 0], top_p=0.5) == [0, 1], "the second reaches it"


def test_temperature_comes_before_top_p_and_top_p_after_top_k() -> None:  # B157
    logits = [3.0, 2, 1, 0]
    assert kept(logits, top_p=0.6) == [0] and kept(logits, top_p=0.6, temperature=3) == [0, 1]
    # .644 of all, but .731 of the two that top-k leaves: the first alone reaches .7 only there.
    assert kept(logits, top_p=0.7) == [0, 1] and kept(logits, top_p=0.7, top_k=2) == [0]
    # min-p looks at shares of the largest after temperature: e^-1 = .37, at temperature 2 e^-.5 = .61.
    assert kept(logits, min_p=0.5) == [0] and kept(logits, min_p=0.5, temperature=2) == [0, 1]


@pytest.mark.parametrize("top_k", [-1, 0, 5, 6, 2**40])
def test_top_k_off(top_k: int) -> None:  # B158
    logits = np.random.default_rng(0).normal(size=(6, 5))
    plain, _ = draw(logits, [Sampling()] * 6)
    found, _ = draw(logits, [Sampling(top_k=top_k)] * 6, needs=Needs(draws=True, cuts=True))
    assert found.tokens.tolist() == plain.tokens.tolist() and len(set(plain.tokens.tolist())) > 1
    assert kept([1.0, 2, 3, 4, 5], top_k=top_k) == [0, 1, 2, 3, 4]


def test_top_k_keeps_what_equals_the_kth_and_greedy_takes_the_lowest_id() -> None:  # B166
    logits = [0.0, 2, 2, 1, 2, 2]
    assert kept(logits, top_k=1) == [1, 2, 4, 5] and kept(logits, top_k=5) == [1, 2, 3, 4, 5]
    for needs in (Needs(), EVERYTHING):
        drawn, _ = draw(
            [logits, [-0.0, 0, 0, 0, 0, 0], [-1, -0.0, 0, 0, 0, 0]], [Sampling(temperature=0)] * 3, needs=needs
        )
        assert drawn.tokens.tolist() == [1, 0, 1]


def test_every_position_draws_anew() -> None:  # B160
    drawn, _ = draw(np.zeros((100, 48)), [Sampling()] * 100, seeds=[7] * 100, positions=jnp.arange(100))
    again, _ = draw(np.zeros((100, 48)), [Sampling()] * 100, seeds=[7] * 100, positions=jnp.zeros(100, jnp.int32))
    assert len(set(drawn.tokens.tolist())) > 30 and len(set(again.tokens.tolist())) == 1


def test_every_seed_draws_anew_to_its_64th_bit() -> None:  # B161: n choices are n seeds
    seeds = [0, 1, 1 << 31, 1 << 32, 1 << 63, -1]
    drawn, _ = draw(np.zeros((6, 4096)), [Sampling()] * 6, seeds=seeds)
    assert len(set(drawn.tokens.tolist())) == 6
    own, _ = draw(np.zeros((6, 4096)), [Sampling(seed=seed) for seed in seeds], seeds=[9] * 6)
    assert own.tokens.tolist() == drawn.tokens.tolist()


def test_the_noise_is_that_of_the_framework() -> None:
    for seed in (0, 5, 2**32 - 1):
        key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), 3)
        high, low = jax.random.key_data(key)
        ids = jnp.arange(1000, dtype=jnp.uint32)
        assert (noise.random_bits(high, low, ids) == jax.random.bits(key, (1000,))).all()
    found = np.asarray(noise.gumbel(jnp.array([[0, 5]], jnp.uint32), jnp.array([3]), 20_000)[0])
    assert stats.kstest(found, "gumbel_r").pvalue > 1e-3
    extremes = np.array([0, 2**32 - 1], np.uint32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(noise, "random_bits", lambda high, low, ids: jnp.asarray(extremes)[None])
        most, least = noise.gumbel(jnp.zeros((1, 2), jnp.uint32), jnp.zeros(1, jnp.int32), 2)[0]
    assert 22.5 < most < 23 and -3 < least < -2.5


def test_a_penalty_is_of_distinct_ids_and_only_frequency_counts() -> None:  # B163
    logits = np.array([2.0, -2.0, 1.0, 0.5])
    answers = [0, 0, 0, 1]

    def scores(**penalty: Any) -> list[float]:
        one = [Sampling(temperature=0, **penalty)]
        history = histories(one, 4, [(2, 2)], [answers])
        args = rows_of(one), history, jnp.array([4]), jnp.ones(1, bool)
        return np.asarray(compiled_weights(jnp.asarray(logits[None]), *args, needs=Needs.of(one)))[0].tolist()

    assert scores(repetition_penalty=1.25) == pytest.approx([1.6, -2.5, 0.8, 0.5])
    assert scores(presence_penalty=0.5) == pytest.approx([1.5, -2.5, 1.0, 0.5]), "not of the prompt"
    assert scores(frequency_penalty=0.5) == pytest.approx([0.5, -2.5, 1.0, 0.5])
    assert scores(logit_bias={3: 1.5, 1: -1}) == pytest.approx([2.0, -3.0, 1.0, 2.0])
    assert scores(logit_bias={1: 4}, repetition_penalty=2) == pytest.approx([1, 1, 0.5, 0.5]), "bias first"


def test_only_drawn_tokens_of_active_rows_are_counted() -> None:  # B164
    samplings = [Sampling(temperature=0, frequency_penalty=1)] * 3
    logits, history = np.array([[3.0, 2, 0]] * 3), History.idle(3, 3)
    active, drawn = jnp.array([True, True, False]), []
    for step in range(4):
        out, history = draw(logits, samplings, history=history, active=active, num_new=jnp.full(3, step))
        drawn.append(out.tokens.tolist())
    assert [row[0] for row in drawn] == [0, 0, 1, 0] and [row[2] for row in drawn] == [0] * 4
    assert history.counts.tolist() == [[3, 1, 0], [3, 1, 0], [0, 0, 0]] and not np.any(history.prompt)
    assert out.finite.all()


def test_a_row_is_admitted_with_its_prompt_its_answer_and_its_biases_alone() -> None:
    one = Sampling(logit_bias={2: 5})
    history = jax.jit(admit, donate_argnums=0)(
        jax.tree.map(lambda x: jnp.ones_like(x), History.idle(2, 4)), 1, History.of(one, 4, [3, 3], [0, 0])
    )
    assert history.prompt.tolist() == [[True] * 4, [False, False, False, True]]
    assert history.counts.tolist() == [[1] * 4, [2, 0, 0, 0]] and history.bias.tolist() == [[1] * 4, [0, 0, 5, 0]]


def test_no_end_is_drawn_before_min_tokens() -> None:  # B167
    one = Sampling(temperature=0, min_tokens=8, stop_ids=(1,))
    samplings = [one, one, Sampling(temperature=0)]
    logits = np.array([[2.0, 3, 4, 1]] * 3)  # 2 ends by the tokenizer, 1 by the request
    for num_new, expected in ((0, 0), (7, 0), (8, 2)):
        drawn, _ = draw(logits, samplings, num_new=jnp.full(3, num_new), ends=[2])
        assert drawn.tokens.tolist() == [expected, expected, 2]
    on = Sampling(temperature=0, min_tokens=8, ignore_ends=True)
    assert draw(logits[:1], [on], ends=[2])[0].tokens.tolist() == [2], "it ends nothing"


def test_rows_beyond_the_tokenizer_are_never_drawn_nor_offered() -> None:
    logits = np.tile([0.0, 0, 0, 9, 9], (50, 1))
    samplings = [Sampling(temperature=t, logprobs=2) for t in (0, 1) for _ in range(25)]
    drawn, _ = draw(logits, samplings, num_tokens=3)
    assert set(drawn.tokens.tolist()) == {0, 1, 2} and drawn.tokens[:25].max() == 0
    assert drawn.top_ids.shape == (50, 3) and drawn.top_ids.max() == 2


def test_logprobs_are_those_of_the_raw_logits() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 3, (4, 64)).astype(np.float32)
    one = Sampling(temperature=0.3, top_k=2, logit_bias={5: 30}, logprobs=3)
    drawn, _ = draw(logits, [one] * 4)
    expected = logits - np.log(np.exp(logits.astype(np.float64)).sum(1, keepdims=True))
    assert drawn.tokens.tolist() == [5] * 4
    np.testing.assert_allclose(drawn.logprobs, expected[:, 5], atol=1e-5)
    order = np.argsort(-logits, axis=1)[:, :MAX_LOGPROBS]
    assert drawn.top_ids.tolist() == order.tolist()
    np.testing.assert_allclose(drawn.top_logprobs, np.take_along_axis(expected, order, 1), atol=1e-5)
    bare, _ = draw(logits, [Sampling()] * 4)
    assert bare.logprobs is bare.top_ids is bare.top_logprobs is None


def test_a_row_depends_neither_on_its_neighbours_nor_on_what_they_need() -> None:
    rng, vocab = np.random.default_rng(3), 600
    wide: dict[str, Any] = dict(top_p=0.97, temperature=1.5)  # its cut lies beyond those looked at first
    kinds = [Sampling(), Sampling(temperature=0), Sampling(top_k=40, top_p=0.9), Sampling(**wide), Sampling(min_p=0.05)]
    kinds.append(Sampling(frequency_penalty=0.3, presence_penalty=0.1, repetition_penalty=1.3, logit_bias={4: 2}))
    logits = rng.normal(0, 1, (6, vocab)).astype(np.float32)
    prompts, answers = rng.integers(0, vocab, (2, 6, 9)).tolist()
    history = histories(kinds, vocab, prompts, answers)
    order, seeds = rng.permutation(6), [11, 12, 13, 14, 15, 16]
    for position in range(12):
        at = jnp.full(6, position)
        together, counted = draw(logits, kinds, history=history, positions=at, needs=EVERYTHING, seeds=seeds)
        moved = jax.tree.map(lambda x: x[order], (logits, history))
        other, _ = draw(
            moved[0], [kinds[i] for i in order], history=moved[1], positions=at, needs=EVERYTHING,
            seeds=[seeds[i] for i in order],
        )  # fmt: skip
        assert other.tokens.tolist() == together.tokens[order].tolist()
        for row, one in enumerate(kinds):
            mine = jax.tree.map(lambda x, row=row: x[row : row + 1], (logits, history))
            alone, _ = draw(mine[0], [one], history=mine[1], positions=at[:1], seeds=[seeds[row]])
            assert alone.tokens[0] == together.tokens[row], f"row {row}, {one}"
        assert counted.counts.sum() == 6 * 10


def test_a_cut_is_the_same_place_wherever_it_is_looked_for() -> None:
    rng, rows, vocab = np.random.default_rng(1), 64, 300
    scores = np.round(rng.normal(0, rng.choice([0.2, 1, 3], (rows, 1)), (rows, vocab)) * 8) / 8
    scores = jnp.asarray(scores - scores.max(1, keepdims=True), jnp.float32).at[:, 7].set(-jnp.inf)
    top_k = jnp.asarray(rng.choice([0, 1, 3, 50, 200, 299, 300], rows), jnp.int32)
    top_p = jnp.asarray(rng.choice([1, 1e-6, 0.3, 0.8, 0.99, 0.99999], rows), jnp.float32)
    min_p = jnp.asarray(rng.choice([0, 0.1], rows), jnp.float32)
    found = [jax.jit(partial(cuts.cut, most=most))(scores, top_k, top_p, min_p) for most in (1, 20, vocab)]
    sizes = np.isfinite(found[2]).sum(1)
    assert (sizes > 20).sum() > 10 and (sizes <= 20).sum() > 10, "both ways must be taken"
    assert (found[0] == found[2]).all() and (found[1] == found[2]).all()


def test_logits_that_are_no_numbers_are_reported() -> None:
    logits = np.zeros((6, 4))
    logits[1, 2], logits[2, 0], logits[3], logits[4, 1] = np.nan, np.inf, -np.inf, -np.inf
    for needs in (Needs(), Needs(draws=True), EVERYTHING):
        for temperature in (0.0, 1.0):
            active = jnp.arange(6) < 5
            if temperature and not needs.draws:
                continue
            drawn, _ = draw(logits, [Sampling(temperature=temperature)] * 6, needs=needs, active=active)
            assert drawn.finite.tolist() == [True, False, False, False, True, True]
            assert (drawn.tokens >= 0).all() and (drawn.tokens < 4).all() and drawn.tokens[4] != 1


def test_tiny_temperatures_are_greedy_and_large_ones_stay_finite() -> None:
    logits = np.array([[1e4, 1e4 - 1e-2, 0]] * 3)
    samplings = [Sampling(temperature=1e-30), Sampling(temperature=2e-5, top_p=0.5), Sampling(temperature=100)]
    drawn, _ = draw(logits, samplings)
    assert drawn.tokens[:2].tolist() == [0, 0] and drawn.finite.all() and drawn.tokens[2] != 2


def test_a_variant_holds_what_the_requests_need_and_no_more() -> None:
    assert Needs.of([]) == Needs() == Needs.of([Sampling(temperature=0, top_k=5, top_p=0.3)])
    assert Needs.of([Sampling(temperature=0), Sampling(top_k=-1)]) == Needs(draws=True)
    for one in (dict(top_k=1), dict(top_p=0.5), dict(min_p=0.5)):
        assert Needs.of([Sampling(**one)]) == Needs(draws=True, cuts=True)  # type: ignore[arg-type]
    for one in (
        dict(min_tokens=1), dict(logit_bias={1: 1}), dict(presence_penalty=-1), dict(frequency_penalty=1),
        dict(repetition_penalty=0.5),
    ):  # fmt: skip
        assert Needs.of([Sampling(temperature=0, **one)]) == Needs(history=True)  # type: ignore[arg-type]
    assert Needs.of([Sampling(temperature=0, logprobs=0), Sampling(min_p=0.1)]) == Needs(True, True, False, True)

    def text(needs: Needs) -> str:
        args = (
            jnp.zeros((2, 700)),
            Controls.idle(2),
            History.idle(2, 700),
            *[jnp.zeros(2, jnp.int32)] * 2,
            jnp.ones(2, bool),
        )
        return compiled.lower(*args, needs=needs).as_text()

    assert "k = 256" in text(EVERYTHING) and "k = 256" not in text(Needs(True, False, True, True))
    assert "log_plus_one" in text(Needs(draws=True)) and "log_plus_one" not in text(Needs(False, False, True, True))
    assert "scatter" in text(Needs(history=True)) and "scatter" not in text(Needs(True, True, False, True))


def test_a_row_is_set_without_touching_what_a_step_may_still_read() -> None:
    before = Controls.idle(2)
    after = before.with_row(1, Sampling(temperature=0.5, top_k=3), 4, ends=[9])
    assert before.temperature.tolist() == [0, 0] and after.temperature.tolist() == [0, 0.5]
    assert after.ends[1, :2].tolist() == [9, -1] and after.ends.dtype == before.ends.dtype == np.int32
    assert jax.tree.map(lambda x: (x.shape, x.dtype), before) == jax.tree.map(lambda x: (x.shape, x.dtype), after)


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="40 ids end the answer, the tokenizer's 40 among them; 32 or fewer are taken"):
        Controls.idle(1).with_row(0, Sampling(), 0, ends=range(40))
    with pytest.raises(ValueError, match="logit_bias names token 9; the vocabulary's ids are 0 to 4"):
        require_ids(Sampling(logit_bias={4: 1, 9: 1}), 5)
    with pytest.raises(ValueError, match="stop_ids names token -1; the vocabulary's ids are 0 to 4"):
        require_ids(Sampling(stop_ids=(-1,)), 5)
    with pytest.raises(ValueError, match="stop_ids holds 17 ids; 16 or fewer are taken"):
        Sampling(stop_ids=tuple(range(17)))
