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


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([], False),
        (HURRIED, True),
        (WHOLE, True),
        ([*WHOLE, ("bert (wire f16) 7.5", "searching", "gone")], False),  # the running one is as good
        ([*WHOLE, ("bert (wire f16) 7.5", "searching", "preparing")], True),
        (
            [*WHOLE, ("bert (wire f16) 7.5", "searching", "preparing"), ("bert (wire f16) 7.5", "preparing", "active")],
            False,
        ),
    ],
)
def test_a_hurried_plan_is_not_the_last_word(steps: list[tuple[str, str, str]], expected: bool) -> None:
    story = [{"plan": plan, "from": before, "to": after} for plan, before, after in steps]
    assert under_way(story) is expected
