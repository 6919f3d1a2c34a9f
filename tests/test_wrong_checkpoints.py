"""Checkpoints that cannot be read exactly: one line that says what and how to mend it, and nothing on disk changes."""

from __future__ import annotations

import json
import pickle
import re
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxpp import cli
from jaxpp.conversion import convert
from jaxpp.pretrained import open_checkpoint
from tests import command, formats
from tests.convert import gguf_files

SINGLE = "model.safetensors"


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path


@pytest.fixture
def source(workspace: Path) -> Path:
    return formats.write(workspace / "in", files=2)


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    before = command.contents(Path.cwd())
    assert cli.main(words) == 2
    assert command.contents(Path.cwd()) == before
    out, err = capsys.readouterr()
    assert out == "" and re.fullmatch(r"jaxpp: [^\n]+\n", err), err
    return err


def cut(path: Path, most: int) -> None:
    path.write_bytes(path.read_bytes()[:most])


def only(path: Path, name: str, content: bytes) -> None:
    """Leave one file of weights."""
    for file in path.glob("model*"):
        file.unlink()
    (path / name).write_bytes(content)


def zipped(path: Path) -> None:
    only(path, SINGLE, b"")
    with zipfile.ZipFile(path / SINGLE, "w") as archive:
        archive.writestr("archive/data.pkl", b"x" * 100)


def edit(path: Path, **values: Any) -> None:
    config = {**json.loads((path / "config.json").read_text()), **values}
    (path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


FILES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated": (
        lambda path: cut(path / "model-00002-of-00002.safetensors", 3000),
        r"model-00002-of-00002.safetensors is cut: 3000 bytes found, \d+ needed; copy or download it again",
    ),
    "truncated header": (
        lambda path: cut(path / "model-00001-of-00002.safetensors", 40),
        "model-00001-of-00002.safetensors is cut: 40 bytes found, .* needed for its header alone",
    ),
    "a missing file (B43)": (
        lambda path: (path / "model-00002-of-00002.safetensors").unlink(),
        "index.json names 1 of 2 files that are not there: model-00002-of-00002.safetensors",
    ),
    "no index": (
        lambda path: (path / "model.safetensors.index.json").unlink(),
        r"in holds model-00001-of-00002.safetensors, .*, but no model.safetensors.index.json",
    ),
    "an archive": (zipped, "model.safetensors is no safetensors file but a zip archive, as torch.save writes"),
    "a pickle": (
        lambda path: only(path, SINGLE, pickle.dumps({"a": [1] * 99})),
        "model.safetensors is no safetensors file but a pickle",
    ),
    "only a pickle": (
        lambda path: only(path, "pytorch_model.bin", b"PK\x03\x04"),
        "in holds no .safetensors file but pytorch_model.bin, a pickle that we do not run; .* save_pretrained",
    ),
    "a pointer": (
        lambda path: only(path, SINGLE, b"version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 9\n"),
        "model.safetensors is no safetensors file but a Git LFS pointer, .* `git lfs pull`",
    ),
    "an empty file": (lambda path: only(path, SINGLE, b""), "model.safetensors is empty"),
    "broken JSON": (
        lambda path: (path / "config.json").write_text('{"model_type": "llama",'),
        "in/config.json cannot be read: Expecting property name",
    ),
    "JSON of another kind": (lambda path: (path / "config.json").write_text("[1]"), "in/config.json .* object"),
    "no config": (
        lambda path: (path / "config.json").unlink(),
        "there are .safetensors files, but no config.json beside them: copy it too",
    ),
    "an unknown family": (
        lambda path: edit(path, model_type="llama5"),
        r'config.json: unknown model_type "llama5"; did you mean "llama"\?',
    ),
    "no family": (lambda path: edit(path, model_type=None), 'config.json has no "model_type"'),
    "another family": (
        lambda path: edit(path, model_type="qwen2", attention_bias=None, mlp_bias=None, pretraining_tp=None),
        r"missing: model.layers.0.self_attn.[qkv]_proj.bias",
    ),
    "another family's names": (
        lambda path: edit(path, model_type="gpt2", n_embd=64, n_head=4, n_layer=2, n_positions=128),
        "config.json",
    ),
    "an unknown rope": (
        lambda path: edit(path, rope_parameters={"rope_type": "foo", "rope_theta": 10000.0}),
        'rope_type.*"foo"',
    ),
    "two ropes that differ": (lambda path: edit(path, rope_theta=1234.0), "rope_theta"),
    "an unknown attribute": (
        lambda path: edit(path, secret_sauce=3),
        "config.json has attributes that this reader does not know .*: secret_sauce = 3; .* --accept=secret_sauce",
    ),
    "quantised weights": (
        lambda path: edit(path, quantization_config={"quant_method": "gptq"}),
        "the weights are quantised .quantization_config, method gptq., which is not read",
    ),
    "other sizes": (
        lambda path: edit(path, intermediate_size=95),
        r"of another shape or type: model.layers.0.mlp.\w+_proj.weight.*\(96, 64\)",
    ),
    "fewer layers": (
        lambda path: edit(path, num_hidden_layers=1),
        "unexpected: model.layers.1.input_layernorm.weight",
    ),
    "more layers": (lambda path: edit(path, num_hidden_layers=3), "missing: model.layers.2."),
}


