"""A small experiment on this machine, from its file to its report: cut off, gone on with, compared."""

import json

import pytest

from hepti_mqtt.bench import runner
from hepti_mqtt.bench.results import Writer, cell_of, read
from hepti_mqtt.cli.main import main
from hepti_mqtt.errors import ConfigError

TINY = """
name: tiny
lab: {lab}
models: [tiny-bert]
lengths: [12]
strategies: [auto, single, single, row/kv]
devices: [1, 2]
repetitions: 2
rounds: 2
"""
PULLED = """
name: pulled
lab: pair.yaml
models: [tiny-bert]
lengths: [12]
strategies: [auto]
devices: [2]
repetitions: 1
rounds: 1
changes: plug.yaml
"""
LAB = "{name: pair, kind: local, defaults: {threads: 1, memory: 600MiB}, hosts: {one: {}, two: {}}}"
HEADER = {"experiment": "x", "digest": "d", "machine": "m", "versions": {}, "revision": "r"}


@pytest.mark.wide
@pytest.mark.processes
def test_run_cut_off_resume_report_compare(tmp_path, capsys):
    (tmp_path / "pair.yaml").write_text(LAB)
    file, out = tmp_path / "tiny.yaml", tmp_path / "out"
    file.write_text(TINY.format(lab="pair.yaml"))
    assert main(["bench", str(file), "--out", str(out)]) == 0
    whole = (out / "results.jsonl").read_text().splitlines()
    turns = read(out).turns()
    assert len(turns) == 4 * 2
    assert all(t["ok"] and t["error"] < 1e-4 and len(t["latency_ms"]) == 2 for t in turns)
    assert {t["plan"]["strategy"] for t in turns if t["of"]["strategy"] == "row/kv"} == {"row"}

    kept = whole[:4]
    (out / "results.jsonl").write_text("\n".join([*kept, whole[4][:30]]))  # cut off within a line
    assert main(["bench", str(file), "--out", str(out)]) == 2
    assert "--resume" in capsys.readouterr().err
    assert main(["bench", str(file), "--out", str(out), "--resume"]) == 0
    again = read(out)
    assert (out / "results.jsonl").read_text().splitlines()[:4] == kept
    assert again.done() == {(t["cell"], t["round"]) for t in turns}
    assert len(again.turns()) == len(turns)

    report = (out / "report.md").read_text()
    assert "A/A single x1" in report
    assert "| row/kv x2 |" in report
    assert all(set(t["needs_bytes"]) == set(t["plan"]["devices"]) for t in turns), "what each device holds"
    assert len((out / "results.csv").read_text().splitlines()) == 1 + 4 * 2 * 2
    assert main(["bench", "report", str(out)]) == 0
    assert main(["bench", "compare", str(out), str(out)]) == 0
    assert "agrees" in capsys.readouterr().out


@pytest.mark.wide  # half a minute; the site's own tests pull plugs too
@pytest.mark.processes
def test_a_plug_is_pulled_under_requests_on_hosts_that_are_not_emulated(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "AFTERWARDS_S", 3.0)
    (tmp_path / "pair.yaml").write_text(LAB)
    (tmp_path / "plug.yaml").write_text("- {at: 0.5, do: kill, host: two}\n- {at: 2.5, do: restart, host: two}\n")
    (tmp_path / "pulled.yaml").write_text(PULLED)
    assert main(["bench", str(tmp_path / "pulled.yaml"), "--out", str(tmp_path / "out")]) == 0
    (play,) = read(tmp_path / "out").plays().values()
    assert play.whole
    assert [(c["do"], c["host"], "error" in c) for c in play.changes] == [
        ("kill", "two", False),
        ("restart", "two", False),
    ]
    late = [r for r in play.requests if r["unix_s"] > play.changes[0]["unix_s"]]
    assert len(late) > 2
    assert all(r["ok"] for r in play.requests), "no request is lost"
    assert "kill two" in (tmp_path / "out/report.md").read_text()


def test_other_versions_and_other_experiments_are_refused(tmp_path):
    with Writer(tmp_path, HEADER, resume=False) as writer:
        writer.add("note")
    with pytest.raises(ConfigError, match="another digest"):
        Writer(tmp_path, {**HEADER, "digest": "e"}, resume=True)
    with pytest.raises(ConfigError, match="another revision"):
        Writer(tmp_path, {**HEADER, "revision": "s"}, resume=True)
    both = r"another machine \(m, now n\), another revision \(r, now s\)"
    with pytest.raises(ConfigError, match=both) as told:
        Writer(tmp_path, {**HEADER, "machine": "n", "revision": "s"}, resume=True)
    assert "another --out" in str(told.value)
    (tmp_path / "results.jsonl").write_text(json.dumps({"record": "header", "format": 99}) + "\n")
    with pytest.raises(ConfigError, match="format 99"):
        read(tmp_path)
    (tmp_path / "results.jsonl").write_text("[]\n")
    with pytest.raises(ConfigError, match="no result"):
        read(tmp_path)


def test_a_cell_survives_json():
    turn = {"lab": "l", "rate": None, "model": "m", "tokens": 3, "strategy": "row/kv", "devices": ["a", "b"]}
    cell = cell_of({**turn, "wire": "f32", "copy": 0})
    assert cell.devices == ("a", "b")
    assert cell_of(json.loads(json.dumps({**turn, "wire": "f32", "copy": 0}))).id == cell.id


def test_mistakes_are_told_without_a_traceback(capsys):
    for words in (
        ["bench"],
        ["bench", "nothing"],
        ["bench", "report"],
        ["bench", "compare", "a"],
        ["bench", "report", "x"],
    ):
        assert main(words) == 2
        assert "Traceback" not in capsys.readouterr().err


def results_of(directory, milliseconds):
    cell = cell_of(
        {"lab": "l", "rate": None, "model": "m", "tokens": 3, "strategy": "single", "devices": ["a"], "wire": "f32"}
    )
    with Writer(directory, HEADER, resume=False) as writer:
        for number, ms in enumerate(milliseconds):
            writer.turn(cell, number, {"ok": True, "latency_ms": [ms, ms, 99 * ms]})
        writer.turn(cell, len(milliseconds), {"ok": False, "code": "no_plan", "message": "too little memory"})
    return read(directory)


def test_runs_that_differ_are_told_apart_and_failed_turns_are_no_times(tmp_path, capsys):
    one, two = results_of(tmp_path / "a", [10.0, 11.0]), results_of(tmp_path / "b", [20.0, 21.0])
    assert next(iter(one.intervals().values())).high == 11.0
    assert len(two.done()) == 3
    assert main(["bench", "compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    assert "DIFFERS" in capsys.readouterr().out
