"""Checkpoints of every format, opened and put onto meshes: the numbers of their files, each where it belongs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxpp
from jaxpp import dims, tree
from jaxpp.conversion import convert, like, load, named_devices
from jaxpp.models import DecoderConfig
from jaxpp.parallel import Plan
from jaxpp.pretrained import open_checkpoint
from tests import command, formats
from tests.convert import gguf_files
from tests.golden import reading


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a llama with a tokenizer, in three files."""
    return formats.write(tmp_path_factory.mktemp("hf") / "llama", files=3)


@pytest.fixture(scope="module")
def numbers(directory: Path) -> dict[str, np.ndarray]:
    """Return each weight of `directory`, as loaded on one device."""
    return values(load(directory))


def values(model: Any) -> dict[str, np.ndarray]:
    return {path: np.asarray(x) for path, x in tree.named_leaves(nnx.state(model, nnx.Param)).items()}


def test_every_form_holds_the_same_weights(
    directory: Path, numbers: dict[str, np.ndarray], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = formats.write(tmp_path / "whole")
    convert(directory, tmp_path / "ours", "orbax")
    monkeypatch.chdir(tmp_path)
    forms = {"hf": [whole, whole / "model.safetensors", "whole"], "orbax": ["ours", tmp_path / "ours" / "0"]}
    for format, names in forms.items():
        for name in names:
            checkpoint = open_checkpoint(name)
            assert checkpoint.format == format and checkpoint.notes == ()
            model = load(checkpoint)
            assert formats.same(values(model), numbers), name
            assert model.config == load(directory).config and model.tokenizer.ends == {255, 256}
            assert checkpoint.texts["tokenizer_config.json"] == (directory / "tokenizer_config.json").read_text()
    assert jaxpp.load is load  # the name that others rely on


def test_a_gguf_file_holds_the_weights_of_the_directory_that_it_was_made_from(tmp_path: Path) -> None:
    architecture, _, shapes, attributes = gguf_files.CASES["llama"]
    drawn = gguf_files.drawn(shapes)
    reading.write_directory(tmp_path / "hf", {**attributes, "vocab_size": gguf_files.VOCAB}, drawn)
    metadata, tensors = gguf_files.metadata_of("llama"), gguf_files.converted(architecture, drawn)
    for name in ("tiny.gguf", "tiny"):  # whatever it is called
        path = gguf_files.write(tmp_path / name, architecture, metadata, tensors)
        checkpoint = open_checkpoint(path)
        assert checkpoint.format == "gguf" and checkpoint.tokenizer() is None
        assert formats.same(values(load(checkpoint)), values(load(tmp_path / "hf")))


def test_a_run_that_was_trained_here(tmp_path: Path) -> None:
    command.write_run(tmp_path)
    command.jaxpp("train", "run.yaml", "train.num_steps=2", "checkpoint.every=1", cwd=tmp_path)
    stored = open_checkpoint(tmp_path / "out" / "checkpoints" / "1")
    newest = open_checkpoint(tmp_path / "out")
    assert (newest.format, newest.config.vocab_size) == ("orbax", 300)
    first, last = values(load(stored, "data:2 tensor:2")), values(load(newest))
    assert first.keys() == last.keys() and not formats.same(first, last)
    model = load(newest, "fsdp:4 tensor:2")
    assert formats.same(values(model), last)
    assert model.tokenizer.vocab_size == 257 and model.tokenizer.decode([104, 105]) == "hi"


@pytest.mark.parametrize("mesh", ["tensor:2 data:2", "fsdp:8", "fsdp:4 tensor:2"])
def test_each_device_holds_its_own_slice_of_the_file(
    mesh: str, directory: Path, numbers: dict[str, np.ndarray]
) -> None:
    """B53, B88: nobody reads another's slice, and nothing is laid out otherwise than the plan says."""
    model, layout = load(directory, mesh), Plan(mesh=mesh).layout(named_devices(mesh))
    assert formats.same(values(model), numbers)
    wanted = layout.param_shardings(nnx.state(model, nnx.Param))
    split = 0
    for (path, leaf), (_, node) in zip(
        tree.named_leaves(nnx.state(model, nnx.Param)).items(), tree.named_leaves(wanted).items(), strict=True
    ):
        assert leaf.sharding.is_equivalent_to(node, leaf.ndim), path
        for shard in leaf.addressable_shards:
            assert np.array_equal(shard.data, numbers[path][shard.index]), path
        split += not leaf.is_fully_replicated
    assert split >= 8


def test_dtypes(tmp_path: Path) -> None:
    for stored, asked, expected in [
        ("float32", None, "float32"),
        ("float16", None, "float32"),  # wide activations overflow it
        ("bfloat16", None, "bfloat16"),
        ("bfloat16", "float32", "float32"),
        ("float32", "bfloat16", "bfloat16"),
        ("float32", "float16", "float16"),
    ]:
        path = tmp_path / stored
        path = path if path.exists() else formats.write(path, dtype=stored)
        checkpoint = open_checkpoint(path)
        assert {str(dtype) for dtype in checkpoint.dtypes.values()} == {stored}
        found, file = values(load(checkpoint, dtype=asked)), formats.tensors(path)
        assert {str(x.dtype) for x in found.values()} == {expected}
        table = file["model.embed_tokens.weight"].astype(found["tokens/table"].dtype)
        assert np.array_equal(found["tokens/table"], table)
    with pytest.raises(ValueError, match='dtype "int8": one of float32, bfloat16, float16 is needed'):
        load(checkpoint, dtype="int8")
    convert(tmp_path / "bfloat16", tmp_path / "ours", "orbax")  # ours have dtypes of their own, too
    for asked, expected in ((None, "bfloat16"), ("float32", "float32")):
        model = load(tmp_path / "ours", "tensor:2", dtype=asked)
        assert formats.same(values(model), values(load(tmp_path / "bfloat16", dtype=expected)))


@pytest.mark.parametrize("case", ["gemma3", "gpt_neox", "qwen2_moe", "gpt2"])
def test_nothing_stays_as_it_was_drawn(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, directory: Path
) -> None:
    """B26, B112: with an initialiser that gives NaN, no NaN is left."""
    build = DecoderConfig.build

    def poisoned(self: DecoderConfig, rngs: nnx.Rngs) -> nnx.Module:
        model = build(self, rngs)
        nnx.update(model, jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), nnx.state(model, nnx.Param)))
        return model

    monkeypatch.setattr(DecoderConfig, "build", poisoned)
    found = values(load(formats.write(tmp_path / "hf", case, vocab=None)))
    assert all(np.isfinite(x).all() for x in found.values())


