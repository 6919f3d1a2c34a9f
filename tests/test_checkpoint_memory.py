"""Host memory while saving and restoring, against the bytes that the process holds.

On a CPU the "device" arrays lie in host memory too, so each ratio is (peak resident memory minus that before the arrays
existed) / bytes of the arrays: 1.0 is the arrays alone. Each measure runs in a fresh process with eight fake devices.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

MEASURE = """
import json, sys, threading, time
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jaxpp.checkpoint import Checkpoints

action, directory, megabytes, saves = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
PAGE = 4096
NAMES = {f"layer{i}": (16, 256, megabytes) for i in range(64)}  # each 1/64 of the whole


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * PAGE


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


store = Checkpoints(directory, keep=2)
row, turned = NamedSharding(mesh(8), P("fsdp")), NamedSharding(mesh(4, 2), P(None, "tensor", "fsdp"))
make = born(row, NAMES["layer0"])
update = jax.jit(lambda x: x + 1, donate_argnums=0, out_shardings=row)
warm = {"x": update(make(jax.random.key(0)))}
store.save(0, warm)
store.restore(0, {"x": jax.ShapeDtypeStruct(warm["x"].shape, jnp.float32, sharding=turned)})
del warm
before = resident()
result = {}
if action == "restore":
    like = {k: jax.ShapeDtypeStruct(v, jnp.float32, sharding=turned) for k, v in NAMES.items()}
    with Peak() as peak:
        state = store.restore(store.latest(), like)
        jax.block_until_ready(state)
    held = sum(x.nbytes for x in state.values())
else:
    state = {k: make(jax.random.key(i)) for i, k in enumerate(NAMES)}
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


def measure(action: str, directory: Path, megabytes: int, saves: int = 1) -> dict:
    environment = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
    }
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, action, str(directory), str(megabytes), str(saves)],
        env=environment,
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


if __name__ == "__main__":
    import tempfile

    d = tempfile.mkdtemp()
    for action, saves in (("save", 3), ("train", 3), ("restore", 1)):
        print(action, measure(action, Path(d) / "x", int(sys.argv[1]), saves) if action == "restore" else measure(action, Path(d) / action if action=="train" else Path(d)/"x", int(sys.argv[1]), saves))
    import shutil
    shutil.rmtree(d)
