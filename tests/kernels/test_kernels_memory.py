"""Kernels own the memory that they write to, for as long as they write to it."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import hepti_mqtt.kernels
from hepti_mqtt.kernels.machine.jit import JIT

HERE = Path(__file__).parent
SOURCES = sorted(Path(hepti_mqtt.kernels.__file__).parent.rglob("*.py"))


def names_in(node):
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def assigned(node):
    """Return (name, value) for every assignment to a name in `node`, tuples taken apart."""
    for found in ast.walk(node):
        if isinstance(found, ast.Assign):
            for target in found.targets:
                if isinstance(target, ast.Tuple):
                    values = (
                        found.value.elts if isinstance(found.value, ast.Tuple) else [found.value] * len(target.elts)
                    )
                    yield from ((t.id, v) for t, v in zip(target.elts, values, strict=True) if isinstance(t, ast.Name))
                elif isinstance(target, ast.Name):
                    yield target.id, found.value


def is_made(value):
    """Whether an expression is a new array of NumPy."""
    return isinstance(value, ast.Call) and ast.unparse(value.func) in ("np.empty", "np.zeros", "np.full", "np.ones")


def reads_address(value, array):
    return any(
        isinstance(n, ast.Attribute) and n.attr == "ctypes" and isinstance(n.value, ast.Name) and n.value.id == array
        for n in ast.walk(value)
    )


def outlived(source):
    """Return what a function of `source` uses by address after the last statement that names the array.

    Numba frees an array after the last statement of the function (a whole loop, for one in it) that names it.
    """
    found = []
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef):
            continue
        for array in {name for name, value in assigned(function) if is_made(value)}:
            addresses = {name for name, value in assigned(function) if reads_address(value, array)}
            for _ in range(len(function.body)):
                addresses |= {name for name, value in assigned(function) if names_in(value) & addresses}
            last = max(i for i, statement in enumerate(function.body) if array in names_in(statement))
            later = set().union(*map(names_in, function.body[last + 1 :])) & addresses
            found += [f"{function.name}: {array}, by {name}" for name in sorted(later)]
    return found


FREED = """
def kernel(out, n):
    scratch = np.empty(n, np.float32)
    at = scratch.ctypes.data
    for i in range(n):
        there = at + 4 * i
        tile(there)
"""


def test_an_array_that_is_freed_before_its_address_is_used_is_found():
    assert outlived(FREED) == ["kernel: scratch, by at", "kernel: scratch, by there"]
    assert not outlived(
        FREED.replace("= at +", "= scratch.ctypes.data +").replace("    at = scratch.ctypes.data\n", "")
    )


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: f"{path.parent.name}.{path.stem}")
def test_no_kernel_uses_an_array_by_address_after_it_was_freed(source):
    assert not outlived(source.read_text(encoding="utf-8"))


@pytest.mark.skipif(not JIT or not sys.platform.startswith("linux"), reason="about compiled code and glibc's heap")
def test_kernels_leave_memory_alone_that_other_threads_allocate_meanwhile():
    paths = os.pathsep.join([str(HERE.parents[1]), str(HERE.parent), str(HERE)])
    done = subprocess.run(
        [sys.executable, str(HERE / "memory_watch.py")],
        env={**os.environ, "PYTHONPATH": paths, "MALLOC_ARENA_MAX": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
