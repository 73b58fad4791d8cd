"""Where a result comes from: machine, versions, revision."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from hepti_mqtt.lab.calibrate import machine

_PACKAGES: Final = ("hepti", "numpy", "numba", "paho-mqtt", "torch", "onnxruntime")


def provenance() -> dict[str, Any]:
    """Return machine, versions and git revision, as JSON can hold them."""
    return {
        "machine": machine(),
        "python": platform.python_version(),
        "versions": {name: found for name in _PACKAGES if (found := _version(name))},
        "revision": revision(),
    }


def revision() -> str:
    """Return the git revision of the sources, "-dirty" where they differ from it, "unknown" outside of a checkout."""
    command = ["git", "-C", str(Path(__file__).parents[2]), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
