"""Checkpoints: equal bits on any layout, all or nothing on disk, readable refusals."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpp.checkpoint import Checkpoints
from jaxpp.checkpoint_leaves import named_arrays
from jaxpp.tree import map_named


def mesh(**axes: int) -> Mesh:
    count = int(np.prod(list(axes.values())))
    devices = np.array(jax.devices()[:count]).reshape(tuple(axes.values()))
    return Mesh(devices, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def put(tree: Any, mesh: Mesh, *axes: Any) -> Any:
    """Place each leaf, its leading dims over `axes` as far as it has dims that divide."""
    return jax.tree.map(lambda leaf: jax.device_put(leaf, spread(leaf, mesh, axes)), tree)


def spread(leaf: Any, mesh: Mesh, axes: tuple[Any, ...]) -> NamedSharding:
    spec = [
        axis if axis and size % mesh.shape[axis] == 0 else None for axis, size in zip(axes, leaf.shape, strict=False)
    ]
    return NamedSharding(mesh, P(*spec))


def abstract(tree: Any, mesh: Mesh, *axes: Any) -> Any:
    def one(leaf: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=spread(leaf, mesh, axes))

    return jax.tree.map(one, tree)


def same_bits(left: Any, right: Any) -> None:
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for (name, a), b in zip(named_arrays(left).items(), named_arrays(right).values(), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape, name
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), name


def sample() -> dict[str, Any]:
    key = jax.random.key(3)
    return {
        "kernel": jax.random.normal(key, (16, 8, 24)),
        "half": jax.random.normal(key, (8, 16)).astype(jnp.bfloat16),
        "count": jnp.int32(16777217),
        "bytes": jnp.arange(40, dtype=jnp.uint8).reshape(8, 5),
        "odd": jnp.array([float("nan"), -0.0, 3.0]),
    }


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(8, 16, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(16, 16, rngs=rngs), nnx.LayerNorm(16, rngs=rngs)])
        self.dropout = nnx.Dropout(0.1, rngs=rngs)


@pytest.fixture
def store(tmp_path: Path):
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        yield checkpoints


LAYOUTS = {
    "one device": ({"data": 1}, (None,)),
    "fsdp 8": ({"fsdp": 8}, ("fsdp",)),
    "fsdp 4, tensor 2, turned": ({"fsdp": 4, "tensor": 2}, ("tensor", "fsdp")),
    "data 2, fsdp 2, tensor 2": ({"data": 2, "fsdp": 2, "tensor": 2}, (None, "fsdp", "tensor")),
    "replicated over 8": ({"data": 8}, (None,)),
    "three of eight devices": ({"tensor": 3}, (None, None, "tensor")),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_restores_the_same_bits_onto_another_mesh(store: Checkpoints, name: str) -> None:
    state = put(sample(), mesh(fsdp=4, tensor=2), "fsdp", "tensor")
    store.save(7, state)
    shape, axes = LAYOUTS[name]
    like = abstract(state, mesh(**shape), *axes)
    restored = store.restore(7, like)
    same_bits(restored, state)
    for leaf, wanted in zip(jax.tree.leaves(restored), jax.tree.leaves(like), strict=True):
        assert isinstance(leaf, jax.Array)
        assert leaf.sharding == wanted.sharding
    assert int(restored["count"]) == 16777217


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_restored_leaves_lie_on_the_callers_mesh(store: Checkpoints, kind: AxisType) -> None:
    store.save(1, put(sample(), mesh(fsdp=8), "fsdp"))
    other = Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"), axis_types=(kind, kind))
    restored = store.restore(1, abstract(sample(), other, "b", "a"))
    for leaf in jax.tree.leaves(restored):
        assert leaf.sharding.mesh is other
        assert leaf.sharding.mesh.axis_types == (kind, kind)


def test_no_array_is_ever_whole_on_a_device(store: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    state = put({"stacked": jnp.ones((64, 8, 8))}, mesh(fsdp=8), "fsdp")
    store.save(1, state)
    store.wait()
    like = abstract(state, mesh(data=2, fsdp=4), None, "fsdp", "data")
    placed: list[int] = []
    read = jax.device_put

    def count(array: Any, *args: Any, **kwargs: Any) -> Any:
        placed.append(array.nbytes)
        return read(array, *args, **kwargs)

    monkeypatch.setattr(jax, "device_put", count)
    restored = store.restore(1, like)
    shard = like["stacked"].sharding.shard_shape((64, 8, 8))
    assert placed == [np.prod(shard) * 4] * 8
    assert max(s.data.nbytes for s in restored["stacked"].addressable_shards) == placed[0]


def test_round_trip_of_any_structure(store: Checkpoints) -> None:
    one = jnp.ones(3)
    state = {
        "numbered": {0: one, 10: [one * 2, (one * 3, optax.EmptyState())]},
        "none": None,
        "empty": {},
        "adam": optax.ScaleByAdamState(count=jnp.int32(4), mu={"a": one * 5}, nu={"a": one * 6}),
    }
    store.save(1, state)
    restored = store.restore(1, abstract(state, mesh(data=1)))
    same_bits(restored, state)
    assert set(restored["numbered"]) == {0, 10}


def test_round_trip_of_a_model_and_its_optimizer(store: Checkpoints) -> None:
    params = nnx.state(Net(nnx.Rngs(0)), nnx.Param)
    labels = map_named(lambda name, _: "norm" if "layers/1" in name else "matrix", params)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.multi_transform({"norm": optax.adamw(1e-3), "matrix": optax.adamw(1e-2)}, labels),
    )
    moments = optimizer.init(params)
    _, moments = optimizer.update(jax.tree.map(jnp.ones_like, params), moments, params)
    state = {"params": params, "optimizer": moments}
    store.save(1, put(state, mesh(fsdp=8), "fsdp"))
    restored = store.restore(1, abstract(state, mesh(a=2, b=2), "a", "b"))
    same_bits(restored, state)


def test_round_trip_of_random_keys(store: Checkpoints) -> None:
    state = nnx.state(Net(nnx.Rngs(5)))
    state["other"] = nnx.RngKey(jax.random.key(1, impl="rbg"), tag="other")
    store.save(1, state)
    restored = store.restore(1, abstract(state, mesh(data=8)))
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        assert a.dtype == b.dtype and len(a.sharding.device_set) == 8
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_array_equal(a, b)


def test_the_state_may_be_donated_as_soon_as_save_returns(store: Checkpoints) -> None:
    sharding = NamedSharding(mesh(fsdp=8), P("fsdp"))
    numbers = np.arange(8 * 2**18, dtype=np.float32)
    state = jax.device_put(numbers, sharding)
    spoil = jax.jit(lambda x: x * 0 - 1, donate_argnums=0, out_shardings=sharding)
    store.save(1, {"x": state})
    for _ in range(5):
        state = spoil(state)
    state.block_until_ready()
    np.testing.assert_array_equal(store.restore_numpy(1)["x"], numbers)


def test_restore_waits_for_the_save(store: Checkpoints) -> None:
    state = put({"x": jnp.arange(2.0**20)}, mesh(fsdp=8), "fsdp")
    store.save(1, state)
    same_bits(store.restore(1, abstract(state, mesh(fsdp=2), "fsdp")), state)


def test_a_subtree_restores_alone(store: Checkpoints) -> None:
    state = {"params": sample(), "params_average": {"x": jnp.ones(2)}, "step": jnp.int32(3)}
    store.save(1, state)
    restored = store.restore(1, abstract(sample(), mesh(fsdp=8), "fsdp"), prefix="params")
    same_bits(restored, state["params"])
    step = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh(a=1), P()))
    assert int(store.restore(1, step, prefix="step")) == 3
    assert set(store.restore_numpy(1, "params_average")) == {"params_average/x"}
    with pytest.raises(ValueError, match="nothing under 'weights'; it has params, params_average"):
        store.restore(1, step, prefix="weights")


def test_numpy_and_contents_need_no_template(store: Checkpoints) -> None:
    state = put(sample(), mesh(fsdp=8), "fsdp")
    store.save(1, state)
    contents, arrays = store.contents(1), store.restore_numpy(1)
    assert set(contents) == set(arrays) == set(state)
    for name, leaf in state.items():
        assert (contents[name].shape, contents[name].dtype) == (leaf.shape, leaf.dtype)
        assert isinstance(arrays[name], np.ndarray) and arrays[name].dtype == leaf.dtype
        assert arrays[name].tobytes() == np.asarray(leaf).tobytes()


def test_texts_lie_in_the_step_as_plain_files(store: Checkpoints) -> None:
    texts = {"config.yaml": "seed: 1\nname: café\n", "data.json": '{"batch": 3}', "plan.yaml": ""}
    store.save(4, {"x": jnp.ones(2)}, texts)
    assert store.texts(4) == texts
    path = Path(os.fspath(store.directory)) / "4" / "config.yaml"
    assert path.read_text(encoding="utf-8") == texts["config.yaml"]


@pytest.mark.parametrize("name", ["a/b", "..", "", "files.json", "state"])
def test_text_names_are_plain(store: Checkpoints, name: str) -> None:
    with pytest.raises(ValueError, match="needed a plain file name"):
        store.save(1, {"x": jnp.ones(2)}, {name: ""})
    assert store.steps() == [] and store.incomplete() == []


def test_the_newest_are_kept(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, keep=2) as store:
        for step in (1, 2, 3, 10):
            store.save(step, {"x": jnp.full(2, step)})
            store.wait()
            assert store.latest() == step
        assert store.steps() == [3, 10]
        assert store.set_aside(3) is not None
        assert store.steps() == [3]
        store.save(2, {"x": jnp.full(2, -2)})
        store.save(1, {"x": jnp.full(2, -1)})
        store.wait()
        assert 1 in store.steps(), "the step just saved is never removed"
    numbered = [path.name for path in tmp_path.iterdir() if path.name.isdigit()]
    assert sorted(numbered) == [str(s) for s in store.steps()]


def test_saving_a_step_twice(store: Checkpoints) -> None:
    store.save(5, {"x": jnp.ones(2)})
    with pytest.raises(ValueError, match=r"checkpoints/5 exists already: overwrite=True"):
        store.save(5, {"x": jnp.zeros(2)})
    np.testing.assert_array_equal(store.restore_numpy(5)["x"], np.ones(2))
    store.save(5, {"x": jnp.zeros(2)}, overwrite=True)
    np.testing.assert_array_equal(store.restore_numpy(5)["x"], np.zeros(2))


@pytest.mark.parametrize("lost", ["files.json", "state", "state/_METADATA", "state/manifest.ocdbt"])
def test_a_partial_newer_step(store: Checkpoints, tmp_path: Path, lost: str) -> None:
    """A copy or save that did not finish is reported, never chosen; a damaged one is refused."""
    for step in (1, 2):
        store.save(step, {"x": jnp.full(2, step)})
    store.wait()
    path = tmp_path / "checkpoints" / "2" / lost
    subprocess.run(["rm", "-r", str(path)], check=True)
    (tmp_path / "checkpoints" / "3.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    (tmp_path / "checkpoints" / "4").mkdir()
    unfinished = ["2"] if lost == "files.json" else []
    assert store.incomplete() == [*unfinished, "3.orbax-checkpoint-tmp", "4"]
    assert store.latest() == (1 if unfinished else 2)
    words = rf"checkpoints/2 is damaged: .*{lost}.* (is|are) missing.*checkpoint\.step=1 restores"
    for read in (store.restore_numpy, store.contents, store.texts):
        with pytest.raises(ValueError, match=words) as caught:
            read(2)
        assert "\n" not in str(caught.value)
    store.save(4, {"x": jnp.full(2, 4)})
    store.wait()
    assert store.latest() == 4, "a partial directory gives way to a save of its step"
    assert "3.orbax-checkpoint-tmp" not in store.incomplete()


@pytest.mark.parametrize("share", [0.5, 0.0])
def test_a_truncated_data_file_is_named(store: Checkpoints, tmp_path: Path, share: float) -> None:
    state = put({"x": jnp.arange(2.0**16)}, mesh(fsdp=8), "fsdp")
    store.save(3, state)
    store.wait()
    files = (path for path in (tmp_path / "checkpoints" / "3" / "state").rglob("*"))
    largest = max((path for path in files if path.is_file()), key=lambda path: path.stat().st_size)
    size = largest.stat().st_size
    os.truncate(largest, int(size * share))
    with pytest.raises(ValueError) as caught:
        store.restore(3, abstract(state, mesh(fsdp=8), "fsdp"))
    name = largest.relative_to(tmp_path / "checkpoints" / "3")
    words = f"{name} has {int(size * share)} bytes, needed {size}; no older step is intact"
    assert words in str(caught.value) and "checkpoints/3 is damaged" in str(caught.value)


def test_damage_that_sizes_do_not_show(store: Checkpoints, tmp_path: Path) -> None:
    state = {"x": jnp.arange(2.0**16)}
    store.save(3, state)
    store.wait()
    for path in (tmp_path / "checkpoints" / "3" / "state").rglob("*"):
        if path.is_file() and path.parent.name == "d":
            path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(ValueError, match="checkpoints/3 is damaged") as caught:
        store.restore(3, abstract(state, mesh(fsdp=8), "fsdp"))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


def test_differences_are_listed(store: Checkpoints) -> None:
    layers = {f"layer{i:02}": jnp.ones(4) for i in range(12)}
    store.save(1, {"kernel": jnp.ones((4, 6)), "old": jnp.ones(2), "count": jnp.int32(1), **layers})
    like = {"kernel": jnp.ones((4, 8)), "new": jnp.ones(2), "count": jnp.float32(1)}
    with pytest.raises(ValueError) as caught:
        store.restore(1, abstract(like, mesh(data=1)))
    message = str(caught.value)
    assert "does not fit, 16 differences" in message and message.endswith("; and 8 more")
    assert "count: found int32[], needed float32[]" in message
    assert "kernel: found float32[4,6], needed float32[4,8]" in message
    assert "\n" not in message
    with pytest.raises(ValueError) as caught:
        store.restore(1, abstract({**like, **layers}, mesh(data=1)))
    assert "new: missing, needed float32[2]" in str(caught.value)
    assert "old: unexpected float32[2]" in str(caught.value)


def test_refusals_in_one_line(store: Checkpoints, tmp_path: Path) -> None:
    one = jnp.ones(2)
    store.save(2, {"x": one})
    cases = {
        r"no checkpoint .*/9; complete steps there: 2": lambda: store.contents(9),
        "no sharding= given to the ShapeDtypeStruct of x": lambda: store.restore(2, jax.eval_shape(lambda: {"x": one})),
        "x/1 is of type int, needed a jax.Array": lambda: store.save(3, {"x": [one, 3]}),
        "the state holds no arrays": lambda: store.save(3, {"x": None}),
        "keep=0": lambda: Checkpoints(tmp_path, keep=0),
    }
    for words, action in cases.items():
        with pytest.raises(ValueError, match=words) as caught:
            action()
        assert "\n" not in str(caught.value)


def test_a_directory_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "run", Path("/proc/run")):
        with pytest.raises(ValueError, match=re.escape(f"in {path}:")) as caught:
            Checkpoints(path)
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="cannot read checkpoints"):
        Checkpoints(tmp_path / "absent", writable=False)
    assert not (tmp_path / "absent").exists() and (tmp_path / "file").read_text() == "x"


def test_a_failed_background_save_is_raised_and_harms_nothing(
    store: Checkpoints, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    state = put({"x": jnp.ones((8, 2**20))}, mesh(fsdp=8), "fsdp")
    store.save(1, state)
    store.wait()
    store.save(2, state)
    # Another run puts its own step there while this one is being written.
    (tmp_path / "checkpoints" / "2").mkdir()
    (tmp_path / "checkpoints" / "2" / "theirs").write_text("x")
    with pytest.raises(OSError, match=r"checkpoints/2 was not saved: ") as caught:
        store.wait()
    assert "\n" not in str(caught.value)
    assert store.latest() == 1
    assert (tmp_path / "checkpoints" / "2" / "theirs").read_text() == "x"
    store.save(3, state)
    same_bits(store.restore(3, abstract(state, mesh(fsdp=4), "fsdp")), state)
    assert capfd.readouterr() == ("", "")


def run(code: str, *arguments: str, devices: int = 1, **options: Any) -> subprocess.Popen[str]:
    """Start a fresh Python on `code`, with its own number of fake devices."""
    flags = f"--xla_force_host_platform_device_count={devices}"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    prelude = """
        import sys, jax, numpy as np, jax.numpy as jnp
        from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
        from jaxpp.checkpoint import Checkpoints
    """
    text = textwrap.dedent(prelude) + textwrap.dedent(code)
    return subprocess.Popen(
        [sys.executable, "-c", text, *arguments],
        env=environment,
        cwd=Path(__file__).parents[1],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **options,
    )


@pytest.mark.timeout(120)
def test_one_device_reads_what_eight_saved(store: Checkpoints) -> None:
    state = put(sample(), mesh(fsdp=4, tensor=2), "fsdp", "tensor")
    store.save(6, state)
    store.wait()
    code = """
        assert jax.device_count() == 1
        store = Checkpoints(sys.argv[1], writable=False)
        print(sorted((k, v.shape, str(v.dtype)) for k, v in store.contents(6).items()))
        print(float(store.restore_numpy(6, "kernel")["kernel"].astype(np.float64).sum()))
    """
    process = run(code, os.fspath(store.directory))
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 0, output
    wanted = sorted((name, leaf.shape, str(leaf.dtype)) for name, leaf in state.items())
    total = float(np.asarray(state["kernel"]).astype(np.float64).sum())
    assert output.splitlines() == [str(wanted), str(total)]


@pytest.mark.timeout(120)
def test_kill_in_mid_save_leaves_the_previous_step(tmp_path: Path) -> None:
    code = """
        import threading, time
        from pathlib import Path
        store = Checkpoints(sys.argv[1], keep=1)
        sharding = NamedSharding(Mesh(np.array(jax.devices()), ("a",)), P("a"))
        arrays = {f"x{i}": np.full((8, 2**18), i, np.float32) for i in range(12)}
        state = jax.device_put(arrays, sharding)
        store.save(1, state)
        store.wait()
        print("saved", flush=True)
        store.save(2, state)
        print("saving", flush=True)
        store.wait()
        print("finished", flush=True)
    """
    process = run(code, str(tmp_path), devices=8)
    assert process.stdout is not None
    lines = [process.stdout.readline().strip() for _ in range(2)]
    process.send_signal(signal.SIGKILL)
    rest = process.stdout.read()
    process.wait()
    assert (lines, rest) == (["saved", "saving"], "")
    with Checkpoints(tmp_path, keep=1) as store:
        assert store.steps() == [1]
        assert store.incomplete() == ["2.orbax-checkpoint-tmp"]
        arrays = store.restore_numpy(1)
        assert all((arrays[f"x{i}"] == i).all() for i in range(12))
        store.save(2, {"x": jnp.ones(2)})
        store.wait()
        assert store.steps() == [2] and store.incomplete() == []


PROCESSES = """
    address, count, rank, directory, action = sys.argv[1:]
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, int(count), int(rank))
    mesh = Mesh(np.array(jax.devices()).reshape(-1, 2), ("fsdp", "tensor"))
    whole = np.arange(16 * 32, dtype=np.float32).reshape(16, 32)
    layouts = {"rows": P("fsdp"), "both": P("tensor", "fsdp"), "copied": P()}
    shardings = {name: NamedSharding(mesh, spec) for name, spec in layouts.items()}
    with Checkpoints(directory) as store:
        if action == "save":
            state = {
                name: jax.make_array_from_callback(whole.shape, sharding, whole.__getitem__)
                for name, sharding in shardings.items()
            }
            store.save(1, state, {"config.yaml": "a: 1"})
            store.save(2, state, {"config.yaml": "a: 2"})
        like = {
            name: jax.ShapeDtypeStruct(whole.shape, whole.dtype, sharding=sharding)
            for name, sharding in shardings.items()
        }
        restored = store.restore(2, like)
        for name, array in restored.items():
            assert array.sharding == shardings[name]
            for shard in array.addressable_shards:
                np.testing.assert_array_equal(shard.data, whole[shard.index])
        assert store.texts(2) == {"config.yaml": "a: 2"} and store.steps() == [1, 2]
"""


@pytest.mark.timeout(180)
def test_processes_save_and_another_number_restores(tmp_path: Path) -> None:
    for action, count, devices in (("save", 2, 2), ("restore", 1, 8), ("restore", 2, 4)):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        ranks = range(count)
        arguments = [(address, str(count), str(r), str(tmp_path), action) for r in ranks]
        started = [run(PROCESSES, *words, devices=devices) for words in arguments]
        outputs = [process.communicate(timeout=150)[0] for process in started]
        assert [process.returncode for process in started] == [0] * count, outputs
    with Checkpoints(tmp_path) as store:
        same_bits(
            store.restore_numpy(2),
            {k: np.arange(16 * 32, dtype=np.float32).reshape(16, 32) for k in ("both", "copied", "rows")},
        )
