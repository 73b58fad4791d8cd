"""`hepti doctor` looks at machine, broker and site, and says what to mend."""

from __future__ import annotations

import json

import pytest
from broker_kinds import needs_mosquitto

from hepti_mqtt.cli.main import main
from hepti_mqtt.embedded_broker import start_broker


@pytest.fixture(scope="module")
def broker():
    with start_broker() as running:
        yield running


def run(capsys, *arguments: str) -> tuple[int, dict[str, dict]]:
    code = main(["doctor", "--json", *arguments])
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is (code == 0)
    return code, {f["what"]: f for f in found["findings"]}


def test_a_good_broker_without_a_site(broker, capsys):
    code, found = run(capsys, "--broker", str(broker.url))
    assert code == 0
    assert found["largest packet"]["found"] == f"{32 << 20} bytes"
    assert "hepti planner" in found["site home"]["advice"]
    assert not found["machine"]["advice"]


@needs_mosquitto
def test_a_broker_that_limits_packets_is_told_the_setting(capsys):
    with start_broker(max_packet_bytes=3_000_000) as small:
        code, found = run(capsys, "--broker", str(small.url))
    assert code == 0
    assert "max_packet_size" in found["largest packet"]["advice"]


def test_no_broker(capsys, monkeypatch):
    monkeypatch.delenv("HEPTI_BROKER", raising=False)
    code, found = run(capsys)
    assert code == 2
    assert "HEPTI_BROKER" in found["broker"]["advice"]
    code, found = run(capsys, "--broker", "mqtt://127.0.0.1:1")
    assert code == 3
    assert "127.0.0.1:1" in found["broker"]["found"]


def test_people_see_what_to_mend(capsys, monkeypatch):
    monkeypatch.delenv("HEPTI_BROKER", raising=False)
    assert main(["doctor"]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("!")]
