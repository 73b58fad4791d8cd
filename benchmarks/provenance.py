"""Where a result comes from (machine, versions, revision), and the file that it is in."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, Self

import numpy as np

from benchmarks.files import ROOT
from hepti_mqtt.core.errors import ConfigError
from hepti_mqtt.kernels import isa

FILE: Final = "results.jsonl"
_PACKAGES: Final = ("hepti", "numpy", "numba", "llvmlite", "paho-mqtt", "torch", "onnxruntime", "onnx")


def machine() -> str:
    """Return what this machine is, in a line."""
    model = platform.processor() or platform.machine()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    return f"{os.cpu_count()} x {model}, {platform.system()} {platform.release()}"


def provenance() -> dict[str, Any]:
    """Return what two results must have in common to stand in one table, as JSON can hold it."""
    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]  # type: ignore[call-arg,index,unused-ignore]
    return {
        "machine": machine(),
        "isa": isa(),
        "python": platform.python_version(),
        "versions": {name: found for name in _PACKAGES if (found := _version(name))},
        "blas": f"{blas['name']} {blas['version']}",
        "revision": _revision(),
    }


def head(title: str, said: Mapping[str, Any]) -> list[str]:
    """Return the lines that stand before every report. said: `provenance`, with the command and perhaps a seed."""
    versions = ", ".join(f"{name} {number}" for name, number in said["versions"].items())
    seed = f", seed {said['seed']}" if "seed" in said else ""
    where = f"{said['machine']} ({said['isa']}); Python {said['python']}; {versions}; {said['blas']}"
    return [f"# {title}", "", f"{where}; revision {said['revision']}{seed}, `{said['command']}`", ""]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _revision() -> str:
    """Return the git revision of the sources; "-dirty" where they differ from it, "unknown" outside of a checkout."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"


@dataclass(frozen=True)
class Results:
    """What a result file holds: its header, and the other records as they came."""

    header: Mapping[str, Any]
    records: Sequence[Mapping[str, Any]]

    def of(self, *kinds: str) -> list[Mapping[str, Any]]:
        """Return the records of some kinds."""
        return [r for r in self.records if r["record"] in kinds]


def read(path: Path) -> Results:
    """Return a result file or that of a directory; a last line that was cut off is left out; raises ConfigError."""
    file = path / FILE if path.is_dir() else path
    try:
        found = [json.loads(line) for line in file.read_bytes().split(b"\n")[:-1]]
        return Results(found[0], found[1:])
    except (OSError, ValueError, LookupError) as error:
        raise ConfigError(f"{file} cannot be read as results: {error}") from error


class Writer:
    """Writes the result file of a directory, a JSON line for each record, header first; a context manager."""

    def __init__(self, directory: Path, header: Mapping[str, Any]) -> None:
        """Raises ConfigError where there are results already, or none can be written."""
        self._lock = threading.Lock()  # changes are written by the thread that makes them
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._file = (directory / FILE).open("x", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"results cannot be written to {directory}: {error}; choose another --out") from error
        self.add("header", **header)

    def add(self, kind: str, /, **fields: Any) -> None:
        """Append a record; it is in the file when this returns."""
        with self._lock:
            self._file.write(json.dumps({"record": kind, **fields}, default=str) + "\n")
            self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
