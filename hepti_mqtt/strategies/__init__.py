"""The parallel methods: each is a table of layouts, registered here by name."""

from __future__ import annotations

from hepti_mqtt.strategies.maps import pixels
from hepti_mqtt.strategies.method import Division, Lane, Method, Options, Share
from hepti_mqtt.strategies.programs import (
    largest,
    lowered,
    make_plan,
    passes,
    peers,
    program,
    programs,
    programs_digest,
    resident_weights,
    short_programs,
    tasks,
)
from hepti_mqtt.strategies.registry import STRATEGIES

__all__ = [
    "STRATEGIES",
    "Division",
    "Lane",
    "Method",
    "Options",
    "Share",
    "largest",
    "lowered",
    "make_plan",
    "passes",
    "peers",
    "pixels",
    "program",
    "programs",
    "programs_digest",
    "resident_weights",
    "short_programs",
    "tasks",
]
