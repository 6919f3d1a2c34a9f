"""The project's own files as syntax trees, for the tests of the house."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Module:
    """One file of the package: its import name and its parsed text."""

    name: str  # jaxpp.parallel.layout, also for models/: jaxpp.models.decoder
    path: Path
    tree: ast.Module
    num_lines: int

    @property
    def area(self) -> str:
        """The name below `jaxpp`; empty for the package itself."""
        return self.name.partition(".")[2].partition(".")[0]

    @property
    def is_package(self) -> bool:
        """Whether the file is an `__init__.py`."""
        return self.path.name == "__init__.py"


@dataclass(frozen=True)
class Import:
    """One imported module or name, resolved as far as the text tells."""

    target: str  # "jaxpp.mesh", "jaxpp.mesh.make_mesh", "rich.table.Table"
    line: int
    at_import_time: bool  # neither inside a function nor under TYPE_CHECKING


@cache
def modules() -> tuple[Module, ...]:
    """Parse every file of `jaxpp/` and `models/` once (the link jaxpp/models is not followed)."""
    return tuple(_parse(ROOT / "jaxpp", "jaxpp")) + tuple(_parse(ROOT / "models", "jaxpp.models"))


def names() -> set[str]:
    """Import names of all modules."""
    return {module.name for module in modules()}


def imports(module: Module) -> Iterator[Import]:
    """Yield every import of a module, deferred ones too."""
    yield from _imports_of(module, module.tree.body, at_import_time=True)


@cache
def repository_files() -> tuple[Path, ...]:
    """List the files that git tracks or would track."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = (ROOT / name for name in listed.split("\0") if name)
    return tuple(sorted(path for path in paths if path.is_file() and not path.is_symlink()))


def _parse(folder: Path, package: str) -> Iterator[Module]:
    for path in sorted(folder.rglob("*.py")):
        if path.is_relative_to(ROOT / "jaxpp" / "models"):
            continue
        parts = [package, *path.relative_to(folder).with_suffix("").parts]
        name = ".".join(part for part in parts if part != "__init__")
        text = path.read_text(encoding="utf-8")
        yield Module(name, path, ast.parse(text, str(path)), len(text.splitlines()))


def _imports_of(module: Module, nodes: list[ast.stmt], at_import_time: bool) -> Iterator[Import]:
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, at_import_time)
        elif isinstance(node, ast.ImportFrom):
            base = _base(module, node)
            for alias in node.names:
                yield Import(f"{base}.{alias.name}", node.lineno, at_import_time)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _imports_of(module, node.body, at_import_time=False)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from _imports_of(module, node.body, at_import_time=False)
            yield from _imports_of(module, node.orelse, at_import_time)
        else:
            yield from _imports_of(module, _blocks(node), at_import_time)


def _blocks(node: ast.stmt) -> list[ast.stmt]:
    """Statements directly inside a compound statement (class, if, try, with, for, match)."""
    blocks = [getattr(node, field, []) for field in ("body", "orelse", "finalbody")]
    holders = [*getattr(node, "handlers", []), *getattr(node, "cases", [])]
    return sum(blocks + [holder.body for holder in holders], [])


def _base(module: Module, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    package = module.name.split(".") if module.is_package else module.name.split(".")[:-1]
    package = package[: len(package) - (node.level - 1)]
    return ".".join([*package, node.module] if node.module else package)
