"""`import jaxpp` and its modules need jax, flax, optax, orbax-checkpoint, chex and nothing else."""

from __future__ import annotations

import subprocess
import sys

from tests.house import source

CORE = {"jax", "jaxlib", "flax", "optax", "orbax", "etils", "chex", "numpy", "jaxpp"}

# Packages that none of CORE's own imports bring in, so their presence is our doing.
OPTIONAL = (
    "grain", "tokenizers", "gguf", "huggingface_hub", "jinja2", "jsonargparse", "tensorboardX", "matplotlib", "fastapi",
    "uvicorn", "prometheus_client",
    "ray",
)  # fmt: skip


def test_other_packages_are_imported_inside_functions() -> None:
    eager = [
        f"{module.name}:{imported.line} imports {imported.target} at import time"
        for module in source.modules()
        for imported in source.imports(module)
        if imported.at_import_time and imported.target.partition(".")[0] not in CORE | sys.stdlib_module_names
    ]
    assert not eager, "\n".join(eager)


def test_importing_everything_loads_no_optional_package() -> None:
    lines = [
        "import importlib, sys",
        f"for name in {sorted(source.names())!r}: importlib.import_module(name)",
        f"print(sorted(set(sys.modules) & set({OPTIONAL!r})))",
    ]
    command = [sys.executable, "-c", "\n".join(lines)]
    done = subprocess.run(command, cwd=source.ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
