"""Where a result comes from: machine, versions, revision."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

from hepti_mqtt.kernels import isa
from hepti_mqtt.lab.calibrate import machine

_PACKAGES: Final = ("hepti", "numpy", "numba", "llvmlite", "paho-mqtt", "torch", "onnxruntime", "onnx")


def provenance() -> dict[str, Any]:
    """Return what two results must have in common to stand in one table, as JSON can hold it."""
    return {
        "machine": machine(),
        "isa": isa(),
        "python": platform.python_version(),
        "versions": {name: found for name in _PACKAGES if (found := _version(name))},
        "blas": _blas(),
        "revision": _revision(),
    }


class Described(Protocol):
    """What every kind of experiment says of itself."""

    @property
    def name(self) -> str:
        """Return its name."""
        ...

    @property
    def digest(self) -> str:
        """Return a hash of what it measures."""
        ...

    @property
    def seed(self) -> int:
        """Return the seed of models, inputs and order."""
        ...

    @property
    def source(self) -> Mapping[str, Any]:
        """Return the file as it was read."""
        ...


def header(experiment: Described, command: str) -> dict[str, Any]:
    """Return what stands at the head of an experiment's results."""
    return {
        **provenance(),
        "experiment": experiment.name,
        "digest": experiment.digest,
        "seed": experiment.seed,
        "command": command,
        "file": experiment.source,
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


def _revision() -> str:
    """Return the git revision of the sources; "-dirty" where they differ from it, "unknown" outside of a checkout."""
    root = Path(__file__).parents[2]
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"
