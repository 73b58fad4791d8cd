"""Functions of the product stay short."""

import ast
from pathlib import Path

import hepti_mqtt

ROOT = Path(hepti_mqtt.__file__).parents[1]
MOST = 60  # lines of a body, without signature and docstring: no rule of ruff counts lines


def functions(node):
    """Yield the functions below a node; expressions, the most of a tree, have none."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield child
            yield from functions(child)


def lines(function):
    """Return the number of lines of a function after its docstring."""
    body = function.body[1:] if ast.get_docstring(function) and len(function.body) > 1 else function.body
    return function.end_lineno - body[0].lineno + 1


def test_functions_are_short():
    files = [path for package in ("hepti_mqtt", "device_agent") for path in (ROOT / package).rglob("*.py")]
    assert len(files) > 100
    counted = {(path.name, f.name): lines(f) for path in files for f in functions(ast.parse(path.read_bytes()))}
    assert {function: count for function, count in counted.items() if count > MOST} == {}
    (function,) = functions(ast.parse('def f():\n    """Say\n    so."""\n    x = 1\n\n    return x\n'))
    assert lines(function) == 3
