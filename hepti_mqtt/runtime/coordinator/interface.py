"""The coordinator's interface: events in, commands out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Final

from hepti_mqtt.core.errors import HeptiError
from hepti_mqtt.core.plan import Plan
from hepti_mqtt.models.generation import Likely
from hepti_mqtt.planner import Assessment, Candidate, Decision, EarlierPlan, Question
from hepti_mqtt.protocol import messages
from hepti_mqtt.protocol.frames import Frame
from hepti_mqtt.protocol.keys import Seal
from hepti_mqtt.protocol.messages import Caps, Heartbeat, Status
from hepti_mqtt.runtime.coordinator.requests import Request, RequestKey, RunStats
from hepti_mqtt.runtime.coordinator.search_kinds import SearchKind
from hepti_mqtt.runtime.machinery import Publish, Transition


@dataclass(frozen=True, slots=True)
class DeviceStatus:
    """A device's retained status, or its last will."""

    device: str
    status: Status


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """Whether people let plans use a device."""

    device: str
    wanted: bool


@dataclass(frozen=True, slots=True)
class DeviceCaps:
    """A device's retained capabilities (caps)."""

    device: str
    caps: Caps


@dataclass(frozen=True, slots=True)
class DeviceHeartbeat:
    """A device's heartbeat."""

    device: str
    heartbeat: Heartbeat


@dataclass(frozen=True, slots=True)
class DeviceMessage:
    """A device's control message and its seal."""

    device: str
    message: messages.Message
    seal: Seal | None = None


@dataclass(frozen=True, slots=True)
class DeviceFrame:
    """A part of a run's output, or the report of a finished run."""

    device: str
    frame: Frame


@dataclass(frozen=True, slots=True)
class RequestArrived:
    """A user's request, tokenised and cut into batches."""

    request: Request


@dataclass(frozen=True, slots=True)
class RequestCancelled:
    """A client cancels a request, which may have ended."""

    key: RequestKey  #: key of the client's request, over all models that answer it


@dataclass(frozen=True, slots=True)
class Solved:
    """The result of a search: a decision, or an error."""

    model: str
    ticket: int  #: of its `Solve`
    decision: Decision | None
    active: Candidate | None = None  #: price of the active plan under the same measurements
    error: HeptiError | None = None
    is_whole: bool = False  #: it covered all plans of a whole search, although it was of another kind


@dataclass(frozen=True, slots=True)
class PlanRecalled:
    """The plan of an earlier planner, from its retained record or the state file; None if there is none."""

    model: str
    recalled: EarlierPlan | None


@dataclass(frozen=True, slots=True)
class WeightsUnreadable:
    """The planner cannot read weights that a device requested."""

    model: str
    device: str
    error: HeptiError


@dataclass(frozen=True, slots=True)
class BrokerState:
    """The planner's connection to the broker is lost, or established.

    A device's silence means nothing while it is lost; a new broker may lack the retained messages.
    """

    online: bool
    is_new: bool = True  #: False if it is the earlier connection, on which the broker was silent


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""

    has_backlog: bool = False  #: unread messages wait, so no device counts as silent
    heard_s: float = inf  #: last sign of life of the broker, by the session's clock


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
    | WeightsUnreadable
    | BrokerState
    | Tick
)


# ----------------------------------------------------------------------------------------------------------------------
# Commands.


SMALL_BYTES: Final = 8192  # of an output: two thousand numbers


@dataclass(frozen=True, slots=True)
class Solve:
    """Search for plans and price the active one under the same measurements; the shell reports `Solved`."""

    model: str
    ticket: int  #: identifies the search in `Solved`
    question: Question
    active: Plan | None
    kind: SearchKind = SearchKind.WHOLE
    plans: tuple[Plan, ...] = ()  #: plans to price in a search of named plans
    recalled: EarlierPlan | None = None  #: the plan that served before, in a search of that kind


@dataclass(frozen=True, slots=True)
class SendTiles:
    """Publish the requested tiles to a device."""

    model: str
    device: str
    hashes: tuple[bytes, ...]
    share: float = 0.0  #: share of the device's link that they may take from runs


@dataclass(frozen=True, slots=True)
class AnswerRequest:
    """Answer a user's request."""

    request: Request
    plan: Plan
    stats: tuple[RunStats, ...]

    @property
    def is_small(self) -> bool:
        """Return whether writing its JSON takes no longer than waking another thread."""
        generation = self.request.generation
        states = () if generation is None else generation.states
        nbytes: int = sum(output.nbytes for output in (*self.request.outputs.values(), *states))
        return nbytes <= SMALL_BYTES


@dataclass(frozen=True, slots=True)
class TokenReady:
    """A generated token."""

    request: Request
    index: int  #: its place in `tokens`
    tokens: tuple[int, ...]  #: all tokens up to it
    attempt: int = 0  #: number of this text, from 0
    likely: tuple[Likely, ...] = ()  #: the likeliest tokens at its place, if they are wanted


@dataclass(frozen=True, slots=True)
class RefuseRequest:
    """End a user's request with an error."""

    request: Request
    error: HeptiError


@dataclass(frozen=True, slots=True)
class PublishPlan:
    """Publish the retained record of a model's plans."""

    model: str
    active: Plan | None  #: of the default group
    preparing: Plan | None  #: of the default group
    decision: Decision | None  #: decision of the last search, even if it changed nothing
    error: HeptiError | None = None
    progress: Mapping[str, tuple[int, int]] = field(default_factory=dict)  #: (loaded, total) bytes of weights by device
    story: tuple[Transition, ...] = ()  #: the last transitions
    pinned: tuple[Plan, ...] = ()  #: active plans of pinned groups
    pinned_preparing: tuple[Plan, ...] = ()  #: plans being prepared by pinned groups
    in_flight: int = 1  #: limit of concurrent runs
    considered: tuple[Assessment, ...] = ()  #: the rule's last assessments of other plans
    needs: Mapping[str, int] = field(default_factory=dict)  #: bytes that the active plan needs, by device
    loading: str = ""  #: the load of `preparing` in a sentence


@dataclass(frozen=True, slots=True)
class LogEvent:
    """Publish and log an event: joined, left, replanned, overloaded ..."""

    kind: str
    text: str


Answer = AnswerRequest | TokenReady | RefuseRequest
CoordinatorCommand = Publish | Solve | SendTiles | Answer | PublishPlan | LogEvent
