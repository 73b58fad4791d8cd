"""Compile every kernel into the cache, on all cores, so that not each process of a suite does it at once."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Each process takes every n-th kernel; neighbours in the list cost alike.
PART = """
import sys
from hepti_mqtt import kernels  # defines them all
from hepti_mqtt.kernels.machine import jit
first, step = map(int, sys.argv[1:])
for dispatcher, arguments in jit.registered[first::step]:
    dispatcher.compile(arguments)
"""


def compile_kernels(processes: int = os.cpu_count() or 1) -> None:
    """Fill the cache; raises `CalledProcessError` if a kernel does not compile."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    parts = [[sys.executable, "-c", PART, str(i), str(processes)] for i in range(processes)]
    running = [subprocess.Popen(part, env=environment) for part in parts]
    failed = [process for process in running if process.wait()]
    if failed:
        raise subprocess.CalledProcessError(failed[0].returncode, failed[0].args)


if __name__ == "__main__":
    began = time.monotonic()
    compile_kernels()
    print(f"kernels are compiled: {time.monotonic() - began:.0f} s")
