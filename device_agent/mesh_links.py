"""This device's own endpoint and the peers that it hears directly, as the session thread uses them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final

from device_agent.complaints import Complaints
from device_agent.peer_probes import ANSWER, PeerProbes
from hepti_mqtt.errors import WireError
from hepti_mqtt.ids import Epoch
from hepti_mqtt.runtime.device.commands import Admit, Join, Part
from hepti_mqtt.runtime.device.events import FrameIn, PeerBehind, PeerJoined, PeerLost, PeerRefused
from hepti_mqtt.runtime.publish import Publish
from hepti_mqtt.transport.mesh import Address, Dropped, Joined, Lost, Mesh, MeshEvent, Refused
from hepti_mqtt.wire import frames
from hepti_mqtt.wire.arrivals import Arrival, Exchanges
from hepti_mqtt.wire.frames import Frame
from hepti_mqtt.wire.peers import MAX_PEERS, MAX_TROUBLE, Edge
from hepti_mqtt.wire.topics import MAX_TOPIC_BYTES, Topics

if TYPE_CHECKING:
    from collections.abc import Callable

# The largest frame there is, behind the longest topic: a plan's requests may be of any size.
LARGEST_BYTES: Final = 2 + MAX_TOPIC_BYTES + frames.frame_bytes(frames.MAX_BODY_BYTES)

LinkEvent = Arrival | FrameIn | PeerJoined | PeerRefused | PeerLost | PeerBehind


class MeshLinks:
    """Carries mesh commands out, and gives what has come as events of the session; for the session thread alone.

    make: opens the endpoint with callbacks for messages and events. probes: measures the ways to peers. Frames are
    views of the buffers that they came in.
    """

    def __init__(
        self,
        topics: Topics,
        device: str,
        make: Callable[[Callable[[str, str, memoryview], None], Callable[[MeshEvent], None]], Mesh],
        complaints: Complaints,
        probes: PeerProbes,
    ) -> None:
        self.probes = probes
        self._topics, self._device, self._complaints = topics, device, complaints
        self._arrived: list[LinkEvent] = []
        self._exchanges = Exchanges()
        self._admitted: dict[tuple[str, Epoch], frozenset[str]] = {}
        self._joined: dict[tuple[str, Epoch], frozenset[str]] = {}
        self.tensors = (0, 0)  # frames and bytes that came and went, each receiver counted; no probes
        self.mesh = make(self._message, self._event)

    @property
    def open(self) -> bool:
        """Return whether anything may come from a peer."""
        return bool(self._joined)

    def wait(self, timeout_s: float | None) -> list[LinkEvent]:
        """Wait for what comes from peers, until woken or for `timeout_s`, and return it."""
        self.mesh.wait(timeout_s)
        arrived, self._arrived = self._arrived, []
        return arrived

    def publish(self, command: Publish) -> None:
        """Send a message to those who read it, header and body as they lie."""
        readers = self.mesh.publish(command.topic, command.payload, command.body)
        count, nbytes = self.tensors
        self.tensors = count + readers, nbytes + readers * (len(command.payload) + command.body.nbytes)
        if not readers:
            self._complaints.add("mesh_unread", f"nobody reads {command.topic}: its reader's connection is away")

    def admit(self, command: Admit) -> None:
        """Let peers in."""
        key = (command.model, command.epoch)
        for peer in command.peers:
            filters = self._topics.activations_from(command.model, self._device, peer.device)
            self.mesh.admit(peer.device, key, peer.token_in, filters)
        self._admitted[key] = self._admitted.get(key, frozenset()).union(peer.device for peer in command.peers)

    def join(self, command: Join) -> None:
        """Hear peers."""
        key = (command.model, command.epoch)
        self._joined[key] = self._joined.get(key, frozenset()).union(peer.device for peer in command.peers)
        for peer in command.peers:
            filters = self._topics.activations_from(command.model, peer.device, self._device)
            place = Address(peer.endpoint.host, peer.endpoint.port, peer.endpoint.fingerprint)
            self.mesh.join(peer.device, key, place, peer.token_out, filters, LARGEST_BYTES)

    def part(self, command: Part) -> None:
        """End what an epoch was admitted and joined for."""
        key = (command.model, command.epoch)
        for peer in self._joined.pop(key, ()):
            self.mesh.leave(peer, key)
        for peer in self._admitted.pop(key, ()):
            self.mesh.expel(peer, key)

    def probe(self, now: float, busy: bool) -> None:
        """Probe the peer whose turn it is, of those that this device hears and that hear it."""
        models = self._both_ways()
        due = self.probes.due(now, models, busy)
        if due is not None:
            peer, payloads = due
            self._send_probes(models[peer], peer, payloads)

    def probe_large(self, peer: str, now: float) -> bool:
        """Send a peer a large probe, if one is due; return whether it was."""
        model = self._both_ways().get(peer)
        due = [] if model is None else self.probes.probers()[peer].large_due(now, busy=True)
        if model is not None:
            self._send_probes(model, peer, due)
        return bool(due)

    def _both_ways(self) -> Mapping[str, str]:
        """Return the peers that this device hears and that hear it, with a model of which they do."""
        return {
            peer: key[0] for key, peers in self._joined.items() for peer in peers & self._admitted.get(key, frozenset())
        }

    def _send_probes(self, model: str, peer: str, payloads: Iterable[bytes]) -> None:
        for payload in payloads:
            self.mesh.publish(self._topics.activation(model, 0, self._device, peer), payload)

    def edges(self) -> Mapping[str, Edge]:
        """Return what went to and came from each peer, of as many as a heartbeat takes; from any thread."""
        found = self.mesh.stats()
        now = frozenset[str]().union(*list(self._joined.values()), *list(self._admitted.values()))
        newest = list(found)[::-1]
        told = [*(name for name in newest if name in now), *(name for name in newest if name not in now)]
        return {
            name: Edge(
                e.frames_in,
                e.bytes_in,
                e.frames_out,
                e.bytes_out,
                e.queued_bytes,
                e.dropped,
                e.reconnections,
                int(e.joined),
                e.trouble[:MAX_TROUBLE],
            )
            for name, e in ((name, found[name]) for name in told[:MAX_PEERS])
        }

    def close(self) -> None:
        """Close the endpoint and every connection."""
        self.mesh.close()

    # -- called by the mesh, in `wait` and `publish` ---------------------------------------------------------------

    def _message(self, peer: str, topic: str, payload: memoryview) -> None:
        arrived = self._exchanges.arrival(peer, topic, payload) or self._checked(peer, topic, payload)
        if arrived is not None:
            count, nbytes = self.tensors
            self.tensors = count + 1, nbytes + payload.nbytes
            self._arrived.append(arrived)

    def _checked(self, peer: str, topic: str, payload: memoryview) -> FrameIn | None:
        """Read and check a whole frame; return it if it is a tensor that may come from there."""
        try:
            parsed, frame = self._topics.parse(topic), frames.decode(payload)
            if frame.kind == "probe" and parsed.kind == "activation" and (frame.source, parsed.source) == (peer, peer):
                self._probed(peer, parsed.model, frame)
                return None
            # What a peer may publish is its own: neither topic nor frame may name another source.
            said = (frame.kind, frame.model, frame.layer, frame.source, parsed.source)
            if parsed.kind != "activation" or said != ("tensor", parsed.model, parsed.layer, peer, peer):
                raise WireError(f"the frame says {said}, which is not what its topic and its sender say")
        except WireError as exc:
            self._complaints.add("bad_payload", f"dropped {len(payload)} bytes of {peer} on {topic[:200]!r}: {exc}")
            return None
        self._exchanges.learn(peer, topic, payload, frame)
        return FrameIn(frame)

    def _probed(self, peer: str, model: str, frame: Frame) -> None:
        if frame.numbers == ANSWER:
            self.probes.received(peer, frame, time.perf_counter())
            return
        answer = frames.encode(self.probes.answer(frame))
        self.mesh.publish(self._topics.activation(model, 0, self._device, peer), answer)

    def _event(self, event: MeshEvent) -> None:
        match event:
            case Joined(peer, (str(model), Epoch() as epoch)):
                self._arrived.append(PeerJoined(peer, model, epoch))
            case Refused(peer, (str(model), Epoch() as epoch), reason):
                self._arrived.append(PeerRefused(peer, model, epoch, reason))
            case Lost(peer, reason):
                self._arrived.append(PeerLost(peer, reason))
            case Dropped(peer, nbytes):
                self._arrived.append(PeerBehind(peer, nbytes))
