"""`hepti bench transport`: every way carries every kind of exchange, and the report shows ratios within rounds."""

from __future__ import annotations

import json

import pytest

from hepti_mqtt.bench import transport, transport_report
from hepti_mqtt.bench.transport import KINDS, WAYS, Options
from hepti_mqtt.bench.transport_crew import Record
from hepti_mqtt.cli.main import main
from hepti_mqtt.errors import BenchError


def test_a_small_run(tmp_path):
    results = transport.run(
        Options(tmp_path / "out", (1024, 300_000), rounds=1, repeat=4, command="hepti bench transport")
    )
    records = [Record(**record) for record in results["records"]]
    assert {(r.kind, r.bytes, r.way) for r in records} == {
        (k, n, w) for k in KINDS for n in (1024, 300_000) for w in WAYS
    }
    assert all(r.seconds > 0 and r.sender_cpu_s > 0 and r.receiver_cpu_s > 0 for r in records)
    assert any(r.broker_cpu_s > 0 for r in records if r.way == "broker, paho")
    assert json.loads((tmp_path / "out/transport.json").read_text()) == json.loads(json.dumps(results))
    report = (tmp_path / "out/transport.md").read_text()
    assert report.count("| 1 KB |") == len(KINDS) + 3


def test_a_process_that_stops_is_named(tmp_path):
    with pytest.raises(BenchError, match="process 0 of the benchmark stopped"):
        transport.run(Options(tmp_path, (1024,), ways=("raw TCP", "pigeons"), rounds=1))


def record(way, turn, seconds):
    return Record("one way", 65_536, way, turn, seconds, seconds / 2, seconds / 4, 0.0)._asdict()


def test_ratios_are_within_rounds():
    records = [record("mesh", 1, 2e-3), record("raw TCP", 1, 1e-3), record("mesh", 2, 9e-3), record("raw TCP", 2, 3e-3)]
    records += [record("mesh", 3, 4e-3), record("raw TCP", 3, 4e-3)]
    assert transport_report.cell(records, "mesh") == (4e-3, 2.0)
    lines = transport_report.markdown(
        {"records": records, "command": "c", "provenance": {"machine": "m"}, "rounds": 3, "broker": "none"}
    )
    assert "| payload | raw TCP | mesh |" in lines
    assert "| 64 KB | 3 | 4 (2.00) |" in lines
    assert "| 64 KB | 1.5e+03 | 2e+03 (2.00) |" in lines
    assert lines[-1] == "| 64 KB | 0 | 0 |"


@pytest.mark.wide
def test_the_command(tmp_path, capsys):
    assert main(["bench", "transport", "--quick", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "## All-gather" in said
    assert f"written to {tmp_path}" in said
    results = json.loads((tmp_path / "transport.json").read_text())
    assert len(results["records"]) == 3 * len(KINDS) * 3 * len(WAYS)


LAB = "{name: pair, kind: local, defaults: {threads: 1, memory: 600MiB}, hosts: {one: {}, two: {}, three: {}}}"


@pytest.mark.wide
def test_hosts_of_a_lab(tmp_path, capsys):
    (tmp_path / "lab.yaml").write_text(LAB)
    out = tmp_path / "out"
    assert main(["bench", "transport", "--quick", "--lab", str(tmp_path / "lab.yaml"), "--out", str(out)]) == 0
    records = json.loads((out / "transport.json").read_text())["records"]
    assert len(records) == 2 * 3 * 2
    assert all(r["seconds"] > 0 and r["rate"] is None for r in records)
    assert "| payload | raw TCP | mesh |" in capsys.readouterr().out
