"""The contract of every parallel scheme, alone and composed: the numbers of one device, the collectives it states."""

from __future__ import annotations

import functools
import importlib.util
import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpp import dims, tree
from jaxpp.models import DecoderConfig
from jaxpp.parallel import SCHEMES, Plan, executing
from jaxpp.train.program import TrainState
from jaxpp.train.programs import make_program

_spec = importlib.util.spec_from_file_location("collectives", Path(__file__).with_name("collectives.py"))
assert _spec is not None and _spec.loader is not None
collectives = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(collectives)

LAYERS, EMBED, VOCAB, BATCH, SEQ = 2, 64, 256, 16, 32
CONFIG = DecoderConfig(VOCAB, LAYERS, EMBED, num_heads=8, mlp_dim=128)
ACTIVATION, TOKENS = BATCH * SEQ * EMBED, BATCH * SEQ
SIZES = {1: (8,), 2: (2, 4), 3: (2, 2, 2)}


BASIC = ("data", "zero1", "fsdp", "tensor", "sequence")  # composed in every legal way
OTHERS = tuple(name for name in SCHEMES if name not in BASIC)  # alone, and each with some of these
WITH_OTHERS = ((), ("data",), ("data", "zero1"), ("fsdp",), ("tensor",), ("fsdp", "tensor", "sequence"))


def compositions() -> list[tuple[str, ...]]:
    """List every legal set of the basic schemes, and the others beside some of them."""
    sets = itertools.chain.from_iterable(itertools.combinations(BASIC, n) for n in range(1, len(BASIC) + 1))
    legal = [names for names in sets if all(need in names for name in names for need in SCHEMES[name].needs)]
    return legal + [(other, *names) for other in OTHERS for names in WITH_OTHERS]


def plan_of(names: tuple[str, ...], **fields) -> Plan:
    """Put a set of schemes on eight devices."""
    axes = list(dict.fromkeys(SCHEMES[name].axis for name in names))
    if axes == ["stage"]:  # there are not eight layers
        return Plan(mesh=f"stage:{LAYERS}", schemes=names, **fields)
    mesh = " ".join(f"{axis}:{size}" for axis, size in zip(axes, SIZES[len(axes)], strict=True))
    return Plan(mesh=mesh, schemes=names, **fields)


def make_batch() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCAB, (BATCH, SEQ + 1), dtype=np.int32)
    cut = rng.integers(1, SEQ, (BATCH, 1))
    at = np.arange(SEQ, dtype=np.int32)[None]
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "segments": (1 + (at >= cut)).astype(np.int32),
        "positions": np.where(at >= cut, at - cut, at).astype(np.int32),
        "weights": (rng.random((BATCH, SEQ)) < 0.8).astype(np.float32),
    }


@functools.cache
def drawn() -> TrainState:
    """One set of weights for all."""
    return make_program(CONFIG, optax.sgd(0.1), Plan(mesh="data:1"), devices=jax.devices()[:1]).init(0)


def loss_and_gradients(plan: Plan, devices=None) -> tuple[float, dict[str, np.ndarray]]:
    program = make_program(CONFIG, optax.sgd(0.1), plan, devices=devices)
    state = jax.device_put(drawn(), program.shardings)
    loss, grads = program.loss_and_gradients(state, program.place(make_batch()))
    return float(loss), {name: np.asarray(g) for name, g in tree.named_leaves(grads).items()}


@pytest.fixture(scope="module")
def oracle() -> tuple[float, dict[str, np.ndarray]]:
    """One device, no scheme."""
    return loss_and_gradients(Plan(mesh="data:1"), jax.devices()[:1])


def assert_same(found: tuple[float, dict[str, np.ndarray]], oracle: tuple[float, dict[str, np.ndarray]]) -> None:
    assert found[0] == pytest.approx(oracle[0], rel=1e-5)
    for name, wanted in oracle[1].items():
        np.testing.assert_allclose(found[1][name], wanted, rtol=0, atol=1e-5 * np.abs(wanted).max(), err_msg=name)


def cases() -> list[Any]:
    """Leave what is contained in a larger composition, or alike, to the slow tests."""
    pairs = {(other, *names) for other in OTHERS for names in WITH_OTHERS if len(names) < 3 and names != ("fsdp",)}
    inner = {names for names in compositions() if 1 < len(names) < 4 and set(names) < set(BASIC)}
    slow = pairs | {names for names in inner if "sequence" in names or "zero1" in names}
    return [
        pytest.param(one, marks=[pytest.mark.slow] if one in slow else [], id="+".join(one)) for one in compositions()
    ]


@pytest.mark.parametrize("names", cases())
def test_every_composition_computes_what_one_device_does(names, oracle):
    plan = plan_of(names)
    devices = jax.devices()[:LAYERS] if names == ("stage",) else None
    assert_same(loss_and_gradients(plan, devices), oracle)


@pytest.mark.parametrize(
    "fields",
    [dict(layers="unroll"), dict(microbatches=2), dict(remat="full"), dict(remat="dots"), dict(remat="block")],
    ids=str,
)
def test_every_way_to_run_it_computes_the_same(fields, oracle):
    assert_same(loss_and_gradients(plan_of(("data", "fsdp", "tensor", "sequence"), **fields)), oracle)


def test_the_list_of_compositions_is_complete():
    assert len(compositions()) == 17 + 2 * 6
    assert {name for names in compositions() for name in names} == set(SCHEMES)


