"""The cluster that devices described, for simulating a plan where the planner is not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hepti_mqtt.cluster import (
    Cluster,
    DeviceProfile,
    Link,
    PeerLink,
    cluster_of,
    frame_cost,
    frames_foreseen,
    peer_links_of,
    profile_from_caps,
)
from hepti_mqtt.errors import ConfigError
from hepti_mqtt.wire import peers as peer_forms


def cluster_described(found: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Cluster:
    """Return the cluster of the devices `names` among those that `Hepti.devices` found.

    Raises ConfigError if one of `names` is not there or has not said how fast it is.
    """
    by_name = {d["device"]: d for d in found if "curves" in d}
    missing = [n for n in names if n not in by_name]
    if missing:
        raise ConfigError(f"devices of the plan are not there any more: {', '.join(missing)}; try again")
    profiles: dict[str, DeviceProfile] = {}
    links, peers = {}, {}
    for name in names:
        device = by_name[name]
        hb = device.get("heartbeat") or {}
        profiles[name] = profile_from_caps(
            name,
            device["curves"],
            device["memory_budget_bytes"],
            hb.get("slowdown") or 1.0,
            frame_cost(hb.get("peer_frame_s"), hb.get("peer_byte_s")),
        )
        rate = hb.get("bandwidth_bytes_per_s") or Link().up_bytes_per_s
        links[name] = Link((hb.get("round_trip_s") or 2 * Link().latency_s) / 2, rate, rate)
        peers[name] = {
            target: PeerLink(told["round_trip_s"] / 2, told["bytes_per_s"])
            for target, told in (hb.get("peers") or {}).items()
        }
    endpoints = {name: told for name in names if (told := peer_forms.endpoint(by_name[name].get("endpoint")))}
    profiles = frames_foreseen(profiles, [name for name, endpoint in endpoints.items() if not endpoint.loopback])
    return replace(cluster_of(profiles, links), endpoints=frozenset(endpoints), peer_links=peer_links_of(peers))
