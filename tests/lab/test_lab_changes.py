"""Scripts of changes: what is refused before anything starts, and when each change is made, on a virtual clock."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hepti_mqtt.errors import ConfigError, LabError
from hepti_mqtt.lab.changes import ACTIONS, Change, Script, Stamp, parse_script
from hepti_mqtt.lab.spec import parse

SPEC = parse({"name": "x", "hosts": {"a": {"gflops": 10}, "b": {}}}, "x")
BOARDS = parse({"name": "x", "kind": "local", "hosts": {"a": {}}}, "x")


class Virtual:
    """A clock that moves only when somebody waits."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> bool:
        self.now += seconds
        return False


def step(**more: Any) -> dict[str, Any]:
    return {"at": 1, "do": "cut", "host": "a", **more}


def test_a_script_is_read_in_order_of_time() -> None:
    data = [step(at=2.5, do="rate", mbit=100), step(do="cpu", share=0.25, host="hub"), step(do="cpu", gflops=5)]
    assert parse_script(data, "s", SPEC) == (
        Change(1.0, "cpu", "hub", share=0.25),
        Change(1.0, "cpu", "a", gflops=5.0),
        Change(2.5, "rate", "a", mbit=100.0),
    )


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({}, "list"),
        ([], "list"),
        ([3], "step 1"),
        ([step(), step(do="explode")], "step 2: `do`"),
        ([step(do=["cut"])], "`do`"),
        ([step(at=-1)], "`at`"),
        ([step(at="soon")], "`at`"),
        ([step(at=True)], "`at`"),
        ([step(host="c")], "'c'"),
        ([step(host=None)], "`host`"),
        ([step(mbit=3)], "'mbit'"),
        ([step(do="rate")], "mbit"),
        ([step(do="rate", mbit=0)], "`mbit`"),
        ([step(do="cpu", share=0.5, gflops=3)], "one of"),
        ([step(do="cpu", share=2)], "`share`"),
        ([step(do="cpu", gflops=3, host="b")], "`gflops`"),
    ],
)
def test_what_is_wrong_is_named(data: Any, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_script(data, "s.yaml", SPEC)
    assert str(caught.value).startswith("s.yaml: ")
    assert words in str(caught.value)


@pytest.mark.parametrize("change", [{"do": "cut"}, {"do": "rate", "mbit": 5}, {"do": "cpu", "share": 0.5}])
def test_links_and_quotas_of_boards_cannot_be_changed(change: Any) -> None:
    with pytest.raises(ConfigError, match=r"kind local; what it can do is kill, restart, stop, cont$"):
        parse_script([{"at": 0, "host": "a", **change}], "s", BOARDS)


def test_processes_of_boards_can() -> None:
    steps = [{"at": 0, "host": "a", "do": do} for do in ("stop", "cont", "kill", "restart")]
    assert [change.do for change in parse_script(steps, "s", BOARDS)] == ["stop", "cont", "kill", "restart"]


@given(st.lists(st.tuples(st.floats(0, 1000), st.floats(0, 5)), min_size=1, max_size=20))
def test_changes_are_made_in_order_and_never_early(steps: list[tuple[float, float]]) -> None:
    changes = parse_script([step(at=at) for at, _ in steps], "s", SPEC)
    clock = Virtual()
    durations = iter([took for _, took in steps])

    def apply(_: Change) -> None:
        clock.now += next(durations)

    reported: list[Stamp] = []
    script = Script(changes, apply, reported.append, clock, clock.wait)
    script.play()
    assert script.finished()
    assert reported == script.stamps
    assert [stamp.change for stamp in reported] == list(changes)
    end = 0.0
    for stamp, (_, took) in zip(reported, steps, strict=True):
        assert stamp.begun_s == pytest.approx(max(stamp.change.at_s, end), abs=1e-6)
        assert stamp.took_s == pytest.approx(took, abs=1e-6)
        end = stamp.begun_s + stamp.took_s


def test_a_change_that_fails_is_stamped_and_the_next_ones_follow() -> None:
    clock = Virtual()

    def apply(change: Change) -> None:
        if change.do == "cut":
            raise LabError("no cable")

    script = Script(parse_script([step(), step(at=2, do="mend")], "s", SPEC), apply, clock=clock, wait=clock.wait)
    script.play()
    assert [stamp.error for stamp in script.stamps] == ["no cable", None]
    records = json.loads(json.dumps([stamp.record() for stamp in script.stamps]))
    assert {"planned_s": 1.0, "begun_s": 1.0, "do": "cut", "host": "a", "error": "no cable"}.items() <= records[
        0
    ].items()
    assert "error" not in records[1]


def test_closing_a_script_stops_it_before_the_next_change() -> None:
    made: list[str] = []
    with Script((Change(0, "cut", "a"), Change(80_000, "mend", "a")), lambda change: made.append(change.do)) as script:
        pass
    assert made in ([], ["cut"])
    assert not script.finished()


def test_every_action_can_be_written() -> None:
    amounts = {"rate": {"mbit": 5}, "cpu": {"share": 0.5}}
    data = [step(do=do, **amounts.get(do, {})) for do in ACTIONS]
    assert [change.do for change in parse_script(data, "s", SPEC)] == list(ACTIONS)
