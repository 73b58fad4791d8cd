"""`hepti broker`, `health` and `doctor` as users run them: how they end, and what they leave."""

from __future__ import annotations

import datetime
import json
import os
import signal
import stat
import subprocess
import sys
from contextlib import ExitStack

import psutil
import pytest
from broker_kinds import needs_mosquitto
from programs import ROOT
from site_processes import PATIENCE_S, Voice, free_port

from hepti_mqtt.cli.main import main
from hepti_mqtt.closed_site.folder import SiteFolder
from hepti_mqtt.embedded_broker import start_broker
from hepti_mqtt.protocol.messages import Status, encode_status
from hepti_mqtt.protocol.topics import Topics


class Running:
    """`hepti broker ARGUMENTS`, which has said that it answers."""

    def __init__(self, directory, *arguments):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "hepti_mqtt.cli", "broker", *arguments],
            env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(directory)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()

    def broker(self):
        """Return the broker's own process, below that of its keeper."""
        (keeper,) = psutil.Process(self.process.pid).children()
        (broker,) = keeper.children()
        return broker

    def end(self):
        """Wait for its end; return exit code and stderr."""
        _, err = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, err

    def close(self):
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def start(tmp_path):
    """A function that starts `hepti broker ARGUMENTS`, with its temporary files in `tmp_path`."""
    with ExitStack() as stack:

        def start(*arguments):
            running = Running(tmp_path, *arguments)
            stack.callback(running.close)
            return running

        yield start


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_broker_that_is_told_to_end_leaves_nothing(start, tmp_path, number):
    running = start()
    running.process.send_signal(number)  # SIGHUP: its terminal is closed
    assert running.end()[0] == 0
    assert not list(tmp_path.iterdir())


def test_an_open_broker_says_so_once(start):
    running = start("--bind", "0.0.0.0", "--port", str(free_port()))
    running.process.terminate()
    code, err = running.end()
    assert (code, err.count("OPEN BROKER")) == (0, 1)


def test_a_broker_that_dies_ends_the_command(start, tmp_path):
    running = start()
    running.broker().kill()
    code, err = running.end()
    assert code == 3
    assert err
    assert not list(tmp_path.iterdir())


@needs_mosquitto
def test_what_waits_for_somebody_at_a_closed_sites_broker_outlives_it(start, tmp_path):
    now = datetime.datetime.now(datetime.UTC)
    site = SiteFolder.create(tmp_path / "site", "home", ("127.0.0.1",), free_port(), now).add("client", "alice")
    url = str(site.login("alice"))
    first = start("--closed", str(site.path), "--bind", "127.0.0.1")
    with Voice(url, "hepti/v1/home/infer/+/res/alice/#", client_id="alice", clean=False):
        pass
    planner = Voice(str(site.login("planner")))
    planner.say("hepti/v1/home/infer/m/res/alice/1", b"the answer")
    planner.close(PATIENCE_S)
    first.process.terminate()
    code, err = first.end()
    assert code == 0
    assert "lost" not in err
    assert stat.S_IMODE((site.path / "state").stat().st_mode) == 0o700
    start("--closed", str(site.path), "--bind", "127.0.0.1")
    with Voice(url, client_id="alice", clean=False) as alice:
        assert alice.next() == ("hepti/v1/home/infer/m/res/alice/1", b"the answer")


TOPICS = Topics("home")


def test_the_exit_code_says_who_is_online(run):
    with start_broker() as broker, Voice(broker.url, "#") as voice:
        words = {
            TOPICS.planner_status(): Status("online", 3),
            TOPICS.status("a"): Status("starting", 3, "compiling kernels", 4, 23),
            TOPICS.status("b"): Status("offline", 3),
        }
        for topic, status in words.items():
            voice.say(topic, encode_status(status), retain=True)
            voice.next(topic)
        health = ("health", "--broker", str(broker.url))
        assert run(*health, "planner")[:2] == (0, "online\n")
        assert run(*health, "agent", "--id", "a")[:2] == (1, "starting: compiling kernels 4 of 23\n")
        assert run(*health, "agent", "--id", "b")[0] == 1
        code, _, err = run(*health, "agent", "--id", "c", "--timeout", "0.2")
    assert code not in (0, 1)
    assert "agent" in err


def doctor(run, *arguments):
    code, out, _ = run("doctor", "--json", *arguments)
    findings = json.loads(out)
    assert findings["ok"] is (code == 0)
    return code, {f["what"]: f for f in findings["findings"]}


@needs_mosquitto
def test_a_good_broker_without_a_site_that_limits_packets(run):
    with start_broker(max_packet_bytes=3_000_000) as broker:
        code, findings = doctor(run, "--broker", str(broker.url))
    assert code == 0
    assert "max_packet_size" in findings["largest packet"]["advice"]
    assert "hepti planner" in findings["site home"]["advice"]
    assert not findings["machine"]["advice"]


def test_no_broker(run, monkeypatch):
    monkeypatch.delenv("HEPTI_BROKER", raising=False)
    monkeypatch.setattr("hepti_mqtt.client.discovery.look", list)  # nothing is announced
    code, findings = doctor(run)
    assert code == 2
    assert "HEPTI_BROKER" in findings["broker"]["advice"]
    code, out, _ = run("doctor")
    assert (code, "\n!" in f"\n{out}") == (2, True), "and people see it"
    code, findings = doctor(run, "--broker", "mqtt://127.0.0.1:1")
    assert code == 3
    assert "127.0.0.1:1" in findings["broker"]["found"]


def test_doctor_prints_each_finding_when_its_check_ends_and_compiles_only_if_it_may(monkeypatch, capsys):
    printed = []

    def compiled():
        printed.append(capsys.readouterr().out)
        return 1, 2

    monkeypatch.setattr("hepti_mqtt.kernels.precompile.compiled", compiled)
    questions: list[str] = []
    monkeypatch.setattr("hepti_mqtt.kernels.precompile.fill_cache", lambda which, *_: questions.append(which))
    main(["doctor", "--broker", "mqtt://127.0.0.1:1"])
    assert "127.0.0.1:1" in printed[0], "the last check found the others' findings printed"
    assert not questions
    assert "hepti doctor --compile" in capsys.readouterr().out
    main(["doctor", "--broker", "mqtt://127.0.0.1:1", "--compile"])
    assert questions == ["all"]
