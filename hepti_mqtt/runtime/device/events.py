"""What a device's session is told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hepti_mqtt.errors import HeptiError
from hepti_mqtt.ids import Epoch
from hepti_mqtt.kernels import Weight
from hepti_mqtt.program import WeightRef
from hepti_mqtt.runtime.device.executor import Bound
from hepti_mqtt.runtime.device.resident import Resident
from hepti_mqtt.wire import messages
from hepti_mqtt.wire.arrivals import Arrival
from hepti_mqtt.wire.frames import Frame


@dataclass(frozen=True, slots=True)
class MessageIn:
    """A control message from the planner."""

    message: messages.Message


@dataclass(frozen=True, slots=True)
class FrameIn:
    """A frame: a request from the planner, or activations from a peer."""

    frame: Frame


@dataclass(frozen=True, slots=True)
class Loaded:
    """The shell has made the weights of an epoch resident."""

    model: str
    epoch: Epoch
    weights: Mapping[WeightRef, Weight]


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """The shell has some of the tiles."""

    model: str
    epoch: Epoch
    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """The shell could not make the weights resident."""

    model: str
    epoch: Epoch
    error: HeptiError


@dataclass(frozen=True, slots=True)
class Subscribed:
    """Every SUBACK of an epoch's filters is in."""

    model: str
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class Studied:
    """What a Prepare needs here, or why it cannot be had."""

    prepare: messages.Prepare
    found: Resident | HeptiError


@dataclass(frozen=True, slots=True)
class Built:
    """The shell has built what the order of this number asked for, or could not."""

    number: int
    made: Bound | Exception


@dataclass(frozen=True, slots=True)
class PlannerLost:
    """The planner restarted: its boot counter changed, so everything of the earlier boot is void."""

    boot: int


@dataclass(frozen=True, slots=True)
class Doubt:
    """What the planner said may have passed us by: the connection was away, or the broker has published our will."""

    why: str


@dataclass(frozen=True, slots=True)
class PeerJoined:
    """What a peer sends under an epoch comes directly from now on (again)."""

    peer: str
    model: str
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class PeerRefused:
    """A peer is there, but does not let this device in; it may not have heard of the epoch yet."""

    peer: str
    model: str
    epoch: Epoch
    reason: str


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The connection to a peer's endpoint is gone, and what was on it; the shell makes it again."""

    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class PeerBehind:
    """A frame for a peer was dropped, since it does not take what waits for it already."""

    peer: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Tick:
    """The session's deadline has come."""


WorkerEvent = (
    MessageIn
    | FrameIn
    | Arrival
    | Loaded
    | LoadProgress
    | LoadFailed
    | Subscribed
    | Studied
    | Built
    | PlannerLost
    | Doubt
    | PeerJoined
    | PeerRefused
    | PeerLost
    | PeerBehind
    | Tick
)
