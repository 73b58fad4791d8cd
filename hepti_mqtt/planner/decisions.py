"""Which way of dividing a model to try beside the one that runs: a prediction is off by some 10 %, a run is not.

A plan that is a little better on paper alone would be kept for ever where it is a little worse in truth, and the other
one never seen. So while a model is served the ways that are predicted to be about as fast have their turn, each once;
then what runs have taught decides.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace
from typing import Final

from hepti_mqtt.cost.memory import weights_bytes
from hepti_mqtt.plan_programs import resident_weights
from hepti_mqtt.planner.candidates import Candidate, Decision, explain_choice
from hepti_mqtt.planner.estimates import EXPLORATION_BONUS, Corrections, StrategyKey, strategy_key
from hepti_mqtt.planner.price import Question, price
from hepti_mqtt.planner.refine import balance_shares
from hepti_mqtt.spec import Spec

KNOWN: Final = 0.96  # of the running plan's measured time: what a trial must promise
OTHERS: Final = 4  # ways that stay in sight after a trial
LOADS_S: Final = 60.0  # a trial for which a device would load for longer costs more than it may win


def with_exploration(learned: Corrections) -> Corrections:
    """Return what was learned, for a search in which ways that were never tried get their turn."""
    return replace(learned, exploration_bonus=EXPLORATION_BONUS)


def next_trial(decision: Decision, learned: Corrections, not_again: Set[StrategyKey] = frozenset()) -> Candidate | None:
    """Return the candidate of a decision that by runs, or by hope, beats the chosen plan by most; None if none does.

    Only for latency, and where the chosen plan was measured.
    """
    chosen, learned = decision.chosen, with_exploration(learned)
    if chosen.price.objective != "latency" or not learned.knows(chosen.plan):
        return None
    enough_s = KNOWN * chosen.price.seconds * learned.factor(chosen.plan)

    def hoped_s(c: Candidate) -> float:
        return c.price.seconds * learned.factor(c.plan) * learned.bonus_for(c.plan)

    others = (
        c
        for c in decision.ranking
        if c.price.feasible and strategy_key(c.plan) not in {strategy_key(chosen.plan), *not_again}
    )
    best = min(others, key=hoped_s, default=None)
    return best if best is not None and hoped_s(best) < enough_s else None


def ranked_with_previous(question: Question, found: Decision, last: Decision) -> Decision:
    """Return the decision for a trial, ranked beside what the plan before it was compared with, at prices of now."""
    tried, there = found.chosen.name, question.cluster.devices.keys()
    others = [c for c in last.ranking if c.name != tried and c.price.feasible and there >= set(c.plan.devices)]
    now = (replace(c, price=price(question, c.plan, full=True, memory=c.price.memory)) for c in others[:OTHERS])
    return replace(found, ranking=(found.chosen, *sorted(now, key=lambda c: c.price.cost)))


def fits_beside(spec: Spec, decision: Decision, c: Candidate) -> bool:
    """Return whether each device has room for a candidate's plan beside the chosen one, and loads it soon."""
    return all(_has_room(spec, decision, c, device) for device in c.plan.devices)


def _has_room(spec: Spec, decision: Decision, c: Candidate, device: str) -> bool:
    running = decision.chosen
    there = {*resident_weights(spec, running.plan, device)} if device in running.plan.devices else set()
    wanted = {*resident_weights(spec, c.plan, device)}
    needed = c.price.needs[device] + running.price.needs.get(device, 0) - weights_bytes(wanted & there)
    loads_s = weights_bytes(wanted - there) / decision.cluster.links[device].down_bytes_per_s
    return needed <= c.price.memory_bytes[device] and loads_s <= LOADS_S


# ----------------------------------------------------------------------------------------------------------------------
# Whether a plan is still the best after measurements have drifted: some ten prices instead of a search of many more.
#
# On a weak machine that coordinates and computes, each search slows down the requests beside it for seconds.


MOVED: Final = 1.25  # a price that changed by more means that the site is not the one of the last search
FASTER: Final = 1.1  # what a device outside of the plan can do, if it has grown by less, is as it was
GAIN: Final = 1.05  # plans that cost less by no more are not searched for: a plan stays unless another gains more
# methods that came next


def revalidate(question: Question, last: Decision) -> Decision | None:
    """Return the decision for a plan with the prices of now; None where a search may find a better one.

    It stays where it costs about what it did, devices that it leaves out have become no faster, and neither shares
    moved once more nor what the other methods came to cost less.
    """
    plan = last.chosen.plan
    if not _comparable(question, last) or _faster_outside(question, last):
        return None
    full = price(question, plan, full=True)
    ratio = full.cost[0] / last.chosen.price.cost[0]
    if not full.feasible or max(ratio, 1 / ratio) > MOVED:
        return None
    now = Candidate(plan, price(question, plan, memory=full.memory), last.chosen.shares)
    ranked = [c for c in last.ranking if c.name != plan.method][:OTHERS]
    others = [replace(c, price=price(question, c.plan, memory=c.price.memory)) for c in ranked]
    better = (c for c in (balance_shares(question, now), *others) if c.price.feasible)
    if any(GAIN * c.price.cost[0] < now.price.cost[0] for c in better):
        return None
    return _reprice(question, last, replace(now, price=full), others)


def _comparable(question: Question, last: Decision) -> bool:
    """Return whether prices of now and of then differ by measurements alone."""
    same_devices = question.cluster.devices.keys() == last.cluster.devices.keys()
    shapes = {played.shape for played in last.chosen.price.simulated}
    return (
        same_devices and shapes == {question.shape} and question.objective == last.chosen.price.objective == "latency"
    )


def _faster_outside(question: Question, last: Decision) -> bool:
    """Return whether a device that the plan leaves out computes, sends or receives faster than it did."""
    rows, now, then = question.shape.size, question.cluster, last.cluster
    for name in now.devices.keys() - set(last.chosen.plan.devices):
        speeds = [now.devices[name].speed(rows), now.links[name].up_bytes_per_s, now.links[name].down_bytes_per_s]
        before = [then.devices[name].speed(rows), then.links[name].up_bytes_per_s, then.links[name].down_bytes_per_s]
        if any(a > FASTER * b for a, b in zip(speeds, before, strict=True)):
            return True
    return False


def _reprice(question: Question, last: Decision, chosen: Candidate, others: Sequence[Candidate]) -> Decision:
    ranking = (chosen, *sorted(others, key=lambda c: c.price.cost))
    reason = explain_choice(ranking, chosen, last.pruned)
    plan = replace(chosen.plan, predicted_s=chosen.price.seconds, predicted_bytes=chosen.price.nbytes, reason=reason)
    chosen = replace(chosen, plan=plan)
    return replace(last, chosen=chosen, ranking=(chosen, *ranking[1:]), reason=reason, cluster=question.cluster)
