"""The worker's interface: the commands that it returns and the events that it handles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hepti_mqtt.errors import HeptiError
from hepti_mqtt.ids import PlanVersion
from hepti_mqtt.kernels import Weight
from hepti_mqtt.plan import Plan
from hepti_mqtt.program import WeightRef
from hepti_mqtt.protocol import messages
from hepti_mqtt.protocol.frames import Frame, TensorArrival
from hepti_mqtt.protocol.keys import Seal
from hepti_mqtt.protocol.messages import Peer, Prepare
from hepti_mqtt.runtime.machinery import Publish
from hepti_mqtt.runtime.worker.executor import BoundProgram
from hepti_mqtt.runtime.worker.kv_caches import KeptCache
from hepti_mqtt.runtime.worker.residents import Place, ProgramKey, ResidentPlan
from hepti_mqtt.spec import Spec


@dataclass(frozen=True, slots=True)
class Subscribe:
    """Subscribe the data plane to filters and the control plane to the topic `work_topic`.

    The shell reports `Subscribed` when every SUBACK is in.
    """

    model: str
    plan_version: PlanVersion
    filters: tuple[str, ...]
    work_topic: str


@dataclass(frozen=True, slots=True)
class Unsubscribe:
    """Leave filters and topics of requests that no resident plan needs any more."""

    filters: tuple[str, ...]
    work_topics: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Load:
    """Make weight ranges resident from the tiles of a manifest; the shell reports `Loaded` or `LoadFailed`.

    matrices: of each range the one that is resident for it. keep: as of `Unload`. devices: of the plan, in its order.
    """

    transaction_id: int
    model: str
    plan_version: PlanVersion
    manifest: bytes
    matrices: Mapping[WeightRef, WeightRef]
    keep: frozenset[Place]
    share: float = 0.0  #: of the device and its link that the load may take from runs
    devices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Unload:
    """Release the weights of one plan.

    keep: what stays resident: what other plans use, and what has room, because a plan may come back.
    """

    model: str
    plan_version: PlanVersion
    keep: frozenset[Place] = frozenset()


@dataclass(frozen=True, slots=True)
class ReadCaches:
    """Read the saved KV caches of a layout, and delete them; the shell reports `CachesRead` if there are any."""

    model: str
    plan_version: PlanVersion
    layout: bytes


@dataclass(frozen=True, slots=True)
class LogTrouble:
    """Count and log trouble that is survived."""

    kind: str  #: the counter's name
    text: str
    error: BaseException | None = None  #: an unexpected error, logged with its traceback


@dataclass(frozen=True, slots=True)
class AnalysePrepare:
    """Analyse a Prepare (it lowers the longest requests) on another thread; the shell reports `PrepareAnalysed`.

    awaited: as of a Program.
    """

    prepare: Prepare
    awaited: bool = False


@dataclass(frozen=True, slots=True)
class BuildProgram:
    """Build a device's Program beside the session's thread; the shell reports `ProgramBuilt`.

    number: of the order, which `ProgramBuilt` carries. weights: of the plan version, to which the kernels are bound.
    awaited: by a run, or by a plan while no run is under way; else it gives way to runs.
    """

    number: int
    spec: Spec
    plan: Plan
    shape: ProgramKey
    weights: Mapping[WeightRef, Weight]
    awaited: bool = False


@dataclass(frozen=True, slots=True)
class AllowPeers:
    """Let peers read at this device's endpoint what it sends them under a plan version, each with its own token."""

    model: str
    plan_version: PlanVersion
    peers: tuple[Peer, ...]


@dataclass(frozen=True, slots=True)
class JoinPeers:
    """Read at the endpoints of peers what they send under a plan; the shell reports `PeerJoined` for each."""

    model: str
    plan_version: PlanVersion
    peers: tuple[Peer, ...]


@dataclass(frozen=True, slots=True)
class LeavePeers:
    """Undo the `AllowPeers` and `JoinPeers` of a plan."""

    model: str
    plan_version: PlanVersion


Command = (
    Publish
    | Subscribe
    | Unsubscribe
    | Load
    | Unload
    | ReadCaches
    | AnalysePrepare
    | BuildProgram
    | LogTrouble
    | AllowPeers
    | JoinPeers
    | LeavePeers
)


# ----------------------------------------------------------------------------------------------------------------------
# Events.


@dataclass(frozen=True, slots=True)
class MessageIn:
    """A control message from the planner, and its seal."""

    message: messages.Message
    seal: Seal | None = None


@dataclass(frozen=True, slots=True)
class FrameIn:
    """A frame: a request from the planner, or activations from a peer."""

    frame: Frame


@dataclass(frozen=True, slots=True)
class Loaded:
    """The shell has made the weights of a plan version resident."""

    model: str
    plan_version: PlanVersion
    weights: Mapping[WeightRef, Weight]


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """The shell has some of the tiles."""

    model: str
    plan_version: PlanVersion
    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """The shell could not make the weights resident."""

    model: str
    plan_version: PlanVersion
    error: HeptiError


@dataclass(frozen=True, slots=True)
class CachesRead:
    """Saved KV caches of the layout of a plan version."""

    model: str
    plan_version: PlanVersion
    caches: tuple[KeptCache, ...]


@dataclass(frozen=True, slots=True)
class Subscribed:
    """Every SUBACK of a plan version's filters is in."""

    model: str
    plan_version: PlanVersion


@dataclass(frozen=True, slots=True)
class PrepareAnalysed:
    """What a Prepare needs on this device, or why it fails."""

    prepare: messages.Prepare
    result: ResidentPlan | HeptiError
    unexpected: Exception | None = None  #: the error that the result reports, logged with its traceback


@dataclass(frozen=True, slots=True)
class ProgramBuilt:
    """The shell has built what the order of this number asked for, or could not."""

    number: int
    result: BoundProgram | Exception


@dataclass(frozen=True, slots=True)
class PlannerLost:
    """The planner restarted: everything of an earlier start is void."""

    boot: int


@dataclass(frozen=True, slots=True)
class MayHaveMissedCommands:
    """Commands may be lost: the connection was away, or the broker has published this device's will."""

    why: str


@dataclass(frozen=True, slots=True)
class PeerJoined:
    """What a peer sends under a plan version comes directly from now on (again)."""

    peer: str
    model: str
    plan_version: PlanVersion


@dataclass(frozen=True, slots=True)
class PeerRefused:
    """A peer is there, but does not let this device in; it may not have heard of the plan version yet."""

    peer: str
    model: str
    plan_version: PlanVersion
    reason: str


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The connection to a peer's endpoint is gone, and what was on it; the shell makes it again."""

    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class PeerFrameDropped:
    """A frame for a peer was dropped, since it does not take what waits for it already."""

    peer: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Tick:
    """The session's deadline has come."""


WorkerEvent = (
    MessageIn
    | FrameIn
    | TensorArrival
    | Loaded
    | LoadProgress
    | LoadFailed
    | CachesRead
    | Subscribed
    | PrepareAnalysed
    | ProgramBuilt
    | PlannerLost
    | MayHaveMissedCommands
    | PeerJoined
    | PeerRefused
    | PeerLost
    | PeerFrameDropped
    | Tick
)
