"""What a device's session asks its shell to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hepti_mqtt.ids import Epoch
from hepti_mqtt.kernels import Weight
from hepti_mqtt.plan import Plan
from hepti_mqtt.program import WeightRef
from hepti_mqtt.runtime.publish import Publish
from hepti_mqtt.spec import RequestShape, Spec
from hepti_mqtt.wire.messages import Prepare
from hepti_mqtt.wire.peers import Peer


@dataclass(frozen=True, slots=True)
class Subscribe:
    """Subscribe the data plane to filters and the control plane to the topic `work`.

    Every SUBACK in, the shell reports `Subscribed(model, epoch)`.
    """

    model: str
    epoch: Epoch
    filters: tuple[str, ...]
    work: str


@dataclass(frozen=True, slots=True)
class Unsubscribe:
    """Leave filters and topics of requests that no resident plan needs any more."""

    filters: tuple[str, ...]
    works: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Load:
    """Make weight ranges resident from the tiles of a manifest; the shell reports `Loaded` or `LoadFailed`.

    spare_bytes: as of `Unload`.
    """

    txn: int
    model: str
    epoch: Epoch
    manifest: bytes
    refs: tuple[WeightRef, ...]
    spare_bytes: float = 0


@dataclass(frozen=True, slots=True)
class Unload:
    """Give up the weights of one epoch (those that another resident epoch uses stay).

    spare_bytes: of weights that no epoch uses and that may be kept all the same, because a plan may come back.
    """

    model: str
    epoch: Epoch
    spare_bytes: float = 0


@dataclass(frozen=True, slots=True)
class Complain:
    """Count and log trouble that is survived; `kind` is the counter's name."""

    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Study:
    """Find out what a Prepare needs here (it lowers the longest requests), beside the session's thread: `Studied`."""

    prepare: Prepare


@dataclass(frozen=True, slots=True)
class Build:
    """Build a device's Program for a request shape beside the session's thread; the shell reports `Built`.

    number: of the order, which `Built` carries. weights: of the epoch, to which the kernels are bound.
    """

    number: int
    spec: Spec
    plan: Plan
    shape: RequestShape
    weights: Mapping[WeightRef, Weight]


@dataclass(frozen=True, slots=True)
class Admit:
    """Let peers read at this device's endpoint what it sends them under an epoch, each with its own token."""

    model: str
    epoch: Epoch
    peers: tuple[Peer, ...]


@dataclass(frozen=True, slots=True)
class Join:
    """Read at the endpoints of peers what they send under an epoch; the shell reports `PeerJoined` for each of them."""

    model: str
    epoch: Epoch
    peers: tuple[Peer, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """What an epoch was admitted and joined for is over."""

    model: str
    epoch: Epoch


Command = Publish | Subscribe | Unsubscribe | Load | Unload | Study | Build | Complain | Admit | Join | Part
