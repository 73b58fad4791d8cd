"""The embedded broker: where it comes from, that it answers, and that it goes with its parent."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from hepti_mqtt.embedded_broker import KINDS, EmbeddedBroker, process, sources, start, start_broker
from hepti_mqtt.embedded_broker.sources import Source, Unavailable
from hepti_mqtt.errors import ConfigError, NetworkError

PATIENCE_S = 20.0
ROOT = Path(__file__).parents[2]


def unavailable(why):
    def source():
        raise Unavailable(why)

    return source


def wait_until(happened):
    deadline = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < deadline, "it did not happen"
        os.sched_yield()


def answers(port):
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


@pytest.mark.broker
def test_it_answers_keeps_its_port_and_leaves_nothing():
    broker = start_broker()
    port, directory = broker.port, broker._directory
    assert broker.url == f"mqtt://127.0.0.1:{port}"
    assert broker.running
    assert answers(port)
    children = psutil.Process(broker._process.pid).children()
    assert children
    broker.restart()
    assert broker.port == port
    assert answers(port)
    broker.stop()
    assert not broker.running
    assert not answers(port)
    broker.start()
    broker.start()
    assert answers(port)
    broker.close()
    broker.close()
    assert not answers(port)
    assert not directory.exists()
    assert not any(child.is_running() for child in children)


@pytest.mark.broker
def test_the_reason_says_which_and_why_not_the_others(monkeypatch):
    installed = start._SOURCES["mosquitto"]
    monkeypatch.setitem(start._SOURCES, "mosquitto", unavailable("it is not installed"))
    monkeypatch.setitem(start._SOURCES, "unpacked", lambda: replace(installed(), kind="unpacked"))  # without a fetch
    with start_broker() as broker:
        assert broker.kind in ("unpacked", "amqtt")
        assert broker.reason.startswith(broker.kind)
        assert "not mosquitto: it is not installed" in broker.reason


def test_one_that_is_insisted_on_is_that_one_or_none(monkeypatch):
    monkeypatch.setitem(start._SOURCES, "unpacked", unavailable("the network is down"))
    for kind in ("mosquitto", "amqtt"):
        monkeypatch.setitem(start._SOURCES, kind, lambda: pytest.fail("another one is tried"))
    with pytest.raises(NetworkError, match="unpacked: the network is down"):
        start_broker("unpacked")


def test_one_without_access_lists_is_no_broker_of_a_closed_site(tmp_path):
    with pytest.raises(ConfigError, match=r"amqtt knows no access lists.*mosquitto, unpacked"):
        start_broker("amqtt", closed=tmp_path)


def test_without_any_broker_every_reason_is_told(monkeypatch):
    for kind in KINDS:
        monkeypatch.setitem(start._SOURCES, kind, unavailable(f"no {kind} today"))
    with pytest.raises(NetworkError, match=r"no mosquitto today.*no unpacked today.*no amqtt today.*HEPTI_BROKER"):
        start_broker()


def test_a_broker_that_nobody_knows_is_a_config_error():
    with pytest.raises(ConfigError, match="mosquitto, unpacked, amqtt"):
        start_broker("emqx")


def test_a_program_that_does_not_start_is_told_with_its_last_words(monkeypatch):
    wrong = Source("mosquitto", (sys.executable, "-c", "import sys; sys.exit('out of order')"))
    monkeypatch.setitem(start._SOURCES, "mosquitto", lambda: wrong)
    for kind in ("unpacked", "amqtt"):
        monkeypatch.setitem(start._SOURCES, kind, unavailable("no"))
    with pytest.raises(NetworkError, match="mosquitto does not start: out of order"):
        start_broker()


def test_a_program_that_never_answers_is_given_up(monkeypatch):
    monkeypatch.setattr(process, "START_TIMEOUT_S", 0.2)
    broker = EmbeddedBroker(Source("mosquitto", ("sleep", "60")), "", users=None, max_packet_bytes=None)
    monkeypatch.setattr(EmbeddedBroker, "_command", lambda *_: ["sleep", "60"])
    with pytest.raises(NetworkError, match="does not answer"):
        broker.start()
    assert not broker.running
    broker.close()


@pytest.fixture
def written(tmp_path):
    """What an open and a closed site's Mosquitto is told, in a function that writes it."""
    (tmp_path / "site").mkdir()

    def written():
        texts = []
        for closed in (None, tmp_path / "site"):
            broker = EmbeddedBroker(
                Source("mosquitto", ("mosquitto",)), "", users=None, max_packet_bytes=None, closed=closed
            )
            try:
                texts.append(Path(broker._command(1883)[-1]).read_text())
            finally:
                broker.close()
        return texts

    return written


def test_it_runs_as_who_owns_its_files_whatever_the_environment_says(written, monkeypatch):
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.setenv(name, "somebody")  # as after `su` without `-`
    for text in written():
        assert f"user {pwd.getpwuid(os.geteuid()).pw_name}" in text.splitlines()
        assert "somebody" not in text


def test_an_account_without_a_name_names_none(written, monkeypatch):
    def unknown(number):
        raise KeyError(f"getpwuid(): uid not found: {number}")

    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)  # as in a container that runs as any number
    for text in written():
        assert not any(line.startswith("user ") for line in text.splitlines())


def test_a_place_where_nothing_can_be_kept_is_an_error(tmp_path):
    (tmp_path / "state").write_text("no directory")
    with pytest.raises(ConfigError, match=r"cannot keep anything in .*state"):
        start_broker("mosquitto", stored=tmp_path / "state")


