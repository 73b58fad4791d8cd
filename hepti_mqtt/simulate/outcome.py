"""What goes into the virtual clock and comes out of it: requests, bars of a time line, times, bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from hepti_mqtt.plan import Route
from hepti_mqtt.program import Key, Program
from hepti_mqtt.simulate.load import RunTimes
from hepti_mqtt.spec import RequestShape


class Event(NamedTuple):
    """One bar of a time line: what a device (`compute`, `send`) or a link (`up`, `down`) did, in seconds.

    What a device does to take a frame is in `send` too. Lane `task`: from the lease of a bag's task to its end there.
    """

    device: str
    lane: str
    label: str
    start: float
    stop: float


class Slows(NamedTuple):
    """A device becomes slower: from a time on, in seconds, its ops take so many times as long."""

    since_s: float
    times: float


@dataclass(slots=True)
class DeviceUse:
    """What one device did: seconds of compute, seconds idle until its last op, FLOPs, bytes sent."""

    compute_s: float = 0.0
    wait_s: float = 0.0
    flops: float = 0.0
    sent_bytes: int = 0


@dataclass(slots=True)
class Simulation:
    """The outcome of one request: seconds from dispatch to answer at the planner, all bytes sent, and each device."""

    seconds: float
    nbytes: int
    devices: dict[str, DeviceUse]
    events: list[Event] = field(default_factory=list)


class Replica(NamedTuple):
    """One of several complete plans under which a request may run: its devices' Programs, and seconds by prediction."""

    programs: Mapping[str, Program]
    seconds: float = 0.0


class Request(NamedTuple):
    """One of several requests: its shape, its devices' Programs, when it is asked; None: as soon as there is room.

    replicas: instead of `programs`, those of several plans side by side, of which it runs under one.
    """

    shape: RequestShape
    programs: Mapping[str, Program]
    asked_s: float | None = None
    replicas: tuple[Replica, ...] = ()

    @property
    def choices(self) -> tuple[Replica, ...]:
        """Return under what it may run."""
        return self.replicas or (Replica(self.programs),)


class Arrival(NamedTuple):
    """A frame that a device has from now on: the request itself (no key), or an exchange of it by one route.

    leased: instead of both, tasks of the request's bag; no task: none is left.
    """

    seconds: float
    device: str
    admission: int
    key: Key | None
    nbytes: int
    label: str
    route: Route = "broker"
    leased: tuple[int, ...] | None = None


@dataclass(slots=True)
class Outcome:
    """The outcome of several requests, by admission: all bytes sent, and each device.

    events, arrivals, ran: if recorded, the time line, which frames arrived, and (device, admission, place in the
    Program) of every op, in the order in which they began.
    """

    runs: tuple[RunTimes, ...]
    nbytes: int
    devices: dict[str, DeviceUse]
    events: list[Event] = field(default_factory=list)
    arrivals: list[Arrival] = field(default_factory=list)
    ran: list[tuple[str, int, int]] = field(default_factory=list)
