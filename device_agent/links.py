"""This device's mesh endpoint and its connections to peers, for the session thread."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from statistics import median
from typing import Final, cast, get_args

from device_agent.config import AgentConfig, listen_address, login_certificate, mesh_address
from device_agent.loader import PeerMessageIn, TileIn, TilePeerChanged
from device_agent.network import Network
from device_agent.probes import ANSWER_MARK, PeerProbes, Prober
from device_agent.tile_peers import MessageKind
from hepti_mqtt.config.process import RateLimitedLog
from hepti_mqtt.core.errors import ConfigError, WireError
from hepti_mqtt.core.ids import PlanVersion
from hepti_mqtt.protocol import frames
from hepti_mqtt.protocol.frames import ExchangeCache, Frame, TensorArrival
from hepti_mqtt.protocol.messages import MAX_TROUBLE, Endpoint, PeerStats
from hepti_mqtt.protocol.plausible import MAX_PEERS
from hepti_mqtt.protocol.topics import MAX_TOPIC_BYTES, Topics
from hepti_mqtt.runtime.machinery import Publish
from hepti_mqtt.runtime.worker import interface
from hepti_mqtt.transport.codec import publish_head
from hepti_mqtt.transport.mesh import Mesh
from hepti_mqtt.transport.peer import MESH_VERSION, Dropped, Joined, Lost, MeshEvent, Refused
from hepti_mqtt.transport.sockets import MeshTls, mesh_possible

# The largest frame after the longest topic: a plan's requests may have any size.
LARGEST_BYTES: Final = 2 + MAX_TOPIC_BYTES + frames.frame_bytes(frames.MAX_BODY_BYTES)

TILES: Final = "tiles"  # the last part of the key of a connection for tiles
TILE_LAYER: Final = 0
NO_VERSION: Final = PlanVersion(0, 0)
TileInput = PeerMessageIn | TileIn | TilePeerChanged

LinkEvent = TensorArrival | interface.FrameIn | interface.PeerEvent


class MeshLinks:
    """Executes mesh commands, and returns arrivals as events of the session; for the session thread alone.

    Listens on `host` and `port` (0: any free port); raises OSError if it cannot. Frames are views of receive buffers.
    on_tiles: takes peers' messages about tiles, for the loader's thread.
    """

    def __init__(
        self,
        topics: Topics,
        device: str,
        boot: int,
        complaints: RateLimitedLog,
        host: str,
        port: int = 0,
        tls: MeshTls | None = None,
        on_tiles: Callable[[TileInput], None] = lambda _: None,
    ) -> None:
        self._on_tiles = on_tiles
        self.probes = PeerProbes(device, boot)
        self._topics, self._device, self._complaints = topics, device, complaints
        self._arrived: list[LinkEvent] = []
        self._exchanges = ExchangeCache()
        self._admitted: dict[tuple[str, PlanVersion], frozenset[str]] = {}
        self._joined: dict[tuple[str, PlanVersion], frozenset[str]] = {}
        self._traffic = (0, 0)
        self._fingerprint = "" if tls is None else tls.fingerprint
        self.mesh = Mesh(host, port, user=device, on_message=self._message, on_event=self._event, tls=tls)

    def endpoint(self, address: str) -> Endpoint:
        """Return the endpoint by which peers connect to this device at `address`."""
        return Endpoint(address, self.mesh.port, self._fingerprint)

    @property
    def tensor_traffic(self) -> tuple[int, int]:
        """Return the frames and bytes sent and received, per receiver, without probes."""
        (count, nbytes), (more, more_bytes) = self._traffic, self.mesh.channels.traffic
        return count + more, nbytes + more_bytes

    @property
    def compiled_frames(self) -> int:
        """Return how many of these frames compiled code sent and received; from any thread."""
        return self.mesh.channels.traffic[0]

    @property
    def has_peers(self) -> bool:
        """Return whether frames may arrive from a peer."""
        return bool(self._joined)

    def wait(self, timeout_s: float | None) -> list[LinkEvent]:
        """Wait for frames and events from peers, until woken or for `timeout_s`, and return them."""
        self.mesh.wait(timeout_s)
        arrived, self._arrived = self._arrived, []
        return arrived

    def publish(self, command: Publish) -> None:
        """Send a message to its readers without copying header or body."""
        readers = self.mesh.publish(command.topic, command.payload, command.body)
        count, nbytes = self._traffic
        self._traffic = count + readers, nbytes + readers * (len(command.payload) + command.body.nbytes)
        if not readers:
            self._complaints.record("mesh_unread", f"no peer reads {command.topic}: the reader is disconnected")

    def admit(self, command: interface.AllowPeers) -> None:
        """Admit peers as readers."""
        key = command.key
        for peer in command.peers:
            filters = self._topics.activations_from(command.model, self._device, peer.device)
            self.mesh.admit(peer.device, key, peer.token_in, filters)
            if peer.token_out:  # both read each other: they exchange tiles on any of the plan's routes
                topic = self._topics.activation(command.model, TILE_LAYER, peer.device, self._device)
                self.mesh.join(peer.device, (*key, TILES), peer.endpoint, peer.token_out, (topic,), LARGEST_BYTES)
        self._admitted[key] = self._admitted.get(key, frozenset()).union(peer.device for peer in command.peers)

    def join(self, command: interface.JoinPeers) -> None:
        """Connect to peers as their reader."""
        key = command.key
        self._joined[key] = self._joined.get(key, frozenset()).union(peer.device for peer in command.peers)
        for peer in command.peers:
            filters = self._topics.activations_from(command.model, peer.device, self._device)
            self.mesh.join(peer.device, key, peer.endpoint, peer.token_out, filters, LARGEST_BYTES)

    def leave(self, command: interface.LeavePeers) -> None:
        """End a plan's admissions and connections."""
        key = command.key
        for peer in self._joined.pop(key, ()):
            self.mesh.leave(peer, key)
        for peer in self._admitted.pop(key, ()):
            self.mesh.leave(peer, (*key, TILES))
            self.mesh.expel(peer, key)
            if not any(peer in peers for (model, _), peers in self._admitted.items() if model == command.model):
                self._on_tiles(TilePeerChanged(peer, command.model, is_joined=False))

    def send_tiles(self, peer: str, model: str, kind: MessageKind, body: bytes) -> bool:
        """Send the loader's message to a peer; return whether the peer reads it. Safe from any thread."""
        frame = Frame(kind, model, NO_VERSION, 0, source=self._device, shape=(len(body),), body=body)
        topic = self._topics.activation(model, TILE_LAYER, self._device, peer)
        return bool(self.mesh.publish(topic, *frames.encode_parts(frame)))

    def probe(self, now: float, busy: bool) -> None:
        """Probe the next of the peers that read this device's frames and send it theirs."""
        models = self._mutual_peers()
        due = self.probes.due(now, models, busy)
        if due is not None:
            peer, payloads = due
            self._send_probes(models[peer], peer, payloads)

    def probe_large(self, peer: str, now: float) -> bool:
        """Send a peer a large probe if it is due; return whether it was."""
        model = self._mutual_peers().get(peer)
        due = [] if model is None else self.probes.probers()[peer].due_large_probe(now, busy=True)
        if model is not None:
            self._send_probes(model, peer, due)
        return bool(due)

    def _mutual_peers(self) -> Mapping[str, str]:
        """Return the peers connected in both directions, each with a model of such a plan."""
        return {
            peer: key[0] for key, peers in self._joined.items() for peer in peers & self._admitted.get(key, frozenset())
        }

    def _send_probes(self, model: str, peer: str, payloads: Iterable[bytes]) -> None:
        for payload in payloads:
            self.mesh.publish(self._topics.activation(model, 0, self._device, peer), payload)

    def peer_stats(self) -> Mapping[str, PeerStats]:
        """Return the traffic of at most MAX_PEERS peers, current and newest ones first. Thread-safe."""
        stats = self.mesh.stats()
        current = frozenset[str]().union(*list(self._joined.values()), *list(self._admitted.values()))
        newest = list(stats)[::-1]
        names = sorted(newest, key=lambda name: name not in current)[:MAX_PEERS]
        return {
            name: PeerStats(**asdict(e) | {"joined": int(e.joined), "trouble": e.trouble[:MAX_TROUBLE]})
            for name, e in ((name, stats[name]) for name in names)
        }

    def close(self) -> None:
        """Close the endpoint and every connection."""
        self.mesh.close()

    # -- called by the mesh, in `wait` and `publish` ---------------------------------------------------------------

    def _message(self, peer: str, topic: str, payload: memoryview) -> None:
        arrived = self._exchanges.arrival(peer, topic, payload) or self._decode_frame(peer, topic, payload)
        if arrived is not None:
            count, nbytes = self._traffic
            self._traffic = count + 1, nbytes + payload.nbytes
            self._arrived.append(arrived)

    def _decode_frame(self, peer: str, topic: str, payload: memoryview) -> interface.FrameIn | None:
        """Read and check a whole frame; return it if it is a tensor of its sender."""
        try:
            parsed, frame = self._topics.parse(topic), frames.decode(payload)
            if frame.kind == "probe" and parsed.kind == "activation" and (frame.source, parsed.source) == (peer, peer):
                self._probed(peer, parsed.model, frame)
                return None
            if frame.kind in get_args(MessageKind) and (frame.source, frame.model) == (peer, parsed.model):
                self._on_tiles(self._tile_input(peer, parsed.model, frame))
                return None
            # A peer publishes in its own name only: topic and frame must name it as the source.
            claim = (frame.kind, frame.model, frame.layer, frame.source, parsed.source)
            if parsed.kind != "activation" or claim != ("tensor", parsed.model, parsed.layer, peer, peer):
                raise WireError(f"the frame's header {claim} contradicts its topic or its sender")
        except WireError as exc:
            self._complaints.record("bad_payload", f"dropped {len(payload)} bytes of {peer} on {topic[:200]!r}: {exc}")
            return None
        self._exchanges.learn(peer, topic, payload, frame, publish_head(topic, payload.nbytes, MESH_VERSION))
        return interface.FrameIn(frame)

    @staticmethod
    def _tile_input(peer: str, model: str, frame: Frame) -> TileInput:
        assert isinstance(frame.body, memoryview)  # a view of the payload
        if frame.kind == "tile":
            return TileIn(frame.body, peer)
        return PeerMessageIn(peer, model, cast(MessageKind, frame.kind), bytes(frame.body))

    def _probed(self, peer: str, model: str, frame: Frame) -> None:
        if frame.numbers == ANSWER_MARK:
            self.probes.on_answer(peer, frame, time.perf_counter())
            return
        answer = frames.encode(self.probes.answer(frame))
        self.mesh.publish(self._topics.activation(model, 0, self._device, peer), answer)

    def _event(self, event: MeshEvent) -> None:
        match event:
            case Joined(peer, (str(model), PlanVersion() as plan_version)):
                self._arrived.append(interface.PeerJoined(peer, model, plan_version))
            case Refused(peer, (str(model), PlanVersion() as plan_version)):
                self._arrived.append(interface.PeerRefused(peer, model, plan_version))
            case Joined(peer, (str(model), PlanVersion(), _)):
                self._on_tiles(TilePeerChanged(peer, model, is_joined=True))
            case Lost(peer, reason):
                self._on_tiles(TilePeerChanged(peer, None, is_joined=False))
                self._arrived.append(interface.PeerLost(peer, reason))
            case Dropped(peer, nbytes):
                self._arrived.append(interface.PeerFrameDropped(peer, nbytes))


