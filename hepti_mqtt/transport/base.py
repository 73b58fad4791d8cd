"""What the rest of Hepti sees of a connection to a broker, and what its two kinds share.

Its events and counters, the inbox that events go to, checks, errors and backoff.
"""

from __future__ import annotations

import random
import re
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from math import inf
from queue import SimpleQueue
from typing import Any, Final, Generic, NamedTuple, TypeVar

from hepti_mqtt.errors import CertificateDateError, NetworkError
from hepti_mqtt.transport.codec import is_filter, is_topic
from hepti_mqtt.transport.url import BrokerUrl

KEEPALIVE_S: Final = 10
MAX_QUEUED_BYTES: Final = 64 * 2**20
MAX_QUEUED: Final = 10_000
UNAVAILABLE: Final = frozenset({3, 136, 137, 151, 156, 157, 159})  # server unavailable, busy, quota, moved, rate


@dataclass(frozen=True, slots=True)
class Connected:
    """The connection is up, and every subscription made before is acknowledged again.

    protocol: 4 (MQTT 3.1.1) or 5. largest_packet_bytes: as the broker announces it (MQTT 5 only), counted as by
    `publish_bytes`, else None. local: the broker is on this machine, both ends of the connection having one address.
    resumed: it knew our session.
    """

    protocol: int
    largest_packet_bytes: int | None
    local: bool = False
    resumed: bool = False


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The connection was lost; it is being restored."""

    reason: str


@dataclass(frozen=True, slots=True)
class Subscribed:
    """The broker acknowledged every filter of `subscribe`; sent for each SUBACK, so again after a reconnection."""

    token: int


@dataclass(frozen=True, slots=True)
class Refused:
    """The broker refused filters of a `subscribe`, or (token None) a publish of QoS 1.

    It refuses a publish with a reason (MQTT 5), or by hanging up on it repeatedly.
    """

    token: int | None
    topics: tuple[str, ...]
    reason: str


class Receipt(NamedTuple):
    """What acknowledges a message: the number of the connection on which it came, and its packet id."""

    connection: int
    packet: int


@dataclass(frozen=True, slots=True)
class Delivery:
    """A message that the broker keeps until it is acknowledged; it comes again on the next connection otherwise.

    receipt: None at QoS 0. repeated: the broker has sent it before. retained: it is old, and comes with every
    subscription; a message published now has this unset, even if it is to be retained.
    """

    topic: str
    payload: bytes
    receipt: Receipt | None
    repeated: bool
    retained: bool = False


Body = bytes | memoryview
State = Connected | Disconnected | Subscribed | Refused
OnMessage = Callable[[str, Any], None]  # topic; payload: bytes, or on the data connection a memoryview
OnDelivery = Callable[[Delivery], None]
OnState = Callable[[State], None]
OnTaken = Callable[[bool], None]  # whether anybody is subscribed to the topic


class Will(NamedTuple):
    """What the broker publishes for us if the connection breaks; also the form of a last publish before closing."""

    topic: str
    payload: bytes
    qos: int = 1
    retain: bool = True


@dataclass(slots=True)
class Counts:
    """PUBLISH packets and their bytes (as `publish_bytes` counts them) since the start.

    lost: published at QoS 0 without a connection or with a full queue, or still queued when closed. bad: received with
    a topic that is not UTF-8, or handed to a callback that failed.
    """

    published: int = 0
    published_bytes: int = 0
    received: int = 0
    received_bytes: int = 0
    lost: int = 0
    bad: int = 0
    reconnections: int = 0


class VersionRefused(NetworkError):
    """The broker does not speak this version of MQTT, or closes the connection or keeps silent on our CONNECT."""

    def __init__(self, message: str, *, is_sure: bool) -> None:
        super().__init__(message)
        #: it said so, or closed the connection
        self.is_sure = is_sure


# -- errors ----------------------------------------------------------------------------------------------------------


def absent(url: BrokerUrl, error: Exception) -> NetworkError:
    """Return the error for a broker to which there is no connection."""
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


_LOOK_S: Final = 2.0  # to fetch a certificate that is only looked at
# OpenSSL's codes of a certificate that is not yet valid, and of one that is no longer.
_DATED: Final = (9, 10)
# In DER: a sequence of two times, UTCTime (YYMMDDHHMMSSZ) or GeneralizedTime (YYYYMMDDHHMMSSZ).
_TIME: Final = rb"(?:\x17\x0d(\d{12})Z|\x18\x0f(\d{14})Z)"
_VALIDITY: Final = re.compile(rb"\x30." + _TIME + _TIME, re.DOTALL)


def _dates(url: BrokerUrl, error: ssl.SSLCertVerificationError) -> str:
    """Return which clock says what, where a certificate is not valid at the time of this machine."""
    here = f"this machine's clock says {datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    early = error.verify_code == _DATED[0]
    try:
        shown = ssl.get_server_certificate((url.host, url.port), timeout=_LOOK_S)
        begin, end = validity(ssl.PEM_cert_to_DER_cert(shown))
        when = f"its certificate is valid from {begin:%Y-%m-%d %H:%M} to {end:%Y-%m-%d %H:%M} UTC"
    except (OSError, ValueError):
        when = f"its certificate is {'not valid yet' if early else 'no longer valid'}"
    do = "set this machine's clock" if early else "renew the certificate, or set this machine's clock"
    return f"{when}, and {here}; {do}. Agents and the planner try again by themselves"


def validity(certificate: bytes) -> tuple[datetime, datetime]:
    """Return from when to when a certificate (DER) is valid, in UTC; raises ValueError if it does not say."""
    found = _VALIDITY.search(certificate)
    if found is None:
        raise ValueError("no validity in the certificate")
    times = [(short, long) for short, long in (found.groups()[:2], found.groups()[2:])]
    begin, end = (
        datetime.strptime((long or (b"20" if short < b"5" else b"19") + short).decode(), "%Y%m%d%H%M%S")
        for short, long in times
    )
    return begin.replace(tzinfo=UTC), end.replace(tzinfo=UTC)


# -- checks ----------------------------------------------------------------------------------------------------------


def check_message(topic: str, payload: object, qos: int) -> None:
    """Raise TypeError for a payload that is not bytes, ValueError for a topic or QoS that MQTT does not allow."""
    if not isinstance(payload, (bytes, bytearray)):
        raise TypeError(f"a payload is bytes, not {type(payload).__name__}")
    if not is_topic(topic) or qos not in (0, 1):
        raise ValueError(f"cannot publish to {topic!r} at QoS {qos}")


def check_filters(filters: Sequence[tuple[str, int]]) -> None:
    """Raise ValueError without filters or for one that MQTT does not allow."""
    if not filters:
        raise ValueError("name at least one filter")
    for name, qos in filters:
        if not is_filter(name) or qos not in (0, 1):
            raise ValueError(f"cannot subscribe to {name!r} at QoS {qos}")


# -- reconnection ----------------------------------------------------------------------------------------------------

BACKOFF_S: Final = (0.1, 5.0)
SOON_S: Final = 30.0  # a broker that is away for no longer than a restart is tried every ...
SOON_DELAY_S: Final = 0.5  # ... so often


class Backoff:
    """Pauses before a broker is tried again: they double, with jitter, so that devices do not return all at once."""

    def __init__(self) -> None:
        self._delay_s, self._lost_at = BACKOFF_S[0], float("-inf")

    def lost(self, up_s: float) -> None:
        """A connection that was up for so long is lost."""
        if up_s > BACKOFF_S[1]:
            # Not sooner: two clients of one name would disconnect each other for ever.
            self._delay_s, self._lost_at = BACKOFF_S[0], time.monotonic()

    def pause_s(self) -> float:
        """Return how long to wait now."""
        pause_s = self._delay_s * random.uniform(0.5, 1.0)
        soon = time.monotonic() - self._lost_at < SOON_S
        self._delay_s = min(2 * self._delay_s, SOON_DELAY_S if soon else BACKOFF_S[1])
        return pause_s


SAY_S: Final = 10.0  # between two lines about a wait for a broker
T = TypeVar("T")


def wait_for_broker(
    connect: Callable[[float], T],
    say: Callable[[str], None],
    *,
    within_s: float = inf,
    stop: threading.Event | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> T | None:
    """Return what `connect` returns once a broker answers, None after `stop`: a site's machines start in any order.

    connect: takes the seconds that are left. say: takes a line every SAY_S.
    Raises the last NetworkError after `within_s` seconds, and any other error at once.
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

