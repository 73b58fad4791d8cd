"""In which numbers the exchanges of a plan may go: what is pinned, or what keeps the answer within an accuracy budget.

How far an answer moves depends on what is exchanged and how often: on the method, its variant and the number of
devices, and hardly on their shares. So an error is known by these, and is measured (`planner.accuracy`) once for each
that the search would choose; measuring all of them at load would take a run of the model for each, most of which no
search ever chooses.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from hepti_mqtt.plan import NARROW, Plan, WireDtype

if TYPE_CHECKING:
    from hepti_mqtt.planner.price import Question

EXACT: Final[WireDtype] = "f32"
# Another input's answer may move further than those of the inputs that were measured. Over seeds and lengths of small
# seeded models they differ by up to 1.4 times for transformers; for three logits of a convolutional network by 9 with
# i8, and the most of eight inputs is what counts there.
MARGIN: Final = 2.0
# The methods of one model differ by up to 8 times, most of them by less than 3: a dtype that is further than this from
# the budget under one is not measured under the others.
FAR: Final = 4.0

# What an error belongs to: method with its variant, number of devices, wire.
Narrowed = tuple[str, int, WireDtype]


def narrowed(plan: Plan, wire: WireDtype | None = None) -> Narrowed:
    """Return what the error of a plan belongs to; wire: another one than the plan's own."""
    return plan.method, len(plan.devices), wire or plan.wire


def wires(question: Question, plan: Plan) -> tuple[WireDtype, ...]:
    """Return the dtypes to price against each other for a plan, the narrowest first; what is pinned is alone."""
    if question.accuracy is None:
        return (question.wire,)
    if len(plan.devices) == 1:
        return (EXACT,)
    return (*(wire for wire in NARROW if _may(question.accuracy, question.errors, narrowed(plan, wire))), EXACT)


def _may(accuracy: float, errors: Mapping[Narrowed, float], key: Narrowed) -> bool:
    """Return whether an error is within the budget, or may be as far as is known."""
    if key in errors:
        return errors[key] * MARGIN <= accuracy
    elsewhere = [error for (_, _, wire), error in errors.items() if wire == key[2]]
    return min(elsewhere, default=0.0) * MARGIN <= FAR * accuracy