def test_a_row_of_nan_stays_where_it_is(tmp_path: Path) -> None:
    """B34: the logits of the other tokens are what they were; a NaN in use shows."""
    tokens = np.arange(2, 26).reshape(1, 24)

    def spoil(tensors: dict[str, np.ndarray]) -> None:
        tensors["model.embed_tokens.weight"][255] = np.nan

    for case, others in (("llama_gqa", 256), ("llama32", 255)):  # untied, tied
        whole = np.asarray(load(formats.write(tmp_path / f"{case}-whole", case, vocab=None))(tokens))
        model = load(formats.write(tmp_path / case, case, vocab=None, change=spoil))
        found = np.asarray(model(tokens))
        np.testing.assert_array_equal(found[..., :others], whole[..., :others])
        assert np.isnan(found[..., others:]).all() and np.isnan(np.asarray(model(np.array([[255, 3]])))).any()


def renamed(function: Callable[[str], str]) -> Callable[[dict[str, np.ndarray]], None]:
    def change(tensors: dict[str, np.ndarray]) -> None:
        for name in list(tensors):
            tensors[function(name)] = tensors.pop(name)

    return change


def with_buffers(name: str, shape: tuple[int, ...]) -> Callable[[dict[str, np.ndarray]], None]:
    return lambda tensors: tensors.update({name: np.full(shape, 7, np.float32)})


@pytest.mark.parametrize(
    "case, change, noted",
    [
        ("llama_gqa", with_buffers("model.layers.0.self_attn.rotary_emb.inv_freq", (8,)), "rotary_emb.inv_freq"),
        ("gemma3", renamed(lambda name: name.replace("model.", "language_model.model.", 1)), ""),
        ("gemma3", renamed(lambda name: name.replace("model.", "model.language_model.", 1)), ""),
        ("gpt2", renamed(lambda name: name.removeprefix("transformer.")), ""),
        ("gpt2", with_buffers("transformer.h.0.attn.bias", (1, 1, 8, 8)), "h.0.attn.bias"),
    ],
    ids=["B44", "B46", "B46-5", "B47", "B47-buffers"],
)
def test_prefixes_and_stored_buffers(
    case: str, change: Callable[[dict[str, np.ndarray]], None], noted: str, tmp_path: Path
) -> None:
    plain = formats.write(tmp_path / "plain", case, vocab=None)
    other = open_checkpoint(formats.write(tmp_path / "other", case, vocab=None, change=change))
    assert formats.same(values(load(other)), values(load(plain)))
    assert bool(noted) == bool(other.notes) and all(noted in note for note in other.notes)


@pytest.mark.parametrize("case, mesh", [("qwen2", "tensor:2"), ("gpt2", "tensor:4"), ("llama2", "fsdp:2 tensor:4")])
def test_tables_of_any_height_are_filled_up_and_cut(case: str, mesh: str, tmp_path: Path) -> None:
    """B31, B32: 251 rows are split evenly, not quietly replicated; what is added is no token and is not written."""
    source = formats.write(tmp_path / "in", case, vocab=None)
    model, golden = load(source, mesh), reading.load(case).arrays
    table = model.tokens.table.get_value()
    assert table.shape[0] == 252 and {shard.data.shape[0] for shard in table.addressable_shards} == {
        252 // int(mesh[-1])
    }
    assert not np.asarray(table[251:]).any()
    np.testing.assert_allclose(model(golden["tokens"]), golden["logits"], rtol=0, atol=1e-4)
    jaxpp.save(model, tmp_path / "out")
    convert(source, tmp_path / "ours", "orbax", mesh=mesh)
    for path in (tmp_path / "out", tmp_path / "back"):
        if path.name == "back":
            convert(tmp_path / "ours", path, "hf", mesh="tensor:2")
        assert formats.same(formats.tensors(path), formats.tensors(source))
        assert open_checkpoint(path).config == open_checkpoint(source).config


