"""Changes to a lab while it runs: a timed script, checked before anything starts, and what happened when."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from hepti_mqtt.config import load_yaml
from hepti_mqtt.errors import ConfigError, HeptiError
from hepti_mqtt.lab.spec import GFLOPS, HUB, RATE_MBIT, LabSpec

# What can be done to a host -> the keys of which exactly one says how much.
ACTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "rate": ("mbit",),
    "cpu": ("gflops", "share"),
    "cut": (),
    "mend": (),
    "kill": (),
    "restart": (),
    "stop": (),
    "cont": (),
}
_BOUNDS: Final = {"mbit": RATE_MBIT, "gflops": GFLOPS, "share": (0.001, 1.0)}
_LATEST_S: Final = 86_400.0
# What needs an emulated link or quota; the others are done to processes, on boards too.
_EMULATED: Final = ("rate", "cpu", "cut", "mend")


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


@dataclass(frozen=True, slots=True)
class Stamp:
    """A change that was made: planned and real time after the script's start, how long it took, its error if any."""

    change: Change
    begun_s: float
    took_s: float
    unix_s: float
    error: str | None = None

    def record(self) -> dict[str, Any]:
        """Return it as data for JSON."""
        change = {key: value for key, value in asdict(self.change).items() if value is not None}
        planned = change.pop("at_s")
        times = {"begun_s": round(self.begun_s, 6), "took_s": round(self.took_s, 6), "unix_s": round(self.unix_s, 6)}
        return {"planned_s": planned, **times, **change, **({} if self.error is None else {"error": self.error})}


def load_script(path: Path, spec: LabSpec) -> tuple[Change, ...]:
    """Return the changes of a file; raises ConfigError that names file, step and key."""
    return parse_script(load_yaml(path), str(path), spec)


def parse_script(data: Any, where: str, spec: LabSpec) -> tuple[Change, ...]:
    """Return the changes that a list describes, in order of time; raises ConfigError that names step and key."""
    if not isinstance(data, Sequence) or isinstance(data, str) or not data:
        raise ConfigError(f"{where}: a script is a list of steps, e.g. `- {{at: 2.5, do: cut, host: pi2}}`")
    steps = []
    for number, step in enumerate(data, start=1):
        try:
            steps.append(parse_change(step, spec))
        except ConfigError as error:
            raise ConfigError(f"{where}: step {number}: {error}") from error
    return tuple(sorted(steps, key=lambda change: change.at_s))


def parse_change(step: Any, spec: LabSpec) -> Change:
    """Return one change; raises ConfigError that names the key."""
    if not isinstance(step, Mapping):
        raise ConfigError(f"needs a mapping with at, do and host, not {type(step).__name__}")
    do, host = step.get("do"), step.get("host")
    if not isinstance(do, str) or do not in ACTIONS:
        raise ConfigError(f"`do` is {do!r}; it is one of {', '.join(ACTIONS)}")
    if spec.kind != "emulated" and do in _EMULATED:
        others = ", ".join(action for action in ACTIONS if action not in _EMULATED)
        raise ConfigError(
            f"`{do}` needs an emulated host, and lab {spec.name} is of kind {spec.kind}; what it can do is {others}"
        )
    amounts = ACTIONS[do]
    for key in step:
        if key not in ("at", "do", "host", *amounts):
            raise ConfigError(f"`{do}` has an unknown key {key!r}; known are {', '.join(('at', 'host', *amounts))}")
    at = step.get("at")
    if isinstance(at, bool) or not isinstance(at, int | float) or not 0 <= at <= _LATEST_S:
        raise ConfigError(f"`at` is {at!r}; it needs seconds after the start, from 0 to {_LATEST_S:g}")
    if not isinstance(host, str):
        raise ConfigError(f"`host` is {host!r}; it needs the name of a host")
    if host != HUB:
        spec.host(host)
    given = [key for key in amounts if key in step]
    if len(given) != min(len(amounts), 1):
        raise ConfigError(f"`{do}` needs one of {', '.join(amounts)}")
    for key in given:
        low, high = _BOUNDS[key]
        value = step[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise ConfigError(f"`{key}` is {value!r}; it needs a number from {low:g} to {high:g}")
    if "gflops" in given and (host == HUB or spec.host(host).gflops is None):
        raise ConfigError(f"`gflops`: {host} has no target in the lab file to scale from; use `share`")
    return Change(float(at), do, host, **{key: float(step[key]) for key in given})


class Script:
    """Plays changes in a thread of its own; a context manager that stops it.

    apply: makes one change. report: gets each stamp when it is made. clock: seconds; wait(seconds) -> whether to stop.
    """

    def __init__(
        self,
        changes: Sequence[Change],
        apply: Callable[[Change], object],
        report: Callable[[Stamp], object] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], bool] | None = None,
    ) -> None:
        self.stamps: list[Stamp] = []
        self._changes, self._apply, self._report, self._clock = changes, apply, report, clock
        self._stop = threading.Event()
        self._wait = wait or self._stop.wait
        self._thread = threading.Thread(target=self.play, name="changes", daemon=True)

    def play(self) -> None:
        """Make every change at its time; one that fails is stamped with its error, and the next ones follow."""
        start = self._clock()
        for change in self._changes:
            while (left := start + change.at_s - self._clock()) > 0:
                if self._wait(left):
                    return
            if self._stop.is_set():
                return
            self._make(change, start)

    def finished(self) -> bool:
        """Return whether every change was made."""
        return len(self.stamps) == len(self._changes)

    def start(self) -> None:
        """Begin: the script's time counts from now."""
        self._thread.start()

    def close(self) -> None:
        """Make no further change and wait for the one that is being made."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _make(self, change: Change, start: float) -> None:
        begun, unix = self._clock(), time.time()
        error = None
        try:
            self._apply(change)
        except HeptiError as failed:
            error = str(failed)
        stamp = Stamp(change, begun - start, self._clock() - begun, unix, error)
        self.stamps.append(stamp)
        self._report(stamp)
