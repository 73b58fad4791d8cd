"""Profiles of devices and links, and clusters of devices."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from math import inf, log
from statistics import median
from typing import Final, NamedTuple

from hepti_mqtt.core.plan import DevicePair, Route
from hepti_mqtt.core.program import Work
from hepti_mqtt.core.storage import Product

# A faster link is loopback: the device runs on the broker's machine. Frames cost CPU time there, and the measured rate
# is noise.
LOCAL_BYTES_PER_S: Final = 250e6

# Cost of a frame over the mesh, sent or received, measured on a server's core; the kernel copies at this rate.
MESH_FRAME_S: Final = 10e-6
MESH_COPY_BYTES_PER_S: Final = 4e9
# Cost of a byte off loopback relative to a measured frame, until the site has measured its own: a network card or a
# shaped link cuts frames into packets of about 1448 bytes.
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
    """A device's power beyond idling, in watts: while it computes, and while it sends or receives."""

    compute_w: float
    link_w: float


class FrameCost(NamedTuple):
    """The cost of a frame over the mesh on a device's session thread: seconds, and seconds per byte."""

    frame_s: float
    byte_s: float


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """One device by its own measurements."""

    name: str
    linear: tuple[Curve, ...]  #: time curves for a few shapes of weights, in f32 and perhaps of other products
    attention_flops_per_s: float
    rowwise_bytes_per_s: float
    op_overhead_s: float = 0.1e-6
    memory_bytes: float = inf  #: for weights and live slots, without an idle agent's memory
    slowdown: float = 1.0  #: recently observed over measured time: 1 = as measured
    frame_s: float = 100e-6  #: cost of sending or receiving a frame over the broker, on the session thread
    copy_bytes_per_s: float = 2e9
    mesh_frame_s: float = MESH_FRAME_S  #: like `frame_s` over the mesh on loopback, for each receiver
    mesh_copy_bytes_per_s: float = MESH_COPY_BYTES_PER_S
    power: Power | None = None  #: None if unknown; no device measures it
    mesh_frame_cost: FrameCost | None = None  #: recent cost of frames over the mesh, None without frames

    def seconds(self, *parts: Work) -> float:
        """Return the predicted time of one op, given the work of its kernels."""
        return self.op_overhead_s + self.slowdown * sum(map(self._kernel_seconds, parts))

    def product_seconds(self, *parts: Work) -> float:
        """Return the part of that time in products with weights."""
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
        """Return the predicted time of sending `frames` frames of `nbytes` bytes in all, or of receiving one."""
        if route == "mesh":
            if self.mesh_frame_cost is not None:
                return self.mesh_frame_cost.frame_s * frames + self.mesh_frame_cost.byte_s * nbytes
            return self.slowdown * (self.mesh_frame_s * frames + nbytes / self.mesh_copy_bytes_per_s)
        return self.slowdown * (self.frame_s * frames + nbytes / self.copy_bytes_per_s)

    def speed(self, rows: int, product: Product = F32) -> float:
        """Return FLOP/s of large matmuls at `rows` rows, from which shares are derived."""
        curve = max(self._curves(product), key=lambda c: c.k * c.n)
        return 2.0 * rows * curve.k * curve.n / (curve.seconds(rows) * self.slowdown)

    def _curves(self, product: Product) -> tuple[Curve, ...]:
        """Return the curves of a product, or all if it was not measured (by an agent that has just started)."""
        return tuple(c for c in self.linear if c.product == product) or self.linear


@dataclass(frozen=True, slots=True)
class Link:
    """A device's connection to the broker: one-way latency and the rate in each direction."""

    latency_s: float = 0.2e-3
    up_bytes_per_s: float = 1e9
    down_bytes_per_s: float = 1e9


class PeerLink(NamedTuple):
    """A direct connection from one device to another, as measured: one-way latency, and the rate if measured."""

    latency_s: float
    bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class Cluster:
    """The devices of a site with their links; the planner process has a link too."""

    devices: Mapping[str, DeviceProfile]
    links: Mapping[str, Link]
    planner_link: Link = field(default_factory=Link)
    #: Rate of the broker's own link in each direction. It carries every copy of a message, except between processes on
    #: the broker's machine (`LOCAL_BYTES_PER_S`).
    broker_bytes_per_s: float = inf
    endpoints: frozenset[str] = frozenset()  #: devices that peers can connect to
    #: Measured links between devices; others follow from the devices' links to the broker.
    peer_links: Mapping[DevicePair, PeerLink] = field(default_factory=dict)
    #: Devices on one medium, such as Wi-Fi: one packet at a time, and packets between two of them twice.
    shared_medium: frozenset[str] = frozenset()
    deadline_s: float = inf  #: time limit of an answer, for methods that save energy until then


def rows_factor(cluster: Cluster, devices: Collection[str], product: Product, rows: int) -> float:
    """Return the time of products of `rows` rows relative to one row, on the device where it is largest."""
    profiles = [cluster.devices[name] for name in devices if name in cluster.devices]
    return max(
        (rows * device.speed(1, product) / device.speed(rows, product) for device in profiles), default=float(rows)
    )


