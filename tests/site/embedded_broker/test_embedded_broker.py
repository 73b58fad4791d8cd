"""The embedded broker: where it comes from, that it answers, and that it goes with its parent."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from broker_kinds import needs_mosquitto
from programs import ROOT
from site_processes import PATIENCE_S, listens, poll

from hepti_mqtt.core.errors import ConfigError, NetworkError
from hepti_mqtt.embedded_broker import EmbeddedBroker, broker, find_mosquitto, start_broker


def test_it_answers_keeps_its_port_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = set(psutil.Process().children(recursive=True))
    broker = start_broker()
    port = broker.port
    assert broker.url == f"mqtt://127.0.0.1:{port}"
    assert broker.running
    assert listens(port)
    keeper_and_broker = set(psutil.Process().children(recursive=True)) - before
    assert len(keeper_and_broker) >= 2
    assert list(tmp_path.iterdir())
    broker.stop()
    broker.start()
    assert broker.port == port
    assert listens(port)
    broker.stop()
    assert not broker.running
    assert not listens(port)
    broker.start()
    broker.start()
    assert listens(port)
    broker.close()
    broker.close()
    assert not listens(port)
    assert not list(tmp_path.iterdir())
    assert not any(process.is_running() for process in keeper_and_broker)


def test_it_listens_on_the_address_alone_and_on_the_port_that_it_is_given():
    with socket.create_server(("127.0.0.9", 0)) as probe:
        port = probe.getsockname()[1]
    with start_broker(address="127.0.0.9", port=port) as broker:
        assert broker.url == f"mqtt://127.0.0.9:{port}"
        socket.create_connection(("127.0.0.9", port), 5).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), 5)


def test_amqtt_runs_where_mosquitto_is_hidden(monkeypatch):
    monkeypatch.setenv("HEPTI_NO_MOSQUITTO", "1")
    with start_broker() as broker:
        assert broker.kind == "amqtt"
        assert listens(broker.port)


@needs_mosquitto
def test_mosquitto_runs_where_it_is_installed():
    with start_broker() as running:
        assert running.kind == "mosquitto"
        assert find_mosquitto() in running.reason


def test_mosquitto_off_path_is_not_found(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(broker, "SBIN", ())
    assert find_mosquitto() is None


@pytest.mark.parametrize(
    ("wanted", "advice"),
    [
        ({"only": "mosquitto"}, "install"),
        ({"closed": Path("site")}, "install"),
        ({"only": "amqtt", "closed": Path("site")}, "access lists"),
        ({"only": "emqx"}, "mosquitto, amqtt"),
        ({}, r"mosquitto.*broker.*HEPTI_BROKER"),
    ],
    ids=["mosquitto", "closed site", "no access lists", "unknown", "none at all"],
)
def test_a_broker_that_cannot_be_had_is_named_with_what_to_do(monkeypatch, wanted, advice):
    monkeypatch.setenv("HEPTI_NO_MOSQUITTO", "1")
    if not wanted:
        monkeypatch.setattr(broker.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match=advice):
        start_broker(**wanted)


def test_a_broker_that_does_not_start_is_reported_with_its_last_words(monkeypatch, tmp_path):
    program = tmp_path / "mosquitto"
    program.write_text("#!/bin/sh\necho out of order\nexit 127\n")
    program.chmod(0o755)
    monkeypatch.delenv("HEPTI_NO_MOSQUITTO", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(NetworkError, match="out of order"):
        start_broker()


def test_a_program_that_never_answers_is_given_up(monkeypatch, tmp_path):
    monkeypatch.setattr(broker, "START_TIMEOUT_S", 0.2)
    program = tmp_path / "mosquitto"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    silent = EmbeddedBroker(str(program))
    with pytest.raises(NetworkError, match="does not answer"):
        silent.start()
    assert not silent.running
    silent.close()


def test_a_place_where_nothing_can_be_kept_is_an_error(tmp_path):
    (tmp_path / "state").write_text("no directory")
    with pytest.raises(ConfigError, match=r"state"):
        EmbeddedBroker("mosquitto", stored=tmp_path / "state")


def test_a_port_that_was_asked_for_and_is_taken_is_an_error():
    with start_broker() as first, pytest.raises(ConfigError, match=rf"port {first.port} .*--port"):
        start_broker(port=first.port)


CHILD = """
import psutil, sys
from hepti_mqtt.embedded_broker import start_broker
broker = start_broker()
print(broker.port, psutil.Process().children()[0].pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def parent():
    """A process with an embedded broker: (process, port, keeper's id)."""
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    port, keeper = map(int, child.stdout.readline().split())
    yield child, port, keeper
    child.kill()
    child.wait()
    child.stdin.close()
    child.stdout.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_broker_goes_with_its_parent_however_that_ends(parent, number):
    child, port, keeper = parent
    assert listens(port)
    os.kill(child.pid, number)
    child.wait(PATIENCE_S)
    poll(lambda: not listens(port) and not _alive(keeper), "the end of both")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent was killed")
def test_the_broker_goes_when_its_keeper_is_killed(parent):
    _, port, keeper = parent
    os.kill(keeper, signal.SIGKILL)
    poll(lambda: not listens(port), "the broker's end")


FORKING = """
import os, subprocess, sys
keeper = subprocess.Popen([sys.executable, sys.argv[1], str(os.getpid()), "sleep", "60"], stdin=subprocess.PIPE)
fork = os.fork()
if fork == 0:
    os.set_inheritable(keeper.stdin.fileno(), True)
    os.execvp("sleep", ["sleep", "60"])
print(keeper.pid, fork, flush=True)
os._exit(0)
"""


def test_a_process_forked_by_the_parent_does_not_keep_the_broker_alive():
    # The fork holds the pipe open; the keeper looks at its parent's number as well.
    command = [sys.executable, "-c", FORKING, str(Path(broker.__file__).with_name("child.py"))]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as run:
        keeper, fork = map(int, run.stdout.readline().split())
    try:
        poll(lambda: not _alive(keeper), "the keeper's end")
        assert _alive(fork)
    finally:
        os.kill(fork, signal.SIGKILL)


def _alive(pid):
    # An orphan stays a zombie where nobody collects it.
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


@needs_mosquitto
@pytest.mark.parametrize("damage", [bytes(4096), b"", b"\x00\xb5\x00mosquitto db\x00\x00\x00\x00" + bytes(40)])
def test_a_damaged_store_is_set_aside(tmp_path, caplog, damage):
    """As a power cut leaves it."""
    kept = tmp_path / "mosquitto.db"
    kept.write_bytes(damage)
    with start_broker("mosquitto", stored=tmp_path) as broker:
        assert broker.running
    if damage:
        assert (tmp_path / "mosquitto.damaged").read_bytes() == damage
        assert "mosquitto.damaged" in caplog.text
