"""Quantised models: what they compute, on one device and on meshes, what they take, and what is refused."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpp import cli, dims, tree
from jaxpp.compress import Quantization, QuantizedWeight, quantize
from jaxpp.compress.quantization import install
from jaxpp.compress.quantized import QuantizedPart
from jaxpp.conversion import load, save
from jaxpp.parallel import bytes_per_device, executing
from jaxpp.pretrained import open_checkpoint
from jaxpp.serve import Engine
from tests.golden import reading

GROUP = 4  # the only one that fits all: heads of 12, 96 and 48 wide mlps in two shards
CASES = ("llama_gqa", "gemma2", "mixtral", "gpt2")
INT8, INT4 = Quantization("int8"), Quantization("int4", GROUP)
CLOSE = {  # root mean square of the logits' change, over theirs; weights are random, routers change their mind
    "int8": {"llama_gqa": 0.02, "gemma2": 0.03, "mixtral": 0.1, "gpt2": 0.02},
    "int4": {"llama_gqa": 0.15, "gemma2": 0.2, "mixtral": 0.35, "gpt2": 0.2},
}
MESHES = ("tensor:2", "fsdp:2 tensor:2")


@pytest.fixture(autouse=True)
def exact_products():
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    root = tmp_path_factory.mktemp("hf")
    return functools.cache(lambda name: reading.write(name, root / name))


@pytest.fixture(scope="module")
def logits(written):
    """Return the logits of a quantised case on one device, computed once."""
    return functools.cache(
        lambda name, how: np.asarray(load(written(name), quantize=how)(reading.load(name).arrays["tokens"]))
    )


def weights_of(model: Any) -> dict[str, QuantizedWeight]:
    return {"/".join(map(str, path)): node for path, node in nnx.iter_graph(model) if isinstance(node, QuantizedWeight)}


def relative(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.sqrt(np.square(found - wanted).mean() / np.square(wanted).mean()))


@pytest.mark.parametrize("how", [INT8, INT4], ids=lambda how: how.kind)
@pytest.mark.parametrize("name", CASES)
def test_logits_are_near_the_reference_and_are_those_of_the_rounded_weights(name, how, written, logits):
    golden = reading.load(name).arrays
    found = logits(name, how)
    assert 1e-3 < relative(found, golden["logits"]) < CLOSE[how.kind][name]
    plain, rounded = load(written(name)), load(written(name), quantize=how)
    for path, weight in weights_of(rounded).items():
        install(plain, path, weight.in_use().dequantized())
    np.testing.assert_allclose(found, plain(golden["tokens"]), rtol=0, atol=1e-4)


@pytest.mark.parametrize("how", [INT8, INT4], ids=lambda how: how.kind)
@pytest.mark.parametrize("name", CASES)
def test_the_engine_answers_greedily_as_the_model_does(name, how, written):
    prompt = reading.load(name).arrays["greedy_prompt"].tolist()
    model = load(written(name), quantize=how)
    answer = Engine(model, slots=2, chunk=16).generate([prompt], max_tokens=16, temperature=0)[0]
    again = load(written(name), quantize=how)
    best = np.asarray(again(np.array([prompt + answer.ids])))[0].argmax(-1)
    assert len(answer.ids) == 16
    assert best[len(prompt) - 1 : -1].tolist() == answer.ids
    if how is INT8 and name != "gpt2":
        assert answer.ids == reading.load(name).arrays["greedy_new"].tolist()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "how", "mesh"),
    [("llama_gqa", INT8, "fsdp:2 tensor:2"), ("llama_gqa", INT4, "tensor:2"), ("gemma2", INT4, "fsdp:2 tensor:2"),
     ("mixtral", INT4, "expert:2 fsdp:2 tensor:2"), ("mixtral", INT8, "fsdp:2 tensor:2"),
     ("gpt2", INT8, "tensor:2")],
    ids=str,
)  # fmt: skip
def test_meshes_give_the_logits_of_one_device(name, how, mesh, written, logits):
    found = load(written(name), mesh, quantize=how)(reading.load(name).arrays["tokens"])
    np.testing.assert_allclose(found, logits(name, how), rtol=0, atol=1e-4)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("how", [INT8, INT4], ids=lambda how: how.kind)
def test_a_device_holds_one_byte_or_half_a_byte_for_each_weight(how, mesh, written):
    plain = tree.named_nodes(nnx.state(load(written("mixtral"), mesh), nnx.Param))
    found = weights_of(load(written("mixtral"), mesh, quantize=how))
    assert len(found) == 9  # table, head, four of attention, three of experts
    for path, weight in found.items():
        whole, is_table = plain[path].get_value(), path in ("tokens/table", "head/kernel")
        parts = [part.get_value() for part in (weight.values, weight.scales, weight.offsets) if part is not None]
        here = [part.addressable_shards[0].data.nbytes for part in parts]
        assert here == [bytes_per_device(part) for part in parts]
        assert here[0] == bytes_per_device(whole) // (4 if is_table or how is INT8 else 8)
        _, reads, _ = weight.arrow.sizes(whole.shape)
        if is_table or how is INT8:
            sharing = weight.arrow.writes if is_table and weight.arrow.is_lookup() else weight.arrow.reads
            assert set(sharing).isdisjoint(dims.of(weight.scales).dims)
            assert len(parts) == 2 and parts[1].nbytes == 4 * whole.size // (64 if is_table else reads)
        else:
            assert [part.nbytes for part in parts[1:]] == 2 * [2 * whole.size // GROUP]
            assert here[1] == 2 * bytes_per_device(whole) // 4 // GROUP  # split as the weight is


def test_a_weight_that_is_split_for_storage_is_gathered_as_integers(written):
    """Fully sharded weights travel in a quarter of the bytes."""
    model = load(written("llama_gqa"), "fsdp:2", quantize=INT8)
    graph, state = nnx.split(model)

    def run(state: Any, tokens: jax.Array) -> jax.Array:
        with executing(model.loaded.execution):
            merged: Any = nnx.merge(graph, state)
            batch = {"tokens": tokens, "positions": jnp.broadcast_to(jnp.arange(4), (2, 4))}
            return merged.run(merged.embed(batch), batch)

    text = jax.jit(run).lower(state, jnp.zeros((2, 4), jnp.int32)).compile().as_text() or ""
    gathers = [line.split("=", 1)[1].split("[")[0].strip(" (") for line in text.splitlines() if " all-gather(" in line]
    assert gathers.count("s8") >= 7  # query, key, value, out, gate, up, down
    large = [line for line in text.splitlines() if " all-gather(" in line and "f32[64,96]" in line]
    assert not large


def test_small_and_delicate_weights_stay(written):
    model = load(written("mixtral"), quantize=INT8)
    left = set(tree.named_nodes(nnx.state(model, nnx.Param)))
    assert left == {
        "blocks/attention_norm/scale", "blocks/mlp_norm/scale", "blocks/mlp/router/kernel", "final_norm/scale"
    }  # fmt: skip
    assert "places/table" in tree.named_nodes(nnx.state(load(written("gpt2"), quantize=INT8), nnx.Param))


def test_a_loaded_model_is_quantised_in_place_to_the_same_integers(written):
    model = load(written("llama_gqa"))
    table = model.tokens.table.get_value()
    assert quantize(model, "int4", group=GROUP) is model
    assert table.is_deleted()
    wanted = nnx.state(load(written("llama_gqa"), quantize=INT4))
    jax.tree.map(np.testing.assert_array_equal, tree.named_leaves(nnx.state(model)), tree.named_leaves(wanted))


def test_bfloat16_models_run_in_bfloat16(written):
    golden = reading.load("llama_gqa").arrays
    model = load(written("llama_gqa"), dtype="bfloat16", quantize=INT8)
    assert model.tokens(jnp.zeros((1, 1), jnp.int32)).dtype == jnp.bfloat16
    assert relative(np.asarray(model(golden["tokens"])), golden["logits"]) < 0.05
    assert Engine(model, slots=2)._program.pages[0].keys.dtype == jnp.bfloat16


def test_float16_sums_of_integers_do_not_overflow(written):
    weight = load(written("llama_gqa"), quantize=INT8).head.kernel.in_use()
    x = jnp.sign(weight.dequantized()[:, 0])[None] * 100
    assert (x @ weight.values.astype(jnp.float32)).max() > 70_000  # more than a float16 holds
    with jax.default_matmul_precision("default"):
        np.testing.assert_allclose(x.astype(jnp.float16) @ weight, x @ weight, rtol=0.02, atol=0.5)


class Watched:
    """A checkpoint that notes what is read, and how much is held meanwhile."""

    def __init__(self, path: Path):
        self.checkpoint, self.asked, self.held = open_checkpoint(path), list[list[str]](), 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.checkpoint, name)

    def read(self, like: Any, progress: Any = None) -> Any:
        self.asked.append(list(tree.named_nodes(like)))
        found = self.checkpoint.read(like, progress)
        self.held = max(self.held, sum(x.nbytes for x in jax.live_arrays() if not x.is_deleted()))
        return found


def test_loading_holds_the_quantised_model_and_one_weight(written):
    before = sum(x.nbytes for x in jax.live_arrays() if not x.is_deleted())
    watched: Any = Watched(written("mixtral"))
    model = load(watched, quantize=INT8)
    kept = tree.total_bytes(nnx.state(model))
    plain = {p: tree.num_bytes(x) for p, x in tree.named_leaves(nnx.state(load(written("mixtral")), nnx.Param)).items()}
    assert [len(paths) for paths in watched.asked] == [1] * len(plain)
    assert watched.held - before <= kept + 2 * max(plain.values())
    assert kept + 2 * max(plain.values()) < sum(plain.values())


@pytest.mark.parametrize(
    ("how", "mesh", "message"),
    [
        ({"kind": "int5"}, "data:1", r'unknown kind "int5"; did you mean "int'),
        ({"kind": "int8", "group": -1}, "data:1", "group -1: 0 or more"),
        ({"kind": "int4", "group": 48}, "data:1", "groups of 48 do not come out even along what it reads, embed 64; "
                                                  "groups of 2, 4, 8, 16, 32 would"),
        ({"kind": "int4", "group": 32}, "tensor:2", "mlp 96 is split into 2 shards, which hold no whole groups of 32; "
                                                    "groups of 2, 4, 8, 16 would"),
        ({"kind": "int4", "group": 48}, "fsdp:4", "embed 64.*groups of 2, 4, 8, 16 would"),
    ],
)  # fmt: skip
def test_wrong_wishes_are_refused_before_a_weight_is_read(how, mesh, message, written):
    watched: Any = Watched(written("llama_gqa"))
    with pytest.raises(ValueError, match=message):
        load(watched, mesh, quantize=Quantization(**how))
    assert watched.asked == []


def test_a_quantised_model_is_not_quantised_again_saved_or_trained(written, tmp_path):
    model = load(written("llama_gqa"), quantize="int8")
    with pytest.raises(ValueError, match="quantised already; load it again without quantize"):
        quantize(model, "int8")
    with pytest.raises(ValueError, match="cannot save the model"):
        save(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    tokens = jnp.zeros((1, 4), jnp.int32)
    batch = {"tokens": tokens, "targets": tokens, "positions": tokens, "weights": jnp.ones((1, 4))}
    assert np.isfinite(model.loss(batch)[0])
    with pytest.raises(ValueError, match="run forward only"):
        nnx.grad(lambda model: model.loss(batch)[0])(model)
    experts = load(written("mixtral"), quantize="int8")
    with pytest.raises(ValueError, match="run forward only"):
        nnx.grad(lambda model: model.loss(batch)[0])(experts)
    assert not tree.named_nodes(nnx.state(load(written("llama_gqa")), QuantizedPart))


@pytest.mark.parametrize("command", ["convert", "inspect"])
def test_commands_that_run_no_model_do_not_take_the_option(command, written, tmp_path, capsys):
    target = [str(tmp_path / "out")] if command == "convert" else []
    assert cli.main([command, str(written("llama_gqa")), *target, "--quantize", "int8"]) == 2
    assert "does not take --quantize int8" in capsys.readouterr().err
