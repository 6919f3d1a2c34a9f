"""Who started this process and its peers: our launcher, a TPU pod, SLURM, MPI or Kubernetes, read off the environment.

Starts nothing: `jaxpp.runtime` does.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Cluster:
    """Say who starts the processes, and what `jax.distributed.initialize` must be told.

    Attributes:
        kind: `launcher`, `tpu`, `slurm`, `mpi` or `kubernetes`.
        arguments: keywords for `jax.distributed.initialize`; what is absent JAX detects itself.
    """

    kind: str
    arguments: Mapping[str, Any]


def _from_launcher(environment: Mapping[str, str]) -> Cluster | None:
    names = ("JAXPP_COORDINATOR_ADDRESS", "JAXPP_NUM_PROCESSES", "JAXPP_PROCESS_ID")
    missing = [name for name in names if name not in environment]
    if missing:
        raise ValueError(
            f"{', '.join(sorted(set(names) - set(missing)))} set without {', '.join(missing)}; "
            "set all three (host:port, count, id) or none"
        )
    address, count, index = (environment[name] for name in names)
    if not (count.isdigit() and index.isdigit() and int(index) < int(count)):
        raise ValueError(f"JAXPP_PROCESS_ID={index} of JAXPP_NUM_PROCESSES={count}; ids run from 0 to count - 1")
    if not re.fullmatch(r".+:\d+", address):
        raise ValueError(f"JAXPP_COORDINATOR_ADDRESS={address} lacks a port; give host:port")
    if int(count) == 1:
        return None
    arguments: dict[str, Any] = {
        "coordinator_address": address,
        "num_processes": int(count),
        "process_id": int(index),
        "cluster_detection_method": "deactivate",
    }
    if address.startswith("127."):  # one machine: stay invisible from outside
        arguments["coordinator_bind_address"] = address
    return Cluster("launcher", arguments)


def _from_tpu(environment: Mapping[str, str]) -> Cluster | None:
    hosts = environment.get("TPU_PROCESS_ADDRESSES") or environment.get("TPU_WORKER_HOSTNAMES")
    if hosts:
        num_hosts = len(hosts.split(",")) * int(environment.get("MEGASCALE_NUM_SLICES") or 1)
        return Cluster("tpu", {}) if num_hosts > 1 else None
    if "TPU_SKIP_MDS_QUERY" in environment:
        return None
    # A Cloud TPU machine knows its pod only from its metadata server, which JAX asks.
    return Cluster("tpu", {})


def _from_slurm(environment: Mapping[str, str]) -> Cluster | None:
    count = environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS") or "1"
    if int(count) == 1:
        return None
    devices = slurm_local_devices(environment)
    return Cluster("slurm", {"local_device_ids": devices} if devices else {})


def _from_mpi(environment: Mapping[str, str]) -> Cluster | None:
    count = int(environment.get("OMPI_COMM_WORLD_SIZE") or environment.get("PMI_SIZE") or 1)
    if count == 1:
        return None
    if "OMPI_MCA_orte_hnp_uri" in environment:
        return Cluster("mpi", {})
    if importlib.util.find_spec("mpi4py") is None:
        raise ValueError(f"{count} MPI processes, but mpi4py is missing; pip install mpi4py")
    return Cluster("mpi", {"cluster_detection_method": "mpi4py"})


def _from_kubernetes(environment: Mapping[str, str]) -> Cluster | None:
    if importlib.util.find_spec("kubernetes") is None:
        index = environment["JOB_COMPLETION_INDEX"]
        raise ValueError(
            f"pod {index} of an indexed Kubernetes job, but its peers are unknown; set the three "
            "JAXPP_... variables as tpu_scripts/jobset.sh does, or pip install kubernetes"
        )
    return Cluster("kubernetes", {})


def _on_tpu_machine(environment: Mapping[str, str]) -> bool:
    if "tpu" not in environment.get("JAX_PLATFORMS", "tpu"):
        return False
    chips = Path("/dev/accel0").exists() or any(Path("/dev/vfio").glob("[0-9]*"))
    return chips and importlib.util.find_spec("libtpu") is not None


# Who may have started this process: (is it there?, what it says), asked in this order.
CLUSTERS: dict[str, tuple[Callable[[Mapping[str, str]], bool], Callable[..., Cluster | None]]] = {
    "launcher": (
        lambda env: "JAXPP_COORDINATOR_ADDRESS" in env or "JAXPP_NUM_PROCESSES" in env,
        _from_launcher,
    ),
    "tpu": (_on_tpu_machine, _from_tpu),
    "slurm": (lambda env: "SLURM_JOB_ID" in env and "SLURM_STEP_NODELIST" in env, _from_slurm),
    "mpi": (lambda env: "OMPI_COMM_WORLD_SIZE" in env or "PMI_SIZE" in env, _from_mpi),
    "kubernetes": (
        lambda env: "KUBERNETES_SERVICE_HOST" in env and "JOB_COMPLETION_INDEX" in env,
        _from_kubernetes,
    ),
}


def detect_cluster(environment: Mapping[str, str]) -> Cluster | None:
    """Find who started this process; None for a process on its own.

    Raises:
        ValueError: the environment says "several processes" but not which.
    """
    for present, read in CLUSTERS.values():
        if present(environment):
            return read(environment)
    return None


def slurm_local_devices(environment: Mapping[str, str]) -> list[int] | None:
    """List the GPUs that this SLURM task should take, or None where SLURM does not say.

    JAX alone gives one GPU to each task, so one task on a node of eight would see one of them.
    """
    if environment.get("JAX_LOCAL_DEVICE_IDS"):
        return None
    listed = [gpu for gpu in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
    num_on_node = int(environment.get("SLURM_GPUS_ON_NODE") or len(listed))
    num_visible = len(listed) or num_on_node
    per_node = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_NTASKS", "1")
    num_tasks = int(re.split(r"[(,]", per_node)[0])
    if num_visible == 0:
        return None
    if num_tasks == 1 or num_visible < num_on_node:  # alone, or bound to its own GPUs by SLURM
        return list(range(num_visible))
    share = num_visible // num_tasks
    first = int(environment.get("SLURM_LOCALID") or 0) * share
    return list(range(first, first + share)) or None
