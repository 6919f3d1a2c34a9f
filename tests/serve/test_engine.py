"""The engine: whatever runs beside it, a request gets what it would get alone, and nothing is left behind."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxpp.conversion import load
from jaxpp.serve import Engine, QueueFull, Sampling
from jaxpp.serve.generate import greedy
from tests import formats
from tests.golden import reading

SIZES: dict[str, Any] = dict(slots=4, max_context=64, page=4, chunk=8)
GREEDY = Sampling(temperature=0, max_tokens=12, ignore_ends=True)
PROMPT = [5, 9, 200, 31, 77, 3, 3, 18]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return formats.write(tmp_path_factory.mktemp("hf") / "llama")


@pytest.fixture(scope="module")
def engine(directory: Path) -> Iterator[Engine]:
    engine = Engine(load(directory), **SIZES)
    engine.warm_up()
    yield engine
    engine.close()


@pytest.fixture
def compilations() -> list[str]:
    """What XLA compiled since."""
    found: list[str] = []

    def listen(event: str, duration: float, **_: Any) -> None:
        if "backend_compile" in event:
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    return found


@pytest.fixture(autouse=True)
def nothing_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "engine" in request.fixturenames:
        engine = request.getfixturevalue("engine")
        deadline = time.monotonic() + 30
        while (held := engine.statistics()).num_running + held.num_waiting and time.monotonic() < deadline:
            time.sleep(0.01)
        assert (held.num_running, held.num_waiting, held.pages_used) == (0, 0, 0)


def prompts(count: int, seed: int = 0, longest: int = 40) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(256) for _ in range(draw.randrange(1, longest))] for _ in range(count)]


def test_greedy_is_the_argmax_of_the_whole_pass(directory: Path, engine: Engine) -> None:
    asked = prompts(6)
    model = load(directory)
    for prompt, answer in zip(asked, engine.generate(asked, GREEDY), strict=True):
        assert answer.ids == greedy(model, prompt, 12) and answer.finish == "length"


@pytest.mark.parametrize("case", ["gemma2", "mistral", "mixtral", "gpt2", "phi3_longrope", "qwen3", "olmo2"])
def test_every_family_continues_as_the_reference_did(case: str, tmp_path: Path) -> None:
    golden = reading.load(case).arrays
    engine = Engine(load(reading.write(case, tmp_path)), slots=3, max_context=24, page=4, chunk=8)
    asked = golden["greedy_prompt"].tolist()
    sampling = replace(GREEDY, max_tokens=16)
    first, shorter, second = engine.generate([asked, asked[:5], asked], sampling)
    assert first.ids == second.ids == golden["greedy_new"].tolist() != shorter.ids


@pytest.mark.parametrize("mesh", ["tensor:4", "data:4 tensor:2", "fsdp:2 tensor:2"])
def test_every_mesh_gives_the_same_tokens(mesh: str, tmp_path: Path) -> None:
    """Two kv heads on four devices among them."""
    golden = reading.load("llama_gqa").arrays
    engine = Engine(load(reading.write("llama_gqa", tmp_path), mesh), slots=4, max_context=24, page=4, chunk=8)
    asked = golden["greedy_prompt"].tolist()
    answers = engine.generate([asked, asked[:3], asked], replace(GREEDY, max_tokens=16))
    assert answers[0].ids == answers[2].ids == golden["greedy_new"].tolist()


@pytest.mark.parametrize(
    "case, mesh", [("llama_mqa", "tensor:4"), ("llama_gqa", "data:2 tensor:4"), ("gemma2", "tensor:2")]
)
def test_keys_and_values_by_batch(case: str, mesh: str, tmp_path: Path) -> None:
    """Each device keeps its own requests', whole; queries travel there and back."""
    golden = reading.load(case).arrays
    model = load(reading.write(case, tmp_path), mesh)
    engine = Engine(model, slots=8, max_context=24, page=4, chunk=8, kv_split="batch")
    asked = golden["greedy_prompt"].tolist()
    answers = engine.generate([asked, asked[:3], asked, asked[:5], asked], replace(GREEDY, max_tokens=16))
    assert answers[0].ids == answers[2].ids == answers[4].ids == golden["greedy_new"].tolist()
    keys, size = engine._program.pages[0].keys, model.loaded.execution.layout.mesh.size
    assert keys.sharding.shard_shape(keys.shape)[:2] == (len(keys) // size, model.config.num_kv_heads)


def test_a_request_gets_what_it_gets_alone(engine: Engine) -> None:
    """64 requests on 4 slots, of lengths 1 to 16, greedy and drawn, with every setting: one by one and all at once."""
    draw = random.Random(1)
    settings = [
        dict(temperature=0), dict(temperature=1.0), dict(top_k=20), dict(top_p=0.8), dict(min_p=0.05),
        dict(repetition_penalty=1.3), dict(presence_penalty=1.0, frequency_penalty=0.5), dict(logit_bias={7: 5.0}),
    ]  # fmt: skip
    asked = prompts(64, seed=2)
    samplings = [
        Sampling(**{"max_tokens": draw.randrange(1, 17), "seed": i, "ignore_ends": True, **settings[i % 8]})  # type: ignore[arg-type]
        for i in range(64)
    ]
    before = engine.statistics().num_compiled
    together = [engine.submit(prompt, one) for prompt, one in zip(asked, samplings, strict=True)]
    found = [[token.id for delta in request for token in delta.tokens] for request in together]
    assert [len(ids) for ids in found] == [one.max_tokens for one in samplings]
    for index in range(0, 64, 3):
        alone = engine.submit(asked[index], samplings[index])
        assert [token.id for delta in alone for token in delta.tokens] == found[index], samplings[index]
    assert engine.statistics().num_compiled == before, "something was compiled after the warm-up"
    assert len({tuple(ids) for ids in found}) > 40


def test_nothing_compiles_after_the_warm_up(directory: Path, compilations: list[str]) -> None:
    """XLA's own count: programs, sampler, histories and what puts their pieces together."""
    engine = Engine(load(directory), slots=2, max_context=32, page=4, chunk=8)
    engine.warm_up()
    assert compilations
    compilations.clear()
    for settings in ({"temperature": 0}, {"top_p": 0.9}, {"frequency_penalty": 0.5, "logprobs": 2}):
        engine.generate([[1, 2, 3], [4] * 9, [5]], max_tokens=5, seed=1, **settings)
    assert not compilations


def test_a_known_beginning_is_not_run_again(engine: Engine) -> None:
    beginning, tails = prompts(1, seed=11, longest=41)[0] * 2, ([1, 2, 3], [4], [])
    beginning = (beginning * 40)[:30]
    cold = [engine.generate([[*beginning, *tail]], GREEDY)[0] for tail in tails]
    warm = [engine.generate([[*beginning, *tail]], GREEDY)[0] for tail in tails]
    assert [answer.cached_tokens for answer in warm] == [32, 28, 28]
    assert [answer.ids for answer in warm] == [answer.ids for answer in cold]
    model_says = engine.generate([[*beginning, *tails[0], *cold[0].ids[:8]]], GREEDY)[0]
    assert model_says.cached_tokens == 40, "what was answered is known too"


def test_a_beginning_of_which_a_window_lost_its_part_is_run_again(tmp_path: Path) -> None:
    """Sliding layers keep little: with few pages they give theirs away, the others would still have all."""
    path = reading.write("mistral", tmp_path)
    engine = Engine(load(path), slots=2, max_context=48, page=4, chunk=8, num_pages=14)
    beginning = prompts(1, seed=5)[0][:1] * 3 + [8, 1, 77, 4, 9, 120, 6, 5, 54, 3, 2, 99, 8, 7, 6, 5, 4]
    first = engine.generate([[*beginning, 1]], GREEDY)[0]
    engine.generate(prompts(6, seed=6, longest=30), GREEDY)
    again = engine.generate([[*beginning, 1], [*beginning, 2]], GREEDY)
    assert again[0].ids == first.ids
    cold = Engine(load(path), slots=2, max_context=48, page=4, chunk=8)
    assert cold.generate([[*beginning, 2]], GREEDY)[0].ids == again[1].ids


def test_empty_slots_do_not_prolong_the_run(engine: Engine) -> None:
    before = engine._batching.steps
    list(engine.submit(PROMPT, replace(GREEDY, max_tokens=5)))
    [list(one) for one in [engine.submit(PROMPT[:n], replace(GREEDY, max_tokens=n)) for n in (2, 3, 5)]]
    assert engine._batching.steps - before <= 2 * 5 + 3


def test_a_slot_is_clean_for_the_next(engine: Engine) -> None:
    """First of all, after ten others, and beside a long prompt that is read in pieces: the same log-probabilities."""
    asked = replace(GREEDY, logprobs=3)

    def said() -> list[Any]:
        return [token for delta in engine.submit(PROMPT, asked) for token in delta.tokens]

    first = said()
    engine.generate(prompts(10, seed=3), GREEDY)
    assert said() == first
    beside = engine.submit(prompts(1, seed=4)[0] * 3 or PROMPT, replace(GREEDY, max_tokens=2))
    assert said() == first
    list(beside)


def test_log_probabilities_are_those_of_the_model(directory: Path, engine: Engine) -> None:
    tokens = engine.generate([PROMPT], replace(GREEDY, logprobs=5))[0].tokens
    whole = np.array([[*PROMPT, *[token.id for token in tokens]]])
    logits = np.asarray(load(directory)(whole))[0, len(PROMPT) - 1 : -1].astype(np.float64)
    wanted = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    for token, row in zip(tokens, wanted, strict=True):
        assert token.logprob == pytest.approx(row[token.id], abs=1e-4)
        assert [index for index, _ in token.top] == np.argsort(-row[:257], kind="stable")[:5].tolist()


def test_the_seed_decides_and_each_prompt_has_its_own(engine: Engine) -> None:
    drawn = dict(max_tokens=10, temperature=1.0, ignore_ends=True)
    first, again, other = (engine.generate([PROMPT] * 3, seed=seed, **drawn) for seed in (1, 1, 50))
    assert [a.ids for a in first] == [a.ids for a in again] != [a.ids for a in other]
    assert len({tuple(a.ids) for a in first}) == 3
    unseeded = engine.generate([PROMPT] * 2, **drawn)
    assert unseeded[0].ids != unseeded[1].ids


def test_stop_texts_end_the_answer_wherever_they_lie(engine: Engine) -> None:
    """Bytes are tokens here, so a text of three characters spans three."""
    plain = engine.generate([PROMPT], GREEDY)[0]
    text = engine.tokenizer.decode(plain.ids)
    at = next(i for i in range(1, len(text) - 2) if text[i : i + 2].isascii() and text.index(text[i : i + 2]) == i)
    stopped = engine.generate([PROMPT], replace(GREEDY, stop=("nowhere in it", text[at : at + 2])))[0]
    assert (stopped.text, stopped.finish) == (text[:at], "stop")
    ids = engine.generate([PROMPT], replace(GREEDY, stop_ids=(plain.ids[4],)))[0]
    assert ids.ids == plain.ids[: plain.ids.index(plain.ids[4])] and ids.finish == "stop"


def test_an_end_of_text_ends_it_and_min_tokens_holds_it_off(engine: Engine) -> None:
    likely = Sampling(temperature=0, max_tokens=12, logit_bias={256: 100.0})
    assert engine.generate([PROMPT], likely)[0].ids == []
    later = engine.generate([PROMPT], replace(likely, min_tokens=8))[0]
    assert len(later.ids) == 8 and 256 not in later.ids and later.finish == "stop"
    assert engine.generate([PROMPT], replace(likely, ignore_ends=True))[0].ids == [256] * 12


@pytest.mark.parametrize(
    "prompt, settings, message",
    [
        ([], {}, "the prompt is empty"),
        ([300], {}, "token ids 300 to 300; this model takes 0 to 263"),
        ([1] * 64, {}, "the prompt has 64 tokens, but the model takes 64 with what it adds; cut the prompt to 63"),
        ([1] * 60, {"max_tokens": 5}, "max_tokens 5 after a prompt of 60 tokens; .* leaves room for 1 to 4"),
        ([1], {"stop_ids": (999,)}, "stop_ids names token 999; the vocabulary's ids are 0 to 263"),
        ([1], {"logit_bias": {-1: 1.0}}, "logit_bias names token -1"),
    ],
)
def test_what_could_never_run_is_refused_at_once(
    prompt: list[int], settings: Any, message: str, engine: Engine
) -> None:
    with pytest.raises(ValueError, match=message):
        engine.submit(prompt, Sampling(**{"max_tokens": 1, **settings}))


def test_the_longest_answer_fits(engine: Engine) -> None:
    assert len(engine.generate([[1] * 60], replace(GREEDY, max_tokens=4))[0].ids) == 4


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(max_context=10**6), "max_context 1000000: the model takes 128 tokens or fewer"),
        (dict(slots=0), "slots 0: a multiple of the mesh's 1 batch shards is needed, such as 1"),
        (dict(max_context=1), "max_context 1: 2 or more are needed"),
    ],
)
def test_an_engine_that_cannot_be(settings: Any, message: str, directory: Path) -> None:
    with pytest.raises(ValueError, match=message):
        Engine(load(directory), **settings)


