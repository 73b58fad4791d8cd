"""Which replica of a plan runs what waits: each request goes where it is answered first, behind those before it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from hepti_mqtt.plan import Plan
from hepti_mqtt.runtime.planner.packs import MICRO
from hepti_mqtt.runtime.planner.waiting import Waiting
from hepti_mqtt.schedule import deal

SHORTEST_S: Final = 1e-6  # of a run


class Lane(NamedTuple):
    """A replica: until when it is busy by prediction, the seconds of a token there, whether it has room for a run."""

    plan: Plan
    busy_s: float
    token_s: float
    has_room: bool


class Hand(NamedTuple):
    """What goes next: under which plan, and of what waits how many at the most, None for as many as run together."""

    plan: Plan
    share: int | None = None


def next_hand(now: float, lanes: Sequence[Lane], queue: Waiting) -> Hand | None:
    """Return what goes next to a replica that has room; None if all that waits is answered sooner by busy ones."""
    if len(lanes) < 2:
        return Hand(lanes[0].plan) if lanes and lanes[0].has_room else None
    sizes = (float(max(item.tokens, _least(lanes[0].plan))) for item in queue.turns())
    dealt = list(deal(now, [(lane.busy_s, lane.token_s) for lane in lanes], sizes))
    first = next((i for i in dealt if lanes[i].has_room), None)
    return None if first is None else Hand(lanes[first].plan, dealt.count(first))


def token_s(plan: Plan) -> float:
    """Return the seconds of a token, by what the plan was made for; never none, or one replica would get all."""
    return max(plan.predicted_s, SHORTEST_S) / max(plan.predicted_tokens, 1)


def likely_s(plan: Plan, tokens: int) -> float:
    """Return the seconds that a run of so many tokens likely takes."""
    return token_s(plan) * max(tokens, _least(plan))


def _least(plan: Plan) -> int:
    """Return for how many tokens a run of fewer takes as long."""
    return min(MICRO, max(plan.predicted_tokens, 1))
