"""Devices as they describe themselves, and the cluster that they make: the same for the planner and for a client."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import log
from statistics import median
from typing import Any, Final, get_args

from hepti_mqtt.cost.profiles import (
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
from hepti_mqtt.errors import WireError
from hepti_mqtt.plan import WeightDtype
from hepti_mqtt.protocol.messages import Endpoint, Heartbeat
from hepti_mqtt.protocol.plausible import MAX_CURVES, MAX_POINTS, Plain, check, number

# Numbers of a heartbeat that plans are made with.
PLANNED: Final = ("slowdown", "peer_frame_s", "peer_byte_s", "round_trip_s", "bandwidth_bytes_per_s")
# Of its caps, beside its curves. UNMEASURED: 0 says that it has not measured.
CAPS_NUMBERS: Final = ("cores", "threads", "memory_budget_bytes", "rss_idle_bytes", "largest_packet_bytes")
UNMEASURED: Final = frozenset({"largest_packet_bytes"})
NOISE: Final = 0.1  # a device that is slower or faster by less is as measured
# A host that was stopped or cooled down while it waited is faster for a short op, and all wait for it if it then gets a
# larger share. One that stays faster measures itself again.
MIN_SLOWDOWN: Final = 0.9


@dataclass(frozen=True, slots=True)
class ReportedDevice:
    """One device as it describes itself.

    slowdowns: of its last heartbeats. heartbeats: its last ones, that of a calm time first. endpoint: where peers read
    from it, None where they cannot.
    """

    name: str
    curves: Plain
    memory_bytes: float
    slowdowns: Sequence[float] = ()
    heartbeats: Sequence[Heartbeat] = ()
    endpoint: Endpoint | None = None

    def profile(self, usual: float = 1.0) -> DeviceProfile:
        """Return its measured profile; usual: slowdown of the site. Raises WireError if the curves are invalid."""
        costs = (
            FrameCost(hb.peer_frame_s, hb.peer_byte_s)
            for hb in self.heartbeats
            if hb.peer_frame_s is not None and hb.peer_byte_s is not None
        )
        try:
            return profile_from_caps(self.name, self.curves, self.memory_bytes, self.slowdown(usual), next(costs, None))
        except (KeyError, TypeError, ValueError) as exc:
            raise WireError(f"caps of {self.name} cannot be read ({exc!r}); update the agent") from exc

    def slowdown(self, usual: float = 1.0) -> float:
        """Return the median of the last heartbeats, so that a second of load does not count.

        Little more or less than `usual` is `usual`: otherwise equal devices would get unequal shares.
        """
        found = max(median(self.slowdowns), MIN_SLOWDOWN) if self.slowdowns else 1.0
        return found if abs(log(found / usual)) > NOISE else usual

    def link(self) -> Link:
        """Return its measured link to the broker, with defaults until it has measured one."""
        # The best that was measured: load makes a link look slower, and so does a device that has just started.
        base = Link()
        round_trip_s = min((hb.round_trip_s for hb in self.heartbeats if hb.round_trip_s), default=2 * base.latency_s)
        rates = (hb.bandwidth_bytes_per_s for hb in self.heartbeats if hb.bandwidth_bytes_per_s)
        rate = max(rates, default=base.up_bytes_per_s)
        return Link(round_trip_s / 2, rate, rate)

    def peer_links(self) -> dict[str, PeerLink]:
        """Return its measured links straight to others, each the best of its heartbeats."""
        found = {}
        for peer in {name for hb in self.heartbeats for name in hb.peers}:
            reports = [hb.peers[peer] for hb in self.heartbeats if peer in hb.peers]
            rate = max((r.bytes_per_s for r in reports if r.bytes_per_s), default=None)
            found[peer] = PeerLink(min(r.round_trip_s for r in reports) / 2, rate)
        return found


def usual_slowdown(devices: Iterable[ReportedDevice]) -> float:
    """Return the slowdown that is usual on a site."""
    return median([device.slowdown() for device in devices] or [1.0])


def reported_cluster(
    devices: Sequence[ReportedDevice], broker_bytes_per_s: float | None = None, *, mesh: bool = True
) -> Cluster:
    """Return the cluster of these devices; broker_bytes_per_s: of the broker's own link, None if unknown."""
    usual = usual_slowdown(devices)
    profiles = {device.name: device.profile(usual) for device in devices}
    cluster = make_cluster(profiles, {device.name: device.link() for device in devices}, broker_bytes_per_s)
    if not mesh:
        return cluster
    endpoints = {device.name: device.endpoint for device in devices if device.endpoint is not None}
    return replace(
        cluster,
        devices=with_frame_costs(profiles, [name for name, at in endpoints.items() if not at.loopback]),
        endpoints=frozenset(endpoints),
        peer_links=symmetric_peer_links({device.name: device.peer_links() for device in devices}),
    )


def sanitize_heartbeat(heartbeat: Heartbeat) -> tuple[Heartbeat, str | None]:
    """Return a heartbeat without the numbers that no device can have, and what is wrong with the first of them."""
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
    """Return what is wrong with a device's capabilities, by their fields; None if plans can be made with them."""
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
    name: str,
    curves: Mapping[str, Any],
    memory_bytes: float,
    slowdown: float,
    mesh_frame_cost: FrameCost | None = None,
) -> DeviceProfile:
    """Return the profile that an agent's caps describe; mesh_frame_cost: of its heartbeats.

    Raises KeyError, TypeError or ValueError on other data, and for numbers that no device can have.
    """
    # An agent without an endpoint has not measured mesh.
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
        # The broker's measurement lacks the hand-over to a network thread: a frame costs no less than over mesh.
        frame_s=max(curves["frame_s"], numbers["mesh_frame_s"]),
        memory_bytes=memory_bytes,
        slowdown=slowdown,
        mesh_frame_cost=mesh_frame_cost,
        **numbers,
    )


def _curve(entry: Mapping[str, Any]) -> Curve:
    storage = entry.get("storage", "f32")
    if storage not in get_args(WeightDtype):
        raise ValueError("a time curve has an unknown storage")
    if not 0 < len(entry["points"]) <= MAX_POINTS:
        raise ValueError(f"a time curve has 1 to {MAX_POINTS} points")
    points = tuple((check("curve.rows", rows), check("curve.seconds", seconds)) for rows, seconds in entry["points"])
    for (rows, seconds), (more_rows, more_seconds) in pairwise(points):
        # Measurements scatter, but no device takes half as long for more.
        if more_rows <= rows or more_seconds < seconds / 2:
            raise ValueError("a time curve falls")
    return Curve(check("curve.k", entry["k"]), check("curve.n", entry["n"]), points, storage)
