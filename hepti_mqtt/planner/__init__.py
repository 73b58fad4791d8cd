"""The planner: search over strategies, devices and shares, estimates from measurements, and the rule for moves."""

from __future__ import annotations

from hepti_mqtt.planner.accuracy import decide_within_accuracy, weight_error, wire_errors
from hepti_mqtt.planner.candidates import Candidate, Decision, EarlierPlan
from hepti_mqtt.planner.decisions import Assessment, Option, Situation, Verdict, with_loads
from hepti_mqtt.planner.estimates import Corrections, MethodEstimates, SiteEstimates
from hepti_mqtt.planner.price import Price, Question, RequestSimulation, peak_bytes, price, run_seconds
from hepti_mqtt.planner.search import decide, decide_hurried, decide_recalled, price_plans, simulate_plan

__all__ = [
    "Assessment",
    "Candidate",
    "Corrections",
    "Decision",
    "EarlierPlan",
    "MethodEstimates",
    "Option",
    "Price",
    "Question",
    "RequestSimulation",
    "SiteEstimates",
    "Situation",
    "Verdict",
    "decide",
    "decide_hurried",
    "decide_recalled",
    "decide_within_accuracy",
    "peak_bytes",
    "price",
    "price_plans",
    "run_seconds",
    "simulate_plan",
    "weight_error",
    "wire_errors",
    "with_loads",
]
