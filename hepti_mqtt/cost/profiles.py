"""Profiles of devices and links, and the cluster that they make."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from math import inf, log
from statistics import median
from typing import Final, NamedTuple

from hepti_mqtt.plan import DevicePair, Route
from hepti_mqtt.program import Work
from hepti_mqtt.storage import Product

# A faster link is loopback: the device runs on the broker's machine. There frames cost CPU time, and the measured rate
# is noise.
LOCAL_BYTES_PER_S: Final = 250e6

# Of a frame over mesh, sent or received, as measured on a core of a server; the copy is the kernel's.
MESH_FRAME_S: Final = 10e-6
MESH_COPY_BYTES_PER_S: Final = 4e9
# What a byte costs off loopback, as a part of what a frame was measured to cost, until the site has met some: a network
# card or a shaped link cuts frames into packets of about 1448 bytes.
UNSEEN_BYTE: Final = 1 / (6 * 1448)
F32: Final = Product()


@dataclass(frozen=True, slots=True)
class Curve:
    """Measured time of a matmul [rows, k] x [k, n] over rows: points of (rows, seconds), rows ascending."""

    k: int
    n: int
    points: tuple[tuple[int, float], ...]
    product: Product = F32

    def seconds(self, rows: int) -> float:
        """Return the time for `rows`, linear between the points and proportional beyond the last two."""
        xs = [p[0] for p in self.points]
        at = min(max(bisect_left(xs, rows), 1), len(xs) - 1)
        if len(xs) == 1:
            return self.points[0][1] * rows / xs[0]
        (x0, y0), (x1, y1) = self.points[at - 1], self.points[at]
        if rows <= xs[0]:
            return self.points[0][1] if rows else 0.0
        return max(y0 + (y1 - y0) * (rows - x0) / (x1 - x0), y0)


class Power(NamedTuple):
    """What a device draws beyond idling, in watts: while it computes, and while it sends or receives."""

    compute_w: float
    link_w: float


class FrameCost(NamedTuple):
    """What a frame over mesh costs a device's session thread, sent or received: seconds, and seconds of each byte."""

    frame_s: float
    byte_s: float


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """One device as it measured itself.

    linear: time curves for a few shapes of weights, in f32 and perhaps of other products. memory_bytes: for weights and
    live slots, beside what an idle agent needs. slowdown: recent observed / measured time (1 = as measured);
    frame_s, copy_bytes_per_s: cost on the device's session thread of sending or receiving one frame over the broker;
    mesh_frame_s, mesh_copy_bytes_per_s: over mesh on loopback, for each receiver; mesh_frame_cost: what frames over
    mesh recently cost, None without any. power: where it is known; nothing measures it.
    """

    name: str
    linear: tuple[Curve, ...]
    attention_flops_per_s: float
    rowwise_bytes_per_s: float
    op_overhead_s: float = 0.1e-6
    memory_bytes: float = inf
    slowdown: float = 1.0
    frame_s: float = 100e-6
    copy_bytes_per_s: float = 2e9
    mesh_frame_s: float = MESH_FRAME_S
    mesh_copy_bytes_per_s: float = MESH_COPY_BYTES_PER_S
    power: Power | None = None
    mesh_frame_cost: FrameCost | None = None

    def seconds(self, *parts: Work) -> float:
        """Return the predicted time of one op, whose kernels do so much work."""
        return self.op_overhead_s + self.slowdown * sum(map(self._kernel_seconds, parts))

    def product_seconds(self, *parts: Work) -> float:
        """Return the part of it in products with weights."""
        return self.slowdown * sum(self._product_seconds(part) for part in parts if part.kind == "linear")

    def _product_seconds(self, work: Work) -> float:
        area = work.k * work.n
        if not area or not work.rows:
            return 0.0
        curve = min(
            self._curves(work.product),
            key=lambda c: abs(log(c.k * c.n / area)) + 0.25 * abs(log((c.k / c.n) / (work.k / work.n))),
        )
        return curve.seconds(work.rows) * area / (curve.k * curve.n)

    def _kernel_seconds(self, work: Work) -> float:
        if work.kind == "linear":
            return self._product_seconds(work) + work.nbytes / self.rowwise_bytes_per_s
        if work.kind == "attention":
            return work.flops / self.attention_flops_per_s
        return work.nbytes / self.rowwise_bytes_per_s

    def frame_seconds(self, frames: int, nbytes: int, route: Route = "broker") -> float:
        """Return the predicted time of sending so many frames of so many bytes in all, or of receiving one."""
        if route == "mesh":
            if self.mesh_frame_cost is not None:
                return self.mesh_frame_cost.frame_s * frames + self.mesh_frame_cost.byte_s * nbytes
            return self.slowdown * (self.mesh_frame_s * frames + nbytes / self.mesh_copy_bytes_per_s)
        return self.slowdown * (self.frame_s * frames + nbytes / self.copy_bytes_per_s)

    def speed(self, rows: int, product: Product = F32) -> float:
        """Return FLOP/s of large matmuls at `rows` rows: what shares start from."""
        curve = max(self._curves(product), key=lambda c: c.k * c.n)
        return 2.0 * rows * curve.k * curve.n / (curve.seconds(rows) * self.slowdown)

    def _curves(self, product: Product) -> tuple[Curve, ...]:
        """Return the curves of a product, or all where that was not measured (an agent that has just started)."""
        return tuple(c for c in self.linear if c.product == product) or self.linear


