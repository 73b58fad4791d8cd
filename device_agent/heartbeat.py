"""The meter, which compares real requests with the self-measurement, and the thread that publishes heartbeats."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from math import inf
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from device_agent.links import MeshLinks
from device_agent.machine import HealthMonitor
from device_agent.network import AgentEvent, Network, PeerProbeDue
from device_agent.probes import BUSY_S
from hepti_mqtt.config.process import RateLimitedLog
from hepti_mqtt.core.profiles import DeviceProfile, FrameCost, default_frame_cost
from hepti_mqtt.core.program import Compute, Op, SlotSpec
from hepti_mqtt.core.recent import Recent
from hepti_mqtt.cost.reported import profile_from_caps
from hepti_mqtt.kernels import works
from hepti_mqtt.protocol.messages import Heartbeat, encode_heartbeat
from hepti_mqtt.protocol.topics import Topics
from hepti_mqtt.transport.base import Inbox

METERED: Final = frozenset({"linear", "conv2d"})  # kernels that the time curves of matmuls price
IDLE_S: Final = 5.0  # without samples, after which the slowdown is 1 again ...
SMALL_DEVIATION: Final = 1.5  # ... unless it was within this factor; then it is kept for ...
KEEP_SMALL_S: Final = 600.0
DECAY: Final = 0.5  # weight of earlier heartbeats' sums; each counts by its work
SHORTEST_S: Final = 50e-6  # the time of shorter ops is mostly the interpreter's
SAMPLES: Final = 8192
OPS: Final = 8192
FRAMES: Final = 64  # tensors before a fit: a plan's first ones find cold caches
SMALL_BYTES: Final = 4096.0
FRAME_DECAY: Final = 0.8  # weight of earlier heartbeats' sums
MIN_COST_FRACTION: Final = 0.05

Floats = npt.NDArray[np.float64]
Sample = tuple[Op, tuple[SlotSpec, ...], float]


class FrameCostFit:
    """A fit of the time of frames: seconds = p * frames + q * bytes, by least squares over recent heartbeats.

    A network card, TLS or a shaped link cuts a frame into packets: a byte costs many times its price on loopback, a
    frame about the same. One ratio for both priced plans with large frames too low. If all frames have one size, as in
    many plans, the prices on loopback divide the time between frame and bytes.
    """

    def __init__(self) -> None:
        self._sums = np.zeros((2, 2))  # of products of (frames, bytes) with themselves ...
        self._seconds = np.zeros(2)  # ... and with the seconds

    def observe(self, frames: float, nbytes: float, seconds: float) -> None:
        """Add the frames, bytes and seconds since the last heartbeat."""
        amounts = np.array([frames, nbytes], np.float64)
        self._sums = FRAME_DECAY * self._sums + np.outer(amounts, amounts)
        self._seconds = FRAME_DECAY * self._seconds + seconds * amounts

    def cost(self, profile: DeviceProfile) -> FrameCost | None:
        """Return the fit; None before anything was added."""
        if not self._sums.any():
            return None
        expected = np.array(default_frame_cost(profile))
        # The prior: FRAMES small frames at the expected cost.
        weights = (FRAMES * np.array([1.0, SMALL_BYTES])) ** 2
        costs = np.linalg.solve(self._sums + np.diag(weights), self._seconds + weights * expected)
        if costs.min() < 0:  # the other cost then explains all of the time
            kept = int(costs.argmax())
            costs = np.zeros(2)
            costs[kept] = self._seconds[kept] / self._sums[kept, kept]
        frame_s, byte_s = map(float, np.maximum(costs, MIN_COST_FRACTION * expected))
        return FrameCost(frame_s, byte_s)


class Meter:
    """Compares observed with predicted seconds of matmuls and convolutions.

    The session thread only appends to `samples` (op, slots of its Program, seconds) and adds to `frames_s`, its seconds
    of work for frames from and to peers. The heartbeat's thread calls `update_slowdown`, which does the arithmetic.
    curves: the last measurement.
    """

    def __init__(self, curves: dict[str, Any]) -> None:
        self.last_slowdown = 1.0  # what `slowdown` last returned
        self.frames_s = 0.0
        self._frames_seen = self._frames_looked = (0.0, 0, 0)
        self._frames_idle_s = 0.0
        self._fit = FrameCostFit()
        self.samples: deque[Sample] = deque(maxlen=SAMPLES)
        self._observed_s = self._expected_s = 0.0  # recent, decaying
        self.set_curves(curves)

    def set_curves(self, curves: dict[str, Any]) -> None:
        """Replace the measurement to compare with; any thread may call it."""
        self._profile, self.curves = profile_from_caps("self", curves, inf, 1.0), curves
        # By identity; the op is kept so that no other one gets its id.
        self._predicted = Recent[int, tuple[Op, float]](OPS)
        self._sampled_s = -inf

    def update_slowdown(self, now: float) -> float:
        """Return the recent ratio of observed to predicted time, smoothed over seconds; 1.0 after an idle period.

        A small deviation is reported for longer. Otherwise a busy device would be compared with idle ones at their
        measured speed, and equal devices would get unequal shares.
        """
        observed = predicted = 0.0
        while self.samples:
            op, slots, seconds = self.samples.popleft()
            expected = self._expected(op, slots)
            if expected >= SHORTEST_S:
                observed += seconds
                predicted += expected
        is_modest = 1 / SMALL_DEVIATION < self.last_slowdown < SMALL_DEVIATION
        if now - self._sampled_s > (KEEP_SMALL_S if is_modest else IDLE_S):
            self._observed_s = self._expected_s = 0.0
        if predicted:
            self._observed_s = DECAY * self._observed_s + observed
            self._expected_s = DECAY * self._expected_s + predicted
            self._sampled_s = now
        self.last_slowdown = self._observed_s / self._expected_s if self._expected_s else 1.0
        return self.last_slowdown

    def frame_cost(self, frames: int, nbytes: int) -> FrameCost | None:
        """Return the recent cost of a mesh frame and of each of its bytes.

        None before FRAMES tensors. frames, nbytes: tensors sent and received since the start, per receiver. The time of
        probes does not count: they meet an idle device, and cost half as much as tensors.
        """
        now = (self.frames_s, frames, nbytes)
        if frames == self._frames_looked[1]:
            self._frames_idle_s += now[0] - self._frames_looked[0]
        self._frames_looked = now
        spent_s, more, more_bytes = (a - b for a, b in zip(now, self._frames_seen, strict=True))
        if more >= FRAMES:
            self._fit.observe(more, more_bytes, spent_s - self._frames_idle_s)
            self._frames_seen, self._frames_idle_s = now, 0.0
        return self._fit.cost(self._profile)

    def _expected(self, op: Op, slots: tuple[SlotSpec, ...]) -> float:
        if (predicted := self._predicted.get(id(op))) is not None:
            return predicted[1]
        seconds = self._profile.seconds(*works(op, slots)) if isinstance(op, Compute) else 0.0
        self._predicted[id(op)] = (op, seconds)
        return seconds


# ----------------------------------------------------------------------------------------------------------------------
# The thread of heartbeats and probes. Its own, so that a long kernel never looks like a dead device.


HEARTBEAT_S: Final = 1.0


class HeartbeatThread:
    """Publishes heartbeats and probes from `start` to `close`; last: the last heartbeat.

    last_op_s: returns when the session thread last ran an op. counters: returns what the heartbeat carries.
    links: to peers, None without mesh; the session thread probes them when `inbox` says so.
    """

    def __init__(
        self,
        topics: Topics,
        device: str,
        boot: int,
        network: Network,
        health: HealthMonitor,
        meter: Meter,
        last_op_s: Callable[[], float],
        counters: Callable[[], Mapping[str, int]],
        links: MeshLinks | None,
        inbox: Inbox[AgentEvent],
        complaints: RateLimitedLog,
    ) -> None:
        self._topics, self._device, self._boot, self._network = topics, device, boot, network
        self._health, self._prober, self._meter = health, network.prober, meter
        self._stepped_s, self._counters, self._complaints = last_op_s, counters, complaints
        self._links, self._inbox = links, inbox
        self._seq = 0
        self.last: Heartbeat | None = None
        self._closing = threading.Event()
        self._soon = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hepti-heartbeat", daemon=True)

    def start(self) -> None:
        """Start the thread; a later call publishes a heartbeat immediately, because the planner waits for one."""
        self._soon.set()
        if self._thread.ident is None:
            self._thread.start()

    def close(self) -> None:
        """Stop the thread and wait for it."""
        self._closing.set()
        self._soon.set()
        if self._thread.is_alive():
            self._thread.join()

    def publish_heartbeat(self, now: float) -> None:
        """Publish one heartbeat and the probes that are due; `now` by time.perf_counter()."""
        slowdown = self._meter.update_slowdown(now)  # also while disconnected, so that samples do not grow old
        if not self._network.is_connected():
            return  # a device must be reachable on every plane
        links = self._links
        health = self._health.sample()
        frame = None if links is None else self._meter.frame_cost(*links.tensor_traffic)
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
            peers={} if links is None else links.probes.link_reports(),
            edges={} if links is None else links.peer_stats(),
            peer_frame_s=None if frame is None else frame.frame_s,
            peer_byte_s=None if frame is None else frame.byte_s,
            clock_s=time.time(),
        )
        self.last = heartbeat
        self._network.publish("control", self._topics.heartbeat(self._device), encode_heartbeat(heartbeat), 0)
        for payload in self._prober.due_probes(now, busy=now - self._stepped_s() < BUSY_S):
            self._network.publish("data", self._topics.probe(self._device), payload, 0)
        if links is not None:
            self._inbox.post(PeerProbeDue())

    def _run(self) -> None:
        due_s = time.monotonic()
        while True:
            self._soon.wait(max(due_s - time.monotonic(), 0.0))
            if self._closing.is_set():
                return
            self._soon.clear()
            due_s = max(due_s + min(HEARTBEAT_S, self._prober.interval_s), time.monotonic())
            try:
                self.publish_heartbeat(time.perf_counter())
            except Exception as exc:
                self._complaints.record("heartbeat_errors", f"a heartbeat failed: {exc}", exc)
