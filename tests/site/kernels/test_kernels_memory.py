"""Kernels own the memory that they write to, for as long as they write to it."""

from __future__ import annotations

import sys

import pytest
from programs import PATHS, ROOT, run_python

from hepti_mqtt.kernels.jit import JIT


@pytest.mark.nightly
@pytest.mark.skipif(not JIT or not sys.platform.startswith("linux"), reason="about compiled code and glibc's heap")
def test_kernels_leave_memory_alone_that_other_threads_allocate_meanwhile():
    paths = (*PATHS, ROOT / "tests" / "unit" / "kernels")
    run_python(ROOT / "tests" / "helpers" / "memory_watch.py", paths=paths, MALLOC_ARENA_MAX="1")
