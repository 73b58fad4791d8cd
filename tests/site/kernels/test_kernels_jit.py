from __future__ import annotations

import os
import platform
import shutil
from pathlib import Path

import pytest
from kernels_support import Case, array
from programs import ROOT, run_python

import hepti_mqtt.kernels
from hepti_mqtt.kernels import jit, warm_up

COUNT_CACHE = """
from hepti_mqtt.kernels import jit
del jit.registered[2:]  # two are enough to see, and all take seconds
print(*jit.warm_up())
"""
# A CPU of x86-64 that has neither the name nor the vectors of the machine that runs the tests.
OLD_CPU = {"NUMBA_CPU_NAME": "nehalem", "NUMBA_CPU_FEATURES": ""}

compiled_only = pytest.mark.skipif(not jit.JIT, reason="about compiled code")
uncached = pytest.mark.skipif(bool(os.environ.get(jit.OVERRIDE)), reason="a forced instruction set has no cache")


@compiled_only
def test_nothing_compiles_after_warm_up():
    warm_up()
    warm_up()
    case = Case("add", [array(2, 3), array(2, 3)], [(2, 3)], bias=False)
    case.run()
    assert all(len(dispatcher.signatures) == 1 for dispatcher, _ in jit.registered)


def test_a_change_of_any_source_of_the_kernels_is_a_change_of_the_stamp(tmp_path, monkeypatch):
    assert Path(hepti_mqtt.kernels.__file__).parent == jit.SOURCES
    package = shutil.copytree(jit.SOURCES, tmp_path / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(jit, "SOURCES", package)
    stamp = jit.sources_stamp.__wrapped__
    before = stamp()
    for source in package.rglob("*.py"):
        content = source.read_bytes()
        source.write_bytes(content + b"# changed")
        assert (stamp() != before) is (source.relative_to(package).as_posix() not in jit.AROUND), source
        source.write_bytes(content)
    assert stamp() == before


def counts(directory, package=ROOT, **variables):
    """Return (compiled, from the cache) of two kernels in a process of its own."""
    paths = (package, ROOT / "tests" / "helpers")
    done = run_python("-c", COUNT_CACHE, cwd=package, paths=paths, NUMBA_CACHE_DIR=str(directory), **variables)
    return tuple(map(int, done.split()))


@compiled_only
@uncached
def test_the_cache_survives_a_reinstallation_and_not_a_change(tmp_path):
    package, kept = tmp_path / "site", tmp_path / "cache"
    shutil.copytree(ROOT / "hepti_mqtt", package / "hepti_mqtt", ignore=shutil.ignore_patterns("__pycache__"))
    assert counts(kept, package) == (2, 0)
    for source in (package / "hepti_mqtt" / "kernels").rglob("*.py"):
        os.utime(source, (1e9, 1e9))
    assert counts(kept, package) == (0, 2)
    # Not the file of a kernel, but inlined into them.
    helper = package / "hepti_mqtt" / "kernels" / "elementary.py"
    helper.write_text(helper.read_text() + "# changed\n")
    assert counts(kept, package) == (2, 0)


@pytest.mark.nightly
@compiled_only
@uncached
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names CPUs of x86-64")
def test_another_cpu_compiles_its_own_and_leaves_the_cache_alone(tmp_path):
    assert counts(tmp_path) == (2, 0)
    assert counts(tmp_path, **OLD_CPU) == (2, 0)
    assert counts(tmp_path) == (0, 2)
    assert counts(tmp_path, **OLD_CPU) == (0, 2)


@pytest.mark.nightly
@compiled_only
def test_a_forced_instruction_set_neither_reads_nor_writes_the_cache(tmp_path):
    assert counts(tmp_path, HEPTI_KERNELS_ISA="generic") == (2, 0)
    assert not list(tmp_path.rglob("*.nbi"))


FEWER = "not threads and not bits and not more_keys and not any_split and not every_number_of_rows"
# Columns beyond a matrix are computed with what lies there, and nobody reads them.
BESIDE = [option for kind in ("invalid value", "overflow") for option in ("-W", f"ignore:{kind}:RuntimeWarning")]
RUNS = [f"tests/unit/runtime/test_runtime_{name}.py" for name in ("executor", "conformance", "handover", "kv_caches")]


@pytest.mark.nightly
@compiled_only
@pytest.mark.parametrize(
    "which",
    [
        ["tests/unit/kernels", "-m", "not nightly", "-k", FEWER],
        [*RUNS, *BESIDE],
        ["tests/site/test_integration_mesh.py", "-k", "bits"],
    ],
    ids=["kernels", "runs", "devices"],
)
def test_plain_python_gives_the_same(which):
    said = run_python("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *which, NUMBA_DISABLE_JIT="1")
    assert " passed" in said or "[100%]" in said
