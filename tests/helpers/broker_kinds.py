"""Brokers for tests: the one that Hepti brings, one of a kind, or Mosquitto for features that only it has."""

from __future__ import annotations

import socket
from typing import Any

import psutil
import pytest

from hepti_mqtt.embedded_broker import EmbeddedBroker, find_mosquitto, start_broker

NEEDS_MOSQUITTO = "needs Mosquitto: apt install mosquitto"  # `conftest.py` counts the tests that this skips

needs_mosquitto = pytest.mark.skipif(find_mosquitto() is None, reason=NEEDS_MOSQUITTO)


def mosquitto_or_skip() -> str:
    """Return the path of Mosquitto; skips the test where it is not installed."""
    program = find_mosquitto()
    if program is None:
        pytest.skip(NEEDS_MOSQUITTO)
    return program


def broker_of(kind: str | None, **options: Any) -> EmbeddedBroker:
    """Start a broker of this kind, for None the one that Hepti chooses; skips the test where Mosquitto is missing."""
    if kind == "mosquitto":
        mosquitto_or_skip()
    return start_broker(kind, **options)


def process_of(broker: EmbeddedBroker) -> psutil.Process:
    """Return the process that listens on a broker's port, below its keeper."""
    for process in psutil.Process().children(recursive=True):
        if any(c.laddr.port == broker.port and not c.raddr for c in process.net_connections("tcp")):
            return process
    raise AssertionError("no process listens on the broker's port")


def outer_address() -> str:
    """Return an address of this machine that others reach; skips the test where there is none."""
    addresses = [a for each in psutil.net_if_addrs().values() for a in each if a.family == socket.AF_INET]
    outer = [a.address for a in addresses if not a.address.startswith("127.")]
    return outer[0] if outer else pytest.skip("this machine has no address but the loopback one")
