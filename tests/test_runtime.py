from __future__ import annotations

import socket
from pathlib import Path

import pytest

from jaxpp import cluster as clusters
from jaxpp import runtime
from tests.test_launch import start

PROGRAM = """
from jaxpp import runtime
runtime.initialize(); runtime.initialize()
import jax, numpy as np, jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding
mesh = Mesh(np.array(jax.devices()), ("a",))
add = lambda x: jax.lax.psum(x, "a")
total = jax.jit(jax.shard_map(add, mesh=mesh, in_specs=P("a"), out_specs=P()))
x = jax.make_array_from_callback((4,), NamedSharding(mesh, P("a")), lambda i: np.arange(4.0)[i])
runtime.barrier("here")
runtime.agree("same", "the config")
try:
    runtime.agree(str(rank), "the seed")
except ValueError as error:
    print(error)
print(runtime.process_count(), runtime.is_main(), jax.device_count())
print(total(x).addressable_data(0).tolist())
# Last: a collective begun while the transfer is under way can take the threads that the transfer needs.
ends = [NamedSharding(Mesh(np.array([jax.devices()[k]]), ("a",)), P()) for k in (0, 3)]
sent = np.arange(3, dtype=np.float32)
y = jax.make_array_from_callback((3,), ends[0], lambda i: sent[i], dtype=np.float32)
z = jax.device_put(y, ends[1])
if rank == 1:
    assert z.addressable_data(0).tolist() == [0, 1, 2]
"""


@pytest.mark.timeout(120)
def test_two_processes_reduce_transfer_and_agree(tmp_path: Path) -> None:
    process = start(tmp_path, PROGRAM, 2, 2)
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert "the seed differs between processes: process 1" in out
    assert "2 True 4" in out and "[6.0]" in out


@pytest.mark.timeout(120)
def test_exception_in_one_process_ends_a_blocked_peer(tmp_path: Path) -> None:
    body = "from jaxpp import runtime\nruntime.initialize()\nif rank: raise ValueError('boom')\nruntime.barrier('x')"
    process = start(tmp_path, body)
    _, err = process.communicate()
    assert process.returncode == 1 and "[process 1] ValueError: boom" in err


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.mark.timeout(30)
def test_missing_process_is_named() -> None:
    with pytest.raises(ConnectionError, match=r"process\(es\) 1, 2 of 3 .*127.0.0.1"):
        runtime.meet(f"127.0.0.1:{free_port()}", 3, 0, 0.5)
    with pytest.raises(ConnectionError, match="process 1 got no answer"):
        runtime.meet(f"127.0.0.1:{free_port()}", 2, 1, 0.5)


SLURM = {"SLURM_GPUS_ON_NODE": "8", "SLURM_LOCALID": "1"}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x2)"}, list(range(8))),
        ({"SLURM_STEP_TASKS_PER_NODE": "8(x2)"}, [1]),
        ({"SLURM_STEP_TASKS_PER_NODE": "4"}, [2, 3]),
        ({"SLURM_STEP_TASKS_PER_NODE": "8", "CUDA_VISIBLE_DEVICES": "5"}, [0]),
        ({"JAX_LOCAL_DEVICE_IDS": "0"}, None),
    ],
)
def test_slurm_tasks_take_their_gpus(variables: dict, expected: list[int] | None) -> None:
    assert clusters.slurm_local_devices(SLURM | variables) == expected


def test_detection() -> None:
    assert clusters.detect_cluster({}) is None
    ours = {
        "JAXPP_COORDINATOR_ADDRESS": "127.0.0.1:1",
        "JAXPP_NUM_PROCESSES": "2",
        "JAXPP_PROCESS_ID": "1",
    }
    cluster = clusters.detect_cluster(ours)
    assert cluster is not None and cluster.arguments["process_id"] == 1
    with pytest.raises(ValueError, match="without JAXPP_NUM_PROCESSES"):
        clusters.detect_cluster({"JAXPP_COORDINATOR_ADDRESS": "127.0.0.1:1"})
    with pytest.raises(ValueError, match="ids run from 0"):
        clusters.detect_cluster(ours | {"JAXPP_PROCESS_ID": "2"})


def test_fake_devices_after_the_start_must_match() -> None:
    import jax

    count = jax.device_count()
    runtime.fake_devices(count)
    with pytest.raises(ValueError, match=f"already runs with {count} cpu"):
        runtime.fake_devices(count + 1)
