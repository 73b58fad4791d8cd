"""Pictures and tables from made-up results: every one is drawn, and says what the results say."""

import xml.etree.ElementTree as ET
from dataclasses import asdict, replace

import pytest
from swarm import curves

from hepti_mqtt.bench import plots, report
from hepti_mqtt.bench.experiment import Cell
from hepti_mqtt.bench.plays import Play, change_words, parts
from hepti_mqtt.bench.results import Writer, read
from hepti_mqtt.bench.timeline import draw
from hepti_mqtt.checkpoint import spec_of_kind
from hepti_mqtt.errors import ConfigError
from hepti_mqtt.plan import Plan

HEADER = {
    **{"experiment": "made up", "digest": "d", "machine": "m", "python": "3", "versions": {}, "revision": "r"},
    **{"seed": 0, "command": "hepti bench"},
}
SINGLE = Cell("lab", 940.0, "bert", 128, "single", ("pi1",), "f32")
ROW = replace(SINGLE, strategy="row/kv", devices=("pi1", "pi2"))
AUTO = replace(ROW, strategy="auto")
ON_ONE = {"strategy": "single", "options": {}, "devices": ["pi1"], "wire": "f32"}
ON_TWO = {"strategy": "row", "options": {"variant": "kv"}, "devices": ["pi1", "pi2"], "wire": "f32"}


def answer(ms, plan=ON_ONE):
    return {"ok": True, "latency_ms": [ms], "error": 1e-6, "plan": plan, "bytes": 10, "predicted_ms": ms * 1.1}


def lost(unix_s):
    return {"ok": False, "unix_s": unix_s, "code": "timeout", "message": "no answer\nafter 300 s"}


def words_of(picture):
    """Return the text in an SVG that keeps its text as text; raises if it is no XML."""
    return " ".join("".join(e.itertext()) for e in ET.parse(picture).iter() if e.tag.endswith("text"))


@pytest.fixture
def as_text(monkeypatch):
    """Let matplotlib keep letters as letters."""
    import matplotlib as mpl

    monkeypatch.setitem(mpl.rcParams, "svg.fonttype", "none")


@pytest.fixture
def played(tmp_path):
    """Return results of two rates, and of a play that was cut off once and then came to its end."""
    with Writer(tmp_path, HEADER, resume=False) as writer:
        for rate, factor in ((940.0, 1.0), (100.0, 3.0)):
            for number in range(6):
                for cell, ms in ((SINGLE, 200.0), (ROW, 110.0), (AUTO, 111.0)):
                    cell = replace(cell, rate=rate)
                    plan = ON_ONE if cell.strategy == "single" else ON_TWO
                    writer.turn(cell, number, answer((ms + number) * (1.0 if cell == SINGLE else factor), plan))
        begin = {"cell": AUTO.id, "of": asdict(AUTO)}
        writer.add("play", **begin, unix_s=10.0)
        writer.add("under_change", cell=AUTO.id, unix_s=11.0, **answer(999.0))
        writer.add("play", **begin, unix_s=1000.0)
        for unix_s, plan in ((1000.5, ON_TWO), (1001.5, ON_TWO), (1003.5, ON_TWO), (1004.0, ON_ONE)):
            writer.add("under_change", cell=AUTO.id, unix_s=unix_s, **answer(120.0, plan))
        # A change is written when it is made, which may be before the answer to an earlier request is.
        writer.add("change", cell=AUTO.id, planned_s=3, unix_s=1003.0, do="rate", host="pi2", mbit=50.0)
        writer.add("under_change", cell=AUTO.id, **lost(1005.0))
        writer.add("under_change", cell=AUTO.id, **lost(1005.5))
        writer.add("played", cell=AUTO.id)
    return tmp_path


def test_a_play_is_cut_at_changes_and_new_plans(played):
    play = read(played).plays()[AUTO.id]
    assert play.whole
    found = [(p.at_s, p.what, p.plan, len(p.requests)) for p in parts(play)]
    two, one = "row/kv on pi1, pi2", "single on pi1"
    assert found == [(0.0, "begin", two, 2), (3.0, "rate pi2 50 Mbit/s", two, 1), (4.0, "", one, 3)]


def test_a_play_that_was_cut_off_is_not_whole():
    assert not Play(AUTO, 0.0).whole
    assert [(p.what, p.requests) for p in parts(Play(AUTO, 0.0))] == [("begin", [])]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"do": "cpu", "host": "a", "share": 0.25}, "cpu a 25%"),
        ({"do": "cpu", "host": "a", "gflops": 12.0}, "cpu a 12 GFLOP/s"),
        ({"do": "kill", "host": "a", "error": "it is gone"}, "kill a (failed: it is gone)"),
    ],
)
def test_a_change_in_words(change, words):
    assert change_words(change) == words


