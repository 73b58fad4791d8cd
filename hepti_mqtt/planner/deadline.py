"""Plans that settle shares by an estimate, so that they keep the site's deadline by the simulator too."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Final

from hepti_mqtt.plan_programs import make_plan
from hepti_mqtt.planner.decision import Candidate
from hepti_mqtt.planner.lanes import lanes_of
from hepti_mqtt.planner.price import Question, gets_through, memory, price

ROUNDS: Final = 6
MARGIN: Final = 0.98  # beyond what was missed, since shares are whole rows


def in_time(question: Question, c: Candidate) -> Candidate:
    """Return a candidate that is solved again for an earlier deadline as long as the simulator says that it is late.

    What is late all the same is returned as it is best: the reader sees both times.
    """
    wanted, best = question.cluster.deadline_s, c
    asked = wanted
    for _ in range(ROUNDS):
        if best.price.seconds <= wanted:
            break
        asked *= MARGIN * wanted / best.price.seconds
        sooner = replace(question, cluster=replace(question.cluster, deadline_s=asked))
        with suppress(ValueError):
            lanes = lanes_of(sooner, c.plan.devices)
            plan = make_plan(question.spec, best.plan, c.plan.strategy, c.plan.options, c.weights, lanes)
            found = replace(best, plan=plan, price=price(question, plan, known=memory(question, plan)))
            faster = not found.price.missing and found.price.seconds < best.price.seconds
            if faster and gets_through(question, plan):
                best = found
    return best
