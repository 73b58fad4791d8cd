"""The coordinator's interface: the events that it handles and the commands that it returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Final

from hepti_mqtt.errors import HeptiError
from hepti_mqtt.models.generation import Likely
from hepti_mqtt.plan import Plan
from hepti_mqtt.planner import Assessment, Candidate, Decision, Question, Recalled
from hepti_mqtt.protocol import messages
from hepti_mqtt.protocol.frames import Frame
from hepti_mqtt.protocol.keys import Seal
from hepti_mqtt.protocol.messages import Caps, Heartbeat, Status
from hepti_mqtt.runtime.coordinator.requests import Pins, Request, RequestKey, RunStats
from hepti_mqtt.runtime.coordinator.search_kinds import SearchKind
from hepti_mqtt.runtime.machinery import Publish, Transition


@dataclass(frozen=True, slots=True)
class DeviceStatus:
    """A device's retained status, or its will."""

    device: str
    status: Status


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """Whether people let plans use a device."""

    device: str
    wanted: bool


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
class DeviceMessage:
    """A control message from a device, and its seal."""

    device: str
    message: messages.Message
    seal: Seal | None = None


@dataclass(frozen=True, slots=True)
class DeviceFrame:
    """An output, or the report that a device has finished a run."""

    device: str
    frame: Frame


@dataclass(frozen=True, slots=True)
class RequestArrived:
    """A user's request, already tokenised and cut into chunks."""

    request: Request


@dataclass(frozen=True, slots=True)
class RequestCancelled:
    """A client cancels a request, which may have ended."""

    key: RequestKey  #: of the client's request, whichever models answer it


@dataclass(frozen=True, slots=True)
class Solved:
    """The search is over: a decision with the active plan's price under the same measurements, or an error."""

    model: str
    ticket: int
    decision: Decision | None
    active: Candidate | None = None  #: None if there was none
    error: HeptiError | None = None
    is_whole: bool = False  #: a search of another kind looked at all that a whole one would


@dataclass(frozen=True, slots=True)
class PlanRecalled:
    """The retained record of an earlier planner names the plan that it had for a model; None: there is none."""

    model: str
    recalled: Recalled | None


@dataclass(frozen=True, slots=True)
class PinPlan:
    """The planner's user pins a model's plans; empty pins free them."""

    model: str
    pins: Pins


@dataclass(frozen=True, slots=True)
class WeightsUnreadable:
    """A device has asked for weights that the planner cannot read any more."""

    model: str
    device: str
    error: HeptiError


@dataclass(frozen=True, slots=True)
class BrokerConnection:
    """The planner's own connection to the broker was lost, or stands (again).

    Meanwhile silence says nothing about a device; afterwards the broker may have lost its retained messages. is_new:
    False where it is the connection of before, on which the broker was silent.
    """

    online: bool
    is_new: bool = True


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; has_backlog: messages still wait to be read, so no device counts as silent.

    heard_s: when the broker was last heard, by the session's clock; nobody can be heard later.
    """

    has_backlog: bool = False
    heard_s: float = inf


CoordinatorEvent = (
    DeviceStatus
    | DeviceUse
    | DeviceCaps
    | DeviceHeartbeat
    | DeviceMessage
    | DeviceFrame
    | RequestArrived
    | RequestCancelled
    | Solved
    | PlanRecalled
    | PinPlan
    | WeightsUnreadable
    | BrokerConnection
    | Tick
)


# ----------------------------------------------------------------------------------------------------------------------
# Commands.


SMALL_BYTES: Final = 8192  # of an output: some two thousand numbers


@dataclass(frozen=True, slots=True)
class Solve:
    """Search for plans, and price the active one under the same measurements; report `Solved`."""

    model: str
    ticket: int
    question: Question
    active: Plan | None
    kind: SearchKind = SearchKind.WHOLE
    plans: tuple[Plan, ...] = ()  #: to price, if they are named
    recalled: Recalled | None = None  #: the plan that served before


@dataclass(frozen=True, slots=True)
class SendTiles:
    """Publish the asked tiles to the device."""

    model: str
    device: str
    hashes: tuple[bytes, ...]
    share: float = 0.0  #: of the device's link that they may take from runs


@dataclass(frozen=True, slots=True)
class AnswerRequest:
    """Answer a user's request."""

    request: Request
    plan: Plan
    stats: tuple[RunStats, ...]

    @property
    def is_small(self) -> bool:
        """Return whether its JSON takes no longer to write than another thread takes to wake."""
        return sum(output.nbytes for output in self.request.outputs.values()) <= SMALL_BYTES


@dataclass(frozen=True, slots=True)
class TokenReady:
    """A generated token: its place among `tokens`, all tokens so far.

    attempt: the number of this text, from 0. likely: see `Generation`.
    """

    request: Request
    index: int
    tokens: tuple[int, ...]
    attempt: int = 0
    likely: tuple[Likely, ...] = ()


@dataclass(frozen=True, slots=True)
class RefuseRequest:
    """End a user's request with an error."""

    request: Request
    error: HeptiError


@dataclass(frozen=True, slots=True)
class PublishPlan:
    """Publish the retained record of a model's plans.

    active, preparing: the planner's own; pinned, pinned_preparing: those of requests' pins. decision: of the last
    search, also if it changed nothing. progress: (loaded, all) bytes of weights by device. story: the last transitions.
    in_flight: runs at once. considered: what the rule said last of other plans. needs: bytes that the active plan
    needs, by device.
    """

    model: str
    active: Plan | None
    preparing: Plan | None
    decision: Decision | None
    error: HeptiError | None = None
    progress: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    story: tuple[Transition, ...] = ()
    pinned: tuple[Plan, ...] = ()
    pinned_preparing: tuple[Plan, ...] = ()
    in_flight: int = 1
    considered: tuple[Assessment, ...] = ()
    needs: Mapping[str, int] = field(default_factory=dict)
    loading: str = ""  #: the load of `preparing` in a sentence


@dataclass(frozen=True, slots=True)
class LogEvent:
    """Publish and log that something happened: joined, left, re-planned, overloaded ..."""

    kind: str
    text: str


CoordinatorCommand = Publish | Solve | SendTiles | AnswerRequest | TokenReady | RefuseRequest | PublishPlan | LogEvent


def devices_first(commands: Sequence[CoordinatorCommand]) -> list[CoordinatorCommand]:
    """Return commands with the replies to users last, in the same order otherwise.

    Devices wait for their next run, and writing an answer takes longer than sending them one.
    """
    return sorted(commands, key=lambda command: isinstance(command, AnswerRequest | TokenReady | RefuseRequest))