def test_every_picture_is_drawn(played, as_text):
    files = {path.name: words_of(path) for path in plots.draw(read(played), played)}
    assert set(files) == {"latency-1.svg", "latency-2.svg", "predicted.svg", "rates-1.svg", "changes-1.svg"}
    assert "bert, 128 tokens, lab, 100 Mbit/s" in files["latency-1.svg"]
    assert "times as fast as one device" in files["latency-1.svg"]
    assert {"100", "940"} <= set(files["rates-1.svg"].split())
    assert all(word in files["changes-1.svg"] for word in ("rate pi2 50 Mbit/s", "failed", "single on pi1", "row/kv"))
    assert not any("10^" in words or "times 10" in words for words in files.values())


def test_more_and_more_devices_are_drawn_beside_the_ideal_line(played, as_text):
    with Writer(played, HEADER, resume=True) as writer:
        for number in range(6):
            writer.turn(replace(AUTO, devices=("pi1", "pi2", "pi3")), number, answer(80.0 + number, ON_TWO))
    files = {path.name: words_of(path) for path in plots.draw(read(played), played)}
    assert {name for name in files if name.startswith("scaling")} == {"scaling-2.svg"}  # at 940 Mbit/s
    words = files["scaling-2.svg"]
    assert all(word in words for word in ("940 Mbit/s", "ideal", "auto", "devices"))
    assert "row/kv" not in words  # of one number of devices alone


def test_the_report_begins_with_every_cell_at_a_glance(played):
    lines = report.markdown(read(played)).splitlines()
    start = lines.index("## bert, 128 tokens, lab: median ms (predicted)")
    assert lines[start + 2 : start + 7] == [
        "| devices | 940 Mbit/s: 1 | 2 | 100 Mbit/s: 1 | 2 |",
        "|---|---:|---:|---:|---:|",
        "| auto |  | 114 (128) |  | 340 (383) |",
        "| single | **202** (226) |  | **608** (676) |  |",
        "| row/kv |  | **112** (127) |  | **338** (380) |",
    ]
    chose = "Hepti chose row/kv on pi1, pi2; the fastest pinned was"
    assert f"- 2 devices at 940 Mbit/s: {chose} row/kv x2, and its choice took 1.01 times as long" in lines
    assert f"- 2 devices at 100 Mbit/s: {chose} row/kv x2, and its choice took 1.01 times as long" in lines
    assert "| 2 | 4 | 1.12 | 1.12 | 1.12 | 0 | | | |" in lines


def test_devices_of_one_number_are_named_and_failed_cells_left_out(tmp_path):
    other = replace(ROW, devices=("pi1", "pi3"), rate=None)
    with Writer(tmp_path, HEADER, resume=False) as writer:
        writer.turn(replace(ROW, rate=None), 0, answer(80.0, ON_TWO))
        writer.turn(other, 0, answer(9.0, ON_TWO))
        writer.turn(replace(other, wire="i8"), 0, lost(1.0))
    lines = report.markdown(read(tmp_path)).splitlines()
    assert "| devices | pi1, pi2 | pi1, pi3 |" in lines
    assert "| row/kv | **80.0** (88.0) | **9.0** (9.9) |" in lines
    assert not any(line.startswith("| row/kv i8 |") for line in lines)


def test_the_report_says_how_much_slower_a_lab_was(tmp_path):
    calibration = {"lab": "lab", "machine": "m", "hosts": [], "full_gflops": None}
    with Writer(tmp_path, HEADER, resume=False) as writer:
        writer.add("lab", lab={"name": "lab", "rate_mbit": 240.0, "dilation": 2.0}, calibration=calibration, misses=[])
        writer.add("lab", lab={"name": "lab", "rate_mbit": None}, calibration=calibration, misses=[])
    heads = [line for line in report.markdown(read(tmp_path)).splitlines() if line.startswith("## Lab")]
    assert heads[0].startswith("## Lab lab, 240 Mbit/s, 2 times as slow")
    assert heads[1] == "## Lab lab, links as they are"


def test_the_report_tells_of_changes(played):
    text = report.markdown(read(played))
    assert "| 3.0 | rate pi2 50 Mbit/s | row/kv on pi1, pi2 | 1 | 0 | 120 | 120 |" in text
    assert "2 of 6 requests failed\n- no answer (2 times)\n" in text
    assert "999" not in text
    assert "row/kv on pi1, pi2 (= row/kv x2)" in text


def turn(devices):
    spec = spec_of_kind("tiny-bert")
    plan = Plan("m", (1, 1), "row", ("a", "b"), "a", {"variant": "kv"}, {"rows": (1.0, 3.0)})
    said = [{"device": d, "curves": curves(1e9), "memory_budget_bytes": 1 << 30, "heartbeat": None} for d in devices]
    return {"active": plan.to_dict(), "spec": spec.to_dict(), "tokens": 8, "devices": said, "of": {"model": "m"}}


def test_the_time_line_of_a_plan(tmp_path):
    picture = draw(turn(["a", "b", "c"]), tmp_path / "line.svg")
    words = words_of(picture)
    assert "m, row kv, 8 tokens, simulated" in words
    assert {"a", "b"} <= set(words.split())
    assert "c" not in words.split()
    with pytest.raises(ConfigError, match="not there any more, or refused: b"):
        draw(turn(["a"]), tmp_path / "none.svg")
