"""What the coordinator is told, and what it asks its shell to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hepti_mqtt.cluster import Cluster
from hepti_mqtt.errors import HeptiError
from hepti_mqtt.plan import Plan
from hepti_mqtt.planner import Decision, Question
from hepti_mqtt.runtime.commands import Publish
from hepti_mqtt.runtime.flight import Job, Pins, RunStats
from hepti_mqtt.runtime.states import Transition
from hepti_mqtt.spec import Spec
from hepti_mqtt.wire import messages
from hepti_mqtt.wire.frames import Frame
from hepti_mqtt.wire.messages import Caps, Heartbeat, Status


@dataclass(frozen=True, slots=True)
class Served:
    """A model that the planner serves.

    manifest: hash of the manifest of its weights. tokens: the length that plans are optimised for at first. pins:
    what the planner's user fixed; a request may carry others, which hold for that request alone.
    """

    name: str
    spec: Spec
    manifest: bytes
    tokens: int = 128
    pins: Pins = field(default_factory=Pins)


@dataclass(frozen=True, slots=True)
class Standing:
    """A plan that is active or being prepared, with the measurements it was chosen by."""

    plan: Plan
    cluster: Cluster


# -- events -----------------------------------------------------------------------------------------------------------


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
    """The search is over: a decision with the running plan's price under the same measurements, or an error."""

    model: str
    ticket: int
    decision: Decision | None
    running_s: float | None
    error: HeptiError | None = None


@dataclass(frozen=True, slots=True)
class Pin:
    """The planner's user pins a model's plans, or frees them with pins that say nothing."""

    model: str
    pins: Pins


@dataclass(frozen=True, slots=True)
class Connection:
    """The planner's own connection to the broker was lost, or stands (again).

    While it is lost, silence says nothing of a device; afterwards the broker may have forgotten what it retained.
    """

    online: bool


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


CoordinatorEvent = (
    DeviceStatus | DeviceCaps | DeviceHeartbeat | UpMessage | UpFrame | Submit | Solved | Pin | Connection | Tick
)


# -- commands ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Solve:
    """Search for a plan, and price the running one under the same measurements; report `Solved`."""

    model: str
    ticket: int
    question: Question
    running: Plan | None


@dataclass(frozen=True, slots=True)
class SendTiles:
    """Publish the asked tiles to the device."""

    model: str
    device: str
    hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer a user's request."""

    job: Job
    plan: Plan
    stats: tuple[RunStats, ...]


@dataclass(frozen=True, slots=True)
class Token:
    """A token of a job that generates: its place among `tokens`, all that there are so far."""

    job: Job
    index: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Refuse:
    """End a user's request with an error."""

    job: Job
    error: HeptiError


@dataclass(frozen=True, slots=True)
class ShowPlan:
    """Publish the retained record of a model's plans.

    active, preparing: the planner's own. decision: of the last search for these, also if it changed nothing. progress:
    (bytes there, bytes in all) of the weights that devices load for `preparing`. story: the last transitions of the
    model's plans. pinned: the active plans of what requests have pinned. in_flight: runs at once.
    """

    model: str
    active: Plan | None
    preparing: Plan | None
    decision: Decision | None
    error: HeptiError | None = None
    progress: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    story: tuple[Transition, ...] = ()
    pinned: tuple[Plan, ...] = ()
    in_flight: int = 1


@dataclass(frozen=True, slots=True)
class Note:
    """Publish and log that something happened: joined, left, re-planned, overloaded ..."""

    kind: str
    text: str


CoordinatorCommand = Publish | Solve | SendTiles | Answer | Token | Refuse | ShowPlan | Note
