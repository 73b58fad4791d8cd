"""What the session thread hears besides the session's own events."""

from __future__ import annotations

from dataclasses import dataclass

from hepti_mqtt.runtime.device.events import WorkerEvent
from hepti_mqtt.runtime.publish import Plane
from hepti_mqtt.wire.described import Status


@dataclass(frozen=True, slots=True)
class LinkUp:
    """A connection stands and all its subscriptions are acknowledged; the rest is what the broker said of itself."""

    plane: Plane
    protocol: int
    largest_packet_bytes: int | None
    local: bool = False


@dataclass(frozen=True, slots=True)
class LinkDown:
    """A connection was lost; the transport mends it."""

    plane: Plane
    reason: str


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """Every filter of one subscription is acknowledged."""

    plane: Plane
    token: int


@dataclass(frozen=True, slots=True)
class FiltersRefused:
    """The broker refused filters of a subscription, or (token None) a publish."""

    plane: Plane
    token: int | None
    topics: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class PlannerStatus:
    """The planner's retained status, or its will."""

    status: Status


@dataclass(frozen=True, slots=True)
class OwnStatus:
    """What the site is told about this device."""

    status: Status


@dataclass(frozen=True, slots=True)
class Stop:
    """The agent must end, with an error or without; `farewell`: tell the site that it is offline."""

    error: Exception | None = None
    farewell: bool = True


@dataclass(frozen=True, slots=True)
class ProbePeers:
    """It is time to measure the way to a peer."""


AgentEvent = (
    WorkerEvent | LinkUp | LinkDown | Acknowledged | FiltersRefused | PlannerStatus | OwnStatus | Stop | ProbePeers
)
