"""`hepti health` as containers run it: a process that ends with 0 if the planner, or a device, is online."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hepti_mqtt.embedded_broker import start_broker
from hepti_mqtt.protocol.messages import Status, encode_status
from hepti_mqtt.protocol.topics import Topics
from hepti_mqtt.transport import BrokerUrl, PahoTransport

pytestmark = [pytest.mark.broker, pytest.mark.processes]
ROOT = Path(__file__).parents[2]
TOPICS = Topics("home")


def health(url, *arguments):
    return subprocess.run(
        [sys.executable, "-m", "hepti_mqtt.cli", "health", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "HEPTI_BROKER": url},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_exit_code_says_who_is_online():
    with start_broker() as broker:
        acknowledged = []
        transport = PahoTransport(
            BrokerUrl.parse(broker.url), "test", on_message=lambda *_: acknowledged.append(1), on_state=lambda _: None
        )
        transport.subscribe([("#", 1)])
        transport.connect()
        words = {
            TOPICS.planner_status(): Status("online", 3),
            TOPICS.status("a"): Status("starting", 3, "compiling kernels", 4, 23),
            TOPICS.status("b"): Status("offline", 3),
        }
        for topic, status in words.items():
            transport.publish(topic, encode_status(status), 1, True)
        while len(acknowledged) < len(words):
            pass
        planner, a, b = (
            health(broker.url, *who) for who in (["planner"], ["agent", "--id", "a"], ["agent", "--id", "b"])
        )
        missing = health(broker.url, "agent", "--id", "c", "--timeout", "0.2")
        transport.close()
    assert (planner.returncode, planner.stdout) == (0, "online\n")
    assert (a.returncode, a.stdout) == (1, "starting: compiling kernels 4 of 23\n")
    assert b.returncode == 1
    assert missing.returncode not in (0, 1)
    assert "is the agent started?" in missing.stderr
