"""SmolLM2-135M-Instruct, from a GGUF file of 4-bit weights, on one device and on meshes: it predicts and it speaks.

Nine query heads on three key heads: no power of two. The perplexities are those of another implementation, on the first
512 tokens of three texts. Two of these belong to CPython 3.11.7; elsewhere they are not at hand.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import pydoc_data.topics
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxpp import cli
from jaxpp.conversion import load
from jaxpp.serve.perplexity import Windows, score_texts
from tests import formats
from tests.convert.test_gguf_smollm import TEXT as CITY

MESHES = ("data:1", "tensor:3 data:2", "fsdp:8")
DIGESTS = {
    "argparse": "f41c757d61d4589ace7afb079f344e9517250e4b149e66d663db8a85d136587d",
    "with": "c6873f63d4fa5a051af056c3387a860eb05356e492ef49a1f6ed9c67508f30b2",
}


def texts() -> dict[str, tuple[str, float]]:
    """Return the texts at hand with the perplexity of each."""
    found = {"city": (CITY, 12.87)}
    others = {
        "argparse": (Path(argparse.__file__).read_text(encoding="utf-8")[20_000:24_000], 6.68),
        "with": (pydoc_data.topics.topics["with"][:4_000], 13.77),
    }
    for name, (text, perplexity) in others.items():
        if hashlib.sha256(text.encode()).hexdigest() == DIGESTS[name]:
            found[name] = (text, perplexity)
    return found


def predicts(model: Any, batch_size: int, window: int = 511) -> None:
    found = texts() if window == 511 else {"city": texts()["city"]}
    scores = score_texts(
        model, model.tokenizer, [text for text, _ in found.values()], Windows(window, window, batch_size), 512
    )
    for name, score in zip(found, scores, strict=True):
        assert score.perplexity == pytest.approx(found[name][1], abs=0.005), name


@pytest.fixture(scope="module")
def logits():
    """Return the logits of the short text on a mesh, computed once."""

    @functools.cache
    def on(mesh: str) -> np.ndarray:
        model = load(formats.smollm2(), mesh)
        ids = model.tokenizer.encode(CITY)
        predicts(model, 1, len(ids) - 1)
        return np.asarray(model(ids[None])[0])

    return on


@pytest.mark.parametrize("mesh", MESHES)
def test_every_mesh_predicts_alike(mesh: str, logits: Any) -> None:
    found = logits(mesh)
    np.testing.assert_allclose(found, logits("data:1"), rtol=0, atol=1e-4)
    assert found.shape == (61, 49152) and 1 < found.std() < 10


def test_it_predicts_as_others_found() -> None:
    model = load(formats.smollm2())
    predicts(model, 1)


def test_it_answers(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--prompt", "What is the capital of France?", "--temperature", "0", "--max_new_tokens", "20"]
    assert cli.main(["generate", str(formats.smollm2()), "--chat", *words]) == 0
    assert capsys.readouterr().out == "The capital of France is Paris.\n"


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("mesh", MESHES[1:])
def test_every_mesh_predicts_as_others_found(mesh: str) -> None:
    model = load(formats.smollm2(), mesh)
    predicts(model, len(texts()))


@pytest.mark.parametrize(
    "mesh, message",
    [
        ("tensor:2", r"heads (9|3) does not split over tensor=2; .*1, 3"),
        ("tensor:4 data:2", r"heads (9|3) does not split over tensor=4; .*1, 3"),
        ("fsdp:5", "embed 576 does not split over fsdp=5; "),
    ],
)
def test_uneven_degrees_are_refused(mesh: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(formats.smollm2(), mesh)
