"""Functions, files and lists of parameters of the product stay short; what is longer is named here, with its reason."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import hepti_mqtt

ROOT = Path(hepti_mqtt.__file__).parents[1]
FUNCTION_LINES = 60  # without the signature and the docstring
FILE_LINES = 900
PARAMETERS = 7  # that can be given by position: what must be named at every call reads well in any number
# Kernels are compiled, and so is what writes code for them: Numba hands over arrays and numbers, and no records.
COMPILED = "hepti_mqtt/kernels/"
# What puts a process or a host together is handed its parts, once. No number of these may grow.
MORE_PARAMETERS = {
    "device_agent/heartbeat.py HeartbeatThread.__init__": 11,
    "device_agent/shell.py Shell.__init__": 11,
    "hepti_mqtt/service/channel.py Post.__init__": 9,
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def files() -> dict[str, str]:
    """Return the text of every file of the product, by its path."""
    found = sorted(path for package in ("hepti_mqtt", "device_agent") for path in (ROOT / package).rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in found}


def functions(text: str) -> Iterator[tuple[str, Function]]:
    """Yield the functions of a file, also those inside of classes and functions, by their qualified names."""
    waiting: list[tuple[str, ast.AST]] = [("", ast.parse(text))]
    while waiting:
        prefix, node = waiting.pop()
        for child in ast.iter_child_nodes(node):
            named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            name = f"{prefix}{child.name}" if named else prefix
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield name, child
            waiting.append((f"{name}." if named else prefix, child))


def lines(function: Function) -> int:
    """Return how many lines the body of a function has behind its docstring."""
    body = function.body[1:] if ast.get_docstring(function) and len(function.body) > 1 else function.body
    return (function.end_lineno or 0) - body[0].lineno + 1


def parameters(function: Function) -> int:
    """Return how many arguments a function takes by position, self left out."""
    names = [a.arg for a in (*function.args.posonlyargs, *function.args.args)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def test_files_are_short():
    counts = {path: len(text.splitlines()) for path, text in files().items()}
    assert {path: n for path, n in counts.items() if n > FILE_LINES} == {}


def test_functions_are_short_and_take_few_arguments():
    long, many = {}, {}
    for path, text in files().items():
        for name, function in functions(text):
            if (n := lines(function)) > FUNCTION_LINES:
                long[f"{path} {name}"] = n
            if (n := parameters(function)) > PARAMETERS and not path.startswith(COMPILED):
                many[f"{path} {name}"] = n
    assert long == {}
    assert many == MORE_PARAMETERS  # one that has become shorter leaves the table


def test_a_family_like_another_one_is_a_short_file():
    assert len(files()["hepti_mqtt/models/distilbert.py"].splitlines()) <= 60


def test_the_counts_see_what_they_are_for():
    text = (
        'class A:\n    def f(self, a, b=1, *, c):\n        """Say\n        so."""\n        x = 1\n\n        return x\n'
    )
    [(name, function)] = functions(text)
    assert (name, parameters(function), lines(function)) == ("A.f", 2, 3)
