"""Programs on a virtual clock: how long a request takes, which bytes flow, where each device waits, what it holds."""

from __future__ import annotations

from hepti_mqtt.simulate.bytes import Naming, largest_packet_bytes, sent_bytes
from hepti_mqtt.simulate.clock import DeviceUse, Event, Simulation, simulate
from hepti_mqtt.simulate.explain import explain, timeline_svg, timeline_text
from hepti_mqtt.simulate.memory import live_bytes, loading_total, weight_total

__all__ = [
    "DeviceUse",
    "Event",
    "Naming",
    "Simulation",
    "explain",
    "largest_packet_bytes",
    "live_bytes",
    "loading_total",
    "sent_bytes",
    "simulate",
    "timeline_svg",
    "timeline_text",
    "weight_total",
]
