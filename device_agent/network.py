"""The agent's two connections: what arrives is parsed here, on the network threads, and only handed over."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Final, Protocol

from device_agent.complaints import Complaints
from device_agent.events import (
    Acknowledged,
    AgentEvent,
    FiltersRefused,
    LinkDown,
    LinkUp,
    OwnStatus,
    PlannerStatus,
)
from device_agent.loader_thread import TileIn
from device_agent.probe import Prober
from hepti_mqtt.errors import WireError
from hepti_mqtt.ids import ALL, PLANNER
from hepti_mqtt.runtime.device.events import FrameIn, MessageIn
from hepti_mqtt.runtime.publish import Plane
from hepti_mqtt.transport import (
    Connected,
    Counts,
    Disconnected,
    Inbox,
    OnMessage,
    Refused,
    State,
    Subscribed,
    Transport,
    Will,
)
from hepti_mqtt.wire import frames, messages
from hepti_mqtt.wire.payloads import held_bytes
from hepti_mqtt.wire.topics import Parsed, Topics

Body = bytes | memoryview  # what comes over the connection for tensors is a view

PLANES: Final[tuple[Plane, ...]] = ("control", "data")
# A broker that hangs must not hold up the end: who is stopped has two seconds, all in all.
DATA_CLOSE_S: Final = 0.1
CONTROL_CLOSE_S: Final = 0.8
QOS: Final[Mapping[Plane, int]] = {"control": 1, "data": 0}


class MakeTransport(Protocol):
    """Makes the transport of one plane, not yet connected."""

    def __call__(self, plane: Plane, on_message: OnMessage, on_state: Callable[[State], None]) -> Transport:
        """Return it."""
        ...


class Network:
    """Both planes of one device.

    control (QoS 1): commands, requests, tiles, statuses. data (QoS 0): activations and probes. What is not valid is
    counted and dropped. A full inbox refuses requests and activations alone: a run that misses one is issued again, but
    nobody repeats a command. prober: of the broker's way. tiles: gets the bodies of tile frames.
    """

    def __init__(
        self,
        topics: Topics,
        device: str,
        inbox: Inbox[AgentEvent],
        prober: Prober,
        tiles: Callable[[TileIn], None],
        complaints: Complaints,
        make: MakeTransport,
    ) -> None:
        self._topics, self._device = topics, device
        self._inbox, self.prober, self._tiles, self._complaints = inbox, prober, tiles, complaints
        self._parsers: Mapping[str, Callable[[Parsed, Body], None]] = {
            "command": lambda _, payload: inbox.post(MessageIn(messages.decode(payload))),
            "work": self._work,
            "weights": self._weights,
            "planner_status": lambda _, payload: inbox.post(PlannerStatus(messages.decode_status(payload))),
            "status": lambda _, payload: inbox.post(OwnStatus(messages.decode_status(payload))),
            "activation": self._activation,
            "probe": lambda _, payload: self._probe(payload),
        }
        self._transports: Mapping[Plane, Transport] = {
            plane: make(plane, self._hear, self._state_of(plane)) for plane in PLANES
        }
        base: Mapping[Plane, Sequence[str]] = {
            "control": (
                topics.command(device),
                *topics.weights_for(device),
                topics.planner_status(),
                topics.status(device),
            ),
            "data": (topics.probe(device),),
        }
        self.base_tokens = {(plane, self.subscribe(plane, filters)) for plane, filters in base.items()}

    def connect(self, plane: Plane, timeout_s: float) -> None:
        """Connect one plane; raises NetworkError, RefusedError or ConfigError."""
        self._transports[plane].connect(timeout_s)

    def publish(self, plane: Plane, topic: str, payload: bytes, qos: int, retain: bool = False) -> None:
        """Publish on one plane; raises NetworkError if a QoS 1 message finds the queue full."""
        self._transports[plane].publish(topic, payload, qos, retain)

    def send(self, topic: str, *parts: Body) -> None:
        """Publish a tensor on the data plane, its payload in parts, which are the caller's again on return."""
        self._transports["data"].send(topic, *parts)

    def probe_large(self, now: float) -> bool:
        """Send a large probe by the broker's way, if one is due; return whether it was. now: by time.perf_counter()."""
        due = self.prober.large_due(now, busy=True)
        for payload in due:
            self.publish("data", self._topics.probe(self._device), payload, 0)
        return bool(due)

    def subscribe(self, plane: Plane, filters: Sequence[str]) -> int:
        """Subscribe one plane to filters; `Acknowledged` with the returned token follows."""
        return self._transports[plane].subscribe([(f, QOS[plane]) for f in filters])

    def unsubscribe(self, plane: Plane, filters: Sequence[str]) -> None:
        """Leave filters."""
        self._transports[plane].unsubscribe(filters)

    def stands(self) -> bool:
        """Return whether all planes are connected at this moment."""
        return all(transport.connected for transport in self._transports.values())

    def counts(self) -> dict[Plane, Counts]:
        """Return the counters of both planes."""
        return {plane: transport.counts() for plane, transport in self._transports.items()}

    def counters(self) -> dict[str, int]:
        """Return the counters of both planes, as heartbeats carry them."""
        both = self.counts().items()
        return {f"{plane}_{name}": n for plane, counts in both for name, n in asdict(counts).items()}

    def close(self, last: Will | None) -> None:
        """Close both connections; `last` is what control publishes before it goes."""
        self._transports["data"].close(timeout_s=DATA_CLOSE_S)
        self._transports["control"].close(last, CONTROL_CLOSE_S)

    # -- on the network threads ----------------------------------------------------------------------------------

    def _hear(self, topic: str, payload: Body) -> None:
        try:
            parsed = self._topics.parse(topic)
            parser = self._parsers.get(parsed.kind)
            if parser is None:
                raise WireError(f"nothing is expected on {topic}")
            parser(parsed, payload)
        except WireError as exc:
            self._complaints.add("bad_payload", f"dropped {len(payload)} bytes on {topic[:200]!r}: {exc}")

    def _offer(self, event: AgentEvent, nbytes: int) -> None:
        if not self._inbox.offer(event, nbytes):
            self._complaints.add("inbox_overflow", f"the inbox is full; dropped an event of {nbytes} bytes")

    def _work(self, parsed: Parsed, payload: Body) -> None:
        frame = frames.decode(payload)
        if frame.kind != "work" or frame.model != parsed.model or frame.source != PLANNER:
            raise WireError(f"a frame of kind {frame.kind} of {frame.source} is no request to {parsed.model}")
        self._offer(FrameIn(frame), held_bytes(len(payload)))

    def _weights(self, parsed: Parsed, payload: Body) -> None:
        frame = frames.decode(payload)
        if frame.kind != "tile":
            raise WireError(f"a frame of kind {frame.kind} is no tile")
        assert isinstance(frame.body, memoryview)  # what was decoded is a view of the payload
        self._tiles(TileIn(frame.body, mine=parsed.to != ALL))

    def _activation(self, parsed: Parsed, payload: Body) -> None:
        frame = frames.decode(payload)
        # The topic's sender is bound by the broker's access list, the frame's is not.
        said = (frame.kind, frame.model, frame.layer, frame.source)
        if said != ("tensor", parsed.model, parsed.layer, parsed.source):
            raise WireError(f"the frame says {said}, which is not what its topic says")
        self._offer(FrameIn(frame), held_bytes(len(payload)))

    def _probe(self, payload: Body) -> None:
        now = time.perf_counter()
        if bytes(payload[:4]) != frames.MAGIC:
            return  # a trial of the largest packet
        frame = frames.decode(payload)
        if frame.kind == "probe" and frame.source == self._device:
            self.prober.received(frame, now)

    def _state_of(self, plane: Plane) -> Callable[[State], None]:
        def on_state(state: State) -> None:
            match state:
                case Connected(protocol, largest, local):
                    self._inbox.post(LinkUp(plane, protocol, largest, local))
                case Disconnected(reason):
                    self._inbox.post(LinkDown(plane, reason))
                case Subscribed(token):
                    self._inbox.post(Acknowledged(plane, token))
                case Refused(token, topics, reason):
                    self._inbox.post(FiltersRefused(plane, token, topics, reason))

        return on_state
