"""Kernels own the memory that they write to, for as long as they write to it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hepti_mqtt.kernels.jit import JIT

HERE = Path(__file__).parents[2] / "helpers"


@pytest.mark.nightly
@pytest.mark.skipif(not JIT or not sys.platform.startswith("linux"), reason="about compiled code and glibc's heap")
def test_kernels_leave_memory_alone_that_other_threads_allocate_meanwhile():
    paths = os.pathsep.join([str(HERE.parents[1]), str(HERE), str(HERE.parent / "unit" / "kernels")])
    done = subprocess.run(
        [sys.executable, str(HERE / "memory_watch.py")],
        env={**os.environ, "PYTHONPATH": paths, "MALLOC_ARENA_MAX": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