@dataclass(frozen=True, slots=True)
class Link:
    """A device's connection to the broker: one-way latency and the rate in each direction."""

    latency_s: float = 0.2e-3
    up_bytes_per_s: float = 1e9
    down_bytes_per_s: float = 1e9


class PeerLink(NamedTuple):
    """The way from one device straight to another, as measured: one-way latency, the rate where it is known."""

    latency_s: float
    bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class Cluster:
    """The devices of a site with their links; the planner process has a link too.

    broker_bytes_per_s: what the broker's own link carries each way; every copy of a message goes over it, except those
    from and to who sits on the broker's machine (`LOCAL_BYTES_PER_S`). endpoints: devices to which peers can connect.
    peer_links: what was measured between devices; the rest follows from their links to the broker. shared_medium:
    devices whose links are one medium, such as Wi-Fi: it carries one packet at a time, and twice what goes between
    two of them. deadline_s: by which an answer is wanted, for methods that save energy until then.
    """

    devices: Mapping[str, DeviceProfile]
    links: Mapping[str, Link]
    planner_link: Link = field(default_factory=Link)
    broker_bytes_per_s: float = inf
    endpoints: frozenset[str] = frozenset()
    peer_links: Mapping[DevicePair, PeerLink] = field(default_factory=dict)
    shared_medium: frozenset[str] = frozenset()
    deadline_s: float = inf


def rows_factor(cluster: Cluster, devices: Collection[str], product: Product, rows: int) -> float:
    """Return how many times as long products of some rows take as those of one, on the device where that is most."""
    known = [cluster.devices[name] for name in devices if name in cluster.devices]
    return max((rows * device.speed(1, product) / device.speed(rows, product) for device in known), default=float(rows))


def make_cluster(
    devices: Mapping[str, DeviceProfile], links: Mapping[str, Link], broker_bytes_per_s: float | None = None
) -> Cluster:
    """Return the cluster of devices with measured links.

    broker_bytes_per_s: None takes the broker's link to be as fast as the fastest device's. Nobody can measure it alone,
    but it is no slower than that, and what is faster than any network is not on one.
    """
    if broker_bytes_per_s is None:
        rates = (min(link.up_bytes_per_s, link.down_bytes_per_s) for link in links.values())
        broker_bytes_per_s = max((r for r in rates if r < LOCAL_BYTES_PER_S), default=inf)
    return Cluster(devices, links, broker_bytes_per_s=broker_bytes_per_s)


def symmetric_peer_links(reported: Mapping[str, Mapping[str, PeerLink]]) -> dict[DevicePair, PeerLink]:
    """Return the links of pairs as devices have measured them; reported: by device, then by the peer that it sends to.

    A pair measured from one end counts for both directions. Devices that are not keys are ignored.
    """
    found = {(s, t): link for s, links in reported.items() for t, link in links.items() if t in reported and s != t}
    for (source, target), link in [*found.items()]:
        found.setdefault((target, source), link)
    return found