def make_cluster(
    devices: Mapping[str, DeviceProfile], links: Mapping[str, Link], broker_bytes_per_s: float | None = None
) -> Cluster:
    """Return the cluster of devices with measured links.

    broker_bytes_per_s: None assumes a broker's link as fast as the fastest device's. No process can measure it alone,
    but it is no slower than that, and loopback rates do not count.
    """
    if broker_bytes_per_s is None:
        rates = (min(link.up_bytes_per_s, link.down_bytes_per_s) for link in links.values())
        broker_bytes_per_s = max((r for r in rates if r < LOCAL_BYTES_PER_S), default=inf)
    return Cluster(devices, links, broker_bytes_per_s=broker_bytes_per_s)


def symmetric_peer_links(reported: Mapping[str, Mapping[str, PeerLink]]) -> dict[DevicePair, PeerLink]:
    """Return the measured links of pairs; reported: by device, then by the peer that it sends to.

    A pair measured from one end counts for both directions. Devices that are not keys are ignored.
    """
    pairs = {(s, t): link for s, links in reported.items() for t, link in links.items() if t in reported and s != t}
    for (source, target), link in [*pairs.items()]:
        pairs.setdefault((target, source), link)
    return pairs


def with_frame_costs(devices: Mapping[str, DeviceProfile], remote: Collection[str]) -> dict[str, DeviceProfile]:
    """Return the profiles with a frame cost for every `remote` device, estimated for those without traffic so far.

    The estimate uses the costs of the site's other devices, relative to their frames on loopback. remote: devices with
    an endpoint off loopback.
    """
    measured = [
        (max(d.mesh_frame_s, 1e-9), d.mesh_frame_cost) for d in devices.values() if d.mesh_frame_cost is not None
    ]
    profiles = dict(devices)
    for name in remote:
        device = profiles[name]
        if device.mesh_frame_cost is None:
            frame_s, byte_s = default_frame_cost(device)
            if measured:
                frame_s = device.mesh_frame_s * median(cost.frame_s / own_s for own_s, cost in measured)
                byte_s = device.mesh_frame_s * median(cost.byte_s / own_s for own_s, cost in measured)
            profiles[name] = replace(
                device, mesh_frame_cost=FrameCost(device.slowdown * frame_s, device.slowdown * byte_s)
            )
    return profiles


def default_frame_cost(device: DeviceProfile) -> FrameCost:
    """Return the assumed cost of frames off loopback before any measurement."""
    frame_s = device.mesh_frame_s
    return FrameCost(frame_s, frame_s * UNSEEN_BYTE + 1 / device.mesh_copy_bytes_per_s)


# ----------------------------------------------------------------------------------------------------------------------
# Paths between devices that connect to each other directly, from measurements of pairs and of devices.


Queue = tuple[str, str]  # of a link: its owner ("": the site), and its direction
BROKER_IN: Final = ("", "in")
BROKER_OUT: Final = ("", "out")
AIR: Final = ("", "air")


class Path(NamedTuple):
    """A packet's path from one device to another: two links that carry it at the same time, or one shared medium."""

    latency_s: float
    up: Queue
    up_bytes_per_s: float
    down: Queue
    down_bytes_per_s: float
    bytes_per_s: float  #: of this pair alone; each link may carry more for several pairs


class Paths:
    """The paths between devices of a cluster.

    Unmeasured properties of a pair follow from its two links to the broker. A link is as fast as to the broker, or as
    the fastest measured link to any peer. Devices on the broker's machine share that machine's link to all others.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._paths: dict[DevicePair, Path] = {}
        self._most: dict[Queue, float] = {}  # fastest measured rate to any peer
        for (source, target), link in cluster.peer_links.items():
            if link.bytes_per_s is not None and link.bytes_per_s < LOCAL_BYTES_PER_S:
                for end in ((source, "up"), (target, "down")):
                    self._most[end] = max(self._most.get(end, 0.0), link.bytes_per_s)

    def between(self, source: str, target: str) -> Path:
        """Return the path from one device to another."""
        path = self._paths.get((source, target))
        if path is None:
            path = self._paths[source, target] = self._derive(source, target)
        return path

    def link_queue(self, device: str, which: str) -> Queue:
        """Return the queue of a device's own link; which: "up" or "down"."""
        return AIR if device in self._cluster.shared_medium else (device, which)

    def _derive(self, source: str, target: str) -> Path:
        links, reported = self._cluster.links, self._cluster.peer_links.get((source, target))
        up, down = links[source].up_bytes_per_s, links[target].down_bytes_per_s
        latency_s = links[source].latency_s + links[target].latency_s if reported is None else reported.latency_s
        rate = min(up, down) if reported is None or reported.bytes_per_s is None else reported.bytes_per_s
        if rate >= LOCAL_BYTES_PER_S:  # one machine, without a link
            return Path(latency_s, (source, "local"), rate, (target, "local"), rate, rate)
        from_link = self._end(source, "up", up, BROKER_OUT)
        to_link = self._end(target, "down", down, BROKER_IN)
        return Path(latency_s, *from_link, *to_link, inf if reported is None else rate)

    def _end(self, device: str, which: str, rate: float, brokers: Queue) -> tuple[Queue, float]:
        """Return the queue and the rate of one end; rate: of its link to the broker."""
        broker = self._cluster.broker_bytes_per_s
        if rate >= LOCAL_BYTES_PER_S and broker < inf:
            return brokers, broker
        return self.link_queue(device, which), max(rate, self._most.get((device, which), 0.0))
