"""A draft changes how fast an answer comes, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxpp
from jaxpp.conversion import load
from jaxpp.serve import Engine, Sampling
from tests import formats
from tests.golden import reading

SIZES: dict[str, Any] = dict(slots=3, max_context=64, page=4, chunk=8)
GREEDY = Sampling(temperature=0, max_tokens=16, ignore_ends=True)
PROMPTS = [[5, 9, 200, 31, 77, 3, 3, 18], [1, 2, 3], [250, 4] * 9, [17]]

SETTINGS = [
    GREEDY,
    Sampling(max_tokens=16, seed=3, ignore_ends=True),
    Sampling(max_tokens=16, seed=4, top_p=0.9, top_k=40, ignore_ends=True, logprobs=2),
    Sampling(max_tokens=16, temperature=0, frequency_penalty=0.4, repetition_penalty=1.2, ignore_ends=True),
    Sampling(max_tokens=12, seed=5, min_tokens=8, logit_bias={256: 8.0}),
    Sampling(max_tokens=7, seed=6, presence_penalty=1.0, ignore_ends=True),
]


def noisy(tensors: dict[str, np.ndarray]) -> None:
    """Make the draft another model, which is right now and then."""
    draw = np.random.RandomState(0)
    for name, tensor in tensors.items():
        if "proj" in name:
            tensor += 0.2 * tensor.std() * draw.standard_normal(tensor.shape).astype(np.float32)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return formats.write(tmp_path_factory.mktemp("hf") / "llama")


@pytest.fixture(scope="module")
def plain(directory: Path) -> Engine:
    return Engine(load(directory), **SIZES)


@pytest.fixture(scope="module")
def speculating(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    draft = formats.write(tmp_path_factory.mktemp("draft") / "llama", change=noisy)
    return Engine(load(directory), **SIZES, draft=load(draft), draft_tokens=3)


@pytest.mark.parametrize("sampling", SETTINGS, ids=range(len(SETTINGS)))
def test_every_answer_is_what_the_model_alone_draws(sampling: Sampling, plain: Engine, speculating: Engine) -> None:
    """Penalties count every token that is kept, the end is withheld for as long, log-probabilities are the model's."""
    found, wanted = speculating.generate(PROMPTS, sampling), plain.generate(PROMPTS, sampling)
    for one, other in zip(found, wanted, strict=True):
        assert (one.ids, one.finish, one.text) == (other.ids, other.finish, other.text)
        for token, same in zip(one.tokens, other.tokens, strict=True):
            assert token.logprob == pytest.approx(same.logprob, abs=1e-4)
    held = speculating.statistics()
    assert 0 < held.right_tokens < held.guessed_tokens and held.pages_used == 0


def test_the_source_of_a_grown_model_is_always_right(directory: Path) -> None:
    small = load(directory)
    grown = jaxpp.grow.enlarge(small, width=2, noise_db=None)
    grown.loaded = small.loaded
    engine = Engine(grown, **SIZES, draft=small, draft_tokens=3)
    before = engine.generate(PROMPTS[:1], replace(GREEDY, max_tokens=13))[0]
    assert engine._batching.steps == 3, "one token from the prompt, then four in each step"
    held = engine.statistics()
    assert held.right_tokens == held.guessed_tokens == 9
    assert before.ids == Engine(load(directory), **SIZES).generate(PROMPTS[:1], replace(GREEDY, max_tokens=13))[0].ids


def test_windows_and_a_mesh(tmp_path: Path) -> None:
    """The model slides over its tokens, the draft sees all; both are split."""
    prompt = reading.load("mistral").arrays["greedy_prompt"].tolist()
    wanted = reading.load("mistral").arrays["greedy_new"].tolist()
    path, draft = reading.write("mistral", tmp_path / "model"), reading.write("llama_gqa", tmp_path / "draft")
    models = [load(one, "data:2 tensor:2") for one in (path, draft)]
    engine = Engine(models[0], slots=2, max_context=32, page=4, chunk=8, draft=models[1], draft_tokens=2)
    assert [answer.ids for answer in engine.generate([prompt] * 3, GREEDY)] == [wanted] * 3


@pytest.mark.parametrize(
    "case, settings, message",
    [
        ("llama2", {}, "the draft and the model know 251 and 256 tokens; a draft of the same tokenizer is needed"),
        ("llama_dynamic", {"max_context": 64}, "the draft takes 32 tokens, fewer than max_context 64; set that to 32"),
        ("llama_mqa", {"draft_tokens": 0}, "draft_tokens 0: 1 to 15 are needed"),
        ("llama_dynamic", {"max_context": 32}, "the draft's rotary rule dynamic depends on the length of a row"),
    ],
)
def test_what_cannot_guess_is_refused(case: str, settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    models = [load(reading.write(name, tmp_path / name)) for name in ("llama_gqa", case)]
    with pytest.raises(ValueError, match=message):
        Engine(models[0], draft=models[1], **settings)