@pytest.mark.broker
def test_a_port_taken_meanwhile_is_replaced_by_another(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        free, ports = process._free_port, [taken.getsockname()[1]]
        monkeypatch.setattr(process, "_free_port", lambda address: ports.pop() if ports else free(address))
        monkeypatch.setattr(process, "_answers_connect", _patient(taken.getsockname()[1]))
        with start_broker() as broker:
            assert not ports
            assert broker.port != taken.getsockname()[1]


@pytest.mark.broker
def test_a_port_that_was_asked_for_and_is_taken_is_an_error():
    with start_broker() as first, pytest.raises(ConfigError, match=rf"port {first.port} .*--port"):
        start_broker(port=first.port)


def _patient(taken):
    # The server that has taken the port accepts but never answers; spare the test the second of waiting for it.
    honest = process._answers_connect
    return lambda address, port, tls: port != taken and honest(address, port, tls)


CHILD = """
import sys
from hepti_mqtt.embedded_broker import start_broker
broker = start_broker()
print(broker.port, broker._process.pid, flush=True)
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


@pytest.mark.broker
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_broker_goes_with_its_parent_however_that_ends(parent, number):
    child, port, keeper = parent
    assert answers(port)
    os.kill(child.pid, number)
    child.wait(PATIENCE_S)
    wait_until(lambda: not answers(port) and not _alive(keeper))


@pytest.mark.broker
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent was killed")
def test_the_broker_goes_when_its_keeper_is_killed(parent):
    _, port, keeper = parent
    os.kill(keeper, signal.SIGKILL)
    wait_until(lambda: not answers(port))


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
    command = [sys.executable, "-c", FORKING, str(Path(sources.__file__).with_name("keeper.py"))]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as run:
        keeper, fork = map(int, run.stdout.readline().split())
    try:
        wait_until(lambda: not _alive(keeper))
        assert _alive(fork)
    finally:
        os.kill(fork, signal.SIGKILL)


def _alive(pid):
    # An orphan stays a zombie where nobody collects it.
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def test_what_is_not_on_path_is_unavailable(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sources, "SBIN", ())
    with pytest.raises(Unavailable, match="not installed"):
        sources.mosquitto_on_path()
    with pytest.raises(Unavailable, match="no apt-get"):
        sources.unpacked_mosquitto(tmp_path / "cache")


def test_a_mosquitto_that_does_not_run_is_unavailable(monkeypatch, tmp_path):
    program = tmp_path / "mosquitto"
    program.write_text("#!/bin/sh\necho error while loading shared libraries\nexit 127\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(Unavailable, match="shared libraries"):
        sources.mosquitto_on_path()


def test_a_cache_that_cannot_be_written_is_unavailable(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(Unavailable, match="cannot be written"):
        sources.unpacked_mosquitto(tmp_path / "file" / "cache")


@pytest.mark.parametrize(
    ("library", "package"),
    [
        ("libcjson.so.1", "libcjson1"),
        ("libdlt.so.2", "libdlt2"),
        ("libwebsockets.so.17", "libwebsockets17"),
        ("libev.so.4", "libev4t64"),
        ("libuv.so.1", "libuv1t64"),
        ("libsqlite3.so.0", "libsqlite3-0"),
    ],
)
def test_a_missing_library_names_its_debian_package(monkeypatch, library, package):
    # `apt-cache search` of a system whose libraries of 2024 have names with t64.
    known = {"libcjson1", "libdlt2", "libwebsockets17", "libev4t64", "libuv1t64", "libsqlite3-0"}

    def search(_what, command, **_options):
        name = command[-1].strip("^$").replace("\\", "")
        return f"{name} - a library\n" if name in known else ""

    monkeypatch.setattr(sources, "_run", search)
    assert sources._package_of(library) == package


def test_a_library_without_a_package_is_told(monkeypatch):
    monkeypatch.setattr(sources, "_run", lambda *_, **__: "")
    with pytest.raises(Unavailable, match=r"libnone\.so\.1"):
        sources._package_of("libnone.so.1")


def test_libraries_are_fetched_until_none_is_missing(monkeypatch, tmp_path):
    fetched = []
    missing = {1: ["libcjson.so.1", "libwebsockets.so.17"], 2: ["libuv.so.1"]}

    def run(_what, command, **_options):
        if command[:2] == ["apt-get", "download"]:
            fetched.append(command[2:])
            return ""
        if command[0] == "ldd":
            return "\n".join(f"\t{name} => not found" for name in missing.get(len(fetched), []))
        return "found"

    monkeypatch.setattr(sources, "_run", run)
    sources._fetch_packages(tmp_path)
    assert fetched == [["mosquitto"], ["libcjson1", "libwebsockets17"], ["libuv1"]]


def test_amqtt_is_fetched_once_where_it_is_not_installed(monkeypatch, tmp_path):
    calls = []

    def run(what, command, **_options):
        calls.append((what, command[-2:]))
        (tmp_path / "amqtt" / "amqtt").mkdir(parents=True)
        return ""

    monkeypatch.setattr(sources.importlib.util, "find_spec", lambda _name: None)
    monkeypatch.setattr(sources, "_run", run)
    for _ in range(2):
        source = sources.amqtt_broker(tmp_path)
        assert str(tmp_path / "amqtt") in source.environment["PYTHONPATH"].split(os.pathsep)
    assert calls == [("pip", [str(tmp_path / "amqtt"), sources.AMQTT])]


@pytest.mark.skipif(shutil.which("false") is None, reason="needs a program that fails")
def test_a_command_that_fails_or_is_missing_is_unavailable():
    with pytest.raises(Unavailable, match="failed with code 1"):
        sources._run("it", ["false"])
    with pytest.raises(Unavailable, match="it failed"):
        sources._run("it", ["/no/such/program"])
