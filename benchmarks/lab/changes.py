"""Changes to a lab while it runs: a timed script, checked before anything starts, and what happened when."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Self

from benchmarks.lab.spec import BOUNDS, HUB, LabSpec, one_of, only
from hepti_mqtt.config import load_yaml, mapping
from hepti_mqtt.core.errors import ConfigError, HeptiError

# What can be done to a host -> the keys of which exactly one says how much.
ACTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "rate": ("mbit",),
    "cpu": ("gflops", "share"),
    **dict.fromkeys(("cut", "reconnect", "kill", "restart", "stop", "cont"), ()),
}
_EMULATED: Final = ("rate", "cpu", "cut", "reconnect")
_BOUNDS: Final = {"mbit": BOUNDS["rate"], "gflops": BOUNDS["gflops"], "share": (0.001, 4.0), "at": (0.0, 86_400.0)}


@dataclass(frozen=True, slots=True)
class Change:
    """What to do to a host at a time after the script's start.

    mbit: new goodput of its link. share: new quota of CPU as a part of the calibrated one; gflops: the same, as a part
    of the host's target. Speed follows the quota nearly, not exactly: a quarter of 70 GFLOP/s was measured as 16.4.
    """

    at_s: float
    do: str
    host: str
    mbit: float | None = None
    gflops: float | None = None
    share: float | None = None


def load_script(path: Path, spec: LabSpec) -> tuple[Change, ...]:
    """Return the changes of a file in order of time; raises ConfigError that names file, step and key."""
    data = load_yaml(path)
    if not isinstance(data, Sequence) or isinstance(data, str) or not data:
        raise ConfigError(f"{path}: a script is a list of steps, e.g. `- {{at: 2.5, do: cut, host: pi2}}`")
    steps = []
    for number, step in enumerate(data, start=1):
        try:
            steps.append(parse_change(mapping("a step", step), spec))
        except ConfigError as error:
            raise ConfigError(f"{path}: step {number}: {error}") from error
    return tuple(sorted(steps, key=lambda change: change.at_s))


def parse_change(step: Mapping[str, Any], spec: LabSpec) -> Change:
    """Return one change; raises ConfigError that names the key."""
    do, host = one_of("do", step.get("do"), tuple(ACTIONS)), str(step.get("host"))
    if spec.kind != "emulated" and do in _EMULATED:
        raise ConfigError(f"`{do}` needs an emulated host, and lab {spec.name} is of kind {spec.kind}")
    only(f"`{do}`", step, ("at", "do", "host", *ACTIONS[do]))
    if host != HUB:
        spec.host(host)
    amounts = {key: _number(key, step[key]) for key in ACTIONS[do] if key in step}
    if len(amounts) != min(len(ACTIONS[do]), 1):
        raise ConfigError(f"`{do}` needs one of {', '.join(ACTIONS[do])}")
    if "gflops" in amounts and (host == HUB or spec.host(host).gflops is None):
        raise ConfigError(f"`gflops`: {host} has no target in the lab file to scale from; use `share`")
    return Change(_number("at", step.get("at")), do, host, **amounts)


def _number(key: str, value: Any) -> float:
    low, high = _BOUNDS[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ConfigError(f"`{key}` is {value!r}; it needs a number from {low:g} to {high:g}")
    return float(value)


class Script:
    """Makes changes in a thread of its own; a context manager that stops it.

    apply: makes one change. report: gets a record of each when it is made, with its error if it failed.
    """

    def __init__(
        self,
        changes: Sequence[Change],
        apply: Callable[[Change], object],
        report: Callable[[dict[str, Any]], object] = lambda _: None,
    ) -> None:
        self._changes, self._apply, self._report = changes, apply, report
        self._stop, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._play, name="changes", daemon=True)

    def finished(self) -> bool:
        """Return whether every change was made."""
        return self._over.is_set()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _play(self) -> None:
        start = time.monotonic()
        for change in self._changes:
            if self._stop.wait(max(start + change.at_s - time.monotonic(), 0.0)):
                return
            begun, unix = time.monotonic(), time.time()
            record = {key: value for key, value in asdict(change).items() if value is not None}
            try:
                self._apply(change)
            except HeptiError as failed:
                record["error"] = str(failed)
            took_s = time.monotonic() - begun
            self._report({**record, "begun_s": round(begun - start, 6), "took_s": round(took_s, 6), "unix_s": unix})
        self._over.set()
