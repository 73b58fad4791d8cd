"""Devices by their own reports, and their cluster, for the planner and for clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Final, get_args

from hepti_mqtt.core.errors import WireError
from hepti_mqtt.core.plan import WeightDtype
from hepti_mqtt.core.profiles import (
    MESH_COPY_BYTES_PER_S,
    MESH_FRAME_S,
    Cluster,
    Curve,
    DeviceProfile,
    FrameCost,
    Link,
    PeerLink,
    make_cluster,
    symmetric_peer_links,
    with_frame_costs,
)
from hepti_mqtt.core.storage import BLOCK_STORAGES, Product
from hepti_mqtt.protocol.messages import Endpoint, Heartbeat
from hepti_mqtt.protocol.plausible import MAX_CURVES, MAX_POINTS, Plain, check, number

# Numbers of a heartbeat that plans depend on.
PLANNED: Final = ("slowdown", "peer_frame_s", "peer_byte_s", "round_trip_s", "bandwidth_bytes_per_s")
# Numbers of its caps, besides its curves. UNMEASURED: 0 means that the device has not measured them.
CAPS_NUMBERS: Final = ("cores", "threads", "memory_budget_bytes", "rss_idle_bytes", "largest_packet_bytes")
UNMEASURED: Final = frozenset({"largest_packet_bytes"})


@dataclass(frozen=True, slots=True)
class ReportedDevice:
    """One device by its reports, with estimates of its measurements."""

    name: str
    curves: Plain
    memory_bytes: float
    slowdown: float = 1.0
    link: Link = field(default_factory=Link)  #: to the broker
    peer_links: Mapping[str, PeerLink] = field(default_factory=dict)  #: directly to peers
    frame_cost: FrameCost | None = None  #: of frames off loopback, None before the first ones
    endpoint: Endpoint | None = None  #: where peers read from it, None if they cannot

    @classmethod
    def by_heartbeat(
        cls, name: str, curves: Plain, memory_bytes: float, heartbeat: Heartbeat | None, endpoint: Endpoint | None
    ) -> ReportedDevice:
        """Return a device by its last heartbeat alone, if there is one."""
        link, hb = Link(), heartbeat
        if hb is None:
            return cls(name, curves, memory_bytes, endpoint=endpoint)
        latency_s = hb.round_trip_s / 2 if hb.round_trip_s else link.latency_s
        rate = hb.bandwidth_bytes_per_s or link.up_bytes_per_s
        peers = {peer: PeerLink(report.round_trip_s / 2, report.bytes_per_s) for peer, report in hb.peers.items()}
        whole = hb.peer_frame_s is not None and hb.peer_byte_s is not None
        cost = FrameCost(hb.peer_frame_s or 0.0, hb.peer_byte_s or 0.0) if whole else None
        return cls(name, curves, memory_bytes, hb.slowdown, Link(latency_s, rate, rate), peers, cost, endpoint)

    def profile(self) -> DeviceProfile:
        """Return its measured profile. Raises WireError if the curves are invalid."""
        try:
            return profile_from_caps(self.name, self.curves, self.memory_bytes, self.slowdown, self.frame_cost)
        except (KeyError, TypeError, ValueError) as exc:
            raise WireError(f"caps of {self.name} cannot be read ({exc!r}); update the agent") from exc


def reported_cluster(
    devices: Sequence[ReportedDevice], broker_bytes_per_s: float | None = None, *, mesh: bool = True
) -> Cluster:
    """Return the cluster of these devices; broker_bytes_per_s: of the broker's own link, None if unknown."""
    profiles = {device.name: device.profile() for device in devices}
    cluster = make_cluster(profiles, {device.name: device.link for device in devices}, broker_bytes_per_s)
    if not mesh:
        return cluster
    endpoints = {device.name: device.endpoint for device in devices if device.endpoint is not None}
    return replace(
        cluster,
        devices=with_frame_costs(profiles, [name for name, at in endpoints.items() if not at.loopback]),
        endpoints=frozenset(endpoints),
        peer_links=symmetric_peer_links({device.name: device.peer_links for device in devices}),
    )


