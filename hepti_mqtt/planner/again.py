"""Whether a plan is still the best after measurements have drifted: some ten prices instead of a search of many more.

On a weak machine that coordinates and computes, each search slows down the requests beside it for seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from hepti_mqtt.planner.decision import Candidate, Decision
from hepti_mqtt.planner.price import Question, price
from hepti_mqtt.planner.search import balanced
from hepti_mqtt.planner.words import reason_of

MOVED: Final = 1.25  # a price that has changed by more tells of another site than the last search knew
FASTER: Final = 1.1  # what a device outside of the plan can do, if it has grown by less, is as it was
GAIN: Final = 1.05  # plans that cost less by no more are not searched for: a plan stays unless another gains more
OTHERS: Final = 4  # methods that came next


def still_best(question: Question, last: Decision) -> Decision | None:
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
    now = Candidate(plan, price(question, plan, known=(full.needs, full.missing)), last.chosen.weights)
    ranked = [c for c in last.ranking if c.name != plan.method][:OTHERS]
    others = [replace(c, price=price(question, c.plan, known=(c.price.needs, c.price.missing))) for c in ranked]
    better = (c for c in (balanced(question, now), *others) if c.price.feasible)
    if any(GAIN * c.price.cost[0] < now.price.cost[0] for c in better):
        return None
    return _priced_anew(question, last, replace(now, price=full), others)


def _comparable(question: Question, last: Decision) -> bool:
    """Return whether prices of now and of then differ by measurements alone."""
    same_devices = question.cluster.devices.keys() == last.cluster.devices.keys()
    shapes = {played.shape for played in last.chosen.price.played}
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


def _priced_anew(question: Question, last: Decision, chosen: Candidate, others: Sequence[Candidate]) -> Decision:
    ranking = (chosen, *sorted(others, key=lambda c: c.price.cost))
    reason = reason_of(ranking, chosen, last.behind)
    told = replace(chosen.plan, predicted_s=chosen.price.seconds, predicted_bytes=chosen.price.nbytes, reason=reason)
    chosen = replace(chosen, plan=told)
    return replace(last, chosen=chosen, ranking=(chosen, *ranking[1:]), reason=reason, cluster=question.cluster)
