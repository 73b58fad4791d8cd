"""Brokers for tests: the one that Hepti brings, one of a kind, or Mosquitto for features that only it has."""

from __future__ import annotations

from typing import Any

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
