"""When the driver takes a plan to be the planner's whole choice."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from hepti_mqtt.bench import driver as module
from hepti_mqtt.bench.driver import Driver, under_way

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
    on_its_way = [{"epoch": [7, 5]}] if steps and steps[-1][2] in ("preparing", "swapping") else []
    assert under_way({"story": story, "preparing": None, "pinned_preparing": on_its_way}) is expected
    assert under_way({"story": story, "preparing": next(iter(on_its_way), None), "pinned_preparing": []}) is expected


def test_a_search_that_has_not_begun_takes_nothing_from_others() -> None:
    for steps, expected in ((HURRIED, False), (WHOLE, True), (WHOLE[:1], False)):
        story = [{"plan": plan, "from": before, "to": after} for plan, before, after in steps]
        assert under_way({"story": story, "preparing": None, "pinned_preparing": []}, wanted=False) is expected


class Site:
    """What a driver asks of a client: a model that is measured, and another one for which a search runs for a while."""

    def __init__(self) -> None:
        self.asked = 0

    def infer(self, model: str, **_how: object) -> SimpleNamespace:
        assert model == "measured"
        self.asked += 1
        return SimpleNamespace(plan={"id": "7.1"})

    def plan(self, model: str) -> dict[str, object]:
        ends = "searching" if model == "other" and self.asked < 4 else "gone"
        story = [{"plan": f"{model} 7.2", "from": "wanted", "to": ends}]
        return {"story": story, "preparing": None, "pinned_preparing": []}


def test_a_turn_begins_when_no_search_for_any_model_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.time, "sleep", lambda _s: None)
    site = Site()
    inputs = {name: (name, {}, np.zeros(1, np.float32)) for name in ("measured", "other")}
    driver = Driver(site, inputs)  # type: ignore[arg-type]
    pins = dict.fromkeys(("options", "devices", "wire", "weights", "route", "objective"))
    driver.bring({"key": "measured", "strategy": "row", **pins})
    assert site.asked == 4


class Settling:
    """A site whose plan changes with the third request and is searched for until the fifth; a request takes 10 s."""

    def __init__(self, busy: bool) -> None:
        self.asked, self.now, self.busy = 0, 0.0, busy

    def infer(self, _model: str, **_how: object) -> SimpleNamespace:
        self.asked += 1
        self.now += 10.0
        return SimpleNamespace(plan={"id": "7.1" if self.asked < 3 else "7.2"})

    def plan(self, _model: str) -> dict[str, object]:
        story = [{"plan": "m 7.3", "from": "wanted", "to": "searching" if self.busy or self.asked < 5 else "gone"}]
        return {"story": story, "preparing": None, "pinned_preparing": []}


@pytest.mark.parametrize(
    ("busy", "most_s", "ends_s"),
    [
        (False, 300, 80.0),  # the last search was seen to run at 40 s
        (False, 20, 50.0),  # what is under way at the end is waited for
        (True, 20, 140.0),  # but not for ever
    ],
)
def test_the_choice_serves_until_its_plan_stands(
    monkeypatch: pytest.MonkeyPatch, busy: bool, most_s: int, ends_s: float
) -> None:
    site = Settling(busy)
    monkeypatch.setattr(module.time, "monotonic", lambda: site.now)
    driver = Driver(site, {"measured": ("measured", {}, np.zeros(1, np.float32))})  # type: ignore[arg-type]
    pins = dict.fromkeys(("options", "devices", "wire", "weights", "route", "objective"))
    told = driver.settle({"key": "measured", "strategy": "auto", "most_s": most_s, **pins})
    assert told == {"settled": ["7.1", "7.2"], "settled_s": ends_s}
