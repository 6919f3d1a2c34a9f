"""Text from a checkpoint: greedy is the argmax of the model's own logits, on any mesh; mistakes are one line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpp import cli, config, runs
from jaxpp.checkpoint import Checkpoints
from jaxpp.conversion import load
from jaxpp.data import Tokenizer
from jaxpp.serve.generate import greedy as plain
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
            "max_tokens 56 after a prompt of 9 tokens; the model's context of 64 tokens leaves room for 1 to 55",
        ),
        (["--prompt", PROMPT, "--max_new_tokens", "0"], "max_tokens 0: 1 or more is needed"),
        (["--prompt", PROMPT, "--top_p", "1.5"], "top_p 1.5: 0 to 1 is needed"),
        (["--prompt", PROMPT, "--presence-penalty", "3"], "presence_penalty 3.0: -2 to 2 is needed"),
        (["--prompt", PROMPT, "--max-context", "128"], "max_context 128: the model takes 64 tokens or fewer"),
        (["--prompt", PROMPT, "--chat"], "the tokenizer has no chat template"),
        (["--prompt", PROMPT, "--prompts", "x"], "--prompt and --prompts: give one of them"),
        (["--prompts", "nowhere.txt"], "--prompts nowhere.txt cannot be read"),
        ([], "there is no prompt: give --prompt TEXT, --prompts FILE, or --chat to talk"),
        (["--prompt", PROMPT, "--mesh", "tensor:4", "--max-new-tokens", "5"], "heads 2 does not split over tensor=4"),
        (
            ["--prompt", PROMPT, "--mesh", "tensor:16", "--max-new-tokens", "5"],
            'mesh "tensor:16" needs 16 devices, but there are 8',
        ),
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


def test_a_file_of_prompts_is_answered_line_by_line(
    run, greedy: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts.txt").write_text(f"{PROMPT}\n\nabc\n")
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": PROMPT}) + "\n")
    words = ["--temperature", "0", "--max-new-tokens", "5"]
    assert cli.main(["generate", run.directory, "--prompts", str(tmp_path / "prompts.txt"), *words]) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    expected = {"prompt": PROMPT, "text": Tokenizer.bytes().decode(greedy), "finish": "length"}
    assert first == {**expected, "prompt_tokens": 9, "new_tokens": 5} and second["prompt"] == "abc"
    assert cli.main(["generate", run.directory, "--prompts", str(tmp_path / "prompts.jsonl"), *words]) == 0
    assert json.loads(capsys.readouterr().out) == first
    (tmp_path / "prompts.jsonl").write_text("{}")
    assert cli.main(["generate", run.directory, "--prompts", str(tmp_path / "prompts.jsonl")]) == 2
    assert 'each line must be an object like {"prompt": "..."}' in capsys.readouterr().err


def test_the_oracle_of_the_engine_is_the_argmax_too(run, greedy: list[int]) -> None:
    assert plain(load(run.directory), list(PROMPT.encode()), 5) == greedy
