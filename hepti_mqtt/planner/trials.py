"""Which way of dividing a model to try beside the one that runs: a prediction is off by some 10 %, a run is not.

A plan that is a little better on paper alone would be kept for ever where it is a little worse in truth, and the other
one never seen. So while a model is served the ways that are predicted to be about as fast have their turn, each once;
then what runs have taught decides.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace
from typing import Final

from hepti_mqtt.plan_programs import resident_weights
from hepti_mqtt.planner.decision import Candidate, Decision
from hepti_mqtt.planner.experience import HOPE, Learned, Way, way
from hepti_mqtt.planner.price import Question, price
from hepti_mqtt.simulate import weight_total
from hepti_mqtt.spec import Spec

KNOWN: Final = 0.96  # of the running plan's time: what another way must promise where runs have told what ours takes
OTHERS: Final = 4  # ways that stay in sight after a trial
LOADS_S: Final = 60.0  # a trial for which a device would load for longer costs more than it may win


def hopeful(learned: Learned) -> Learned:
    """Return what was learned, for a search in which ways that were never tried get their turn."""
    return replace(learned, hope=HOPE)


def worth_trying(decision: Decision, learned: Learned, not_again: Set[Way] = frozenset()) -> Candidate | None:
    """Return the candidate of a decision that by runs, or by hope, beats the chosen plan by most; None if none does.

    Only for latency, and where runs have told what the chosen plan takes.
    """
    chosen, learned = decision.chosen, hopeful(learned)
    if chosen.price.objective != "latency" or not learned.knows(chosen.plan):
        return None
    enough_s = KNOWN * chosen.price.seconds * learned.factor(chosen.plan)

    def hoped_s(c: Candidate) -> float:
        return c.price.seconds * learned.factor(c.plan) * learned.hoped(c.plan)

    others = (c for c in decision.ranking if c.price.feasible and way(c.plan) not in {way(chosen.plan), *not_again})
    best = min(others, key=hoped_s, default=None)
    return best if best is not None and hoped_s(best) < enough_s else None


def compared(question: Question, found: Decision, last: Decision) -> Decision:
    """Return the decision for a trial, ranked beside what the plan before it was compared with, at prices of now."""
    tried, there = found.chosen.name, question.cluster.devices.keys()
    others = [c for c in last.ranking if c.name != tried and c.price.feasible and there >= set(c.plan.devices)]
    now = (
        replace(c, price=price(question, c.plan, full=True, known=(c.price.needs, c.price.missing)))
        for c in others[:OTHERS]
    )
    return replace(found, ranking=(found.chosen, *sorted(now, key=lambda c: c.price.cost)))


def fits_beside(spec: Spec, decision: Decision, c: Candidate) -> bool:
    """Return whether each device has room for a candidate's plan beside the chosen one, and loads it soon."""
    return all(_has_room(spec, decision, c, device) for device in c.plan.devices)


def _has_room(spec: Spec, decision: Decision, c: Candidate, device: str) -> bool:
    running = decision.chosen
    there = {*resident_weights(spec, running.plan, device)} if device in running.plan.devices else set()
    wanted = {*resident_weights(spec, c.plan, device)}
    needed = c.price.needs[device] + running.price.needs.get(device, 0) - weight_total(wanted & there)
    loads_s = weight_total(wanted - there) / decision.cluster.links[device].down_bytes_per_s
    return needed <= c.price.room[device] and loads_s <= LOADS_S
