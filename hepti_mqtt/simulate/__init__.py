"""Programs on a virtual clock: how long a request takes, which bytes flow, where each device waits, what it holds."""

from __future__ import annotations

from hepti_mqtt.simulate.bytes import Naming, largest_packet_bytes, sent_bytes
from hepti_mqtt.simulate.clock import play, simulate
from hepti_mqtt.simulate.explain import explain, places_taken, tasks_of, timeline_svg, timeline_text
from hepti_mqtt.simulate.layout_svg import layout_svg
from hepti_mqtt.simulate.load import ROUNDS, Load, RunTimes, load_of
from hepti_mqtt.simulate.memory import (
    PROGRAMS,
    SESSIONS_BESIDE,
    live_bytes,
    loading_total,
    most_live_bytes,
    programs_bytes,
    weight_total,
)
from hepti_mqtt.simulate.outcome import DeviceUse, Event, Outcome, Replica, Request, Simulation, Slows
from hepti_mqtt.simulate.several import request_of, under_load
from hepti_mqtt.simulate.work_factor import WorkFactor, plan_work, work_factor

__all__ = [
    "PROGRAMS",
    "ROUNDS",
    "SESSIONS_BESIDE",
    "DeviceUse",
    "Event",
    "Load",
    "Naming",
    "Outcome",
    "Replica",
    "Request",
    "RunTimes",
    "Simulation",
    "Slows",
    "WorkFactor",
    "explain",
    "largest_packet_bytes",
    "layout_svg",
    "live_bytes",
    "load_of",
    "loading_total",
    "most_live_bytes",
    "places_taken",
    "plan_work",
    "play",
    "programs_bytes",
    "request_of",
    "sent_bytes",
    "simulate",
    "tasks_of",
    "timeline_svg",
    "timeline_text",
    "under_load",
    "weight_total",
    "work_factor",
]
