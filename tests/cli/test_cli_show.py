"""What `hepti plan` and `hepti devices` print, without a site."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from hepti_mqtt.checkpoint import spec_of_kind
from hepti_mqtt.cli import output, show
from hepti_mqtt.cli.main import main
from hepti_mqtt.cli.show import print_edges, print_story
from hepti_mqtt.errors import ConfigError, WireError
from hepti_mqtt.ids import Epoch
from hepti_mqtt.plan import Plan


def test_a_story_is_a_table_with_times(capsys: pytest.CaptureFixture[str]) -> None:
    step = {"time": 1.7e9, "plan": "m 9.1", "from": "active", "to": "retiring", "cause": "lost: d1 went offline"}
    print_story("m", {"story": [step, {**step, "time": 1.7e9 + 0.25}]})
    title, head, *lines = capsys.readouterr().out.splitlines()
    assert "story of the plans for m" in title
    assert head.split() == ["time", "plan", "from", "to", "cause"]
    cells = [re.split(r"\s{2,}", line.strip()) for line in lines]
    assert [c[1:] for c in cells] == [["m 9.1", "active", "retiring", "lost: d1 went offline"]] * 2
    assert [c[0][-4:] for c in cells] == [".000", ".250"]


@pytest.mark.parametrize("record", [{}, {"story": []}])
def test_a_planner_that_tells_no_story_has_an_empty_one(record: dict, capsys: pytest.CaptureFixture[str]) -> None:
    print_story("m", record)
    assert len(capsys.readouterr().out.splitlines()) == 2


EDGE = {
    "frames_in": 3,
    "bytes_in": 1 << 20,
    "frames_out": 0,
    "bytes_out": 0,
    "queued_bytes": 7,
    "dropped": 1,
    "reconnections": 2,
    "joined": 1,
    "trouble": "",
}


def device(name: str, edges: dict, peers: dict | None = None, status: str = "online") -> dict:
    return {"device": name, "status": status, "heartbeat": {"edges": edges, "peers": peers or {}}}


def test_what_goes_directly_is_a_table_and_what_cannot_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    silent = {**EDGE, "frames_in": 0, "joined": 0, "trouble": "connection refused"}
    link = {"round_trip_s": 0.0005, "bytes_per_s": 1e6}
    print_edges(
        [
            device("a", {"b": EDGE, "c": silent, "gone": silent}),
            device("b", {"a": {**EDGE, "frames_in": 5}}, {"a": link}),
            device("c", {}),
            device("gone", {}, status="offline"),
        ]
    )
    title, _, first, second, said = capsys.readouterr().out.splitlines()
    assert "directly between devices" in title
    assert first.split() == ["b", "a", "3", "1.0", "7", "1", "2", "0.50", "8"]
    assert second.split() == ["a", "b", "5", "1.0", "7", "1", "2", "-", "-"]
    assert said == "a does not hear c directly: connection refused; the broker is between them"


CURVES = {
    "linear": [{"k": 8, "n": 8, "points": [[1, 1e-6], [8, 5e-6]]}], "frame_s": 1e-4, "attention_flops_per_s": 1e9,
    "rowwise_bytes_per_s": 1e9, "op_overhead_s": 1e-6, "copy_bytes_per_s": 1e9,
}  # fmt: skip
BEAT = {
    "boot": 1, "seq": 1, "cpu_other": 0.1, "free_bytes": 1, "temperature_c": None, "round_trip_s": None,
    "bandwidth_bytes_per_s": None, "slowdown": 1.0, "rss_bytes": 0, "counters": {},
}  # fmt: skip


def listed(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    unused: dict[str, str] | None = None,
    **said: object,
) -> str:
    device = {
        "device": "a",
        "status": "online",
        "boot": 1,
        "threads": 1,
        "memory_budget_bytes": 1 << 30,
        "heartbeat": None,
        **said,
    }

    class Found:
        def __enter__(self) -> Found:
            return self

        def __exit__(self, *_: object) -> None:
            return None

        def devices(self, wait_s: float) -> list[dict]:
            return [device]

        def unused(self) -> dict[str, str]:
            return unused or {}

    monkeypatch.setattr(show.Hepti, "connect", lambda *_, **__: Found())
    assert main(["devices", "--broker", "mqtt://nowhere"]) == 0
    return capsys.readouterr().out


def test_what_the_planner_has_decided_of_a_device_is_listed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = listed(monkeypatch, capsys, {"a": "it got no further while others waited for it"}, curves=CURVES)
    assert "a is not used: it got no further while others waited for it" in shown


@pytest.mark.parametrize("wrong", [{"curves": {}}, {"curves": CURVES, "memory_budget_bytes": 2**62}])
def test_a_device_that_no_plan_uses_is_listed_with_the_reason(
    wrong: dict, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = listed(monkeypatch, capsys, **wrong)
    assert "refused" in said
    assert "a is not used: its capabilities cannot be right" in said
    assert ("(memory_budget_bytes is" if "memory_budget_bytes" in wrong else "(frame_s is missing)") in said


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"caps_unread": "Caps.threads is -1"}, "its capabilities cannot be read (Caps.threads is -1)"),
        ({"curves": CURVES, "boot": 3, "caps_boot": 2}, "its capabilities are those of an earlier start"),
        ({}, "it has told nothing of its capabilities"),
    ],
)
def test_a_device_without_capabilities_of_its_own_is_listed_with_the_reason(
    said: dict, why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = listed(monkeypatch, capsys, **said)
    assert "refused" in shown
    assert f"a is not used: {why}" in shown
    assert "not used" not in listed(monkeypatch, capsys, status="offline"), "it is not there, and that is shown"


@pytest.mark.parametrize("width", [60, 80, 100, 120, 200])
def test_tables_break_no_word_on_a_narrow_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=width, color_system=None, soft_wrap=True)
    monkeypatch.setattr(output, "_console", lambda stderr: console)
    columns = ("device", "status", "threads", "GFLOP/s", "round trip ms", "Mbit/s", "slowdown", "hears directly")
    rows = [("kitchen-pi", "online", 1, "106.7", "1.76", "-", "1.00", "attic, livingroom")] * 2
    output.print_table("site home", columns, rows)
    shown = file.getvalue()
    assert {"kitchen-pi", "directly", "GFLOP/s", "livingroom"} <= set(shown.replace("│", " ").replace("┃", " ").split())
    drawn = width >= 80
    assert ("━" in shown or "─" in shown) == drawn
    if drawn:
        assert max(map(len, shown.splitlines())) <= width


def test_what_is_not_believed_of_a_device_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "not" not in listed(monkeypatch, capsys, curves=CURVES, heartbeat=BEAT)
    said = listed(monkeypatch, capsys, curves=CURVES, heartbeat={**BEAT, "slowdown": 1e12})
    assert "a says what is not believed: slowdown" in said


@pytest.mark.parametrize("other", [{"strategy": "magic"}, {"epoch": [1]}, {"future": 1}])
def test_a_plan_of_another_version_is_told_so(other: dict) -> None:
    plan = Plan("m", Epoch(1, 1), "single", ("a",), "a", predicted_tokens=8).to_dict()
    spec = spec_of_kind("tiny-bert").to_dict()
    assert show._active({"active": plan, "spec": spec}) is not None
    for record in ({"active": plan | other, "spec": spec}, {"active": plan, "spec": spec | {"family": "new"}}):
        with pytest.raises(WireError, match="the planner is of another version than this program; update one of them"):
            show._active(record)


def explained(monkeypatch: pytest.MonkeyPatch, **others: object) -> int:
    """Run `hepti plan --explain` where device a is as it should be, and b says what `others` says."""
    said = {"status": "online", "boot": 1, "curves": CURVES, "memory_budget_bytes": 1 << 30, "heartbeat": BEAT}
    plan = Plan("m", Epoch(1, 1), "single", ("a",), "a", predicted_tokens=8)
    record = {"active": plan.to_dict(), "error": None, "spec": spec_of_kind("tiny-bert").to_dict()}

    class Found:
        def __enter__(self) -> Found:
            return self

        def __exit__(self, *_: object) -> None:
            return None

        def plan(self, model: str, timeout: float) -> dict:
            return record

        def devices(self, wait_s: float) -> list[dict]:
            return [{"device": "a", **said}, {"device": "b", **said, **others}]

    monkeypatch.setattr(show.Hepti, "connect", lambda *_, **__: Found())
    return main(["plan", "m", "--explain", "--broker", "mqtt://nowhere"])


@pytest.mark.parametrize(
    "wrong",
    [
        {"curves": {key: value for key, value in CURVES.items() if key != "frame_s"}},
        {"curves": {**CURVES, "linear": []}},
        {"memory_budget_bytes": 2**62},
        {"caps_boot": 0},
    ],
)
def test_a_device_that_the_planner_refuses_is_left_out_of_what_a_search_would_find(
    wrong: dict, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert explained(monkeypatch) == 0
    both = capsys.readouterr().out
    assert explained(monkeypatch, **wrong) == 0
    alone = capsys.readouterr().out
    assert re.search(r"\bb\b", both)
    assert "what a search finds now" in alone
    assert not re.search(r"\bb\b", alone)


@pytest.mark.parametrize("wrong", [{"slowdown": 1e12}, {"round_trip_s": 1e13}, {"bandwidth_bytes_per_s": 1e-3}])
def test_what_is_not_believed_of_a_device_does_not_count_in_a_search(
    wrong: dict, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert explained(monkeypatch) == 0
    right = capsys.readouterr().out
    assert explained(monkeypatch, heartbeat={**BEAT, **wrong}) == 0
    assert capsys.readouterr().out == right


def test_no_device_is_fast_beyond_measure_in_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    assert explained(monkeypatch, heartbeat={**BEAT, "slowdown": 5e-324}) == 0


def test_a_plan_on_a_device_that_is_refused_now_is_not_explained(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(CURVES, "frame_s", -1.0)
    assert explained(monkeypatch) == ConfigError.exit_code
    assert "not there any more, or refused: a" in capsys.readouterr().err
