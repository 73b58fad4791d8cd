"""Functions of the product stay short."""

from __future__ import annotations

import ast
from pathlib import Path

import hepti_mqtt

ROOT = Path(hepti_mqtt.__file__).parents[1]
MOST = 60  # lines of a body, without signature and docstring: no rule of ruff counts lines


def lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the number of lines of a function after its docstring."""
    body = function.body[1:] if ast.get_docstring(function) and len(function.body) > 1 else function.body
    return (function.end_lineno or 0) - body[0].lineno + 1


def long_ones(text: str, most: int) -> dict[str, int]:
    functions = (n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
    return {f.name: lines(f) for f in functions if lines(f) > most}


def test_functions_are_short():
    files = [path for package in ("hepti_mqtt", "device_agent") for path in (ROOT / package).rglob("*.py")]
    assert len(files) > 100
    long = {path.name: long_ones(path.read_text("utf-8"), MOST) for path in files}
    assert {name: functions for name, functions in long.items() if functions} == {}
    assert long_ones('def f():\n    """Say\n    so."""\n    x = 1\n\n    return x\n', 2) == {"f": 3}
