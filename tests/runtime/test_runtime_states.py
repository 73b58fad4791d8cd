"""Tables of states: what they refuse, what an illegal step does, and the story."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hepti_mqtt.runtime.coordinator.plans import PLANS
from hepti_mqtt.runtime.machinery import KEPT, IllegalStepError, Machine, Story, Table, Transition
from hepti_mqtt.runtime.worker.residents import EPOCHS

DOOR = Table(
    name="door",
    states=("closed", "open", "gone"),
    first=("build", "closed"),
    steps={"closed": {"push": "open", "burn": "gone"}, "open": {"pull": "closed"}, "gone": {}},
    safe={"closed": "closed", "open": "closed", "gone": "gone"},
)
TABLES = (PLANS, EPOCHS, DOOR)


def events(table: Table) -> list[str]:
    return sorted({event for steps in table.steps.values() for event in steps})


def machine(table: Table = DOOR) -> tuple[Machine, Story, Counter[str]]:
    story, counters = Story("tests"), Counter[str]()
    return Machine(table, story, counters), story, counters


PAIRS = [(t, s, e) for t in TABLES for s in t.states for e in events(t)]


@pytest.mark.parametrize(("table", "state", "event"), PAIRS, ids=[f"{t.name}-{s}-{e}" for t, s, e in PAIRS])
def test_a_step_is_in_the_table_or_illegal(table: Table, state: str, event: str) -> None:
    steps, story, counters = machine(table)
    after = table.steps[state].get(event)
    if after is not None:
        assert steps.step("it", state, event, 1.0, "so") == after
        assert story.last() == (Transition(1.0, "it", state, event, after, "so"),)
        assert not counters
        return
    with pytest.raises(IllegalStepError, match=f"it: {event}: .* is {state} has no step"):
        steps.step("it", state, event, 1.0)


def test_in_service_an_illegal_step_is_counted_and_leads_to_the_safe_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Machine, "strict", False)
    steps, story, counters = machine()
    assert steps.step("front", "open", "push", 2.0, "wind") == "closed"
    assert counters["illegal_step"] == 1
    (told,) = story.last()
    assert (told.before, told.event, told.after) == ("open", "push", "closed")
    assert told.why == "illegal: a door that is open has no step for it; wind"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"steps": {k: v for k, v in DOOR.steps.items() if k != "gone"}}, "must name each of closed, open, gone"),
        ({"safe": {"closed": "closed"}}, "must name each"),
        ({"safe": {**DOOR.safe, "open": "ajar"}}, "lead to .'ajar'., which are no states"),
        ({"steps": {**DOOR.steps, "open": {"pull": "ajar"}}}, "ajar"),
        ({"steps": {**DOOR.steps, "closed": {"burn": "gone"}}}, "no step leads to .'open'."),
        ({"steps": {**DOOR.steps, "open": {"push": "open"}}}, "what is open never ends"),
        ({"first": ("build", "gone")}, "no step leads to"),
    ],
)
def test_a_table_with_a_hole_is_refused(change: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        replace(DOOR, **change)


def test_every_safe_state_gives_up_what_devices_hold() -> None:
    assert set(EPOCHS.safe.values()) == {"released"}
    held = {s for s in PLANS.states if s not in {"wanted", "searching", "gone"}}
    assert {PLANS.safe[s] for s in held} == {"retiring"}


@given(st.integers(0, 3 * KEPT), st.integers(0, 2 * KEPT))
def test_a_story_is_bounded_and_says_how_much_there_was(count: int, asked: int) -> None:
    story = Story("doors")
    for i in range(count):
        story.tell(Transition(float(i), f"door {i}", "closed", "push", "open"))
    assert story.told == count
    assert [t.now for t in story.last()] == list(range(max(count - KEPT, 0), count))
    assert len(story.lines()) == min(count, KEPT)
    assert story.last(asked) == story.last()[max(len(story.last()) - asked, 0) :]


def test_a_story_reads_as_one_line_per_step() -> None:
    steps, story, _ = machine()
    state = steps.begin("front", 0.5)
    state = steps.step("front", state, "push", 12.25, "somebody came")
    steps.step("front", state, "pull", 13.0)
    assert story.lines() == [
        "     0.500  front: - -> closed  (build)",
        "    12.250  front: closed -> open  (push: somebody came)",
        "    13.000  front: open -> closed  (pull)",
    ]


def test_a_failed_test_prints_the_stories_of_its_sessions(tmp_path: Path) -> None:
    (tmp_path / "test_failing.py").write_text(
        "from scripted_site import Site\n\n\n"
        "def test_before():\n    Site('before').join('a')\n\n\n"
        "def test_failing():\n    site = Site('kitchen')\n    site.join('a')\n    site.settle()\n    assert not site\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "stories", "-p", "no:cacheprovider", tmp_path],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "story: plans of kitchen" in done.stdout
    assert "kitchen: - -> wanted  (want: the planner has started)" in done.stdout
    assert "plans of before" not in done.stdout
