"""The term of a new start: read what the broker retains of the last one."""

from __future__ import annotations

import queue
import secrets
import time
import uuid
from typing import Final, NamedTuple

from hepti_mqtt.errors import NetworkError, RefusedError, WireError
from hepti_mqtt.ids import Start
from hepti_mqtt.protocol.messages import QUESTION, Status, decode_status, encode_status
from hepti_mqtt.protocol.plausible import U32
from hepti_mqtt.protocol.starts import next_term
from hepti_mqtt.transport.base import Connected, Refused, State
from hepti_mqtt.transport.broker_connection import BrokerConnection
from hepti_mqtt.transport.url import BrokerUrl

ECHO_S: Final = 5.0
CONTRADICTION_S: Final = 3.0


class Claim(NamedTuple):
    """A new start; held: whether a running process holds the name, as far as `claim` was asked to look."""

    start: Start
    held: bool = False


def new_boot() -> int:
    """Return a random boot, never 0."""
    return secrets.randbelow(U32) + 1


def claim(url: BrokerUrl, topic: str, name: str, boot: int, timeout_s: float = 5.0, *, look: bool = False) -> Claim:
    """Read the retained status on `topic` over a connection of its own, and return the start that follows it.

    We publish a question there: it comes back after the retained status, so a site without one costs no waiting. A
    running process contradicts it at once. look: wait for that, if the retained status says that there is one.

    Raises NetworkError and RefusedError of the connection.
    """
    inbox: queue.SimpleQueue[Status | State] = queue.SimpleQueue()

    def heard(_topic: str, payload: bytes) -> None:
        try:
            inbox.put(decode_status(payload))
        except WireError:
            return  # cleared, or of a foreign program

    transport = BrokerConnection(
        url, f"{name}-claim-{uuid.uuid4().hex[:12]}", on_message=heard, on_state=inbox.put, name="claim"
    )
    try:
        transport.subscribe([(topic, 1)])
        transport.connect(timeout_s)
        last = _retained(inbox, transport, topic)
        held = look and last is not None and last.state != "offline" and _contradicted(inbox)
        return Claim(Start(next_term(last), boot), held)
    finally:
        transport.close()


def _retained(inbox: queue.SimpleQueue[Status | State], transport: BrokerConnection, topic: str) -> Status | None:
    """Return the retained status: the one that arrives before our own question."""
    known = None
    until = time.monotonic() + ECHO_S
    while (got := _get(inbox, until)) is not None:
        if isinstance(got, Connected):
            transport.publish(topic, encode_status(QUESTION), 1)
        elif isinstance(got, Refused):
            raise RefusedError(
                f"the broker does not let {transport.url.user or 'an anonymous user'} use {topic}: {got.reason}; the "
                "user must be named as the access list wants it"
            )
        elif got == QUESTION:
            return known
        elif isinstance(got, Status):
            known = got
    raise NetworkError(
        f"the broker at {transport.url.place} has not echoed a message on {topic} within {ECHO_S:g} s; its access list "
        "must let this user publish and read there"
    )


def _contradicted(inbox: queue.SimpleQueue[Status | State]) -> bool:
    until = time.monotonic() + CONTRADICTION_S
    while (got := _get(inbox, until)) is not None:
        if isinstance(got, Status) and got != QUESTION:
            return got.state != "offline"
    return False


def _get(inbox: queue.SimpleQueue[Status | State], until: float) -> Status | State | None:
    try:
        return inbox.get(timeout=max(until - time.monotonic(), 0.0))
    except queue.Empty:
        return None
