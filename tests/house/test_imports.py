"""Imports point down: one rank for each area, one door for each optional package, no cycles."""

from __future__ import annotations

import graphlib
import sys

from tests.house import source

# An area may import areas of a strictly lower rank, also inside functions and under TYPE_CHECKING.
RANKS = {
    "names": 0,
    "quantities": 0,
    "tree": 0,
    "config": 0,
    "cluster": 0,
    "runtime": 0.1,  # it starts what `cluster` found
    "schedule": 0.1,  # costs are read through `config`
    "schedule_commands": 6.9,
    "dims": 0.1,  # arrows name a weight by its path in the tree
    "model": 1,
    "mesh": 1,
    "launch": 1,
    "checkpoint_files": 0,  # the directory of `checkpoint`, without arrays
    "checkpoint_leaves": 0.1,  # its naming of arrays
    "checkpoint": 1,
    "adapt": 1,
    "compress": 1,
    "comm": 2,
    "data": 2,
    "parallel": 3,
    "nn": 4,
    "pipeline": 3.5,  # `nn` runs its stacked blocks through it
    "plan": 4,
    "convert": 4,
    "train": 5,
    "models": 5,
    "partition": 5,
    "serve": 5.1,  # it offers the partitioner
    "server": 5.2,
    "regime": 6,
    "swarm": 6,
    "doctor": 6,
    "runs": 6,  # the one place that knows both the families and the trainer
    "pretrained": 6.1,  # checkpoints of any format, ours through `runs`
    "filling": 5.1,
    "documents": 5.1,  # what travels with weights: it knows the families, and what a run writes
    "conversion": 6.2,
    "initial": 6.2,
    "grow": 6.3,  # a grown checkpoint is opened, loaded and converted as any other
    "describe": 6.3,
    "commands": 6.9,
    "grow_commands": 6.95,
    "generate_commands": 6.95,
    "serve_commands": 6.95,
    "shard_commands": 6.95,
    "cli": 7,
    "__main__": 8,
    "": 8,  # the package itself: it offers names from everywhere, so nothing inside imports from it
}

EVERYWHERE = {"jax", "jaxlib", "flax", "optax", "chex", "numpy", "jaxtyping"}

# Package -> the areas or modules that may import it. What stands in neither table is not used.
DOORS = {
    "orbax": {"checkpoint"},
    "etils": {"checkpoint", "checkpoint_files"},  # orbax's own paths: it installs them and takes them
    "grain": {"data"},
    "tokenizers": {"data"},
    "matplotlib": {"schedule.png"},
    "jinja2": {"data.chat"},
    "gguf": {"convert.gguf"},
    "huggingface_hub": {"convert.hub"},
    "ml_dtypes": {"convert"},  # numpy's bfloat16; jax itself installs it
    "jsonargparse": {"config"},
    "yaml": {"config"},
    "tensorboardX": {"train"},
    "rich": {"train", "commands"},
    "psutil": {"runtime", "doctor"},
    "ray": {"swarm", "regime"},
    "fastapi": {"server.app"},
    "uvicorn": {"server.listen"},
    "prometheus_client": {"server.metrics"},
}


def test_every_area_has_a_rank() -> None:
    unranked = {module.name for module in source.modules() if module.area not in RANKS}
    assert not unranked, f"give them a rank in RANKS: {sorted(unranked)}"


def test_imports_point_to_lower_ranks() -> None:
    wrong = []
    for module in source.modules():
        for imported in source.imports(module):
            if imported.target.partition(".")[0] != "jaxpp":
                continue
            area, rank = _area(imported.target), RANKS.get(module.area, 0)
            if area != module.area and RANKS[area] >= rank:
                wrong.append(
                    f"{module.name}:{imported.line} (rank {rank}) imports {imported.target} (rank {RANKS[area]})"
                )
    assert not wrong, "\n".join(wrong)


def test_other_packages_come_through_their_door() -> None:
    wrong = []
    for module in source.modules():
        inner = module.name.partition(".")[2]
        for imported in source.imports(module):
            package = imported.target.partition(".")[0]
            if package in sys.stdlib_module_names or package in EVERYWHERE | {"jaxpp"}:
                continue
            doors = DOORS.get(package, set())
            if not any(inner == door or inner.startswith(f"{door}.") for door in doors):
                place = f"only in {', '.join(sorted(doors))}" if doors else "nowhere: it has no door"
                wrong.append(f"{module.name}:{imported.line} imports {package}, allowed {place}")
    assert not wrong, "\n".join(wrong)


def test_no_private_jax() -> None:
    private = [
        f"{module.name}:{imported.line} imports {imported.target}"
        for module in source.modules()
        for imported in source.imports(module)
        if imported.target.partition(".")[0] in ("jax", "jaxlib", "flax", "optax", "orbax")
        and any(part.startswith("_") for part in imported.target.split("."))
    ]
    texts = {module.name: module.path.read_text(encoding="utf-8") for module in source.modules()}
    private += [f"{name} mentions jax._src" for name, text in texts.items() if "jax._src" in text]
    assert not private, "\n".join(private)


def test_no_cycles_at_import_time() -> None:
    names = source.names()
    graph = {
        module.name: {
            _module(imported.target, names)
            for imported in source.imports(module)
            if imported.at_import_time and imported.target.startswith("jaxpp.")
        }
        - {module.name}
        for module in source.modules()
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        raise AssertionError(" <- ".join(error.args[1])) from None


def _area(target: str) -> str:
    """Give the area of `jaxpp.<area>...`; a name that is no area comes from the package itself."""
    area = target.partition(".")[2].partition(".")[0]
    known = {module.area for module in source.modules()}
    return area if area in known and area in RANKS else ""


def _module(target: str, names: set[str]) -> str:
    """Give the module that `target` is, or that holds it."""
    while target not in names and "." in target:
        target = target.rpartition(".")[0]
    return target