def sanitize_heartbeat(heartbeat: Heartbeat) -> tuple[Heartbeat, str | None]:
    """Return a heartbeat without implausible numbers, and the fault of the first of them."""
    wrong: str | None = None
    instead: dict[str, Any] = {}
    for key in PLANNED:
        try:
            check(key, getattr(heartbeat, key))
        except ValueError as error:
            wrong, instead[key] = wrong or str(error), number(key).instead
    peers = {}
    for name, report in heartbeat.peers.items():
        try:
            check("peer.round_trip_s", report.round_trip_s)
            check("peer.bytes_per_s", report.bytes_per_s)
            peers[name] = report
        except ValueError as error:
            wrong, instead["peers"] = wrong or str(error), peers
    return replace(heartbeat, **instead), wrong


def implausible_caps(caps: Mapping[str, Any]) -> str | None:
    """Return the first fault of a device's capabilities, by field; None if plans can use them."""
    try:
        for key in CAPS_NUMBERS:
            if caps[key] or key not in UNMEASURED:
                check(key, caps[key])
        profile_from_caps(caps["device"], caps["curves"], caps["memory_budget_bytes"], 1.0)
    except KeyError as error:
        return f"{error.args[0]} is missing"
    except (TypeError, ValueError) as error:
        return str(error)
    return None


def profile_from_caps(
    name: str, curves: Mapping[str, Any], memory_bytes: float, slowdown: float, mesh_frame_cost: FrameCost | None = None
) -> DeviceProfile:
    """Return the profile described by an agent's caps; mesh_frame_cost: from its heartbeats.

    Raises KeyError, TypeError or ValueError on other data, and for implausible numbers.
    """
    # An agent without an endpoint has not measured the mesh.
    instead = {
        "mesh_frame_s": min(check("frame_s", curves["frame_s"]), MESH_FRAME_S),
        "mesh_copy_bytes_per_s": MESH_COPY_BYTES_PER_S,
    }
    names = ("attention_flops_per_s", "rowwise_bytes_per_s", "op_overhead_s", "copy_bytes_per_s")
    numbers = {key: check(key, curves[key]) for key in names}
    numbers |= {key: check(key, curves.get(key, value)) for key, value in instead.items()}
    measured = curves["linear"]
    if not isinstance(measured, list) or not 0 < len(measured) <= MAX_CURVES:
        raise ValueError(f"linear is not a list of 1 to {MAX_CURVES} time curves")
    return DeviceProfile(
        name,
        tuple(map(_curve, measured)),
        # The broker's measurement lacks the handover to a network thread: a frame costs no less than over the mesh.
        frame_s=max(curves["frame_s"], numbers["mesh_frame_s"]),
        memory_bytes=memory_bytes,
        slowdown=slowdown,
        mesh_frame_cost=mesh_frame_cost,
        **numbers,
    )


def _curve(entry: Mapping[str, Any]) -> Curve:
    storage = entry.get("storage", "f32")
    if storage not in (*get_args(WeightDtype), *BLOCK_STORAGES):
        raise ValueError("a time curve has an unknown storage")
    if not 0 < len(entry["points"]) <= MAX_POINTS:
        raise ValueError(f"a time curve has 1 to {MAX_POINTS} points")
    points = tuple((check("curve.rows", rows), check("curve.seconds", seconds)) for rows, seconds in entry["points"])
    for (rows, seconds), (more_rows, more_seconds) in pairwise(points):
        # Measurements scatter, but no device takes half the time for more rows.
        if more_rows <= rows or more_seconds < seconds / 2:
            raise ValueError("a time curve falls")
    product = Product(storage, entry.get("x", "f32") == "i8")
    return Curve(check("curve.k", entry["k"]), check("curve.n", entry["n"]), points, product)