SENDER_EVENTS: Final = 1000  # that wait, of one sender
SENDER_BYTES: Final = 64 << 20  # or one event of any size

Event = TypeVar("Event")


class Inbox(Generic[Event]):
    """Events for one reading thread.

    What may be missed (`offer`) is bounded by number and bytes, because a peer may send faster than the reader works;
    `accept` bounds it for each sender, so that nobody is refused for what another says. What nobody repeats (`post`:
    control messages, this process's own reports) is never refused. `overflowed` counts refusals;
    `empty()` tells whether nothing waits. wake: called after every event that was put, by the thread that did, for a
    reader that waits elsewhere too.
    """

    def __init__(self, limit: int = 16_384, limit_bytes: int = 96 << 20) -> None:
        self._queue: SimpleQueue[tuple[Event, int, str]] = SimpleQueue()
        self._of_sender: dict[str, tuple[int, int]] = {}  # events that wait, and their bytes
        self._accepted = 0  # of all senders, that wait
        self._limit, self._limit_bytes = limit, limit_bytes
        self._lock = threading.Lock()
        self._offered_bytes = 0
        self._taken_bytes = 0  # written by the reading thread only, so that taking needs no lock
        self.overflowed = 0
        self.wake: Callable[[], None] = lambda: None
        self.empty: Callable[[], bool] = self._queue.empty  # asked before every op, so without a call in between

    def offer(self, event: Event, nbytes: int) -> bool:
        """Put an event that holds `nbytes`; return False, and count, if there is no room for it."""
        with self._lock:
            waiting = self._offered_bytes - self._taken_bytes
            # One that is larger than the bound may still come alone, or it could never come at all.
            full = waiting > 0 and waiting + nbytes > self._limit_bytes
            if full or self._queue.qsize() - self._accepted >= self._limit:
                self.overflowed += 1
                return False
            self._offered_bytes += nbytes
        self._queue.put((event, nbytes, ""))
        self.wake()
        return True

    def accept(self, sender: str, event: Event, nbytes: int) -> bool:
        """Put an event of a sender; return False, and count, if too much of the same one waits."""
        with self._lock:
            count, held = self._of_sender.get(sender, (0, 0))
            if count >= SENDER_EVENTS or (count and held + nbytes > SENDER_BYTES):
                self.overflowed += 1
                return False
            self._of_sender[sender] = (count + 1, held + nbytes)
            self._accepted += 1
        self._queue.put((event, nbytes, sender))
        self.wake()
        return True

    def post(self, event: Event) -> None:
        """Put an event that must not be lost, whatever waits already; safe in a signal handler."""
        self._queue.put((event, 0, ""))
        self.wake()

    def get(self, timeout_s: float | None = None) -> Event:
        """Wait for the next event and return it; raises queue.Empty if none comes within `timeout_s`."""
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
