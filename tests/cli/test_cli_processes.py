"""`hepti broker` as a process: how it ends, and what it leaves."""

from __future__ import annotations

import datetime
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from broker_kinds import needs_mosquitto
from closed_broker import Someone
from site_processes import PATIENCE_S, ROOT

from hepti_mqtt.closed_site.folder import SiteFolder
from hepti_mqtt.transport import BrokerUrl

pytestmark = [pytest.mark.processes, pytest.mark.broker]


class Running:
    """`hepti broker ARGUMENTS`, which has said that it answers."""

    def __init__(self, directory: Path, *arguments: str) -> None:
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

    def broker(self) -> psutil.Process:
        """Return the broker's own process, below that of its keeper."""
        (keeper,) = psutil.Process(self.process.pid).children()
        (broker,) = keeper.children()
        return broker

    def end(self) -> tuple[int, str]:
        """Wait for its end; return exit code and stderr."""
        _, err = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, err

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    """A function that starts `hepti broker ARGUMENTS`, with its temporary files in `tmp_path`."""
    with ExitStack() as stack:

        def start(*arguments: str) -> Running:
            running = Running(tmp_path, *arguments)
            stack.callback(running.close)
            return running

        yield start


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_broker_that_is_told_to_end_leaves_nothing(
    start: Callable[..., Running], tmp_path: Path, number: signal.Signals
) -> None:
    running = start()
    running.process.send_signal(number)  # SIGHUP: its terminal is closed
    assert running.end()[0] == 0
    assert not list(tmp_path.iterdir())


def test_a_broker_that_dies_ends_the_command(start: Callable[..., Running], tmp_path: Path) -> None:
    running = start()
    running.broker().kill()
    code, err = running.end()
    assert code == 3
    assert "has ended by itself" in err
    assert not list(tmp_path.iterdir())


@needs_mosquitto
def test_what_waits_for_somebody_at_a_closed_sites_broker_outlives_it(
    start: Callable[..., Running], tmp_path: Path
) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
    now = datetime.datetime.now(datetime.UTC)
    site = SiteFolder.make(tmp_path / "site", "home", ("127.0.0.1",), port, now).add("client", "alice")
    url = BrokerUrl.parse(str(site.login("alice")))
    first = start("--closed", str(site.path), "--bind", "127.0.0.1")
    alice = Someone(url, "alice", clean=False)
    alice.read("hepti/v1/home/infer/+/res/alice/#")
    alice.close()
    planner = Someone(BrokerUrl.parse(str(site.login("planner"))))
    planner.transport.publish("hepti/v1/home/infer/m/res/alice/1", b"the answer", 1)
    planner.transport.close(timeout_s=PATIENCE_S)
    first.process.terminate()
    code, err = first.end()
    assert code == 0
    assert "lost" not in err
    assert stat.S_IMODE((site.path / "state").stat().st_mode) == 0o700
    start("--closed", str(site.path), "--bind", "127.0.0.1")
    alice = Someone(url, "alice", clean=False)
    assert alice.heard.get(timeout=PATIENCE_S) == ("hepti/v1/home/infer/m/res/alice/1", b"the answer")
    alice.close()


def test_a_broker_that_keeps_nothing_says_so(start: Callable[..., Running]) -> None:
    running = start()
    running.process.terminate()
    assert "lost when this broker ends" in running.end()[1]
