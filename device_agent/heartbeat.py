"""The quiet thread: a heartbeat and a probe every second, so that a long kernel never looks like a dead device."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from device_agent.complaints import Complaints
from device_agent.health import HealthMonitor
from device_agent.meter import Meter
from device_agent.network import Network
from device_agent.probe import BUSY_S, Prober
from hepti_mqtt.wire.described import Heartbeat
from hepti_mqtt.wire.messages import encode_heartbeat
from hepti_mqtt.wire.peers import Edge, LinkReport
from hepti_mqtt.wire.topics import Topics

EVERY_S: Final = 1.0


class PeerWatch(NamedTuple):
    """What a heartbeat says of peers, and how it lets the session thread measure the way to one of them.

    tensors: how many frames with tensors, and bytes of them, came and went since the start.
    """

    reports: Callable[[], Mapping[str, LinkReport]]
    edges: Callable[[], Mapping[str, Edge]]
    tensors: Callable[[], tuple[int, int]]
    due: Callable[[], None]


class HeartbeatThread:
    """Publishes heartbeats and probes from `start` to `close`.

    stepped_s: returns when the session thread last ran an op. counters: returns what the heartbeat carries.
    peers: what there is of these, None without mesh.
    """

    def __init__(
        self,
        topics: Topics,
        device: str,
        boot: int,
        network: Network,
        health: HealthMonitor,
        prober: Prober,
        meter: Meter,
        stepped_s: Callable[[], float],
        counters: Callable[[], Mapping[str, int]],
        peers: PeerWatch | None,
        complaints: Complaints,
    ) -> None:
        self._topics, self._device, self._boot, self._network = topics, device, boot, network
        self._health, self._prober, self._meter = health, prober, meter
        self._stepped_s, self._counters, self._complaints = stepped_s, counters, complaints
        self._peers = peers
        self._seq = 0
        self._closing = threading.Event()
        self._soon = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hepti-heartbeat", daemon=True)

    def start(self) -> None:
        """Start the thread, the first time; later beat at once, since somebody waits to hear that we are back."""
        self._soon.set()
        if self._thread.ident is None:
            self._thread.start()

    def close(self) -> None:
        """Stop the thread and wait for it."""
        self._closing.set()
        self._soon.set()
        if self._thread.is_alive():
            self._thread.join()

    def beat(self, now: float) -> None:
        """Publish one heartbeat and the probes that are due; `now` by time.perf_counter()."""
        slowdown = self._meter.slowdown(now)  # also while we are away, or it would stay what it was, and be doubted
        if not self._network.stands():
            return  # a device that cannot be reached on every plane cannot do its part
        health = self._health.look()
        frame = None if self._peers is None else self._meter.frame_cost(*self._peers.tensors())
        self._seq += 1
        heartbeat = Heartbeat(
            boot=self._boot,
            seq=self._seq,
            cpu_other=health.cpu_other,
            free_bytes=health.free_bytes,
            temperature_c=health.temperature_c,
            round_trip_s=self._prober.round_trip_s(),
            bandwidth_bytes_per_s=self._prober.bandwidth_bytes_per_s(),
            slowdown=slowdown,
            rss_bytes=health.rss_bytes,
            counters=self._counters(),
            peers={} if self._peers is None else self._peers.reports(),
            edges={} if self._peers is None else self._peers.edges(),
            peer_frame_s=None if frame is None else frame.frame_s,
            peer_byte_s=None if frame is None else frame.byte_s,
        )
        self._network.publish("control", self._topics.heartbeat(self._device), encode_heartbeat(heartbeat), 0)
        for payload in self._prober.due(now, busy=now - self._stepped_s() < BUSY_S):
            self._network.publish("data", self._topics.probe(self._device), payload, 0)
        if self._peers is not None:
            self._peers.due()

    def _run(self) -> None:
        due_s = time.monotonic()
        while True:
            self._soon.wait(max(due_s - time.monotonic(), 0.0))
            if self._closing.is_set():
                return
            self._soon.clear()
            due_s = max(due_s + EVERY_S, time.monotonic())
            try:
                self.beat(time.perf_counter())
            except Exception as exc:
                self._complaints.add("heartbeat_errors", f"a heartbeat failed: {exc}", exc)
