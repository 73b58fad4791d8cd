"""The agent's network events, its two connections, and its subscriptions."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Final

from device_agent.loader import TileIn
from device_agent.probes import Prober
from hepti_mqtt.config.process import RateLimitedLog
from hepti_mqtt.core.errors import NetworkError, WireError
from hepti_mqtt.core.ids import PLANNER, PlanVersion
from hepti_mqtt.protocol import frames, messages
from hepti_mqtt.protocol.frames import held_bytes
from hepti_mqtt.protocol.keys import Channel
from hepti_mqtt.protocol.messages import Status
from hepti_mqtt.protocol.topics import ParsedTopic, Topics
from hepti_mqtt.runtime.machinery import Plane
from hepti_mqtt.runtime.worker.interface import FrameIn, MessageIn, WorkerEvent
from hepti_mqtt.transport.base import Inbox, OnMessage, State, Will
from hepti_mqtt.transport.broker_connection import BrokerConnection

# ----------------------------------------------------------------------------------------------------------------------
# Events of the session thread in addition to the session's own.


@dataclass(frozen=True, slots=True)
class PlaneState:
    """The state of one plane's connection, or the broker's answer to a subscription or publish."""

    plane: Plane
    state: State


@dataclass(frozen=True, slots=True)
class PlannerStatus:
    """The planner's retained status, or its will."""

    status: Status


@dataclass(frozen=True, slots=True)
class OwnStatus:
    """The published status of this device."""

    status: Status


@dataclass(frozen=True, slots=True)
class Stop:
    """The agent must end, with an error or without; announce_offline: publish `offline`."""

    error: Exception | None = None
    announce_offline: bool = True


@dataclass(frozen=True, slots=True)
class PeerProbeDue:
    """A probe of the path to a peer is due."""


AgentEvent = WorkerEvent | PlaneState | PlannerStatus | OwnStatus | Stop | PeerProbeDue


# ----------------------------------------------------------------------------------------------------------------------
# The agent's two connections: arrivals are parsed here, on the network threads, then queued.


Body = bytes | memoryview  # a view, if it arrives on the data plane

PLANES: Final[tuple[Plane, ...]] = ("control", "data")
# A hanging broker must not delay shutdown: a stopped process has two seconds in total.
DATA_CLOSE_S: Final = 0.1
CONTROL_CLOSE_S: Final = 0.8
QOS: Final[Mapping[Plane, int]] = {"control": 1, "data": 0}


MakeTransport = Callable[[Plane, OnMessage, Callable[[State], None]], BrokerConnection]


