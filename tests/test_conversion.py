"""From one format to another and back: the bytes that came in, the documents beside them, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxpp
from jaxpp import cli
from jaxpp.conversion import Format, check_target, convert, load, save
from jaxpp.data import Tokenizer
from jaxpp.data.published import read_tokenizer
from jaxpp.pretrained import open_checkpoint
from tests import command, formats
from tests.convert import gguf_files

DOCUMENTS = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = formats.write(tmp_path / "in")
    (path / "chat_template.jinja").write_text(formats.TEMPLATE)
    (path / "README.md").write_text("of no use to a model")
    return path


def values_of(path: Path) -> dict[str, Any]:
    return json.loads((path / "config.json").read_text())


def test_documents_travel_byte_for_byte(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "ours", "orbax", mesh="tensor:2 fsdp:2")
    convert(tmp_path / "ours", tmp_path / "back", "hf", mesh="data:2")
    assert formats.same(formats.tensors(tmp_path / "back"), formats.tensors(source))
    names = {"config.json", "model.safetensors", "chat_template.jinja", *DOCUMENTS}
    assert {path.name for path in (tmp_path / "back").iterdir()} == names
    for name in (*DOCUMENTS, "chat_template.jinja"):
        assert (tmp_path / "back" / name).read_bytes() == (source / name).read_bytes(), name
    assert values_of(tmp_path / "back") == values_of(source)
    # and again: nothing of ours has been added on the way
    convert(tmp_path / "back", tmp_path / "again", "hf")
    assert command.contents(tmp_path / "again") == command.contents(tmp_path / "back")


def test_a_dtype_is_written_and_named(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "out", "hf", dtype="bfloat16")
    assert values_of(tmp_path / "out") == {**values_of(source), "dtype": "bfloat16"}
    found = formats.tensors(tmp_path / "out")
    for name, tensor in formats.tensors(source).items():
        assert found[name].dtype.name == "bfloat16"
        np.testing.assert_array_equal(found[name], tensor.astype(found[name].dtype))
    convert(tmp_path / "out", tmp_path / "half", "orbax", dtype="float16")
    assert {str(dtype) for dtype in open_checkpoint(tmp_path / "half").dtypes.values()} == {"float16"}


def test_save_of_load_is_what_was_loaded(source: Path, tmp_path: Path) -> None:
    both: dict[str, Format] = {"one": "hf", "two": "orbax"}
    for name, format in both.items():
        jaxpp.save(jaxpp.load(source, mesh="fsdp:2 tensor:2"), tmp_path / name, format=format)
        again = jaxpp.load(tmp_path / name)
        assert again.config == jaxpp.load(source).config and again.tokenizer.ends == {255, 256}
        jaxpp.save(again, tmp_path / f"{name}-hf")
        assert formats.same(formats.tensors(tmp_path / f"{name}-hf"), formats.tensors(source))
        assert values_of(tmp_path / f"{name}-hf") == values_of(source)


def test_files_of_a_largest_size(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "out", "hf", max_file_bytes=100_000)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(files) > 3 and set(index["weight_map"].values()) == {file.name for file in files}
    assert all(file.stat().st_size < 110_000 for file in files)
    assert formats.same(formats.tensors(tmp_path / "out"), formats.tensors(source))
    # one file over several: what is left of the old ones would be read, or fill the disk
    convert(source, tmp_path / "out", "hf", overwrite=True)
    assert [path.name for path in (tmp_path / "out").glob("*.safetensors*")] == ["model.safetensors"]


def test_nothing_is_overwritten_unasked(source: Path, tmp_path: Path) -> None:
    bare = formats.write(tmp_path / "bare", vocab=None)
    both: tuple[Format, ...] = ("hf", "orbax")
    for to in both:
        target = tmp_path / to
        convert(source, target, to)
        before = command.contents(target)
        with pytest.raises(ValueError, match=f"{target} holds a checkpoint already .*; overwrite it with --overwrite"):
            convert(bare, target, to)
        with pytest.raises(ValueError, match="holds a checkpoint already"):
            save(load(bare), target, to)
        assert command.contents(target) == before
        convert(bare, target, to, overwrite=True)
        checkpoint = open_checkpoint(target)
        assert checkpoint.config == open_checkpoint(bare).config
        assert checkpoint.tokenizer() is None, "the documents of the one that was replaced are gone"
    assert {path.name for path in (tmp_path / "hf").iterdir()} == {"config.json", "model.safetensors"}


def test_a_directory_that_would_hold_two_checkpoints(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "ours", "orbax")
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "steps" / "20").mkdir(parents=True)
    (tmp_path / "file").touch()
    for target, to, message in [
        (source, "orbax", "in holds another checkpoint .config.json., which would stay"),
        (tmp_path / "ours", "hf", r"ours holds another checkpoint \(0\), which would stay"),
        (tmp_path / "run", "orbax", "run holds another checkpoint .checkpoints."),
        (tmp_path / "steps", "orbax", "steps holds another checkpoint .20."),
        (tmp_path / "file", "hf", "file is a file; a directory is needed"),
        (tmp_path / "new", "gguf", 'format "gguf": "hf" or "orbax" is needed'),
    ]:
        with pytest.raises(ValueError, match=message):
            check_target(target, to, overwrite=True)
    sources: list[tuple[Path, Path, Format]] = [
        (source, source, "hf"),
        (source / "model.safetensors", source, "hf"),
        (tmp_path / "ours", tmp_path / "ours", "orbax"),
        (tmp_path / "ours" / "0", tmp_path / "ours", "orbax"),
    ]
    for given, target, to in sources:
        before = command.contents(tmp_path)
        with pytest.raises(ValueError, match="is where the source itself lies; write into another directory"):
            convert(given, target, to, overwrite=True)
        assert command.contents(tmp_path) == before
    check_target(tmp_path / "empty", "hf", overwrite=False)  # what does not exist is made


def test_a_rewritten_config_describes_the_model(tmp_path: Path) -> None:
    """Where the original no longer does: here its head was kept apart, although it says tied."""

    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors["lm_head.weight"] = -tensors["model.embed_tokens.weight"]

    extra = {"eos_token_id": [3, 4], "pad_token_id": 7}
    source = formats.write(tmp_path / "in", "llama32", vocab=None, change=change, config=extra)
    convert(source, tmp_path / "out", "hf")
    found = values_of(tmp_path / "out")
    assert found["tie_word_embeddings"] is False and found["rope_parameters"] == values_of(source)["rope_parameters"]
    assert found.items() >= extra.items() and found["architectures"] == ["LlamaForCausalLM"]
    assert open_checkpoint(tmp_path / "out").config == open_checkpoint(source).config


def test_a_model_that_was_trained_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It becomes a llama, with a tokenizer that others load."""
    command.write_run(tmp_path)
    command.jaxpp("train", "run.yaml", "train.num_steps=1", "model.preset=1m", cwd=tmp_path)
    assert cli.main(["convert", str(tmp_path / "out"), str(tmp_path / "hf")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'out'} (orbax) is now {tmp_path / 'hf'} (hf)\n"
    found = values_of(tmp_path / "hf")
    assert (found["model_type"], found["dtype"], found["eos_token_id"]) == ("llama", "float32", [256])
    tokenizer = read_tokenizer(tmp_path / "hf")
    assert tokenizer is not None and tokenizer.fingerprint == Tokenizer.bytes().fingerprint
    settings = json.loads((tmp_path / "hf" / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast" and settings["eos_token"] == "<|endoftext|>"
    tokens = np.arange(40).reshape(2, 20)
    np.testing.assert_array_equal(load(tmp_path / "hf")(tokens), load(tmp_path / "out")(tokens))
    with pytest.raises(ValueError, match="a gpt2 checkpoint cannot hold this model; llama can"):
        convert(tmp_path / "out", tmp_path / "gpt2", "hf", family="gpt2")
    with pytest.raises(ValueError, match='unknown model_type "lama"; did you mean "llama"'):
        convert(tmp_path / "out", tmp_path / "lama", "hf", family="lama")
    convert(tmp_path / "out", tmp_path / "mistral", "hf", family="mistral")
    assert values_of(tmp_path / "mistral")["model_type"] == "mistral"
    assert not (tmp_path / "gpt2").exists() and not (tmp_path / "lama").exists()


def test_gguf_becomes_a_directory(tmp_path: Path) -> None:
    architecture, _, shapes, _ = gguf_files.CASES["llama"]
    drawn = gguf_files.drawn(shapes)
    metadata = gguf_files.metadata_of("llama")
    path = gguf_files.write(tmp_path / "x.gguf", architecture, metadata, gguf_files.converted(architecture, drawn))
    convert(path, tmp_path / "hf", "hf")
    assert formats.same(formats.tensors(tmp_path / "hf"), drawn)
    assert values_of(tmp_path / "hf")["architectures"] == ["LlamaForCausalLM"]
    assert open_checkpoint(tmp_path / "hf").config == open_checkpoint(path).config


def test_two_processes(source: Path, tmp_path: Path) -> None:
    """Each reads and holds its own slices; the first writes what both send."""
    launched = ("launch", "--processes", "2", "--devices-per-process", "4", "--", "convert")
    command.jaxpp(*launched, "in", "ours", "--mesh", "fsdp:4 tensor:2", cwd=tmp_path)
    told = command.jaxpp(*launched, "ours", "out", "--mesh", "tensor:2 data:4", "--max_file_gb", "1e-4", cwd=tmp_path)
    assert told.stdout.count("ours (orbax) is now out (hf)") == 1
    assert formats.same(formats.tensors(tmp_path / "out"), formats.tensors(source))
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 3 and values_of(tmp_path / "out") == values_of(source)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
