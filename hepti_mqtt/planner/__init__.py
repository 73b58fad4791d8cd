"""Search over strategies, device subsets and shares; the least predicted time among the feasible candidates wins."""

from __future__ import annotations

from hepti_mqtt.planner.accuracy import decide_within_accuracy, wire_errors
from hepti_mqtt.planner.candidates import Candidate, Decision
from hepti_mqtt.planner.decisions import (
    KNOWN,
    fits_beside,
    next_trial,
    ranked_with_previous,
    revalidate,
    with_exploration,
)
from hepti_mqtt.planner.estimates import Corrections, MethodEstimates, SiteEstimates
from hepti_mqtt.planner.price import Price, Question, SimulatedRequest, peak_bytes, price
from hepti_mqtt.planner.search import decide, decide_hurried

__all__ = [
    "KNOWN",
    "Candidate",
    "Corrections",
    "Decision",
    "MethodEstimates",
    "Price",
    "Question",
    "SimulatedRequest",
    "SiteEstimates",
    "decide",
    "decide_hurried",
    "decide_within_accuracy",
    "fits_beside",
    "next_trial",
    "peak_bytes",
    "price",
    "ranked_with_previous",
    "revalidate",
    "wire_errors",
    "with_exploration",
]
