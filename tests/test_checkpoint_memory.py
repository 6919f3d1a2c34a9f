"""Host memory while saving and restoring, against the bytes that the process holds.

On a CPU the "device" arrays lie in host memory too, so each ratio is (peak resident memory minus
that before the arrays existed) / bytes of the arrays: 1.0 is the arrays alone. Each measure runs in
a fresh process with eight fake devices, and restores onto another layout than was saved.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

MEASURE = """
import ctypes, json, resource, sys, threading, time
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jaxpp.checkpoint import Checkpoints

action, directory = sys.argv[1:3]
megabytes, leaves, saves = map(int, sys.argv[3:])
SHAPES = {f"layer{i}": (16, 256 * 64 // leaves, megabytes) for i in range(leaves)}


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


class Peak:
    def __enter__(self):
        self.bytes, self.on = resident(), True
        self.thread = threading.Thread(target=self.sample)
        self.thread.start()
        return self

    def sample(self):
        while self.on:
            self.bytes = max(self.bytes, resident())
            time.sleep(0.001)

    def __exit__(self, *_):
        self.on = False
        self.thread.join()


def mesh(*shape):
    return Mesh(np.array(jax.devices()).reshape(shape), ("fsdp", "tensor")[: len(shape)])


def born(sharding, shape):
    # Not compressible, as weights are not.
    make = lambda key: jax.random.bits(key, shape, jnp.uint32).view(jnp.float32)
    return jax.jit(make, out_shardings=sharding)


store = Checkpoints(directory, keep=1)
warm_store = Checkpoints(directory + "/warm")
row = NamedSharding(mesh(8), P("fsdp"))
turned = NamedSharding(mesh(4, 2), P(None, "tensor", "fsdp"))
make = born(row, SHAPES["layer0"])
update = jax.jit(lambda x: x + 1, donate_argnums=0, out_shardings=row)
warm = {"x": update(make(jax.random.key(0)))}
warm_store.save(0, warm, overwrite=True)
warm_store.restore(0, {"x": jax.ShapeDtypeStruct(warm["x"].shape, jnp.float32, sharding=turned)})
del warm
ctypes.CDLL(None).malloc_trim(0)
before = resident()
result = {}
if action == "restore":
    like = {k: jax.ShapeDtypeStruct(v, jnp.float32, sharding=turned) for k, v in SHAPES.items()}
    with Peak() as peak:
        state = store.restore(store.latest(), like)
        jax.block_until_ready(state)
    held = sum(x.nbytes for x in state.values())
else:
    state = {k: make(jax.random.key(i)) for i, k in enumerate(SHAPES)}
    jax.block_until_ready(state)
    held = sum(x.nbytes for x in state.values())
    result["arrays"] = (resident() - before) / held
    after = []
    for step in range(1, saves + 1):
        start = time.perf_counter()
        with Peak() as peak:
            store.save(step, state)
            result["blocked_s"] = time.perf_counter() - start
            if action == "train":
                state = {k: update(x) for k, x in state.items()}
                jax.block_until_ready(state)
            store.wait()
        result["save_s"] = time.perf_counter() - start
        after.append((resident() - before) / held)
        result["peaks"] = [*result.get("peaks", []), (peak.bytes - before) / held]
    result["after"] = after
    result["peak"] = max(result["peaks"])
result.setdefault("peak", (peak.bytes - before) / held)
result["bytes"] = held
print(json.dumps(result))
"""


def measure(action: str, directory: Path, *, megabytes: int, leaves: int, saves: int = 1) -> dict[str, Any]:
    environment = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
    }
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            MEASURE,
            action,
            str(directory),
            *map(str, (megabytes, leaves, saves)),
        ],
        env=environment,
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


@pytest.mark.timeout(180)
def test_one_save_and_one_restore(tmp_path: Path) -> None:
    saved = measure("save", tmp_path, megabytes=160, leaves=64)
    assert saved["peak"] < 1.35, saved
    restored = measure("restore", tmp_path, megabytes=160, leaves=64)
    assert 0.9 < restored["peak"] < 1.3, restored


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("leaves", [4, 64])
def test_thirty_saves_while_training(tmp_path: Path, leaves: int) -> None:
    """Each step donates the state that is being saved, so two states are alive: old and new."""
    trained = measure("train", tmp_path, megabytes=400, leaves=leaves, saves=30)
    peaks = trained["peaks"]
    assert max(peaks) < 2.2, trained
    assert max(peaks[3:]) < 1.05 * max(peaks[:3]), trained
    restored = measure("restore", tmp_path, megabytes=400, leaves=leaves)
    assert 0.9 < restored["peak"] < 1.3, restored


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_thirty_saves_leave_nothing_behind(tmp_path: Path) -> None:
    saved = measure("save", tmp_path, megabytes=400, leaves=64, saves=30)
    assert max(saved["peaks"]) < 1.35, saved
    assert max(saved["after"][3:]) < 1.05 * saved["after"][2], saved
