"""A grown checkpoint is opened, loaded and converted as any other, to the same bits on every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax import nnx

import jaxpp
from jaxpp import tree
from jaxpp.conversion import convert, load
from jaxpp.grow import Grown, Growth, Request, enlarge
from jaxpp.grow.proof import ask
from jaxpp.pretrained import open_checkpoint
from jaxpp.serve import Engine
from tests import formats

REQUESTS = {
    "wider": Request(width=2),
    "wider by a third": Request(width=3),
    "uneven": Request(operator="lemon", embed_dim=80, mlp=136),
    "deeper": Request(depth=4),
    "experts": Request(experts=4),
    "all": Request(width=2, depth=4, experts=4),
}
MESHES = ("fsdp:8", "tensor:2 fsdp:4")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return formats.write(tmp_path_factory.mktemp("grown") / "in")


def grown(source: Path, request: Request) -> Grown:
    checkpoint = open_checkpoint(source)
    return Grown(checkpoint, request.growth(checkpoint.config))


def bits(model: Any) -> dict[str, np.ndarray]:
    leaves = tree.named_leaves(nnx.split(model, nnx.Param, ...)[1])
    return {path: np.asarray(leaf).view(np.uint32) for path, leaf in leaves.items()}


def same(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> bool:
    return left.keys() == right.keys() and all(np.array_equal(left[path], right[path]) for path in left)


SLOW = ("wider", "deeper", "experts")  # each is in "all"


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in REQUESTS])
def test_every_mesh_makes_the_bits_of_one_device(name: str, source: Path) -> None:
    checkpoint = grown(source, REQUESTS[name])
    one = load(checkpoint, dtype="float32")
    for mesh in MESHES:
        assert same(bits(load(checkpoint, mesh, dtype="float32")), bits(one)), mesh


@pytest.mark.parametrize("name", ["wider by a third", "uneven", "all"])
def test_a_model_in_memory_grows_to_the_bits_of_its_checkpoint(name: str, source: Path) -> None:
    request = REQUESTS[name]
    wanted = bits(load(grown(source, request), dtype="float32"))
    for mesh in ("data:1", "tensor:2 data:2"):
        model = load(source, mesh, dtype="float32")
        bigger = enlarge(model, request.growth(model.config))
        assert same(bits(bigger), wanted), mesh
        assert bigger.tokenizer is model.tokenizer


@pytest.mark.parametrize("to", ["hf", "orbax"])
def test_it_is_written_in_both_formats_and_from_both(to: Any, source: Path, tmp_path: Path) -> None:
    request = REQUESTS["wider"]
    wanted = bits(load(grown(source, request), dtype="float32"))
    convert(grown(source, request), tmp_path / "out", to, mesh="tensor:2 fsdp:2")
    convert(source, tmp_path / "ours", "orbax")
    convert(grown(tmp_path / "ours", request), tmp_path / "again", to, mesh="fsdp:4")
    for path in ("out", "again"):
        assert same(bits(load(tmp_path / path, dtype="float32")), wanted), path


def test_progress_counts_the_bytes_that_are_made(source: Path) -> None:
    checkpoint, counted = grown(source, REQUESTS["wider"]), list[int]()
    model = load(checkpoint, dtype="float32", progress=counted.append)
    assert sum(counted) == tree.total_bytes(nnx.split(model, nnx.Param, ...)[1])
    assert len(counted) > 3


def test_a_narrow_dtype_still_sums_to_the_old_weight(source: Path) -> None:
    """Noise is rounded with the weight, and the second of two copies gets what is left."""
    model = load(grown(source, Request(width=2, noise_db=0.0)), dtype="bfloat16")
    up = tree.named_leaves(nnx.split(model, nnx.Param, ...)[1])["blocks/mlp/up/kernel"]
    old = tree.named_leaves(nnx.split(load(source, dtype="float32"), nnx.Param, ...)[1])["blocks/mlp/up/kernel"]
    halves = np.asarray(up, np.float32).reshape(old.shape[0], 2, old.shape[1], 2, old.shape[2])
    assert not np.array_equal(halves[:, 0], halves[:, 1])
    for copy in range(2):
        np.testing.assert_allclose(halves[:, :, :, copy].sum(1), old, rtol=2**-7, atol=2**-9)


def test_one_word_of_the_package_grows(source: Path) -> None:
    model = jaxpp.load(source, dtype="float32")
    bigger = jaxpp.grow.enlarge(model, width=2, noise_db=None)
    proof = jaxpp.grow.check(model, bigger, [[1, 2, 3, 4, 5, 6, 7, 8]])
    assert proof.holds and proof.num_equal == len(proof.greedy_before) > 0
    assert bigger.config.embed_dim == 2 * model.config.embed_dim
    assert not jaxpp.grow.check(model, enlarge(model, depth=4, depth_op="stack"), [[1, 2, 3]]).holds


@pytest.mark.parametrize("case", ["llama_gqa", "gemma2", "mixtral"])
def test_both_say_the_same_64_tokens(case: str, tmp_path: Path) -> None:
    """With a cache, as the engine decodes, and without one."""
    model = load(formats.write(tmp_path / "in", case, vocab=None), dtype="float32")
    bigger, prompt = enlarge(model, width=2), [1, 2, 3, 4, 5, 6]
    room = min(64, model.config.max_positions - len(prompt))
    before = ask(model, [prompt], num_greedy=room)
    assert ask(bigger, [prompt], like=before).greedy == before.greedy and len(before.greedy) == room
    for one in (model, bigger):
        engine = Engine(one, slots=1, max_context=len(prompt) + room)
        [answer] = engine.generate([prompt], max_tokens=room, temperature=0, ignore_ends=True)
        assert tuple(answer.ids) == before.greedy


def test_a_growth_of_another_model_is_refused(source: Path) -> None:
    growth: Growth = Request(width=2).growth(grown(source, Request(width=2)).config)
    with pytest.raises(ValueError, match="planned for another model"):
        Grown(open_checkpoint(source), growth)
