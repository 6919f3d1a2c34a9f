"""SmolLM2-135M-Instruct, whose file holds 4 bits for each weight in groups of 32: what it still predicts, quantised."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxpp import cli
from jaxpp.compress import Quantization
from jaxpp.conversion import load
from jaxpp.data import CorpusConfig, read_documents
from jaxpp.serve.perplexity import Score, score_texts, windows_for
from tests import formats

NUM_TOKENS = 4096  # of each document; the two have 2,830 together


def perplexity(quantize: str | Quantization) -> float:
    model = load(formats.smollm2(), quantize=quantize)
    texts = [document.text for document in read_documents(CorpusConfig("pydoc"), 2)]
    return sum(score_texts(model, model.tokenizer, texts, windows_for(model.config), NUM_TOKENS), Score()).perplexity


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_int8_is_within_half_a_percent_and_int4_within_four() -> None:
    """The groups of int4 are those of the file, so it costs next to nothing; others, off its grid, cost a lot."""
    plain = perplexity("")
    assert perplexity("int8") == pytest.approx(plain, rel=0.005)
    assert perplexity("int4") == pytest.approx(plain, rel=0.04)
    assert 1.1 * plain < perplexity(Quantization("int4", group=64)) < 1.5 * plain


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_it_answers_quantised(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--prompt", "What is the capital of France?", "--temperature", "0", "--max_new_tokens", "20"]
    assert cli.main(["generate", str(formats.smollm2()), "--chat", "--quantize", kind, *words]) == 0
    assert capsys.readouterr().out == "The capital of France is Paris.\n"


def test_commands_name_the_nearest_kind(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The history of the city goes back to the Middle Ages.")
    assert cli.main(["eval", str(formats.smollm2()), "--text", str(text), "--quantize", "int44"]) == 2
    assert 'unknown kind "int44"; did you mean "int4"? known: int8 int4' in capsys.readouterr().err