def test_too_few_pages_are_said_at_once(directory: Path) -> None:
    engine = Engine(load(directory), slots=2, max_context=64, page=4, chunk=8, num_pages=6)
    with pytest.raises(ValueError, match="prompt and answer take 7 pages of the cache; there are 6"):
        engine.submit([1] * 20, replace(GREEDY, max_tokens=8))
    answers = engine.generate([[1] * 8, [2] * 8, [3] * 8], replace(GREEDY, max_tokens=8))
    assert [len(answer.ids) for answer in answers] == [8, 8, 8], "they take turns"


def test_what_is_cancelled_ends_and_frees_its_slot(engine: Engine) -> None:
    running = [engine.submit(PROMPT, replace(GREEDY, max_tokens=50)) for _ in range(6)]
    begun = [next(iter(request)) for request in running[:4]]
    assert all(delta.tokens for delta in begun)
    for request in running:
        request.cancel()
    assert [list(request)[-1].finish for request in running] == ["cancelled"] * 6


def test_what_takes_too_long_is_given_up(engine: Engine) -> None:
    request = engine.submit(PROMPT, replace(GREEDY, max_tokens=50), timeout_s=0.0)
    assert list(request)[-1].finish == "timeout"


def test_it_streams_on_an_asyncio_loop_and_leaving_gives_it_up(engine: Engine) -> None:
    async def some(count: int) -> list[int]:
        found: list[int] = []
        async for delta in engine.stream(PROMPT, GREEDY):
            found += [token.id for token in delta.tokens]
            if len(found) >= count:
                break
        return found

    async def both() -> list[list[int]]:
        return await asyncio.gather(some(12), some(3))

    whole, begun = asyncio.run(both())
    assert whole == engine.generate([PROMPT], GREEDY)[0].ids and begun == whole[:3]