def compiled(names: tuple[str, ...], what: str, **fields):
    """Count the collectives of one pass."""
    program = make_program(CONFIG, optax.sgd(0.1), plan_of(names, **fields))
    like = program.abstract_state
    batch = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=program.layout.batch_sharding())
        for name, x in make_batch().items()
    }

    def forward(params, other, batch):
        with executing(program.plan.execution(program.layout)):
            return program.summed_loss(params, other, batch)[0]

    if what == "forward":
        lowered = jax.jit(forward).lower(like.params, like.other, batch)
    else:
        lowered = (program.step if what == "step" else program.loss_and_gradients).lower(like, batch)
    return collectives.elements(lowered.compile().as_text())


def parameters(stacked: bool | None = None) -> int:
    """Count the model's parameters; `stacked` picks those of the blocks, or the others."""
    params = make_program(CONFIG, optax.sgd(0.1), "data:-1").params
    leaves = tree.named_leaves(params)
    return sum(x.size for name, x in leaves.items() if stacked is None or name.startswith("blocks/") == stacked)


def only(found, kinds: str, slack: int = 0) -> int:
    """Return the elements of one kind (reduce-scatter counts as all-reduce), asserting that no other kind is there."""
    allowed = set(kinds.split("|"))
    small = {key: n for key, n in found.items() if key[0] not in allowed and n > slack}
    assert not small, f"unexpected collectives {small}"
    return sum(n for (kind, _), n in found.items() if kind in allowed)


def test_data_reduces_each_gradient_once_and_nothing_forward():
    assert only(compiled(("data",), "forward", layers="unroll"), "all-reduce") == 1
    reduced = only(compiled(("data",), "gradients", layers="unroll"), "all-reduce")
    assert parameters() <= reduced <= parameters() + 4


def test_zero1_gathers_the_updated_weights():
    found = compiled(("data", "zero1"), "step", layers="unroll")
    assert found["all-gather", 8] == parameters()
    assert parameters() <= found["all-reduce", 8] + 8 * found["reduce-scatter", 8] <= parameters() + 32
    assert not found["all-to-all", 8] and not found["collective-permute", 8]


def test_fsdp_gathers_each_weight_forward_and_backward():
    found = compiled(("fsdp",), "gradients", layers="scan")
    block, rest = parameters(stacked=True) // LAYERS, parameters(stacked=False)
    norms = 2 * EMBED  # small vectors of a block: gathered once and kept
    assert found["all-gather", 8] == 2 * block - norms + rest
    assert block + rest <= found["all-reduce", 8] + 8 * found["reduce-scatter", 8] <= block + rest + 16


def test_hybrid_reduces_within_fsdp_then_across_data():
    found = compiled(("data", "fsdp"), "gradients", layers="unroll")
    assert set(size for (kind, size), n in found.items() if kind == "all-gather" and n) == {4}
    assert found["all-reduce", 4] > found["all-reduce", 2] > 0  # the second sum is over what each device keeps
    assert found["all-reduce", 4] == 4 * found["all-reduce", 2]


def test_tensor_reduces_twice_per_layer_and_pass():
    small = 3 * TOKENS  # maximum, sum and target of the split logits
    forward = only(compiled(("tensor",), "forward", layers="unroll"), "all-reduce")
    assert forward == (2 * LAYERS + 1) * ACTIVATION + small
    both = only(compiled(("tensor",), "gradients", layers="unroll"), "all-reduce")
    assert both == (4 * LAYERS + 2) * ACTIVATION + small


def test_sequence_turns_reductions_into_scatter_and_gather():
    found = compiled(("tensor", "sequence"), "gradients", layers="unroll")
    moved = (4 * LAYERS + 2) * ACTIVATION
    assert found["all-gather", 8] == moved
    norms = (2 * LAYERS + 1) * EMBED  # gradients of the norms: each device saw its part of the sequence
    assert found["all-reduce", 8] + 8 * found["reduce-scatter", 8] == moved + 3 * TOKENS + norms


def test_the_table_is_not_gathered_when_the_vocabulary_is_split():
    found = compiled(("tensor",), "gradients", layers="unroll")
    assert not [kind for kind, _ in found if kind == "all-gather"]


def test_the_values_of_weights_do_not_depend_on_the_mesh():
    one = make_program(CONFIG, optax.sgd(0.1), "data:1", devices=jax.devices()[:1]).init(3)
    eight = make_program(CONFIG, optax.sgd(0.1), "fsdp:4 tensor:2").init(3)
    for name, value in tree.named_leaves(one.params).items():
        np.testing.assert_array_equal(np.asarray(value), np.asarray(tree.named_leaves(eight.params)[name]), name)


def test_every_leaf_of_the_state_has_the_planned_sharding():
    program = make_program(CONFIG, optax.adamw(1e-3), plan_of(("data", "zero1", "fsdp", "tensor")))
    state = program.init(0)
    wanted, found = tree.named_leaves(program.abstract_state), tree.named_leaves(state)
    for name, leaf in wanted.items():
        assert leaf.sharding is not None and found[name].sharding.is_equivalent_to(leaf.sharding, leaf.ndim), name
    split = [name for name, leaf in found.items() if "mu/" in name and not leaf.sharding.is_fully_replicated]
    assert len(split) == len(dims.arrows(program.params))  # every moment is split somewhere
    assert jnp.issubdtype(found["step"].dtype, jnp.integer)
