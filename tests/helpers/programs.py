"""Python programs in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

#: Limit of each wait. No test takes this long by itself: a site of three models takes a minute on a loaded machine.
PATIENCE_S = 120.0
ROOT = Path(__file__).resolve().parents[2]
PATHS = (ROOT, ROOT / "tests" / "helpers")


def memory_bytes(pid: int | str = "self") -> tuple[int, int]:
    """Return the memory of a process now (VmRSS) and its peak (VmHWM)."""
    status = Path(f"/proc/{pid}/status").read_text()
    now, peak = (int(status.split(f"{name}:")[1].split()[0]) << 10 for name in ("VmRSS", "VmHWM"))
    return now, peak


def run_python(*arguments: object, cwd: Path = ROOT, paths: Sequence[Path] = PATHS, **environment: str) -> str:
    """Return what `python ARGUMENTS` prints; raises AssertionError with its words if it fails."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), **environment}
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout
