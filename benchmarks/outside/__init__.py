"""Outside baselines: the same weights under PyTorch and ONNX Runtime, on the hosts of a lab, in turns with Hepti."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from benchmarks.errors import LabError
from benchmarks.lab.hosts import Host, Process
from hepti_mqtt.core.errors import ConfigError, HeptiError

PATIENCE_S: Final = 300.0
END_S: Final = 30.0
TOLERANCE: Final = 1e-4  # of the reference's norm: what an f32 answer of Hepti is held to
# One thread everywhere: a host of the lab is a share of one core.
ENVIRONMENT: Final = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
TORCH: Final = ("torch",)
ONNX: Final = ("onnxruntime", "onnx")


class Baseline(NamedTuple):
    """A module below this package, what it imports, how many hosts it takes, its variant, whether it packs weights."""

    module: str
    packages: tuple[str, ...]
    least: int
    most: int
    variant: str = ""
    packed: bool = False


_TORCH: Final[Mapping[str, Baseline]] = {
    "torch": Baseline("torch_program", TORCH, 1, 1, "single"),
    "torch-megatron": Baseline("torch_program", TORCH, 2, 16, "megatron"),
    "torch-tokens-x": Baseline("torch_program", TORCH, 2, 16, "x"),
    "torch-tokens-kv": Baseline("torch_program", TORCH, 2, 16, "kv"),
}
BASELINES: Final[Mapping[str, Baseline]] = {
    **_TORCH,
    **{f"{name}-packed": baseline._replace(packed=True) for name, baseline in _TORCH.items()},
    "onnxruntime": Baseline("onnx_program", ONNX, 1, 1),
}


def require(names: Sequence[str]) -> None:
    """Raise ConfigError if this interpreter lacks what one of the baselines imports."""
    for name in names:
        if missing := [package for package in BASELINES[name].packages if find_spec(package) is None]:
            raise ConfigError(
                f"the baseline {name} needs {' and '.join(missing)}, not installed here; use the environment that "
                "`make bench-venv` makes (.cache/bench-venv), or leave it out of `outside:`"
            )


def relative_error(found: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    """Return |found - expected| / |expected| by Euclidean norms; inf where shapes differ or a value is not finite."""
    if found.shape != expected.shape or not np.isfinite(found).all():
        return float("inf")
    scale = float(np.linalg.norm(expected.astype(np.float64)))
    return float(np.linalg.norm(found.astype(np.float64) - expected)) / max(scale, 1e-30)


class Outside:
    """The processes of all baselines in one lab, one per host and library; a context manager that ends them.

    A process is started when its baseline has its first turn and then waits in a read. It holds weights only during a
    turn, since they would take the memory that the host's agent counts on.
    """

    def __init__(self) -> None:
        self._workers: dict[tuple[str, str], Process] = {}

    def turn(
        self,
        name: str,
        hosts: Sequence[Host],
        model: Path,
        body: Mapping[str, Any],
        reference: Path,
        warmup: int,
        repetitions: int,
    ) -> dict[str, Any]:
        """Load, check the hidden states against `reference` (.npy), warm up, and time; return what a turn's record has.

        Loading and checking is at full speed, as in a turn of Hepti; everything after it throttled. The first host has
        the input and the output, and its clock counts. Raises ConfigError for a number of hosts that the baseline does
        not take.
        """
        baseline = BASELINES[name]
        if not baseline.least <= len(hosts) <= baseline.most:
            raise ConfigError(f"{name} takes {baseline.least} to {baseline.most} hosts, not {len(hosts)}")
        begun = time.time()
        try:
            try:
                for host in hosts:
                    host.throttle(False)
                group, loaded = self._load(baseline, hosts, model, body, reference)
                checked = _ask(group, {"do": "check"})
            finally:
                for host in hosts:
                    host.throttle(True)
            error = checked[0]["error"]
            if not error <= TOLERANCE:  # NaN is wrong too
                raise LabError(f"{name} is off by {error:.1e} of its norm, more than {TOLERANCE:g}: it is not timed")
            times = [_ask(group, {"do": "measure"})[0]["latency_ms"] for _ in range(warmup + repetitions)]
            _ask(group, {"do": "drop"})
        except HeptiError as failure:
            self._end([(host.name, baseline.module) for host in hosts])  # some ranks may wait for one that is gone
            return {"ok": False, "unix_s": begun, "code": failure.code, "message": str(failure)}
        said = {"latency_ms": times[warmup:], "error": error, "versions": loaded[0]["versions"]}
        return {"ok": True, "unix_s": begun, **said, "rss_bytes": [rank["rss_bytes"] for rank in checked]}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end(list(self._workers))

    def _load(
        self, baseline: Baseline, hosts: Sequence[Host], model: Path, body: Mapping[str, Any], reference: Path
    ) -> tuple[list[Process], list[dict[str, Any]]]:
        group = [self._worker(baseline.module, host) for host in hosts]
        port = _ask(group[:1], {"do": "port"})[0]["port"]
        part = {"module": baseline.module, "variant": baseline.variant, "packed": baseline.packed, "world": len(hosts)}
        what = {"master": f"{hosts[0].address}:{port}", "model": str(model), "body": body}
        for rank, worker in enumerate(group):
            order = {"do": "load", **part, **what, "rank": rank, "reference": None if rank else str(reference)}
            worker.send(json.dumps(order))
        return group, _answers(group)

    def _worker(self, module: str, host: Host) -> Process:
        key = host.name, module
        if key not in self._workers:
            words = ("benchmarks.outside.worker", host.address)
            self._workers[key] = host.talk(f"outside-{module}", *words, environment=ENVIRONMENT)
        return self._workers[key]

    def _end(self, keys: Sequence[tuple[str, str]]) -> None:
        """End processes; the next turn of their baselines starts new ones."""
        ended = [self._workers.pop(key) for key in keys if key in self._workers]
        for worker in ended:
            worker.signal(9)
        for worker in ended:
            worker.wait(END_S)


def _ask(group: Sequence[Process], order: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Give every rank an order; return their answers. Raises LabError if one fails."""
    for worker in group:
        worker.send(json.dumps(order))
    return _answers(group)


def _answers(group: Sequence[Process]) -> list[dict[str, Any]]:
    """Return every rank's answer. The first rank is heard last: it would wait for minutes for one that has died."""
    found = []
    for worker in reversed(group):
        said: dict[str, Any] = json.loads(worker.receive(PATIENCE_S))
        if not said["ok"]:
            raise LabError(f"{worker.name}: {said['message']}")
        found.append(said)
    return found[::-1]
