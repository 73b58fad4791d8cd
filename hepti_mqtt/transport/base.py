"""Events, counters and inbox of a broker connection, with its errors and backoff."""

from __future__ import annotations

import random
import re
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from math import inf
from queue import SimpleQueue
from typing import Any, Final, Generic, NamedTuple, TypeVar

from hepti_mqtt.core.errors import CertificateDateError, NetworkError
from hepti_mqtt.transport.url import BrokerUrl

KEEPALIVE_S: Final = 10
MAX_QUEUED_BYTES: Final = 64 * 2**20
MAX_QUEUED: Final = 10_000
UNAVAILABLE: Final = frozenset({3, 136, 137, 151, 156, 157, 159})  # server unavailable, busy, quota, moved, rate


@dataclass(frozen=True, slots=True)
class Connected:
    """The connection is up, and the broker has acknowledged all subscriptions."""

    protocol: int  #: 4 (MQTT 3.1.1) or 5
    #: the broker's limit, as `publish_bytes` counts; None if it announces none (MQTT 5 only)
    largest_packet_bytes: int | None
    local: bool = False  #: whether the broker runs on this machine
    resumed: bool = False  #: whether the broker kept our session


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The connection was lost and will be restored."""

    reason: str


@dataclass(frozen=True, slots=True)
class Subscribed:
    """The broker granted all filters of one `subscribe`; repeated after each reconnection."""

    token: int


@dataclass(frozen=True, slots=True)
class Refused:
    """The broker refused filters of a `subscribe` or, with token None, a message of QoS 1.

    MQTT 5 refuses a message with a reason; other brokers close the connection repeatedly.
    """

    token: int | None
    topics: tuple[str, ...]
    reason: str


class Receipt(NamedTuple):
    """Identifies a delivery for its acknowledgement."""

    connection: int  #: number of the connection that received the message
    packet: int  #: its packet id


@dataclass(frozen=True, slots=True)
class Delivery:
    """A message that the broker repeats on the next connection unless it is acknowledged."""

    topic: str
    payload: bytes
    receipt: Receipt | None  #: None at QoS 0
    repeated: bool  #: whether the broker has sent it before
    retained: bool = False  #: whether it is a stored retained message, not a new publish


Body = bytes | memoryview
State = Connected | Disconnected | Subscribed | Refused
OnMessage = Callable[[str, Any], None]  # topic; payload: bytes, or on the data connection a memoryview
OnDelivery = Callable[[Delivery], None]
OnState = Callable[[State], None]
OnAcknowledged = Callable[[bool], None]  # whether the topic has subscribers


class Will(NamedTuple):
    """A last will, or the last message before closing."""

    topic: str
    payload: bytes
    qos: int = 1
    retain: bool = True


@dataclass(slots=True)
class Counts:
    """PUBLISH packets and their bytes (as `publish_bytes` counts) since the start."""

    published: int = 0
    published_bytes: int = 0
    received: int = 0
    received_bytes: int = 0
    lost: int = 0  #: messages of QoS 0 without a connection or with a full queue, and messages queued at the end
    bad: int = 0  #: received messages with an invalid topic, and callbacks that raised
    reconnections: int = 0


class VersionRefused(NetworkError):
    """The broker refuses this version of MQTT, closes the connection or does not answer CONNECT."""

    def __init__(self, message: str, *, is_sure: bool) -> None:
        super().__init__(message)
        self.is_sure = is_sure  #: whether the broker refused the version or closed the connection


# -- errors ----------------------------------------------------------------------------------------------------------


def absent(url: BrokerUrl, error: Exception) -> NetworkError:
    """Return the error for a broker that cannot be reached."""
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code in _DATED:
            return CertificateDateError(f"TLS with the broker at {url.place} failed: {_dates(url, error)}")
        return NetworkError(
            f"TLS with the broker at {url.place} failed: {error.verify_message or error}; name its authority with "
            "?ca=FILE, and the broker by a name that its certificate has"
        )
    if url.tls and isinstance(error, ssl.SSLError | ConnectionResetError | BrokenPipeError | EOFError):
        return NetworkError(
            f"{url.place} ended the TLS handshake ({error}), so it may not encrypt on this port; use "
            f"{url.scheme[:-1]}://, or the broker's port for {url.scheme}://"
        )
    return NetworkError(
        f"no broker answers at {url.place} ({error}); start one (`hepti broker`, or mosquitto) or name another "
        "with --broker or HEPTI_BROKER"
    )


_CERTIFICATE_S: Final = 2.0  # to fetch a certificate for an error message
_DATED: Final = (9, 10)  # OpenSSL's codes for a certificate that is not yet valid, and for an expired one
# DER: a sequence of two times, UTCTime (YYMMDDHHMMSSZ) or GeneralizedTime (YYYYMMDDHHMMSSZ).
_TIME: Final = rb"(?:\x17\x0d(\d{12})Z|\x18\x0f(\d{14})Z)"
_VALIDITY: Final = re.compile(rb"\x30." + _TIME + _TIME, re.DOTALL)


def _dates(url: BrokerUrl, error: ssl.SSLCertVerificationError) -> str:
    """Compare the certificate's validity with this machine's clock, in words."""
    clock = f"this machine's clock says {datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    early = error.verify_code == _DATED[0]
    try:
        certificate = ssl.get_server_certificate((url.host, url.port), timeout=_CERTIFICATE_S)
        begin, end = validity(ssl.PEM_cert_to_DER_cert(certificate))
        valid = f"its certificate is valid from {begin:%Y-%m-%d %H:%M} to {end:%Y-%m-%d %H:%M} UTC"
    except (OSError, ValueError):
        valid = f"its certificate is {'not valid yet' if early else 'no longer valid'}"
    remedy = "set this machine's clock" if early else "renew the certificate, or set this machine's clock"
    return f"{valid}, and {clock}; {remedy}. Agents and the planner try again automatically"


def validity(certificate: bytes) -> tuple[datetime, datetime]:
    """Return the first and last moment (UTC) of a certificate in DER. Raises ValueError if it has none."""
    match = _VALIDITY.search(certificate)
    if match is None:
        raise ValueError("no validity in the certificate")
    begin, end = (
        datetime.strptime((long or (b"20" if short < b"5" else b"19") + short).decode(), "%Y%m%d%H%M%S")
        for short, long in (match.groups()[:2], match.groups()[2:])
    )
    return begin.replace(tzinfo=UTC), end.replace(tzinfo=UTC)


# -- reconnection ----------------------------------------------------------------------------------------------------

BACKOFF_S: Final = (0.1, 5.0)
SOON_S: Final = 30.0  # longest restart of a broker
SOON_DELAY_S: Final = 0.5  # longest pause between attempts during a restart


class Backoff:
    """Pauses between attempts to connect: doubled each time, with jitter so that devices do not return together."""

    def __init__(self) -> None:
        self._delay_s, self._lost_at = BACKOFF_S[0], float("-inf")

    def lost(self, up_s: float) -> None:
        """Note the loss of a connection that was up for `up_s`."""
        if up_s > BACKOFF_S[1]:
            # Two clients of one name disconnect each other; a short connection must not reset the pause.
            self._delay_s, self._lost_at = BACKOFF_S[0], time.monotonic()

    def pause_s(self) -> float:
        """Return the next pause."""
        pause_s = self._delay_s * random.uniform(0.5, 1.0)
        soon = time.monotonic() - self._lost_at < SOON_S
        self._delay_s = min(2 * self._delay_s, SOON_DELAY_S if soon else BACKOFF_S[1])
        return pause_s


SAY_S: Final = 10.0  # between two log lines during a wait for a broker
T = TypeVar("T")


def wait_for_broker(
    connect: Callable[[float], T],
    say: Callable[[str], None],
    *,
    within_s: float = inf,
    stop: threading.Event | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> T | None:
    """Retry `connect` until a broker answers and return its result; None after `stop`.

    connect: takes the seconds that are left. say: takes a line every SAY_S.
    Raises the last NetworkError after `within_s` seconds, and other errors immediately.
    """
    stop, backoff = stop or threading.Event(), Backoff()
    until, said_s = clock() + within_s, -inf
    while not stop.is_set():
        try:
            return connect(until - clock())
        except NetworkError as error:
            now = clock()
            if now >= until:
                raise
            if now - said_s >= SAY_S:
                said_s = now
                say(f"waiting for the broker: {error}")
        stop.wait(min(backoff.pause_s(), max(until - clock(), 0.0)))
    return None


# -- the inbox -------------------------------------------------------------------------------------------------------

SENDER_EVENTS: Final = 1000  # queued events of one sender
SENDER_BYTES: Final = 64 << 20  # queued bytes of one sender; a single event may exceed it

Event = TypeVar("Event")


class Inbox(Generic[Event]):
    """Events for one reading thread.

    `offer` bounds all events that may be lost, because a peer may send faster than the reader works.
    `accept` bounds the events of each sender, so that no sender blocks another one.
    `post` always accepts: nobody repeats control messages and this process's own reports.
    """

    def __init__(self, limit: int = 16_384, limit_bytes: int = 96 << 20) -> None:
        self._queue: SimpleQueue[tuple[Event, int, str]] = SimpleQueue()
        self._of_sender: dict[str, tuple[int, int]] = {}  # queued events and bytes of each sender
        self._accepted = 0  # queued events of all senders
        self._limit, self._limit_bytes = limit, limit_bytes
        self._lock = threading.Lock()
        self._offered_bytes = 0
        self._taken_bytes = 0  # only the reading thread writes it, so `get` needs no lock
        self.wake: Callable[[], None] = lambda: None  #: called by the sending thread after every new event
        #: whether no event waits; called before every op, hence bound directly
        self.empty: Callable[[], bool] = self._queue.empty

    def offer(self, event: Event, nbytes: int) -> bool:
        """Queue an event of `nbytes`; return False if the inbox is full."""
        with self._lock:
            waiting = self._offered_bytes - self._taken_bytes
            # An event larger than the bound is accepted alone; otherwise it could never arrive.
            full = waiting > 0 and waiting + nbytes > self._limit_bytes
            if full or self._queue.qsize() - self._accepted >= self._limit:
                return False
            self._offered_bytes += nbytes
        self._queue.put((event, nbytes, ""))
        self.wake()
        return True

    def accept(self, sender: str, event: Event, nbytes: int) -> bool:
        """Queue an event of a sender; return False if the sender exceeds its share."""
        with self._lock:
            count, held = self._of_sender.get(sender, (0, 0))
            if count >= SENDER_EVENTS or (count and held + nbytes > SENDER_BYTES):
                return False
            self._of_sender[sender] = (count + 1, held + nbytes)
            self._accepted += 1
        self._queue.put((event, nbytes, sender))
        self.wake()
        return True

    def post(self, event: Event) -> None:
        """Queue an event unconditionally; safe in a signal handler."""
        self._queue.put((event, 0, ""))
        self.wake()

    def get(self, timeout_s: float | None = None) -> Event:
        """Return the next event. Raises queue.Empty after `timeout_s`."""
        event, nbytes, sender = self._queue.get(timeout=timeout_s)
        if not sender:
            self._taken_bytes += nbytes
            return event
        with self._lock:
            self._accepted -= 1
            count, held = self._of_sender.pop(sender)
            if count > 1:
                self._of_sender[sender] = (count - 1, held - nbytes)
        return event