# ----------------------------------------------------------------------------------------------------------------------
# Opening the mesh endpoint from the agent's options and the broker's URL.


def open_links(
    config: AgentConfig,
    topics: Topics,
    boot: int,
    complaints: RateLimitedLog,
    on_tiles: Callable[[TileInput], None] = lambda _: None,
) -> MeshLinks | None:
    """Return an agent's links to peers, None if all tensors go through the broker.

    Raises ConfigError for a port in use or an invalid certificate.
    """
    if not config.mesh or not mesh_possible() or (address := mesh_address(config)) is None:
        return None
    certificate = config.mesh_tls or login_certificate(config.url)
    if config.url.tls and certificate is None:
        config.log.info("tensors go through the encrypted broker; --mesh-tls enables direct peer connections")
        return None
    tls = None if certificate is None else MeshTls.load(certificate, certificate)
    try:
        return MeshLinks(
            topics, config.device_id, boot, complaints, listen_address(address), config.mesh_port, tls, on_tiles
        )
    except OSError as exc:
        if config.mesh_port:
            raise ConfigError(f"cannot listen on --mesh-port {config.mesh_port}: {exc}; choose another port") from exc
        complaints.record("mesh_closed", f"no endpoint for peers at {address}: {exc}")
        return None


# ----------------------------------------------------------------------------------------------------------------------
# Large probes in the pauses between runs: a busy device is never idle for a second.
#
# Without them a link that slows down under continuous requests stays unnoticed. One large probe is in flight at a time,
# so that it has this device's links to itself. Each path has its usual interval; it is probed immediately only if runs
# wait much longer for peers than before, or if another path has slowed down.


