"""Every module and every public name of the package says what it is, and its examples are true."""

from __future__ import annotations

import ast
import doctest
import importlib
from collections.abc import Iterator

import pytest

from tests.house import source


def _undocumented(owner: str, body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if node.name.startswith("_"):
            continue
        name = f"{owner}.{node.name}"
        if not ast.get_docstring(node):
            yield f"{name} (line {node.lineno})"
        if isinstance(node, ast.ClassDef):
            yield from _undocumented(name, node.body)


def test_modules_and_public_names_have_docstrings() -> None:
    missing = []
    for module in source.modules():
        if not ast.get_docstring(module.tree):
            missing.append(module.name)
        missing += _undocumented(module.name, module.tree.body)
    assert not missing, "without docstring:\n" + "\n".join(missing)


WITH_EXAMPLES = [module.name for module in source.modules() if ">>> " in module.path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_in_docstrings_hold(name: str) -> None:
    module = importlib.import_module(name)
    options = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    failed, attempted = doctest.testmod(module, optionflags=options)
    assert attempted and not failed, f"{failed} of {attempted} examples of {name} fail"
