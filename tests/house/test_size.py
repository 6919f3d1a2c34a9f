"""Modules and functions stay short enough to be read once from top to bottom."""

from __future__ import annotations

import ast

from tests.house import source

MAX_MODULE_LINES = 500
MAX_MEAN_MODULE_LINES = 200
MAX_FUNCTION_LINES = 80


def test_modules_are_short() -> None:
    long = {m.name: m.num_lines for m in source.modules() if m.num_lines > MAX_MODULE_LINES}
    assert not long, f"over {MAX_MODULE_LINES} lines, split them: {long}"


def test_modules_are_short_on_average() -> None:
    lines = [module.num_lines for module in source.modules()]
    assert lines, "no modules found"
    assert sum(lines) / len(lines) < MAX_MEAN_MODULE_LINES


def test_functions_are_short() -> None:
    long = []
    for module in source.modules():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if num_lines > MAX_FUNCTION_LINES:
                    long.append(f"{module.name}.{node.name}: {num_lines} lines")
    assert not long, f"over {MAX_FUNCTION_LINES} lines:\n" + "\n".join(long)
