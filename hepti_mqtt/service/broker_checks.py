"""Ensure at the start that no other planner serves the site."""

from __future__ import annotations

import queue
import time
import uuid
from typing import Final

from hepti_mqtt.errors import ConfigError, RefusedError, WireError
from hepti_mqtt.protocol.messages import Status, decode_status, encode_status
from hepti_mqtt.protocol.topics import Topics
from hepti_mqtt.transport import BrokerUrl, Connected, PahoTransport, Refused, State

ECHO_S: Final = 3.0
ANSWER_S: Final = 3.0

_QUESTION: Final = Status("offline", 0)


def ensure_single_planner(url: BrokerUrl, site: str) -> None:
    """Return if no other planner serves the site.

    A running planner contradicts at once an "offline" on its status topic, so we publish one, not retained. It comes
    back after the retained status, so a site without a planner costs no waiting; a stale status of a dead planner
    costs some seconds.

    Raises ConfigError naming the other planner; NetworkError and RefusedError of the connection.
    """
    topic = Topics(site).planner_status()
    inbox: queue.SimpleQueue[Status | State] = queue.SimpleQueue()

    def heard(_topic: str, payload: bytes) -> None:
        try:
            inbox.put(decode_status(payload))
        except WireError:
            return  # cleared, or of a foreign program

    name = f"hepti-{site}-planner-check-{uuid.uuid4().hex[:12]}"
    transport = PahoTransport(url, name, on_message=heard, on_state=inbox.put, name="planner-check")
    try:
        transport.subscribe([(topic, 1)])
        transport.connect()
        known = _retained_status(inbox, transport, topic)
        if known is not None and known.state != "offline" and _contradicted(inbox):
            raise ConfigError(
                f"Site {site} already has a planner (boot {known.boot}). Stop it, or choose another --site."
            )
    finally:
        transport.close()


def _retained_status(inbox: queue.SimpleQueue[Status | State], transport: PahoTransport, topic: str) -> Status | None:
    """Return the retained status: the one that arrives before our own question."""
    known = None
    until = time.monotonic() + ECHO_S
    while (got := _get(inbox, until)) is not None:
        if isinstance(got, Connected):
            transport.publish(topic, encode_status(_QUESTION), 1)
        elif isinstance(got, Refused):
            raise RefusedError(
                f"the broker does not let the planner use {topic}: {got.reason}; see the access list in "
                "broker/acl.example"
            )
        elif got == _QUESTION:
            return known
        elif isinstance(got, Status):
            known = got
    return known


def _contradicted(inbox: queue.SimpleQueue[Status | State]) -> bool:
    until = time.monotonic() + ANSWER_S
    while (got := _get(inbox, until)) is not None:
        if isinstance(got, Status) and got != _QUESTION:
            return got.state != "offline"
    return False


def _get(inbox: queue.SimpleQueue[Status | State], until: float) -> Status | State | None:
    try:
        return inbox.get(timeout=max(until - time.monotonic(), 0.0))
    except queue.Empty:
        return None
