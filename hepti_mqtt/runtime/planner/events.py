"""What the coordinator is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from hepti_mqtt.errors import HeptiError
from hepti_mqtt.planner import Decision
from hepti_mqtt.runtime.planner.flight import Job, Pins
from hepti_mqtt.wire import messages
from hepti_mqtt.wire.described import Caps, Heartbeat, Status
from hepti_mqtt.wire.frames import Frame

WORTH: Final = 0.93  # a new plan must cost less than this part of the running one, by the objective


@dataclass(frozen=True, slots=True)
class DeviceStatus:
    """A device's retained status, or its will."""

    device: str
    status: Status


@dataclass(frozen=True, slots=True)
class DeviceCaps:
    """A device's retained caps."""

    device: str
    caps: Caps


@dataclass(frozen=True, slots=True)
class DeviceHeartbeat:
    """A device's heartbeat."""

    device: str
    heartbeat: Heartbeat


@dataclass(frozen=True, slots=True)
class UpMessage:
    """A control message from a device."""

    device: str
    message: messages.Message


@dataclass(frozen=True, slots=True)
class UpFrame:
    """An output, or the report that a device has finished a run."""

    device: str
    frame: Frame


@dataclass(frozen=True, slots=True)
class Submit:
    """A user's request, already tokenised and cut into chunks."""

    job: Job


@dataclass(frozen=True, slots=True)
class Solved:
    """The search is over: a decision with the running plan's price under the same measurements, or an error.

    hurried: it was not the whole search.
    """

    model: str
    ticket: int
    decision: Decision | None
    running_s: float | None
    error: HeptiError | None = None
    hurried: bool = False

    def worth_it(self, part: float = WORTH) -> bool:
        """Return whether the plan that was found costs no more than this part of the running one."""
        if self.running_s is None or self.decision is None:
            return True
        return self.decision.chosen.price.cost[0] <= part * self.running_s


@dataclass(frozen=True, slots=True)
class Pin:
    """The planner's user pins a model's plans, or frees them with pins that say nothing."""

    model: str
    pins: Pins


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A device has asked for weights that the planner cannot read any more."""

    model: str
    device: str
    error: HeptiError


@dataclass(frozen=True, slots=True)
class Connection:
    """The planner's own connection to the broker was lost, or stands (again).

    While it is lost, silence says nothing of a device; afterwards the broker may have forgotten what it retained.
    """

    online: bool


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; behind: what has come still waits to be read, so nobody can be called silent."""

    behind: bool = False


CoordinatorEvent = (
    DeviceStatus
    | DeviceCaps
    | DeviceHeartbeat
    | UpMessage
    | UpFrame
    | Submit
    | Solved
    | Pin
    | Unreadable
    | Connection
    | Tick
)
