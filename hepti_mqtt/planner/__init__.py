"""Search over strategies, device subsets and shares; the least predicted time among the feasible candidates wins."""

from __future__ import annotations

from hepti_mqtt.planner.accuracy import decide_within, wire_errors
from hepti_mqtt.planner.candidates import Candidate, Decision
from hepti_mqtt.planner.decisions import KNOWN, compared, fits_beside, hopeful, still_best, worth_trying
from hepti_mqtt.planner.estimates import DriftRule, Experience, Learned
from hepti_mqtt.planner.price import Played, Price, Question, peak_bytes, price
from hepti_mqtt.planner.search import decide, decide_soon

__all__ = [
    "KNOWN",
    "Candidate",
    "Decision",
    "DriftRule",
    "Experience",
    "Learned",
    "Played",
    "Price",
    "Question",
    "compared",
    "decide",
    "decide_soon",
    "decide_within",
    "fits_beside",
    "hopeful",
    "peak_bytes",
    "price",
    "still_best",
    "wire_errors",
    "worth_trying",
]
