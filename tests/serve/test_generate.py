"""Text from a checkpoint: greedy is the argmax of the model's own logits, on any mesh; mistakes are one line."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpp import cli, config, runs
from jaxpp.checkpoint import Checkpoints
from jaxpp.conversion import load
from jaxpp.data import Tokenizer
from jaxpp.serve.generate import choose, generate
from jaxpp.train.config import resolved
from tests import command

PROMPT = "the quick"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory):
    """A run whose checkpoint of step 3 holds weights as they are drawn."""
    directory = tmp_path_factory.mktemp("run")
    values = {**command.RUN, "directory": str(directory / "out"), "cpu_devices": 8, "plan": {"mesh": "data:4 tensor:2"}}
    run = runs.build_run(values)
    state = {"params": nnx.state(run.model.build(nnx.Rngs(3)), nnx.Param)}
    texts = {"config.yaml": config.dump(resolved(run)), "tokenizer.json": Tokenizer.bytes().to_json()}
    with Checkpoints(directory / "out" / "checkpoints", asynchronous=False) as checkpoints:
        checkpoints.save(3, state, texts)
    return run


def said(capsys: pytest.CaptureFixture[str], run, *words: str, prompt: str = PROMPT) -> str:
    assert cli.main(["generate", run.directory, "--prompt", prompt, *words]) == 0
    return capsys.readouterr().out


@pytest.fixture(scope="module")
def greedy(run) -> list[int]:
    """Append the argmax of the logits of the text so far, at its own length, five times."""
    directory = Path(run.directory) / "checkpoints"
    numbers = Checkpoints(directory, writable=False).restore_numpy(3, prefix="params")
    model = run.model.build(nnx.Rngs(0))
    for path, node in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        node.set_value(jnp.asarray(numbers[f"params/{'/'.join(map(str, path))}"]))

    ids = [int(i) for i in Tokenizer.bytes().encode(PROMPT)]
    for _ in range(5):
        ids.append(int(np.argmax(np.asarray(model([ids]))[0, -1])))
    found = ids[len(PROMPT) :]
    assert 256 not in found and len(set(found)) > 2, "a text that says nothing tests nothing"
    return found


@pytest.mark.parametrize("mesh", ["", "tensor:2", "data:2 fsdp:2 tensor:2"])
def test_greedy_text_is_the_argmax_of_the_logits(
    mesh: str, run, greedy: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--temperature", "0", "--max_new_tokens", "5", *(["--mesh", mesh] if mesh else [])]
    assert said(capsys, run, *words) == PROMPT + Tokenizer.bytes().decode(greedy) + "\n"


def test_any_path_to_the_checkpoint_will_do(run, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--prompt", PROMPT, "--max_new_tokens", "4", "--seed", "3"]
    texts = []
    for path in ("", "checkpoints", "checkpoints/3"):
        assert cli.main(["generate", str(Path(run.directory) / path), *words]) == 0
        texts.append(capsys.readouterr().out)
    assert len(set(texts)) == 1 and texts[0].startswith(PROMPT)


def test_the_seed_decides_the_draw(run, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--max_new_tokens", "12", "--top_k", "0", "--temperature", "1")
    first, again, other = (said(capsys, run, *words, "--seed", seed) for seed in ("1", "1", "2"))
    assert first == again != other


@pytest.mark.parametrize(
    "words, message",
    [
        (["--prompt", ""], "the prompt is empty; give at least one token"),
        (["--prompt", "a" * 80], "the prompt has 80 tokens, but the model takes 64 with .*; cut the prompt to 63"),
        (
            ["--prompt", PROMPT, "--max_new_tokens", "56"],
            "max_new_tokens 56 after a prompt of 9 tokens; the model's 64 positions leave room for 1 to 55",
        ),
        (["--prompt", PROMPT, "--max_new_tokens", "0"], "max_new_tokens 0 .* room for 1 to 55"),
        (["--prompt", PROMPT, "--mesh", "tensor:4"], "heads 2 does not split over tensor=4"),
        (["--prompt", PROMPT, "--mesh", "tensor:16"], 'mesh "tensor:16" needs 16 devices, but there are 8'),
        (["--prompt", PROMPT, "model.embed_dim=64"], "jaxpp generate does not take model.embed_dim=64; see --help"),
    ],
)
def test_mistakes_are_one_line(words: list[str], message: str, run, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", run.directory, *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and re.fullmatch(rf"jaxpp: [^\n]*{message}[^\n]*\n", err), err


def test_no_checkpoint_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "checkpoints").mkdir()
    assert cli.main(["generate", str(tmp_path), "--prompt", "x"]) == 2
    assert "holds no checkpoint: name a run's directory, its checkpoints/ or one" in capsys.readouterr().err
    for path in (tmp_path / "checkpoints" / "7", tmp_path / "nowhere"):
        assert cli.main(["generate", str(path), "--prompt", "x"]) == 2
        assert f"{path}: there is no such file or directory" in capsys.readouterr().err


def test_top_k_draws_among_the_largest_only() -> None:
    logits = jnp.asarray([0.0, 3.0, 1.0, 2.0])
    keys = jax.random.split(jax.random.key(0), 200)
    drawn = np.asarray(jax.vmap(lambda key: choose(logits, key, 1.0, 2))(keys))
    assert set(drawn.tolist()) == {1, 3}
    assert set(np.asarray(jax.vmap(lambda key: choose(logits, key, 1.0, 0))(keys)).tolist()) == {0, 1, 2, 3}
    # A temperature of a half squares the odds: e^2 against 1 between the two largest.
    cold = np.asarray(jax.vmap(lambda key: choose(logits, key, 0.5, 2))(jax.random.split(jax.random.key(1), 4000)))
    assert (cold == 1).mean() == pytest.approx(1 / (1 + np.exp(-2)), abs=0.03)
    assert int(choose(jnp.asarray([1.0, 2.0, 2.0]), keys[0], 0.0, 0)) == 1


def test_it_stops_at_the_end_of_the_text(run, greedy: list[int]) -> None:
    end = greedy[3]
    found = list(generate(load(run.directory), list(PROMPT.encode()), 5, max_positions=64, temperature=0, ends=[end]))
    assert found == greedy[: greedy.index(end)]