def with_frame_costs(devices: Mapping[str, DeviceProfile], remote: Collection[str]) -> dict[str, DeviceProfile]:
    """Return the profiles with a frame cost for every `remote` device, estimated for those without traffic so far.

    What others of the site have met counts, relative to their frames on loopback. remote: who has an endpoint off it.
    """
    met = [(max(d.mesh_frame_s, 1e-9), d.mesh_frame_cost) for d in devices.values() if d.mesh_frame_cost is not None]
    found = dict(devices)
    for name in remote:
        device = found[name]
        if device.mesh_frame_cost is None:
            frame_s, byte_s = default_frame_cost(device)
            if met:
                frame_s = device.mesh_frame_s * median(seen.frame_s / own_s for own_s, seen in met)
                byte_s = device.mesh_frame_s * median(seen.byte_s / own_s for own_s, seen in met)
            found[name] = replace(
                device, mesh_frame_cost=FrameCost(device.slowdown * frame_s, device.slowdown * byte_s)
            )
    return found


def default_frame_cost(device: DeviceProfile) -> FrameCost:
    """Return what frames off loopback cost as long as none was seen."""
    frame_s = device.mesh_frame_s
    return FrameCost(frame_s, frame_s * UNSEEN_BYTE + 1 / device.mesh_copy_bytes_per_s)


# ----------------------------------------------------------------------------------------------------------------------
# The ways between devices that connect to each other directly, from what was measured of pairs and of devices.


Queue = tuple[str, str]  # of a link: whose it is ("": the site's), and which way
BROKER_IN: Final = ("", "in")
BROKER_OUT: Final = ("", "out")
AIR: Final = ("", "air")


class Path(NamedTuple):
    """What a packet takes from one device to another: two links that carry it at once, unless they are one medium.

    bytes_per_s: of this pair alone, which may be less than what each link carries for several.
    """

    latency_s: float
    up: Queue
    up_bytes_per_s: float
    down: Queue
    down_bytes_per_s: float
    bytes_per_s: float


class Paths:
    """The way of each pair of a cluster.

    What was not measured of a pair follows from its two links to the broker. A link carries what it does there, or
    more, if that was measured to any peer. Who sits on the broker's machine has that one's link to all others.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._ways: dict[DevicePair, Path] = {}
        self._most: dict[Queue, float] = {}  # measured to any peer
        for (source, target), link in cluster.peer_links.items():
            if link.bytes_per_s is not None and link.bytes_per_s < LOCAL_BYTES_PER_S:
                for end in ((source, "up"), (target, "down")):
                    self._most[end] = max(self._most.get(end, 0.0), link.bytes_per_s)

    def between(self, source: str, target: str) -> Path:
        """Return the way from one device to another."""
        found = self._ways.get((source, target))
        if found is None:
            found = self._ways[source, target] = self._work_out(source, target)
        return found

    def link_queue(self, device: str, which: str) -> Queue:
        """Return the queue of a device's own link; which: "up" or "down"."""
        return AIR if device in self._cluster.shared_medium else (device, which)

    def _work_out(self, source: str, target: str) -> Path:
        links, reported = self._cluster.links, self._cluster.peer_links.get((source, target))
        up, down = links[source].up_bytes_per_s, links[target].down_bytes_per_s
        latency_s = links[source].latency_s + links[target].latency_s if reported is None else reported.latency_s
        rate = min(up, down) if reported is None or reported.bytes_per_s is None else reported.bytes_per_s
        if rate >= LOCAL_BYTES_PER_S:  # one machine: no link is between them
            return Path(latency_s, (source, "beside"), rate, (target, "beside"), rate, rate)
        from_link = self._end(source, "up", up, BROKER_OUT)
        to_link = self._end(target, "down", down, BROKER_IN)
        return Path(latency_s, *from_link, *to_link, inf if reported is None else rate)

    def _end(self, device: str, which: str, rate: float, brokers: Queue) -> tuple[Queue, float]:
        """Return the queue and the rate of one end; rate: what it has to the broker."""
        broker = self._cluster.broker_bytes_per_s
        if rate >= LOCAL_BYTES_PER_S and broker < inf:
            return brokers, broker
        return self.link_queue(device, which), max(rate, self._most.get((device, which), 0.0))