def test_memory_counts_a_tied_table_once(tmp_path: Path) -> None:
    """B28."""
    checkpoint = open_checkpoint(formats.write(tmp_path / "llama32", "llama32", vocab=None))
    layout = Plan(mesh="tensor:2").layout(jax.devices()[:2])
    params = like(checkpoint, layout)
    assert [path for path in tree.named_leaves(params) if "table" in path or "head/" in path] == ["tokens/table"]
    assert dims.num_parameters(params) == sum(x.size for x in reading.weights("llama32").values())


HEADS = {"model.embed_tokens.weight": "lm_head.weight", "gpt_neox.embed_in.weight": "embed_out.weight"}


def head(kind: str) -> Callable[[dict[str, np.ndarray]], None]:
    """Return what gives the tensors a head: none, a copy of the table, or another one."""

    def change(tensors: dict[str, np.ndarray]) -> None:
        table, name = next((table, name) for table, name in HEADS.items() if table in tensors)
        tensors.pop(name, None)
        if kind != "none":
            tensors[name] = tensors[table] * (1 if kind == "equal" else np.float32(-1))

    return change


@pytest.mark.parametrize(
    "tie, kind, tied",
    [
        (True, "none", True),
        (True, "equal", True),
        (True, "different", False),
        (False, "different", False),
        (False, "equal", False),
        (None, "different", False),
    ],
)
@pytest.mark.parametrize("case", ["llama32", "qwen2", "gpt_neox"])
def test_whether_the_head_is_tied(case: str, tie: bool | None, kind: str, tied: bool, tmp_path: Path) -> None:
    """B22, B25, B37: as the reference of transformers 5 decides, and the same again from what we write."""
    config: dict[str, Any] = {"tie_word_embeddings": tie}
    source = formats.write(tmp_path / "in", case, vocab=None, config=config, change=head(kind))
    checkpoint = open_checkpoint(source)
    assert isinstance(checkpoint.config, DecoderConfig) and checkpoint.config.tied is tied
    assert bool(checkpoint.notes) is (tie is True and kind == "different")
    assert all("the file's head is kept, untied" in note for note in checkpoint.notes)
    file = formats.tensors(source)
    name = next(name for table, name in HEADS.items() if table in file)
    model = load(checkpoint)
    if not tied:
        np.testing.assert_array_equal(model.head.kernel, file[name].T)
    convert(source, tmp_path / "ours", "orbax")
    convert(tmp_path / "ours", tmp_path / "out", "hf")
    again = open_checkpoint(tmp_path / "out")
    assert again.config == checkpoint.config and again.notes == ()
    out = formats.tensors(tmp_path / "out")
    assert formats.same(out, {k: v for k, v in file.items() if not (tied and k == name)})
    assert json.loads((tmp_path / "out" / "config.json").read_text()).get("tie_word_embeddings", False) is tied


@pytest.mark.parametrize("tie", [False, None])
@pytest.mark.parametrize("case", ["llama32", "qwen2", "gpt_neox"])
def test_no_head_and_not_tied_is_refused(case: str, tie: bool | None, tmp_path: Path) -> None:
    """B23: a head drawn at random, or silently tied, would go unnoticed."""
    config: dict[str, Any] = {"tie_word_embeddings": tie}
    source = formats.write(tmp_path / "in", case, vocab=None, config=config, change=head("none"))
    with pytest.raises(ValueError, match=r'(lm_head|embed_out)\.weight is missing, .*"tie_word_embeddings": true'):
        open_checkpoint(source)


def test_a_head_under_another_name_is_missed(tmp_path: Path) -> None:
    """B23: neither tied nor drawn."""
    for name, message in {
        "embed_outs": r"missing: embed_out\.weight.*unexpected: embed_outs\.weight",
        "output": r"embed_out\.weight is missing, and the config does not tie",
    }.items():
        change = renamed(lambda old, name=name: old.replace("embed_out", name))
        source = formats.write(tmp_path / name, "gpt_neox", vocab=None, change=change)
        with pytest.raises(ValueError, match=message):
            open_checkpoint(source)


def test_a_bias_of_the_head_is_not_dropped(tmp_path: Path) -> None:
    """B38."""
    source = formats.write(tmp_path / "in", "qwen2", vocab=None, change=with_buffers("lm_head.bias", (251,)))
    with pytest.raises(ValueError, match=r"unexpected: lm_head\.bias \(251,\)"):
        open_checkpoint(source)