def test_the_queue_is_bounded_and_closing_drains_it(directory: Path) -> None:
    engine = Engine(load(directory), **{**SIZES, "slots": 1}, max_queue=2)
    asked = replace(GREEDY, max_tokens=20)
    taken = [engine.submit(PROMPT, asked)]
    while engine.statistics().num_running == 0:
        time.sleep(0.005)
    taken += [engine.submit(PROMPT, asked) for _ in range(2)]
    with pytest.raises(QueueFull, match="2 requests wait, as many as the queue takes"):
        engine.submit(PROMPT, asked)
    closing = threading.Thread(target=engine.close, args=(60,))
    closing.start()
    assert [list(request)[-1].finish for request in taken] == ["length"] * 3
    closing.join(30)
    with pytest.raises(ValueError, match="the engine is closed"):
        engine.submit(PROMPT, asked)


def test_a_step_that_fails_ends_every_request_with_its_message(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(load(directory), **SIZES)

    def broken(*_: Any) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine._program, "extend", broken)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    last = list(engine.submit(PROMPT, GREEDY))[-1]
    assert (last.finish, last.error) == ("error", "RuntimeError: out of memory")
    with pytest.raises(ValueError, match="the engine is closed"):
        engine.submit(PROMPT, GREEDY)


def test_weights_that_are_no_numbers_are_an_error_not_a_text(tmp_path: Path) -> None:
    def spoil(tensors: dict[str, np.ndarray]) -> None:
        tensors["model.norm.weight"][0] = np.nan

    engine = Engine(load(formats.write(tmp_path, change=spoil)), **SIZES)
    with pytest.raises(ValueError, match="the logits are not finite"):
        engine.generate([PROMPT], GREEDY)


def test_int8_keys_and_values_say_nearly_the_same(directory: Path) -> None:
    engine = Engine(load(directory), **SIZES, kv_dtype="int8")
    wanted = Engine(load(directory), **SIZES).generate([PROMPT], replace(GREEDY, logprobs=0))[0]
    found = engine.generate([PROMPT], replace(GREEDY, logprobs=0))[0]
    assert engine._program.bytes_of_pages() < 0.6 * Engine(load(directory), **SIZES)._program.bytes_of_pages()
    assert found.tokens[0].logprob == pytest.approx(wanted.tokens[0].logprob, abs=0.05)
