"""Reading a retained status, and the term of a new start, which follows the retained one."""

from __future__ import annotations

import queue
import secrets
import time
import uuid
from typing import Final, NamedTuple, Self

from hepti_mqtt.core.errors import NetworkError, RefusedError, WireError
from hepti_mqtt.core.ids import Start
from hepti_mqtt.protocol.messages import QUESTION, Status, decode_status, encode_status
from hepti_mqtt.protocol.plausible import U32
from hepti_mqtt.protocol.starts import next_term
from hepti_mqtt.transport.base import Connected, Refused, State
from hepti_mqtt.transport.broker_connection import BrokerConnection
from hepti_mqtt.transport.url import BrokerUrl

ECHO_S: Final = 5.0
CONTRADICTION_S: Final = 3.0


class Claim(NamedTuple):
    """A new start."""

    start: Start
    held: bool = False  #: whether a running process uses the name; False unless `claim` looked


def new_boot() -> int:
    """Return a random boot, never 0."""
    return secrets.randbelow(U32) + 1


#: stands for an empty or foreign payload
UNREAD: Final = Status("offline", 0, reason="unread")


class StatusReader:
    """A separate connection that reads the statuses on one topic; a `with` block closes it. name: for its client id."""

    def __init__(self, url: BrokerUrl, topic: str, name: str) -> None:
        self._inbox: queue.SimpleQueue[bytes | State] = queue.SimpleQueue()
        self.connection = BrokerConnection(
            url,
            f"{name}-{uuid.uuid4().hex[:12]}",
            on_message=lambda _topic, payload: self._inbox.put(payload),
            on_state=self._inbox.put,
            name="status",
        )
        self.connection.subscribe([(topic, 1)])

    def connect(self, timeout_s: float = 5.0) -> Self:
        """Connect; raises as `BrokerConnection.connect` does."""
        self.connection.connect(timeout_s)
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()

    def next(self, until_s: float) -> Status | State | None:
        """Return the next status or connection state, None after `until_s` (`time.monotonic`)."""
        try:
            item = self._inbox.get(timeout=max(until_s - time.monotonic(), 0.0))
            return decode_status(item) if isinstance(item, bytes) else item
        except queue.Empty:
            return None
        except WireError:
            return UNREAD

    def status(self, timeout_s: float) -> Status | None:
        """Return the next status, None after `timeout_s`."""
        until_s = time.monotonic() + timeout_s
        while (item := self.next(until_s)) is not None:
            if isinstance(item, Status):
                return item
        return None


def claim(url: BrokerUrl, topic: str, name: str, boot: int, timeout_s: float = 5.0, *, look: bool = False) -> Claim:
    """Read the retained status on `topic` over a separate connection, and return the start that follows it.

    A published question returns after the retained status, so a missing status needs no timeout.
    A running process answers the question immediately. look: wait for this answer unless the status is offline.
    Raises NetworkError and RefusedError.
    """
    with StatusReader(url, topic, f"{name}-claim") as reader:
        reader.connect(timeout_s)
        last = _retained(reader, topic)
        held = look and last is not None and last.state != "offline" and _contradicted(reader)
        return Claim(Start(next_term(last), boot), held)


def _retained(reader: StatusReader, topic: str) -> Status | None:
    """Return the status that arrives before our own question."""
    status, transport = None, reader.connection
    until = time.monotonic() + ECHO_S
    while (item := reader.next(until)) is not None:
        if isinstance(item, Connected):
            transport.publish(topic, encode_status(QUESTION), 1)
        elif isinstance(item, Refused):
            raise RefusedError(
                f"the broker does not let {transport.url.user or 'an anonymous user'} use {topic}: {item.reason}; the "
                "user must be named as the access list wants it"
            )
        elif item == QUESTION:
            return status
        elif isinstance(item, Status) and item != UNREAD:
            status = item
    raise NetworkError(
        f"the broker at {transport.url.place} has not echoed a message on {topic} within {ECHO_S:g} s; its access list "
        "must let this user publish and read there"
    )


def _contradicted(reader: StatusReader) -> bool:
    until = time.monotonic() + CONTRADICTION_S
    while (item := reader.next(until)) is not None:
        if isinstance(item, Status) and item not in (QUESTION, UNREAD):
            return item.state != "offline"
    return False