class Network:
    """Both planes of one device.

    control (QoS 1): commands, work frames, tiles, statuses. data (QoS 0): activations and probes. Invalid messages are
    counted and dropped. A full inbox refuses work frames and activations only: a run is repeated, a command is not.
    prober: of the path to the broker. on_tile: gets the bodies of tile frames.
    """

    def __init__(
        self,
        topics: Topics,
        device: str,
        inbox: Inbox[AgentEvent],
        prober: Prober,
        on_tile: Callable[[TileIn], None],
        complaints: RateLimitedLog,
        make_transport: MakeTransport,
    ) -> None:
        self._topics, self._device = topics, device
        self._inbox, self.prober, self._tiles, self._complaints = inbox, prober, on_tile, complaints
        self._parsers: Mapping[str, Callable[[ParsedTopic, Body], None]] = {
            "command": lambda _, payload: inbox.post(MessageIn(*messages.decode_sealed(payload))),
            "work": self._work,
            "weights": lambda _, payload: self._weights(payload),
            "planner_status": lambda _, payload: inbox.post(PlannerStatus(messages.decode_status(payload))),
            "status": lambda _, payload: self._own_status(payload),
            "caps": lambda _, payload: self._repair(topics.caps(device), payload),
            "activation": self._activation,
            "probe": lambda _, payload: self._probe(payload),
        }
        self.channel: Channel | None = None  # seals messages to the planner
        self._sealing = threading.Lock()
        self._retained: dict[str, bytes] = {}  # this device's last retained message of each topic
        self._transports: Mapping[Plane, BrokerConnection] = {
            plane: make_transport(plane, self._on_message, partial(self._enqueue_state, plane)) for plane in PLANES
        }
        base: Mapping[Plane, Sequence[str]] = {
            "control": (
                topics.command(device),
                topics.weights(device),
                topics.planner_status(),
                topics.status(device),
                topics.caps(device),
            ),
            "data": (topics.probe(device),),
        }
        self.base_subscription_tokens = {(plane, self.subscribe(plane, filters)) for plane, filters in base.items()}

    def connect(self, plane: Plane, timeout_s: float) -> None:
        """Connect one plane; raises NetworkError, RefusedError or ConfigError."""
        self._transports[plane].connect(timeout_s)

    def publish(self, plane: Plane, topic: str, payload: bytes, qos: int, retain: bool = False) -> None:
        """Publish on one plane; raises NetworkError if a QoS 1 message finds the queue full."""
        if retain:
            self._retained[topic] = payload
        if topic == self._topics.reports(self._device) and payload[: len(frames.MAGIC)] != frames.MAGIC:
            with self._sealing:
                channel = self.channel
                payload = payload if channel is None else channel.seal(payload)
        self._transports[plane].publish(topic, payload, qos, retain)

    def send(self, topic: str, *parts: Body) -> None:
        """Publish a tensor on the data plane, its payload in parts; the caller may reuse them afterwards."""
        self._transports["data"].send(topic, *parts)

    def probe_large(self, now: float) -> bool:
        """Send a large probe to the broker if it is due; return whether it was. now: by time.perf_counter()."""
        due = self.prober.due_large_probe(now, busy=True)
        for payload in due:
            self.publish("data", self._topics.probe(self._device), payload, 0)
        return bool(due)

    def subscribe(self, plane: Plane, filters: Sequence[str]) -> int:
        """Subscribe one plane to filters; a `PlaneState` with `Subscribed` and the returned token follows."""
        return self._transports[plane].subscribe([(f, QOS[plane]) for f in filters])

    def unsubscribe(self, plane: Plane, filters: Sequence[str]) -> None:
        """Leave filters."""
        self._transports[plane].unsubscribe(filters)

    def is_connected(self) -> bool:
        """Return whether all planes are connected at this moment."""
        return all(transport.connected for transport in self._transports.values())

    def counters(self) -> dict[str, int]:
        """Return the counters of both planes, as heartbeats carry them."""
        both = self._transports.items()
        return {f"{plane}_{name}": n for plane, link in both for name, n in asdict(link.counts()).items()}

    def close(self, last_message: Will | None) -> None:
        """Close both connections; control publishes `last_message` first."""
        self._retained = {} if last_message is None else {last_message.topic: last_message.payload}
        self._transports["data"].close(timeout_s=DATA_CLOSE_S)
        self._transports["control"].close(last_message, CONTROL_CLOSE_S)

    # -- on the network threads ----------------------------------------------------------------------------------

    def _on_message(self, topic: str, payload: Body) -> None:
        try:
            parsed = self._topics.parse(topic)
            parser = self._parsers.get(parsed.kind)
            if parser is None:
                raise WireError(f"unexpected topic {topic}")
            parser(parsed, payload)
        except WireError as exc:
            self._complaints.record("bad_payload", f"dropped {len(payload)} bytes on {topic[:200]!r}: {exc}")

    def _enqueue_state(self, plane: Plane, state: State) -> None:
        self._inbox.post(PlaneState(plane, state))

    def _enqueue(self, event: AgentEvent, nbytes: int) -> None:
        if not self._inbox.offer(event, nbytes):
            self._complaints.record("inbox_overflow", f"the inbox is full; dropped an event of {nbytes} bytes")

    def _own_status(self, payload: Body) -> None:
        """Repair this device's retained status, unless a later start of this name has published it."""
        topic = self._topics.status(self._device)
        try:
            status = messages.decode_status(payload)
            own = messages.decode_status(self._retained[topic]) if topic in self._retained else status
        except WireError:
            self._repair(topic, payload)
            raise
        if status.start <= own.start:
            self._repair(topic, payload)
        self._inbox.post(OwnStatus(status))

    def _repair(self, topic: str, payload: Body) -> None:
        """Publish a retained message again if another one has replaced it.

        On this thread, without delay: a planner soon drops a device that seems to have left.
        """
        own = self._retained.get(topic, payload)
        if own != payload:
            self._complaints.record("repaired", f"published {topic} again: another message had replaced it")
            with suppress(NetworkError):  # its queue is full, or it is closed: the next message is repaired, too
                self._transports["control"].publish(topic, bytes(own), 1, True)

    def _work(self, parsed: ParsedTopic, payload: Body) -> None:
        frame = frames.decode(payload)
        if frame.kind != "work" or frame.model != parsed.model or frame.source != PLANNER:
            raise WireError(
                f"expected a work frame of the planner for {parsed.model}, got kind {frame.kind} from {frame.source}"
            )
        self._enqueue(FrameIn(frame), held_bytes(len(payload)))

    def _weights(self, payload: Body) -> None:
        frame = frames.decode(payload)
        if frame.kind != "tile":
            raise WireError(f"expected a tile frame, got kind {frame.kind}")
        assert isinstance(frame.body, memoryview)  # a view of the payload
        self._tiles(TileIn(frame.body))

    def _activation(self, parsed: ParsedTopic, payload: Body) -> None:
        frame = frames.decode(payload)
        # The broker's access list binds the topic's sender, not the frame's.
        claim = (frame.kind, frame.model, frame.layer, frame.source)
        if claim != ("tensor", parsed.model, parsed.layer, parsed.source):
            raise WireError(f"the frame's header {claim} contradicts its topic")
        self._enqueue(FrameIn(frame), held_bytes(len(payload)))

    def _probe(self, payload: Body) -> None:
        now = time.perf_counter()
        if bytes(payload[:4]) != frames.MAGIC:
            return  # a trial of the largest packet
        frame = frames.decode(payload)
        if frame.kind == "probe" and frame.source == self._device:
            self.prober.on_answer(frame, now)


