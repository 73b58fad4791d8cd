"""The states of a model's plans, from the wish for a search to the release of what it found.

    wanted -> searching -> preparing -> active -> retiring -> gone

A plan that does not fit beside the old one is `swapping` until that one is gone. A plan under which a run never ended
is `suspect`: it gets no more requests, but its weights stay until another plan takes its place.
"""

from __future__ import annotations

from typing import Final, Literal, get_args

from hepti_mqtt.runtime.states import Table

PlanState = Literal["wanted", "searching", "preparing", "swapping", "active", "suspect", "retiring", "gone"]
# What a search is for: something has changed, or no more than measurements, or there is a way that was never tried.
Cause = Literal["change", "drift", "trial"]
PlanEvent = Literal[
    "want",  # a device came or went, a measurement drifted, somebody pinned something, ...
    "search",
    "found",
    "kept",  # what runs is as good
    "no plan",
    "outdated",  # something changed while the search ran
    "ready",  # on every device
    "lacks memory",  # beside the old plan
    "room",  # the old plan is gone
    "refused",
    "silent",
    "lost",  # one of its devices
    "overdue",
    "replaced",
    "make room",  # for a plan that does not fit beside it
    "idle",  # its last run has ended
    "unused",  # nobody asks for its pins, and others need the place
]

PLANS: Final[Table[PlanState, PlanEvent]] = Table(
    name="plan",
    states=get_args(PlanState),
    first=("want", "wanted"),
    steps={
        "wanted": {"want": "wanted", "search": "searching", "unused": "gone"},
        "searching": {
            "found": "preparing",
            "kept": "gone",
            "no plan": "gone",
            "outdated": "gone",
            "make room": "gone",
            "unused": "gone",
        },
        "preparing": {
            "ready": "active",
            "lacks memory": "swapping",
            "refused": "gone",
            "silent": "gone",
            "lost": "gone",
            "make room": "gone",
            "unused": "gone",
        },
        "swapping": {"room": "preparing", "lost": "gone", "make room": "gone", "unused": "gone"},
        "active": {
            "overdue": "suspect",
            "replaced": "retiring",
            "make room": "retiring",
            "lost": "retiring",
            "unused": "retiring",
        },
        "suspect": {
            "no plan": "retiring",
            "replaced": "retiring",
            "make room": "retiring",
            "lost": "retiring",
            "unused": "retiring",
        },
        "retiring": {"idle": "gone"},
        "gone": {},
    },
    safe={
        "wanted": "gone",
        "searching": "gone",
        "preparing": "retiring",  # devices may hold something of it, so it is released
        "swapping": "retiring",
        "active": "retiring",
        "suspect": "retiring",
        "retiring": "retiring",
        "gone": "gone",
    },
)
