"""The processes of the outside baselines on the hosts of a lab, and their turns."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from hepti_mqtt.bench.outside.baselines import BASELINES, Baseline, Library
from hepti_mqtt.errors import ConfigError, HeptiError, LabError
from hepti_mqtt.lab.hosts import Host, Talking

PATIENCE_S: Final = 300.0
END_S: Final = 30.0
TOLERANCE: Final = 1e-4  # of the reference's norm: what an f32 answer of Hepti is held to
# One thread everywhere: a host of the lab is a share of one core.
ENVIRONMENT: Final = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class Outside:
    """The processes of all baselines in one lab, one per host and library; a context manager that ends them.

    A process is started when its baseline has its first turn and then waits in a read. It holds weights only during a
    turn, since they would take the memory that the host's agent counts on.
    """

    def __init__(self) -> None:
        self._workers: dict[tuple[int, Library], Talking] = {}

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
            _throttle(hosts, on=False)
            try:
                group, loaded = self._load(baseline, hosts, model, body, reference)
                checked = _ask(group, {"do": "check"})
            finally:
                _throttle(hosts, on=True)
            error = checked[0]["error"]
            if not error <= TOLERANCE:  # NaN is wrong too
                raise LabError(f"{name} is off by {error:.1e} of its norm, more than {TOLERANCE:g}: it is not timed")
            times = [_ask(group, {"do": "measure"})[0]["latency_ms"] for _ in range(warmup + repetitions)]
            _ask(group, {"do": "drop"})
        except HeptiError as failure:
            self._end(baseline, hosts)  # some ranks may wait for one that is gone
            return {"ok": False, "unix_s": begun, "code": failure.code, "message": str(failure)}
        said = {"latency_ms": times[warmup:], "error": error, "versions": loaded[0]["versions"]}
        said["rss_bytes"] = [rank["rss_bytes"] for rank in checked]
        return {"ok": True, "unix_s": begun, **said}

    def close(self) -> None:
        """End every process."""
        for worker in self._workers.values():
            worker.signal(9)
        while self._workers:
            self._workers.popitem()[1].wait(END_S)

    def __enter__(self) -> Outside:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _load(
        self, baseline: Baseline, hosts: Sequence[Host], model: Path, body: Mapping[str, Any], reference: Path
    ) -> tuple[list[Talking], list[dict[str, Any]]]:
        group = [self._worker(baseline.library, host) for host in hosts]
        port = _ask(group[:1], {"do": "port"})[0]["port"]
        for rank, (host, worker) in enumerate(zip(hosts, group, strict=True)):
            place = host.provide(reference) if rank == 0 else None
            part = {"module": baseline.module, "variant": baseline.variant, "packed": baseline.packed}
            part |= {"rank": rank, "world": len(hosts)}
            what = {"model": host.provide(model), "body": body, "reference": place}
            worker.send(json.dumps({"do": "load", **part, "master": f"{hosts[0].address}:{port}", **what}))
        return group, _answers(group)

    def _worker(self, library: Library, host: Host) -> Talking:
        key = id(host), library
        if key not in self._workers:
            command = [host.python, "-m", "hepti_mqtt.bench.outside.worker", host.address]
            self._workers[key] = host.talk(f"outside-{library.packages[-1]}", command, ENVIRONMENT)
        return self._workers[key]

    def _end(self, baseline: Baseline, hosts: Sequence[Host]) -> None:
        """End a group; its next turn starts new processes."""
        for host in hosts:
            worker = self._workers.pop((id(host), baseline.library), None)
            if worker is not None:
                worker.signal(9)
                worker.wait(END_S)


def _throttle(hosts: Sequence[Host], *, on: bool) -> None:
    for host in hosts:
        host.throttle(on)


def _ask(group: Sequence[Talking], order: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Give every rank an order; return their answers. Raises LabError if one fails."""
    for worker in group:
        worker.send(json.dumps(order))
    return _answers(group)


def _answers(group: Sequence[Talking]) -> list[dict[str, Any]]:
    """Return every rank's answer. The first rank is heard last: it would wait for minutes for one that has died."""
    return [_answer(worker) for worker in reversed(group)][::-1]


def _answer(worker: Talking) -> dict[str, Any]:
    said: dict[str, Any] = json.loads(worker.receive(PATIENCE_S))
    if not said["ok"]:
        raise LabError(f"{worker.name}: {said['message']}")
    return said