# ----------------------------------------------------------------------------------------------------------------------
# The filters of the agent's connections, and the plan versions that wait for their acknowledgement.


Key = tuple[str, PlanVersion]
Filter = tuple[Plane, str]
Token = tuple[Plane, int]


class Subscriptions:
    """Filters with their acknowledgements: activations on the data plane, work frames on the control plane.

    A filter of several plan versions is subscribed once, so that brokers deliver nothing twice. The session decides
    which filters no version needs any more.
    """

    def __init__(self, network: Network) -> None:
        self._network = network
        self._held: dict[Filter, Token] = {}
        self._waiting: dict[Token, set[Key]] = {}
        self._pending: dict[Key, set[Token]] = {}  # of plan versions that wait for an acknowledgement

    def subscribe(self, model: str, plan_version: PlanVersion, filters: Iterable[str], work_topic: str) -> bool:
        """Subscribe to the filters of a plan version; return whether all are acknowledged already.

        filters: of activations. work_topic: of its work frames.
        """
        key = (model, plan_version)
        needed: list[Filter] = [("control", work_topic), *(("data", f) for f in filters)]
        new = [f for f in needed if f not in self._held]
        for plane in dict.fromkeys(plane for plane, _ in new):
            own = [name for p, name in new if p == plane]
            token = (plane, self._network.subscribe(plane, own))
            self._waiting[token] = set()
            self._held.update(((plane, name), token) for name in own)
        tokens = {self._held[f] for f in needed} & self._waiting.keys()
        for token in tokens:
            self._waiting[token].add(key)
        if tokens:
            self._pending[key] = tokens
        return not tokens

    def acknowledged(self, plane: Plane, token: int) -> list[Key]:
        """Handle an acknowledgement; return the plan versions with all filters acknowledged."""
        done = []
        for key in self._waiting.pop((plane, token), ()):
            tokens = self._pending.get(key)
            if tokens is not None:
                tokens.discard((plane, token))
                if not tokens:
                    del self._pending[key]
                    done.append(key)
        return done

    def refused(self, plane: Plane, token: int) -> list[Key]:
        """Handle a refusal: forget its filters, and return the plan versions that wait for them."""
        keys = self._waiting.pop((plane, token), set())
        names = [f for f, t in self._held.items() if t == (plane, token)]
        self._drop(names)
        return [key for key in keys if key in self._pending]

    def unsubscribe(self, filters: Iterable[str], work_topics: Iterable[str] = ()) -> None:
        """Unsubscribe from activations and work topics that no plan version needs any more."""
        gone: list[Filter] = [*(("data", f) for f in filters), *(("control", topic) for topic in work_topics)]
        self._drop([f for f in gone if f in self._held])

    def forget(self, model: str, plan_version: PlanVersion) -> None:
        """Stop waiting for a plan version's acknowledgements."""
        self._pending.pop((model, plan_version), None)

    def _drop(self, filters: list[Filter]) -> None:
        for plane in dict.fromkeys(plane for plane, _ in filters):
            self._network.unsubscribe(plane, [name for p, name in filters if p == plane])
        for f in filters:
            del self._held[f]
