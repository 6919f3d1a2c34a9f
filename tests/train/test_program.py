"""The training program: what it accepts, what it carries, and that no way to run it changes the numbers."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxpp import dims, tree
from jaxpp.data import CorpusConfig, DataConfig, open_data
from jaxpp.models import DecoderConfig
from jaxpp.nn import Linear
from jaxpp.parallel import Plan
from jaxpp.train import OptimizerConfig, TrainState, make_program, make_train_step
from jaxpp.train.evaluate import evaluate
from jaxpp.train.optimizer import OPTIMIZERS, make_optimizer

EMBED, MLP, ROWS = 16, 32, 16
SIZES = {"embed": EMBED, "mlp": MLP}
ONE = jax.devices()[:1]


class Toy(nnx.Module):
    """A user's own small model: two maps, a squared error, weights on its rows."""

    def __init__(self, rngs: nnx.Rngs, dtype=jnp.float32):
        self.up = Linear(rngs.params(), "embed -> mlp", SIZES, bias=True)
        self.down = Linear(rngs.params(), "mlp -> embed", SIZES)
        self.scale = dims.param(jnp.ones(EMBED), "-> embed")
        for _, param in nnx.to_flat_state(nnx.state(self, nnx.Param)):
            param.set_value(param.get_value().astype(dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jnp.tanh(self.up(x))) * self.scale[...]

    def loss(self, batch) -> tuple[jax.Array, jax.Array]:
        error = jnp.square(self(batch["x"]) - batch["y"]).mean(-1)
        return jnp.sum(error * batch["weights"]).astype(jnp.float32), jnp.sum(batch["weights"])


def toy(rngs: nnx.Rngs) -> Toy:
    return Toy(rngs)


def narrow(rngs: nnx.Rngs) -> Toy:
    return Toy(rngs, jnp.bfloat16)


def make_batch(seed: int = 0, rows: int = ROWS, weights=None) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(2, rows, EMBED)).astype(np.float32)
    return {"x": x, "y": y, "weights": np.ones(rows, np.float32) if weights is None else weights}


def run(model, optimizer, plan, batches, devices=None) -> tuple[TrainState, list[float]]:
    state, step = make_train_step(model, optimizer, plan, devices=devices)
    losses = []
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return state, losses


def assert_same(found, wanted, atol: float) -> None:
    found, wanted = tree.named_leaves(found), tree.named_leaves(wanted)
    assert list(found) == list(wanted)
    for name, leaf in wanted.items():
        np.testing.assert_allclose(np.asarray(found[name]), np.asarray(leaf), rtol=0, atol=atol, err_msg=name)


UNEVEN = np.repeat([0.0, 0.25, 1.0, 3.0], 4).astype(np.float32)  # the second sum of weights is 12 times the first
CLIPPED = OptimizerConfig(
    learning_rate=0.01, warmup_steps=0, schedule_steps=10, weight_decay=0.5, clip_norm=0.05, epsilon=1e-4
)


@pytest.mark.parametrize(
    ("name", "weights", "mesh"),
    [
        ("adamw", None, "data:1"),
        ("adamw", UNEVEN, "data:2 fsdp:2"),
        ("adamw", UNEVEN.reshape(4, 4).T.ravel(), "data:1"),
        ("sgd", UNEVEN.reshape(4, 4).T.ravel(), "data:1"),
    ],
    ids=["even", "uneven on a mesh", "uneven", "sgd"],
)
def test_four_microbatches_are_one_batch(name, weights, mesh):
    """B115: after three updates, to 1e-6, with decay and clipping on; decay, clip and step count once per update."""
    optimizer = make_optimizer(dataclasses.replace(CLIPPED, name=name))
    batches = [make_batch(i, weights=weights) for i in range(3)]
    whole, whole_losses = run(toy, optimizer, "data:1", batches, ONE)
    devices = ONE if mesh == "data:1" else jax.devices()[:4]
    parts, losses = run(toy, optimizer, Plan(mesh=mesh, microbatches=4), batches, devices)
    assert_same(parts.params, whole.params, 1e-6)
    assert_same(parts.optimizer, whole.optimizer, 1e-6)
    assert losses == pytest.approx(whole_losses, rel=1e-6)
    assert int(parts.step) == 3


def test_clipping_did_bind():
    state, step = make_train_step(toy, make_optimizer(CLIPPED), "data:1", devices=ONE)
    _, metrics = step(state, make_batch())
    assert metrics["grad_norm"] > 2 * CLIPPED.clip_norm


def dtypes(state) -> dict[str, str]:
    return {name: str(leaf.dtype) for name, leaf in tree.named_leaves(state).items()}


