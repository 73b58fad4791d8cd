"""Where a result comes from: machine, versions, revision."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import numpy as np

from hepti_mqtt.kernels import isa

_PACKAGES: Final = ("hepti", "numpy", "numba", "llvmlite", "torch", "onnxruntime", "onnx")


def provenance(seed: int) -> dict[str, Any]:
    """Return what two results must have in common to stand in one table."""
    return {
        "cpu": _cpu(),
        "isa": isa(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: found for name in _PACKAGES if (found := _version(name))},
        "blas": _blas(),
        "revision": _revision(),
        "seed": seed,
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _blas() -> str:
    # NumPy's stubs know no mode; the dictionary is documented.
    found: Any = np.show_config(mode="dicts")
    blas = found["Build Dependencies"]["blas"]
    return f"{blas['name']} {blas['version']}"


def _cpu() -> str:
    """Return the CPU's name; where Linux gives none (ARM), the architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _revision() -> str:
    """Return the git revision of the sources; "-dirty" where they differ from it, "unknown" outside of a checkout."""
    root = Path(__file__).parents[2]
    try:
        done = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"
