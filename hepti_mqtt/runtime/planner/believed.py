"""What the planner believes of the numbers that devices tell of themselves: those that a device can have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from hepti_mqtt.cluster import plausible, profile_from_caps
from hepti_mqtt.wire.described import Heartbeat
from hepti_mqtt.wire.peers import LinkReport

# A heartbeat's numbers that plans are made with: the least and the most that each may be, and what is taken instead.
PLAUSIBLE: Final[Mapping[str, tuple[float, float, float | None]]] = {
    "slowdown": (0.0, 1e4, 1.0),
    "peer_frame_s": (0.0, 10.0, None),
    "peer_byte_s": (0.0, 1e-3, None),
    "round_trip_s": (0.0, 3600.0, None),
    "bandwidth_bytes_per_s": (1.0, 1e15, None),
}
MEMORY_BYTES: Final = 1 << 50  # no device has more


def believed(heartbeat: Heartbeat) -> tuple[Heartbeat, str | None]:
    """Return a heartbeat without the numbers that no device can have, and what was wrong with the first of them."""
    wrong: str | None = None
    instead: dict[str, Any] = {}
    for key, (low, high, taken) in PLAUSIBLE.items():
        value = getattr(heartbeat, key)
        if value is None:
            continue
        try:
            plausible(key, value, low, high)
        except ValueError as error:
            wrong, instead[key] = wrong or str(error), taken
    peers = {name: report for name, report in heartbeat.peers.items() if _link_believed(report)}
    if len(peers) < len(heartbeat.peers):
        wrong, instead["peers"] = wrong or "a link to a peer is not one that can be", peers
    return replace(heartbeat, **instead), wrong


def caps_refused(device: str, curves: Mapping[str, Any], memory_budget_bytes: int) -> str | None:
    """Return what of a device's capabilities cannot be right, None if plans can be made with them."""
    try:
        plausible("memory_budget_bytes", memory_budget_bytes, 0, MEMORY_BYTES)
        profile_from_caps(device, curves, memory_budget_bytes, 1.0)
    except KeyError as error:
        return f"{error.args[0]} is missing"
    except (TypeError, ValueError) as error:
        return str(error)
    return None


def _link_believed(report: LinkReport) -> bool:
    told = {"round_trip_s": report.round_trip_s, "bandwidth_bytes_per_s": report.bytes_per_s}
    return all(v is None or PLAUSIBLE[k][0] <= v <= PLAUSIBLE[k][1] for k, v in told.items())
