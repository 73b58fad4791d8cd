"""When the driver takes a plan to be the planner's whole choice."""

from __future__ import annotations

import pytest

from hepti_mqtt.bench.driver import under_way

HURRIED = [
    ("bert (wire f16)", "", "wanted"),
    ("bert (wire f16) 7.4", "wanted", "searching"),
    ("bert (wire f16) 7.4", "searching", "preparing"),
    ("bert (wire f16)", "", "wanted"),  # the search was hurried
    ("bert (wire f16) 7.4", "preparing", "active"),
]
WHOLE = [*HURRIED, ("bert (wire f16) 7.5", "wanted", "searching")]
# A plan that does not fit beside the old one: it comes again, and what it was called before is heard of no more.
AGAIN = [
    *WHOLE,
    ("bert (wire f16) 7.5", "searching", "preparing"),
    ("bert (wire f16) 7.5", "preparing", "swapping"),
    ("bert (wire f16) 7.6", "swapping", "preparing"),
]


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([], False),
        (HURRIED, True),
        (WHOLE, True),
        ([*WHOLE, ("bert (wire f16) 7.5", "searching", "gone")], False),  # the running one is as good
        ([*WHOLE, ("bert (wire f16) 7.5", "searching", "preparing")], True),
        (AGAIN, True),
        ([*AGAIN, ("bert (wire f16) 7.6", "preparing", "active")], False),
        (
            [*WHOLE, ("bert (wire f16) 7.5", "searching", "preparing"), ("bert (wire f16) 7.5", "preparing", "active")],
            False,
        ),
    ],
)
def test_a_hurried_plan_is_not_the_last_word(steps: list[tuple[str, str, str]], expected: bool) -> None:
    story = [{"plan": plan, "from": before, "to": after} for plan, before, after in steps]
    on_its_way = bool(steps) and steps[-1][2] in ("preparing", "swapping")
    assert under_way({"story": story, "preparing": {"epoch": [7, 5]} if on_its_way else None}) is expected
