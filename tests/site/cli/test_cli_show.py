"""What commands print, without a site: plans, devices, stories and progress."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
from mesh_nodes import Clock
from programs import ROOT
from rich.console import Console
from site_processes import PATIENCE_S

from hepti_mqtt import __version__
from hepti_mqtt.checkpoint import spec_of_kind
from hepti_mqtt.cli import output, show
from hepti_mqtt.cli.show import print_judgement, print_peer_traffic, print_plan_history
from hepti_mqtt.core.errors import ConfigError, WireError
from hepti_mqtt.core.ids import PlanVersion
from hepti_mqtt.core.plan import Plan


@pytest.fixture
def site(monkeypatch):
    """Let commands meet a site that says what the test has it say."""

    def say(devices, unused=None, record=None):
        client = SimpleNamespace(devices=lambda wait_s: devices, plan=lambda _model, timeout: record)
        client.unused, client.odd_clocks = lambda: unused or {}, lambda _devices: []
        monkeypatch.setattr(show.Hepti, "connect", lambda *_, **__: contextlib.nullcontext(client))

    return say


def test_a_story_is_a_table_with_times(capsys):
    step = {"time": 1.7e9, "plan": "m 9.1", "from": "active", "to": "retiring", "cause": "lost: d1 went offline"}
    print_plan_history("m", {"story": [step, {**step, "time": 1.7e9 + 0.25}]})
    _, head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["time", "plan", "from", "to", "cause"]
    cells = [re.split(r"\s{2,}", line.strip()) for line in lines]
    assert [c[1:] for c in cells] == [["m 9.1", "active", "retiring", "lost: d1 went offline"]] * 2
    assert [c[0][-4:] for c in cells] == [".000", ".250"]
    for record in ({}, {"story": []}):
        print_plan_history("m", record)
        assert len(capsys.readouterr().out.splitlines()) == 2


def test_what_was_considered_is_a_table_in_numbers_and_the_evidence_another(capsys):
    numbers = {"gain": 0.12, "probability": 0.97, "requests": 240.0, "cost_s": 1.5, "load_s": 2.0}
    option = {"name": "row/heads", "devices": ["a", "b"], "load_bytes": 3 << 20, "verdict": "stay", "why": "it waits"}
    print_judgement("m", {"considered": [option | numbers], "evidence": {"a": ["slowdown 1.2", "rate 30 MB/s"]}})
    lines = capsys.readouterr().out.splitlines()
    for cell in ("row/heads", "a, b", "12%", "0.97", "240", "1.5", "3", "stay: it waits"):
        assert cell in lines[2]
    assert [line.split()[0] for line in lines[-2:]] == ["a", "a"]
    print_judgement("m", {})
    assert not capsys.readouterr().out


EDGE = {
    "frames_in": 3, "bytes_in": 1 << 20, "frames_out": 0, "bytes_out": 0, "queued_bytes": 7, "dropped": 1,
    "reconnections": 2, "joined": 1, "trouble": "",
}  # fmt: skip


def device(name, edges, peers=None, status="online"):
    return {"device": name, "status": status, "heartbeat": {"edges": edges, "peers": peers or {}}}


def test_what_goes_directly_is_a_table_and_what_cannot_is_said(capsys):
    silent = {**EDGE, "frames_in": 0, "joined": 0, "trouble": "connection refused"}
    link = {"round_trip_s": 0.0005, "bytes_per_s": 1e6}
    heard = {"b": EDGE, "c": silent, "gone": silent}
    other = device("b", {"a": {**EDGE, "frames_in": 5}}, {"a": link})
    print_peer_traffic([device("a", heard), other, device("c", {}), device("gone", {}, status="offline")])
    _, _, first, second, said = capsys.readouterr().out.splitlines()
    assert first.split() == ["b", "a", "3", "1.0", "7", "1", "2", "0.50", "8"]
    assert second.split() == ["a", "b", "5", "1.0", "7", "1", "2", "-", "-"]
    assert "connection refused" in said


CURVES = {
    "linear": [{"k": 8, "n": 8, "points": [[1, 1e-6], [8, 5e-6]]}], "frame_s": 1e-4, "attention_flops_per_s": 1e9,
    "rowwise_bytes_per_s": 1e9, "op_overhead_s": 1e-6, "copy_bytes_per_s": 1e9,
}  # fmt: skip

BEAT = {
    "boot": 1, "seq": 1, "cpu_other": 0.1, "free_bytes": 1, "temperature_c": None, "round_trip_s": None,
    "bandwidth_bytes_per_s": None, "slowdown": 1.0, "rss_bytes": 0, "counters": {},
}  # fmt: skip

CAPS = {
    "cores": 1, "threads": 1, "memory_budget_bytes": 1 << 30, "rss_idle_bytes": 0, "largest_packet_bytes": 0,
}  # fmt: skip


SAID = {"device": "a", "status": "online", "boot": 1, **CAPS, "heartbeat": None}


@pytest.mark.parametrize(
    ("said", "unused", "shown"),
    [
        ({"curves": {}}, {}, ["refused", "frame_s"]),
        ({"curves": CURVES, "memory_budget_bytes": 2**62}, {}, ["refused", "memory_budget_bytes"]),
        ({"caps_unread": "Caps.threads is -1"}, {}, ["refused", "Caps.threads is -1"]),
        ({"curves": CURVES, "boot": 3, "caps_boot": 2}, {}, ["refused", "earlier start"]),
        ({}, {}, ["refused", "capabilities"]),
        ({"curves": CURVES}, {"a": "put aside"}, ["put aside"]),
        ({"curves": CURVES, "heartbeat": {**BEAT, "slowdown": 1e12}}, {}, ["slowdown"]),
    ],
    ids=str,
)
def test_a_device_that_no_plan_uses_is_listed_with_the_reason(run, site, said, unused, shown):
    site([SAID | said], unused)
    code, out, _ = run("devices", "--broker", "mqtt://nowhere")
    assert code == 0
    assert all(word in out.partition("hears directly")[2] for word in shown), "behind the table's head"


def test_a_device_that_is_not_there_is_not_refused(run, site):
    site([SAID | {"status": "offline"}])
    assert "refused" not in run("devices", "--broker", "mqtt://nowhere")[1]


@pytest.mark.parametrize("width", [60, 100, 200])
def test_tables_break_no_word_on_a_narrow_terminal(width, monkeypatch):
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=width, color_system=None, soft_wrap=True)
    monkeypatch.setattr(output, "_console", lambda stderr: console)
    columns = ("device", "status", "threads", "GFLOP/s", "round trip ms", "Mbit/s", "slowdown", "hears directly")
    rows = [("kitchen-pi", "online", 1, "106.7", "1.76", "-", "1.00", "attic, livingroom")] * 2
    output.print_table("site home", columns, rows)
    shown = file.getvalue()
    assert {"kitchen-pi", "directly", "GFLOP/s", "livingroom"} <= set(shown.replace("│", " ").replace("┃", " ").split())
    assert width < 100 or max(map(len, shown.splitlines())) <= width


@pytest.fixture
def explain(run, site):
    """Run `hepti plan --explain`: b says what `others` says, `changed` is another record of plans."""

    def explain(changed=None, **others):
        said = {**SAID, "curves": CURVES, "heartbeat": BEAT}
        plan = Plan("m", PlanVersion(1, 1), "single", ("a",), "a", predicted_tokens=8)
        record = {"active": plan.to_dict(), "error": None, "spec": spec_of_kind("tiny-bert").to_dict()}
        record |= {key: record[key] | value for key, value in (changed or {}).items()}
        site([said, said | {"device": "b"} | others], record=record)
        return run("plan", "m", "--explain", "--broker", "mqtt://nowhere")

    return explain


@pytest.mark.parametrize(
    "wrong",
    [
        {"curves": {key: value for key, value in CURVES.items() if key != "frame_s"}},
        {"curves": {**CURVES, "linear": []}},
        {"memory_budget_bytes": 2**62},
        {"caps_boot": 0},
        *({"heartbeat": {**BEAT, **w}} for w in ({"slowdown": 1e12}, {"round_trip_s": 1e13}, {"slowdown": 5e-324})),
    ],
    ids=str,
)
def test_what_is_not_believed_of_a_device_does_not_count_in_a_search(explain, wrong):
    code, both, _ = explain()
    assert code == 0
    assert re.search(r"\bb\b", both)
    code, now, _ = explain(**wrong)
    assert code == 0
    if "heartbeat" not in wrong:
        assert not re.search(r"\bb\b", now), "a refused device is left out"
    elif wrong["heartbeat"]["slowdown"] != 5e-324:
        assert now == both


@pytest.mark.parametrize(
    "changed",
    [
        {"active": {"strategy": "magic"}},
        {"active": {"strategy": [1]}},
        {"active": {"version": [1]}},
        {"active": {"predicted_tokens": "many"}},
        {"spec": {"family": "new"}},
    ],
    ids=str,
)
def test_a_plan_of_another_version_or_author_is_refused_with_the_own_version(explain, changed):
    code, _, error = explain(changed)
    assert code == WireError.exit_code
    assert __version__ in error


def test_a_plan_on_a_device_that_is_refused_now_is_not_explained(explain, monkeypatch):
    monkeypatch.setitem(CURVES, "frame_s", -1.0)
    assert explain()[0] == ConfigError.exit_code


MIB = 2**20


def test_a_load_is_printed_at_most_every_few_seconds(capsys):
    clock = Clock()
    view = output.ProgressLines(clock)
    for step in range(60):
        view.print_load("tiny", step * MIB, 60 * MIB)
        clock.now += 0.5
    view.print_load("other", 0, MIB)
    view.finish("tiny", "tiny is here")
    view.print_load("tiny", 1, MIB)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "tiny: loading 0.0 of 60.0 MiB"
    assert lines[-3:] == ["other: loading 0.0 of 1.0 MiB", "tiny is here", "tiny: loading 0.0 of 1.0 MiB"]
    assert sum(line.startswith("tiny: ") for line in lines) == int(30.0 / output.EVERY_S) + 1


def test_words_are_said_when_they_change_and_not_too_often(capsys):
    clock = Clock()
    view = output.ProgressLines(clock)
    for step in range(40):
        view.print("attic", f"compiling kernels {step // 10} of 4")
        clock.now += output.EVERY_S / 10
    view.print("attic", "")
    assert capsys.readouterr().err.splitlines() == [f"attic: compiling kernels {step} of 4" for step in range(4)]


def test_codes_of_emoji_stay_as_they_are(capsys):
    said = '{"text": "who :id: is [bold] :warning:"}'
    output.print_lines([said])
    output.print_text(said)
    assert capsys.readouterr().out == f"{said}\n{said}"


@pytest.mark.parametrize(
    ("encoding", "name", "shown"), [("ascii", "küche".encode(), r"k\xfcche"), ("utf-8", b"k\xff", r"k\udcff")]
)
def test_what_the_output_cannot_hold_is_written_out(tmp_path, encoding, name, shown):
    command = ["-m", "hepti_mqtt.cli", "site", "init", "--dir", bytes(tmp_path) + b"/" + name]
    done = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUTF8": "1", "PYTHONIOENCODING": encoding},
        capture_output=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert shown in done.stdout.decode()