APART_S: Final = 0.3  # at least between two probes
BROKER_PATH: Final = ""
REMEMBERED_RUNS: Final = 8  # recent runs, for the median wait
LONG_WAIT_RATIO: Final = 1.5  # a long wait is over so many times the median ...
LONG_WAIT_S: Final = 0.02  # ... and this: shorter ones vary without a cause
LONG_WAITS: Final = 2  # in a row


class IdleProbes:
    """Probes the paths to the broker and to peers, in turn; for the session thread. links: None without mesh."""

    def __init__(self, network: Network, links: MeshLinks | None) -> None:
        self._network, self._links = network, links
        self._next_s = float("-inf")
        self._turn = self._falls = self._long = 0
        self._waits: deque[float] = deque(maxlen=REMEMBERED_RUNS)

    def on_idle(self, now: float, waited_s: float | None) -> None:
        """Probe if due, while no run is active; waited_s: this device's idle time in the run that just ended, if any.

        now: by time.perf_counter().
        """
        probers = {BROKER_PATH: self._network.prober, **({} if self._links is None else self._links.probes.probers())}
        if (waited_s is not None and self._waits_longer(waited_s)) or self._bandwidth_fell(probers):
            for prober in probers.values():
                prober.expect_slower()
        if now < self._next_s:
            return
        ways = sorted(probers)
        for offset in range(len(ways)):
            place = (self._turn + offset) % len(ways)
            if self._probe(ways[place], now):
                self._turn = place + 1
                self._next_s = now + APART_S
                return

    def _probe(self, way: str, now: float) -> bool:
        if way == BROKER_PATH or self._links is None:
            return self._network.probe_large(now)
        return self._links.probe_large(way, now)

    def _waits_longer(self, waited_s: float) -> bool:
        """Return whether runs have begun to wait much longer than recent ones."""
        is_full = len(self._waits) == REMEMBERED_RUNS
        is_long = is_full and waited_s > LONG_WAIT_RATIO * median(self._waits) + LONG_WAIT_S
        self._long = self._long + 1 if is_long else 0
        if self._long < LONG_WAITS:
            if not self._long:
                self._waits.append(waited_s)
            return False
        self._waits.clear()
        self._long = 0
        return True

    def _bandwidth_fell(self, probers: Mapping[str, Prober]) -> bool:
        """Return whether a path's bandwidth has fallen since the last call: all paths share this device's link."""
        before, self._falls = self._falls, sum(prober.bandwidth_drops for prober in probers.values())
        return self._falls > before
