"""The worker's interface: commands out, events in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hepti_mqtt.core.errors import HeptiError
from hepti_mqtt.core.ids import PlanVersion
from hepti_mqtt.core.plan import Plan
from hepti_mqtt.core.program import WeightRef
from hepti_mqtt.core.spec import Spec
from hepti_mqtt.kernels import Weight
from hepti_mqtt.protocol import messages
from hepti_mqtt.protocol.frames import Frame, TensorArrival
from hepti_mqtt.protocol.keys import Seal
from hepti_mqtt.protocol.messages import Peer, Prepare
from hepti_mqtt.runtime.machinery import Publish
from hepti_mqtt.runtime.worker.executor import BoundProgram
from hepti_mqtt.runtime.worker.kv_caches import KeptCache
from hepti_mqtt.runtime.worker.residents import Place, PlanKey, ProgramKey, ResidentPlan


@dataclass(frozen=True, slots=True)
class _OfPlan:
    """A command or an event of one plan version."""

    model: str
    plan_version: PlanVersion

    @property
    def key(self) -> PlanKey:
        """Return the model and the plan version."""
        return self.model, self.plan_version


@dataclass(frozen=True, slots=True)
class Subscribe(_OfPlan):
    """Subscribe the data plane to filters, and the control plane to `work_topic`; the shell reports `Subscribed`."""

    filters: tuple[str, ...]
    work_topic: str


@dataclass(frozen=True, slots=True)
class Unsubscribe:
    """Unsubscribe from filters and work topics that no resident plan needs."""

    filters: tuple[str, ...]
    work_topics: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Load(_OfPlan):
    """Load weight ranges from the tiles of a manifest; the shell reports `Loaded` or `LoadFailed`."""

    manifest: bytes
    matrices: Mapping[WeightRef, WeightRef]  #: resident range of which each range is a view
    keep: frozenset[Place]  #: as in `Unload`
    share: float = 0.0  #: share of the device and its link that the load may take from runs
    devices: tuple[str, ...] = ()  #: of the plan, in its order


@dataclass(frozen=True, slots=True)
class Unload(_OfPlan):
    """Release the weights of one plan."""

    keep: frozenset[Place] = frozenset()  #: matrices that stay: other plans use them, or there is room for their return


@dataclass(frozen=True, slots=True)
class ReadCaches(_OfPlan):
    """Read and delete the saved KV caches of a layout; the shell reports `CachesRead` if there are any."""

    layout: bytes


@dataclass(frozen=True, slots=True)
class LogTrouble:
    """Count and log a fault that does not end the agent."""

    kind: str  #: name of the counter
    text: str
    error: BaseException | None = None  #: an unexpected error, logged with its traceback


@dataclass(frozen=True, slots=True)
class AnalysePrepare:
    """Analyse a Prepare on another thread, because it lowers the longest requests; the shell reports the result."""

    prepare: Prepare
    awaited: bool = False  #: as in `BuildProgram`


@dataclass(frozen=True, slots=True)
class BuildProgram:
    """Build a device's Program on another thread; the shell reports `ProgramBuilt`."""

    number: int  #: identifies the order in `ProgramBuilt`
    spec: Spec
    plan: Plan
    shape: ProgramKey
    weights: Mapping[WeightRef, Weight]  #: weights to bind the kernels to
    awaited: bool = False  #: a run waits for it, or a plan while no run is active; otherwise it gives way to runs


@dataclass(frozen=True, slots=True)
class AllowPeers(_OfPlan):
    """Admit peers, each with its own token, to this device's endpoint for the frames of a plan version."""

    peers: tuple[Peer, ...]


@dataclass(frozen=True, slots=True)
class JoinPeers(_OfPlan):
    """Connect to the endpoints of peers for the frames of a plan; the shell reports `PeerJoined` for each."""

    peers: tuple[Peer, ...]


@dataclass(frozen=True, slots=True)
class LeavePeers(_OfPlan):
    """Undo the `AllowPeers` and `JoinPeers` of a plan."""


BuildOrder = AnalysePrepare | BuildProgram
PeersCommand = AllowPeers | JoinPeers | LeavePeers
Command = Publish | Subscribe | Unsubscribe | Load | Unload | ReadCaches | BuildOrder | LogTrouble | PeersCommand


# ----------------------------------------------------------------------------------------------------------------------
# Events.


@dataclass(frozen=True, slots=True)
class MessageIn:
    """The planner's control message and its seal."""

    message: messages.Message
    seal: Seal | None = None


@dataclass(frozen=True, slots=True)
class FrameIn:
    """A frame: work from the planner, or a tensor from a peer."""

    frame: Frame


@dataclass(frozen=True, slots=True)
class Loaded(_OfPlan):
    """The weights of a plan version are resident."""

    weights: Mapping[WeightRef, Weight]


@dataclass(frozen=True, slots=True)
class LoadProgress(_OfPlan):
    """The shell has loaded some of the tiles."""

    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class LoadFailed(_OfPlan):
    """The shell could not load the weights."""

    error: HeptiError


@dataclass(frozen=True, slots=True)
class CachesRead(_OfPlan):
    """Saved KV caches of the layout of a plan version."""

    caches: tuple[KeptCache, ...]


@dataclass(frozen=True, slots=True)
class Subscribed(_OfPlan):
    """The broker has acknowledged every filter of a plan version."""


@dataclass(frozen=True, slots=True)
class PrepareAnalysed:
    """The resident plan of a Prepare, or the reason why it fails."""

    prepare: messages.Prepare
    result: ResidentPlan | HeptiError
    unexpected: Exception | None = None  #: the error that the result reports, logged with its traceback


@dataclass(frozen=True, slots=True)
class ProgramBuilt:
    """The result of an order to build a Program."""

    number: int
    result: BoundProgram | Exception


@dataclass(frozen=True, slots=True)
class PlannerLost:
    """The planner restarted, so everything of an earlier start is void."""

    boot: int


@dataclass(frozen=True, slots=True)
class MayHaveMissedCommands:
    """Commands may be lost: the connection was down, or the broker has published this device's will."""

    why: str


@dataclass(frozen=True, slots=True)
class PeerJoined:
    """A peer is connected: its frames of a plan version come directly."""

    peer: str
    model: str
    plan_version: PlanVersion


@dataclass(frozen=True, slots=True)
class PeerRefused:
    """A peer answers but does not admit this device; it may not have received the Prepare yet."""

    peer: str
    model: str
    plan_version: PlanVersion


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The connection to a peer is lost, with the frames on it; the shell reconnects."""

    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class PeerFrameDropped:
    """A frame for a peer was dropped, because the peer reads too slowly."""

    peer: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Tick:
    """The session's deadline has come."""


LoadingEvent = Loaded | LoadProgress | LoadFailed | Subscribed
PeerEvent = PeerJoined | PeerRefused | PeerLost | PeerFrameDropped
Report = CachesRead | PrepareAnalysed | ProgramBuilt | PlannerLost | MayHaveMissedCommands
WorkerEvent = MessageIn | FrameIn | TensorArrival | LoadingEvent | PeerEvent | Report | Tick