@pytest.mark.parametrize("spoil, message", FILES.values(), ids=[name.replace(" ", "-") for name in FILES])
def test_wrong_files(
    spoil: Callable[[Path], Any], message: str, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(source)
    for words in (["inspect", "in"], ["convert", "in", "out"], ["generate", "in", "--prompt", "x"]):
        line = refused(capsys, *words)
        assert re.search(message, line), line
        assert len(line) < 900, "nobody reads more"


def transposed(tensors: dict[str, np.ndarray]) -> None:
    tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"].T.copy()


def missing(tensors: dict[str, np.ndarray]) -> None:
    del tensors["model.layers.1.mlp.up_proj.weight"], tensors["model.norm.weight"]


def misspelt(tensors: dict[str, np.ndarray]) -> None:
    tensors["model.layers.1.mlp.upp_proj.weight"] = tensors.pop("model.layers.1.mlp.up_proj.weight")


def integers(tensors: dict[str, np.ndarray]) -> None:
    tensors["model.norm.weight"] = np.zeros(64)


@pytest.mark.parametrize(
    "change, message",
    [
        (transposed, r"model.layers.1.mlp.up_proj.weight .*\(64, 96\).*\(96, 64\)"),
        (missing, r"missing: model.layers.1.mlp.up_proj.weight.*model.norm.weight"),
        (misspelt, r"missing: model.layers.1.mlp.up_proj.weight.*unexpected: model.layers.1.mlp.upp_proj.weight"),
        (lambda t: t.update({"lm_head.bias": np.zeros(264, np.float32)}), r"unexpected: lm_head.bias \(264,\)"),
        (lambda t: t.pop("lm_head.weight"), r"lm_head.weight is missing, and the config does not tie"),
    ],
)
def test_wrong_tensors(
    change: Callable[[dict[str, np.ndarray]], Any], message: str, workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    formats.write(workspace / "in", change=change)
    for words in (["inspect", "in"], ["convert", "in", "out"]):
        assert re.search(message, refused(capsys, *words))


def test_a_wrong_tokenizer(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Weights can be converted without it."""
    (source / "tokenizer.json").write_text('{"version": "1.0"}')
    for words in (["inspect", "in"], ["eval", "in", "--text", "in/config.json"], ["generate", "in", "--prompt", "x"]):
        assert "in: this is not a tokenizer.json: " in refused(capsys, *words)
    assert cli.main(["convert", "in", "out"]) == 0


def test_wrong_gguf_files(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = gguf_files.llama_file(workspace / "whole.gguf")
    (workspace / "cut.gguf").write_bytes(whole.read_bytes()[:9000])
    (workspace / "text.gguf").write_text("no such thing")
    (workspace / "half-00001-of-00002.gguf").write_bytes(whole.read_bytes())
    (workspace / "folder").mkdir()
    gguf_files.llama_file(workspace / "folder" / "x.gguf")
    assert "give its own path, folder/x.gguf" in refused(capsys, "inspect", "folder")
    gguf_files.write(workspace / "other.gguf", "mamba", {}, {"token_embd.weight": np.zeros((40, 32), np.float32)})
    for name, message in {
        "cut": "cut.gguf is truncated, damaged or too new",
        "text": "text.gguf is no GGUF file: it does not begin with the letters GGUF",
        "half-00001-of-00002": "1 of its 2 parts are missing beside it: half-00002-of-00002.gguf",
        "other": 'other.gguf: unsupported architecture "mamba"; .*supported: llama',
    }.items():
        assert re.search(message, refused(capsys, "inspect", f"{name}.gguf")), name
        refused(capsys, "convert", f"{name}.gguf", "out")


@pytest.mark.parametrize(
    "attributes",
    [{"secret_sauce": 3}, {"secret_sauce": 3, "other_sauce": 1}],
)
def test_attributes_may_be_accepted(
    attributes: dict[str, int], source: Path, workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(source, **attributes)
    assert all(name in refused(capsys, "inspect", "in") for name in attributes)
    accept = ",".join(attributes)
    for words in (["inspect", "in"], ["convert", "in", "ours"], ["eval", "in", "--text", "in/tokenizer_config.json"]):
        assert cli.main([*words, "--accept", accept]) == 0
    capsys.readouterr()
    convert("ours", "out", "hf")  # the attribute that nobody read is not passed on as if it had been
    assert not set(json.loads(Path("out/config.json").read_text())) & set(attributes)
    assert open_checkpoint("out").config == open_checkpoint("in", set(attributes)).config


NAMES = {
    "nowhere": "nowhere: there is no such file or directory, and it is no name on the Hub .organisation/model.",
    "./no/where": "no/where: there is no such file or directory",
    "nobody/nothing": "nobody/nothing: there is no such directory here, it is not in the Hub's cache",
    "empty": "empty holds no checkpoint: name a run's directory, .*, or a directory of config.json and .safetensors",
    "note.txt": "note.txt is no checkpoint: a directory, a .safetensors or a .gguf file is needed",
}


@pytest.mark.parametrize("name", NAMES)
def test_names_of_nothing(name: str, workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (workspace / "empty").mkdir()
    (workspace / "note.txt").write_text("hello")
    begin = time.monotonic()
    for words in (["inspect", name], ["convert", name, "out"], ["eval", name, "--text", "note.txt"]):
        assert re.search(NAMES[name], refused(capsys, *words))
    assert time.monotonic() - begin < 30, "a network that is not there must not be waited for"


def test_a_name_on_the_hub_is_fetched_or_found_in_its_cache(
    source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a network the cache answers; only safetensors and small documents are asked for."""
    import huggingface_hub

    asked: list[dict[str, Any]] = []

    def snapshot(name: str, **given: Any) -> str:
        asked.append({"name": name, **given})
        if not given.get("local_files_only"):
            raise ConnectionError("no route to host\nand more")
        return str(source)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    checkpoint = open_checkpoint("org/model-1.5")
    assert checkpoint.name == "org/model-1.5" and checkpoint.config == open_checkpoint(source).config
    assert [one.get("local_files_only") for one in asked] == [None, True]
    assert not any(pattern.endswith((".bin", ".py", "*")) for pattern in asked[0]["allow_patterns"])
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **_: snapshot(name))
    assert re.search(r"could not be fetched \(no route to host\); give the path", refused(capsys, "inspect", "a/b"))


SETTINGS: dict[str, tuple[list[str], str]] = {
    "a target that exists": (["convert", "in", "in2"], "in2 holds a checkpoint already .*; overwrite it with --over"),
    "the source itself": (["convert", "in", "in", "--to", "hf", "--overwrite"], "in is where the source itself lies"),
    "a target that is a file": (["convert", "in", "note.txt"], "note.txt is a file; a directory is needed"),
    "a mesh that does not fit": (["convert", "in", "out", "--mesh", "tensor:8"], "heads . does not split over tensor="),
    "more devices than there are": (["eval", "in", "--text", "note.txt", "--mesh", "data:16"], "needs 16 devices"),
    "no mesh": (["inspect", "in", "--mesh", "tensor"], 'mesh "tensor"'),
    "an unknown dtype": (["convert", "in", "out", "--dtype", "int8"], 'dtype "int8": one of float32, bfloat16'),
    "a window that is too long": (
        ["eval", "in", "--text", "note.txt", "--window", "129"],
        "a window of 129 tokens; this model takes 128 or fewer",
    ),
    "a stride over the window": (
        ["eval", "in", "--text", "note.txt", "--window", "16", "--stride", "17"],
        "stride 17: 1 to the window's 16 is needed",
    ),
    "no text": (["eval", "in", "--text", "nowhere.txt"], "nowhere.txt.* does not exist"),
    "no tokenizer": (["eval", "bare", "--text", "note.txt"], "has no tokenizer; put its tokenizer.json beside"),
    "no tokenizer to speak": (["generate", "bare", "--prompt", "x"], "has no tokenizer; put its tokenizer.json beside"),
    "no template": (["generate", "plain", "--prompt", "x", "--chat"], "no chat template; a base model .*: leave"),
    "a template that reaches out": (
        ["generate", "sly", "--prompt", "x", "--chat"],
        "chat template, line 2: '__class__' of a str lies outside the sandbox",
    ),
    "a template that refuses": (["generate", "strict", "--prompt", "x", "--chat"], "chat template, line 1: only cats"),
    "a setting of a run": (["inspect", "in", "train.num_steps=3"], "jaxpp inspect does not take train."),
    "an unknown family": (["convert", "in", "out", "--to", "hf", "--family", "lama"], 'unknown model_type "lama"; did'),
    "a family that cannot": (
        ["convert", "in", "out", "--to", "hf", "--family", "gpt2"],
        "a gpt2 checkpoint cannot hold this model; llama can",
    ),
    "files of no size": (["convert", "in", "out", "--to", "hf", "--max_file_gb", "0"], "max_file.* = 0.* more than 0"),
}  # fmt: skip


@pytest.mark.parametrize("words, message", SETTINGS.values(), ids=[name.replace(" ", "-") for name in SETTINGS])
def test_wrong_settings(
    words: list[str], message: str, source: Path, workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (workspace / "note.txt").write_text("hello")
    formats.write(workspace / "bare", vocab=None)
    convert(source, "in2", "orbax")
    for name, template in {
        "plain": None,
        "sly": "{{ messages[0].content }}\n{{ messages[0].content.__class__.__mro__ }}",
        "strict": "{{ raise_exception('only cats') }}",
    }.items():
        settings = {**formats.TOKENIZER_CONFIG, "chat_template": template}
        (formats.write(workspace / name) / "tokenizer_config.json").write_text(json.dumps(settings))
    assert re.search(message, refused(capsys, *words))
