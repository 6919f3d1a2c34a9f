"""Eight fake CPU devices for every test, set before anything imports jax.

`JAXPP_TEST_PLATFORM=cuda` (or `tpu`) runs the tests marked for it on the real devices instead.
"""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

import pytest

NUM_DEVICES = 8

if "jax" in sys.modules:
    raise RuntimeError("jax was imported before tests/conftest.py could ask for fake devices")

platform = os.environ.get("JAXPP_TEST_PLATFORM")
os.environ["JAX_PLATFORMS"] = platform or "cpu"
if platform is None:
    flags = os.environ.get("XLA_FLAGS", "").split()
    flags = [flag for flag in flags if "xla_force_host_platform_device_count" not in flag]
    flags.append(f"--xla_force_host_platform_device_count={NUM_DEVICES}")
    flags.append("--xla_backend_optimization_level=0")  # tests compile far more than they run
    os.environ["XLA_FLAGS"] = " ".join(flags)

import jax  # noqa: E402 (the flags come first)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests that `slow.txt` names; refuse names of files that were collected whole and hold no such test."""
    lines = (Path(__file__).parent / "slow.txt").read_text().splitlines()
    slow = {line for line in lines if line and not line.startswith("#")}
    found = {item.nodeid: item for item in items}
    for name in slow & set(found):
        found[name].add_marker(pytest.mark.slow)
    chosen = any("::" in argument for argument in config.args)
    files = {name.partition("::")[0] for name in found}
    unknown = [name for name in sorted(slow - set(found)) if name.partition("::")[0] in files and not chosen]
    if unknown:
        raise pytest.UsageError(f"tests/slow.txt names tests that are not there: {', '.join(unknown)}")


@pytest.fixture(autouse=True, scope="module")
def compiled_programs_end_with_their_module():
    """Free what a module compiled: over the whole suite it would come to gigabytes in each worker."""
    yield
    jax.clear_caches()
    gc.collect()