def injected() -> optax.GradientTransformation:
    rate = optax.linear_schedule(0.1, 0.0, 10)
    return optax.inject_hyperparams(optax.adamw, hyperparam_dtype=jnp.float32)(learning_rate=rate, weight_decay=0.1)


@pytest.mark.parametrize("name", [*OPTIMIZERS, "injected"])
def test_dtypes_do_not_change(name):
    """B116: bf16 weights and moments stay bf16 over three steps, also with injected hyper-parameters."""
    optimizer = injected() if name == "injected" else make_optimizer(OptimizerConfig(name, clip_norm=0.1))
    program = make_program(narrow, optimizer, "data:1", devices=ONE)
    state = program.init(0)
    before = dtypes(state)
    assert {kind for path, kind in before.items() if path.startswith("params/")} == {"bfloat16"}
    for i in range(3):
        state, metrics = program.step(state, program.place(make_batch(i)))
        assert dtypes(state) == before
    assert np.isfinite(metrics["loss"]) and program.step._cache_size() == 1


ADAM = optax.adam(1e-2, eps=1e-4)


@pytest.fixture(scope="module")
def undonated() -> tuple[list[float], nnx.State]:
    """Three steps on one device, each made of a loss, its gradients and an update, nothing donated."""
    program = make_program(toy, ADAM, "data:1", devices=ONE)
    state, losses = program.init(0), []
    for i in range(3):
        loss, grads = program.loss_and_gradients(state, program.place(make_batch(i)))
        updates, moments = ADAM.update(grads, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        state = dataclasses.replace(state, params=params, optimizer=moments)
        losses.append(float(loss))
    return losses, state.params


@pytest.mark.parametrize(
    ("mesh", "count"), [("data:1", 1), ("data:2", 2), ("data:8", 8), ("fsdp:8", 8), ("data:2 fsdp:2 tensor:2", 8)]
)
def test_donation_changes_no_number(mesh, count, undonated):
    """B73."""
    state, step = make_train_step(toy, ADAM, mesh, devices=jax.devices()[:count])
    losses = []
    for i in range(3):
        given = jax.tree.leaves(state)
        state, metrics = step(state, make_batch(i))
        assert all(leaf.is_deleted() for leaf in given if leaf.ndim)
        losses.append(float(metrics["loss"]))
    assert losses == pytest.approx(undonated[0], rel=1e-5)
    assert_same(state.params, undonated[1], 1e-5)


def test_every_leaf_has_the_planned_sharding_on_the_plans_mesh():
    """B97, B98, B100: abstract leaves, drawn, adopted and stepped ones."""
    program = make_program(toy, optax.adam(1e-3), "data:2 fsdp:2 tensor:2")
    wanted = tree.named_leaves(program.abstract_state)
    stepped, _ = program.step(program.init(0), program.place(make_batch()))
    for state in (program.init(0), program.adopt(Toy(nnx.Rngs(0))), stepped):
        found = tree.named_leaves(state)
        assert list(found) == list(wanted)
        for name, leaf in wanted.items():
            assert isinstance(found[name], jax.Array) and leaf.sharding is not None, name
            assert found[name].sharding.is_equivalent_to(leaf.sharding, leaf.ndim), name
            assert (found[name].shape, found[name].dtype) == (leaf.shape, leaf.dtype), name
            assert found[name].sharding.mesh == program.layout.mesh, name
    assert wanted["params/up/kernel"].sharding.spec == jax.P("fsdp", "tensor")


def test_a_module_a_config_and_a_function_are_models():
    """The same weights whichever way they come."""
    optimizer, batches = optax.sgd(0.1), [make_batch(0), make_batch(1)]
    drawn, losses = run(toy, optimizer, "data:2 fsdp:2 tensor:2", batches)

    @dataclasses.dataclass(frozen=True)
    class Config:
        def build(self, rngs: nnx.Rngs) -> Toy:
            return Toy(rngs)

    built = run(Config(), optimizer, "data:2 fsdp:2 tensor:2", batches)
    adopted = run(Toy(nnx.Rngs(0)), optimizer, "data:2 fsdp:2 tensor:2", batches)
    for state, found in (built, adopted):
        assert_same(state.params, drawn.params, 1e-6)
        assert found == pytest.approx(losses, rel=1e-6)


@pytest.mark.parametrize(("mesh", "devices"), [("data:1", ONE), ("data:8", None), ("fsdp:8", None)])
def test_an_adopted_module_keeps_its_own_arrays(mesh, devices):
    model = Toy(nnx.Rngs(3))
    before = {name: np.array(leaf) for name, leaf in tree.named_leaves(nnx.state(model)).items()}
    state, step = make_train_step(model, optax.adam(0.1), mesh, devices=devices)
    for i in range(2):
        state, _ = step(state, make_batch(i))
    for name, leaf in tree.named_leaves(nnx.state(model)).items():
        np.testing.assert_array_equal(leaf, before[name])
        assert np.abs(np.asarray(tree.named_leaves(state.params)[name]) - before[name]).max() > 0.01


def test_the_weights_depend_on_the_seed_alone():
    first, other = (make_train_step(toy, optax.sgd(1.0), "data:8", seed=seed)[0] for seed in (0, 1))
    again = make_train_step(toy, optax.sgd(1.0), "fsdp:4 tensor:2", seed=0)[0]
    assert_same(first.params, again.params, 2e-7)  # jax 0.12 rounds the last bit otherwise on another mesh
    assert np.abs(np.asarray(first.params["up"]["kernel"][...] - other.params["up"]["kernel"][...])).max() > 0.1


class Silent(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up = Linear(rngs.params(), "embed -> mlp", SIZES)


def test_a_model_without_a_loss_is_refused():
    for model in (Silent, Silent(nnx.Rngs(0))):
        with pytest.raises(ValueError) as error:
            make_train_step(model, optax.sgd(0.1), "data:8")
        assert str(error.value) == (
            "Silent has no method loss(batch) -> (sum of losses, sum of weights); "
            "add one or pass loss=your_function(model, batch)"
        )


def test_a_loss_of_ones_own():
    def squares(model, batch):
        return jnp.sum(jnp.square(model.up(batch["x"]))), jnp.float32(len(batch["x"]))

    state, step = make_train_step(Silent, optax.sgd(0.01), "data:4 tensor:2", loss=squares)
    kernel = np.asarray(state.params["up"]["kernel"][...], np.float64)
    _, metrics = step(state, make_batch())
    assert metrics["loss"] == pytest.approx(np.square(make_batch()["x"] @ kernel).sum() / ROWS, rel=1e-5)


def test_wrong_weights_are_refused_before_any_compile():
    class Bare(Toy):
        def __init__(self, rngs: nnx.Rngs):
            super().__init__(rngs)
            self.extra = nnx.Param(jnp.zeros(3))

    with pytest.raises(ValueError, match=r"parameter extra of shape \(3,\) has no arrow"):
        make_train_step(Bare, optax.sgd(0.1), "data:8")
    with pytest.raises(ValueError, match="mlp 32 does not split over tensor=5; sizes 30 or 35 would"):
        make_train_step(toy, optax.sgd(0.1), "tensor:5", devices=jax.devices()[:5])


def test_a_batch_that_does_not_divide_names_what_would():
    """B83."""
    state, step = make_train_step(toy, optax.sgd(0.1), "data:8")
    with pytest.raises(ValueError, match=r"\b6 does not split .*size 8 would"):
        step(state, make_batch(rows=6))
    state, step = make_train_step(toy, optax.sgd(0.1), Plan(mesh="data:4", microbatches=3), devices=jax.devices()[:4])
    with pytest.raises(ValueError, match=r"\b16 does not split into 3 microbatches.*sizes 12 or 24 would"):
        step(state, make_batch())


def test_a_device_batch_is_taken_too():
    state, step = make_train_step(toy, optax.sgd(0.1), "data:8")
    state, first = step(state, jax.tree.map(jnp.asarray, make_batch()))
    again, step = make_train_step(toy, optax.sgd(0.1), "data:8")
    assert step(again, make_batch())[1]["loss"] == first["loss"]


def test_rows_and_place():
    program = make_program(toy, optax.sgd(0.1), "data:2 fsdp:2 tensor:2")
    assert program.rows(12) == list(range(12))
    x = np.arange(24, dtype=np.float32).reshape(12, 2)
    placed = program.place({"x": x})["x"]
    np.testing.assert_array_equal(placed, x)
    assert placed.sharding.is_equivalent_to(program.layout.batch_sharding(), 2)
    assert {shard.data.shape for shard in placed.addressable_shards} == {(3, 2)}
    shuffled = [*range(6, 12), *range(6)]
    np.testing.assert_array_equal(program.place({"x": x[shuffled]}, shuffled, 12)["x"], x)


def test_metrics_and_the_step_count():
    weights = np.array([2.0, 0.0] * 8, np.float32)
    state, step = make_train_step(toy, optax.sgd(0.1), "data:4 tensor:2")
    model = nnx.merge(nnx.graphdef(Toy(nnx.Rngs(0))), jax.tree.map(np.asarray, state.params))
    total, weight = model.loss(make_batch(weights=weights))
    state, metrics = step(state, make_batch(weights=weights))
    assert set(metrics) == {"loss", "grad_norm", "weight"} and metrics["weight"] == 16
    assert metrics["loss"] == pytest.approx(float(total / weight), rel=1e-5)
    assert state.step.dtype == jnp.int32 and int(state.step) == 1


def test_a_batch_whose_weights_are_all_zero_does_no_harm():
    state, step = make_train_step(toy, optax.sgd(0.1), "data:8")
    before = jax.tree.map(np.array, state.params)
    state, metrics = step(state, make_batch(weights=np.zeros(ROWS, np.float32)))
    assert metrics["loss"] == 0 and metrics["grad_norm"] == 0
    assert_same(state.params, before, 0.0)


def test_bfloat16_compute_keeps_fp32_weights():
    state, losses = run(toy, optax.adam(1e-2), Plan(mesh="data:8", compute_dtype="bfloat16"), [make_batch()] * 5)
    wide, wanted = run(toy, optax.adam(1e-2), "data:8", [make_batch()] * 5)
    assert set(dtypes(state.params).values()) == {"float32"}
    assert losses == pytest.approx(wanted, rel=0.02) and losses != wanted
    assert losses[-1] < losses[0]


class Seen(nnx.Variable):
    """A count of batches, as batch statistics would be kept."""


class Noisy(nnx.Module):
    """Dropout and a running mean beside the weights."""

    def __init__(self, rngs: nnx.Rngs):
        self.up = Linear(rngs.params(), "embed -> mlp", SIZES)
        self.mean = nnx.BatchStat(jnp.zeros(EMBED))
        self.seen = Seen(jnp.zeros((), jnp.int32))
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(dropout=7))

    def loss(self, batch) -> tuple[jax.Array, jax.Array]:
        self.mean[...] = 0.9 * self.mean[...] + 0.1 * batch["x"].mean(0)
        self.seen[...] = self.seen[...] + 1
        kept = self.dropout(self.up(batch["x"]))
        return jnp.sum(jnp.square(kept)), jnp.float32(1.0)


@pytest.mark.parametrize("model", [Noisy, Noisy(nnx.Rngs(0))], ids=["drawn", "adopted"])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_other_variables_are_carried(model, microbatches):
    same = [make_batch(0)] * 3
    state, losses = run(model, optax.sgd(0.0), Plan(mesh="data:4 tensor:2", microbatches=microbatches), same)
    assert len(set(losses)) == 3  # the weights stand still, so it is the dropout that moves on
    assert int(state.other["seen"][...]) == 3 * microbatches
    if microbatches == 1:
        np.testing.assert_allclose(state.other["mean"][...], (1 - 0.9**3) * same[0]["x"].mean(0), atol=1e-6)


def test_dropout_does_not_depend_on_the_mesh():
    """B122: the mask is one of global positions: the same total on one device, and rows with equal inputs differ."""
    batch = {**make_batch(), "x": np.tile(make_batch()["x"][:1], (ROWS, 1))}
    _, one = run(Noisy, optax.sgd(0.0), "data:1", [batch], ONE)
    _, eight = run(Noisy, optax.sgd(0.0), "data:8", [batch])
    assert eight == pytest.approx(one, rel=1e-5)
    alone = {name: x[:1] for name, x in batch.items()}
    _, first = run(Noisy, optax.sgd(0.0), "data:1", [alone], ONE)
    assert abs(one[0] / (ROWS * first[0]) - 1) > 1e-3  # one mask for all rows would give sixteen times the first


def test_evaluation_of_nineteen_rows_on_four_devices(tmp_path):
    """B86: the last batch is filled up with rows of weight 0."""
    for i in range(40):
        (tmp_path / f"{i:03}.txt").write_text("abcdefghijklmno"[: 5 + i % 10])
    corpora = (CorpusConfig(source=str(tmp_path / "*.txt")),)
    config = DataConfig(corpora, 16, 8, "bytes", held_out=0.5, cache_dir=str(tmp_path / "cache"))
    data = open_data(config)
    rows = sum(int((batch["weights"].sum(-1) > 0).sum()) for batch in data.held_out_batches(1))
    assert rows % 4 and rows % 8
    model = DecoderConfig(260, 1, 16, num_heads=2, mlp_dim=32)
    found = []
    for mesh, count, size in (("data:1", 1, 1), ("data:4", 4, 8), ("data:2 tensor:2", 4, 4)):
        program = make_program(model, optax.sgd(0.1), mesh, devices=jax.devices()[:count])
        found.append(evaluate(program, program.init(0), data, size))
    for one in found[1:]:
        assert one == pytest.approx(found[0], rel=1e-6)
    assert found[0]["tokens"] > 0 and found[0]["bytes"] > 0
