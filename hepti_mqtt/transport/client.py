"""A connection that mends itself: one network thread, a bounded queue, remembered subscriptions."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from hepti_mqtt.errors import HeptiError, NetworkError
from hepti_mqtt.transport.base import (
    Connected,
    Counts,
    Disconnected,
    OnMessage,
    OnState,
    Refused,
    State,
    Subscribed,
    Will,
)
from hepti_mqtt.transport.link import Link, LinkLost, VersionRefused
from hepti_mqtt.transport.url import BrokerUrl
from hepti_mqtt.transport.wake import Wake
from hepti_mqtt.wire.limits import packet_limit_error
from hepti_mqtt.wire.topics import publish_bytes

MAX_QUEUED_BYTES: Final = 64 * 2**20
MAX_QUEUED: Final = 10_000
BACKOFF_S: Final = (0.1, 5.0)
RECONNECT_TIMEOUT_S: Final = 5.0
ANSWER_S: Final = 1.0  # amqtt misreads some CONNECTs of MQTT 5 and waits for more instead of refusing
TURN_S: Final = 1.0
BATCH: Final = 64  # queued messages handed over before the socket is read again

_log = logging.getLogger(__name__)


class _Publish(NamedTuple):
    topic: str
    payload: bytes
    qos: int
    retain: bool
    packet_bytes: int


_Filters = tuple[tuple[str, int], ...]


class _Subscribe(NamedTuple):
    token: int


class _Unsubscribe(NamedTuple):
    filters: tuple[str, ...]


@dataclass(slots=True)
class _Session:
    """What belongs to one connection; only the network thread touches it."""

    inflight: dict[int, _Publish] = field(default_factory=dict)  # by packet id, QoS 1, sent
    waiting: deque[_Publish] = field(default_factory=deque)  # QoS 1, until the broker's window opens
    subscribing: dict[int, tuple[int, _Filters]] = field(default_factory=dict)  # by packet id
    awaited: set[int] = field(default_factory=set)  # tokens whose SUBACK comes before Connected
    writing: _Publish | None = None
    announced: bool = False


class PahoTransport:
    """A connection to one broker over MQTT 3.1.1 or 5, with its own network thread.

    protocol: 4 (3.1.1), 5, or None to try 5 and fall back where the broker refuses the version. clean: forget the
    session of the last connection. on_message(topic, payload), on_state: called on the network thread; they must only
    hand over. name: of the thread. max_queued_bytes: bound of what waits for the network or, at QoS 1, for its
    acknowledgement; one message larger than that is taken when nothing else waits.

    A publish at QoS 0 that finds no connection or a full queue is counted as lost. At QoS 1 it waits for the
    connection, and a full queue raises NetworkError; it is sent again after a reconnection, so at least once.
    """

    def __init__(
        self,
        url: BrokerUrl,
        client_id: str,
        *,
        on_message: OnMessage,
        on_state: OnState,
        protocol: int | None = None,
        will: Will | None = None,
        clean: bool = True,
        name: str = "mqtt",
        max_queued_bytes: int = MAX_QUEUED_BYTES,
    ) -> None:
        self.url, self.client_id, self.name = url, client_id, name
        self._hear, self._tell = on_message, on_state
        self._protocols: tuple[int, ...] = (5, 4) if protocol is None else (protocol,)
        self._will, self._clean, self._max_queued_bytes = will, clean, max_queued_bytes
        self._lock = threading.Lock()  # guards what follows, up to the blank line
        self._queue: deque[_Publish | _Subscribe | _Unsubscribe] = deque()
        self._queued_bytes = 0
        self._filters: dict[int, _Filters] = {}
        self._token = 0
        self._up = False
        self._largest_bytes: int | None = None  # as the broker said at the last connection
        self._stop_at: float | None = None
        self._counts = Counts()

        self._wake = Wake()
        self._thread: threading.Thread | None = None
        self._session = _Session()

    # -- any thread --------------------------------------------------------------------------------------------------

    def connect(self, timeout_s: float = 5.0) -> None:
        """Connect once and start the network thread, which mends later losses for ever.

        Raises NetworkError (nobody answers at host:port), RefusedError (user, password, client id), ConfigError (CA
        file); then nothing runs, and connect may be called again. Raises ValueError if already connected or closed.
        """
        if self._thread is not None or self._stop_at is not None:
            raise ValueError("connect a transport once; make a new one after close")
        first: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(first, timeout_s), name=self.name, daemon=True)
        self._thread.start()
        try:
            # Looking a name up cannot be interrupted, so that the thread may be late.
            first.result(timeout_s + 2.0)
        except TimeoutError:
            self.close(timeout_s=0.0)
            raise NetworkError(f"no broker answers at {self.url.place} within {timeout_s:g} s") from None
        except Exception:
            self._thread.join()
            self._thread = None
            raise

    def publish(self, topic: str, payload: bytes, qos: int = 0, retain: bool = False) -> None:
        """Queue a message; the payload must not change afterwards.

        Raises NetworkError if the transport is closed, or at QoS 1 and 2 if the queue is full; PacketLimitError for
        what the broker says it does not take (it would end the connection, and at QoS 1 get the same again, for ever);
        TypeError for a payload that is not bytes; ValueError for a topic with a wildcard or a payload that no packet
        can carry.
        """
        if not isinstance(payload, (bytes, bytearray)):
            raise TypeError(f"a payload is bytes, not {type(payload).__name__}")
        if not topic or set(topic) & {"+", "#", "\0"} or qos not in (0, 1, 2):
            raise ValueError(f"cannot publish to {topic!r} at QoS {qos}")
        packet_bytes = publish_bytes(topic, len(payload), qos)
        with self._lock:
            if self._stop_at is not None:
                raise NetworkError(f"the connection {self.name} is closed; nothing can be published on it")
            if self._largest_bytes is not None and packet_bytes > self._largest_bytes:
                raise packet_limit_error(
                    self._largest_bytes, packet_bytes, "this message", f"the broker at {self.url.place}"
                )
            full = len(self._queue) >= MAX_QUEUED or (
                self._queued_bytes > 0 and self._queued_bytes + packet_bytes > self._max_queued_bytes
            )
            if qos == 0 and (full or not self._up):
                self._counts.lost += 1
                return
            if full:
                raise NetworkError(
                    f"{self._queued_bytes} bytes wait for the broker at {self.url.place}, which is too slow or away; "
                    "send less, or try again later"
                )
            self._queue.append(_Publish(topic, payload, qos, retain, packet_bytes))
            self._queued_bytes += packet_bytes
        self._wake.set()

    def subscribe(self, filters: Sequence[tuple[str, int]]) -> int:
        """Subscribe to (filter, QoS), now and after every reconnection; return the token that `Subscribed` will carry.

        Raises ValueError without filters or for one that MQTT does not allow.
        """
        if not filters:
            raise ValueError("name at least one filter")
        for name, qos in filters:
            levels = name.split("/")
            wild = any(len(level) > 1 and set(level) & {"+", "#"} for level in levels) or "#" in levels[:-1]
            if not name or wild or "\0" in name or qos not in (0, 1, 2):
                raise ValueError(f"cannot subscribe to {name!r} at QoS {qos}")
        with self._lock:
            self._token += 1
            token = self._token
            self._filters[token] = tuple(filters)
            if self._up:  # otherwise it goes out with the others, once there is a connection
                self._queue.append(_Subscribe(token))
        self._wake.set()
        return token

    def unsubscribe(self, filters: Sequence[str]) -> None:
        """Leave filters and forget them."""
        gone = set(filters)
        with self._lock:
            kept = {token: tuple(f for f in own if f[0] not in gone) for token, own in self._filters.items()}
            self._filters = {token: own for token, own in kept.items() if own}
            if self._up and gone:
                self._queue.append(_Unsubscribe(tuple(sorted(gone))))
        self._wake.set()

    def counts(self) -> Counts:
        """Return a snapshot of the counters."""
        with self._lock:
            return replace(self._counts)

    @property
    def connected(self) -> bool:
        """Return whether the connection stands at this moment."""
        return self._up

    def close(self, last: Will | None = None, timeout_s: float = 2.0) -> None:
        """Send what is queued and `last` (if connected, for at most `timeout_s`), then disconnect cleanly.

        Blocks until the thread has ended, except when called on it. A second call does nothing.
        """
        with self._lock:
            if self._stop_at is not None:
                return
            self._stop_at = time.monotonic() + timeout_s
            if last is not None:
                self._queue.append(_Publish(*last, publish_bytes(last.topic, len(last.payload), last.qos)))
        self._wake.set()
        thread = self._thread
        if thread is None:
            self._wake.close()
        elif thread is not threading.current_thread():
            thread.join(timeout_s + 2.0)

    # -- the network thread ------------------------------------------------------------------------------------------

    def _run(self, first: Future[None], timeout_s: float) -> None:
        try:
            link = self._open(timeout_s)
        except Exception as error:
            first.set_exception(error)
            return
        first.set_result(None)
        delay_s = BACKOFF_S[0]
        try:
            while True:
                since = time.monotonic()
                self._serve(link)
                if time.monotonic() - since > BACKOFF_S[1]:
                    delay_s = BACKOFF_S[0]  # not sooner: two clients of one name would throw each other out for ever
                while not self._stopping():
                    # Jitter, so that the devices of a site do not come back all at once.
                    self._pause(delay_s * random.uniform(0.5, 1.0))
                    delay_s = min(2 * delay_s, BACKOFF_S[1])
                    try:
                        link = self._open(RECONNECT_TIMEOUT_S)
                        break
                    except (HeptiError, OSError) as error:
                        _log.info("%s: not connected again yet: %s", self.name, error)
                if self._stopping():
                    return
                with self._lock:
                    self._counts.reconnections += 1
        finally:
            with self._lock:
                self._counts.lost += sum(isinstance(op, _Publish) for op in self._queue)
                self._queue.clear()
            self._wake.close()

    def _pause(self, delay_s: float) -> None:
        until = time.monotonic() + delay_s
        while not self._stopping() and (left := until - time.monotonic()) > 0:
            self._wake.wait(left)

    def _stopping(self) -> bool:
        return self._stop_at is not None

    def _open(self, timeout_s: float) -> Link:
        """Return an open link, of the first version of MQTT that the broker accepts."""
        until = time.monotonic() + timeout_s
        for protocol in self._protocols:
            last = protocol == self._protocols[-1]
            link = Link(
                self.url,
                self.client_id,
                protocol=protocol,
                will=self._will,
                clean=self._clean,
                listener=self,
                wake=self._wake,
            )
            left = max(until - time.monotonic(), 0.1)
            try:
                link.open(left if last else min(left, ANSWER_S), self._stopping)
            except VersionRefused:
                if last:
                    raise
                continue
            self._protocols = (protocol, *(p for p in self._protocols if p != protocol))
            return link
        raise NetworkError("no version of MQTT to try")

    def _serve(self, link: Link) -> None:
        """Drive one connection until it is lost or the transport is closed."""
        reason = "closed"
        try:
            self._begin(link)
            while not self._stopping():
                more = bool(self._queue) and not link.busy
                link.turn(0.0 if more else TURN_S)
                self._feed(link)
            self._drain(link)
            link.disconnect(max((self._stop_at or 0.0) - time.monotonic(), 0.2))
        except LinkLost as error:
            reason = str(error)
        except Exception as error:
            _log.exception("%s: the connection is made again", self.name)
            reason = repr(error)
        self._end(link)
        if not self._stopping():
            self._emit(Disconnected(reason))

    def _begin(self, link: Link) -> None:
        with self._lock:
            self._up, self._largest_bytes = True, link.largest_packet_bytes
            everything = dict(self._filters)
        self._session = session = _Session(awaited=set(everything))
        for token, filters in everything.items():
            session.subscribing[link.subscribe(filters)] = (token, filters)
        self._announce(link)

    def _announce(self, link: Link) -> None:
        if not self._session.awaited and not self._session.announced:
            self._session.announced = True
            self._emit(Connected(link.protocol, link.largest_packet_bytes, link.local))

    def _end(self, link: Link) -> None:
        """Count what is lost with the connection, and queue again what the broker has not acknowledged."""
        session = self._session
        with self._lock:
            self._up = False
            lost = [op for op in self._queue if isinstance(op, _Publish) and op.qos == 0]
            kept = [op for op in self._queue if isinstance(op, _Publish) and op.qos > 0]
            self._queue = deque([*session.inflight.values(), *session.waiting, *kept])
            self._queued_bytes -= sum(op.packet_bytes for op in lost)
            unfinished = session.writing is not None and link.busy
            self._counts.lost += len(lost) + unfinished

    def _drain(self, link: Link) -> None:
        while time.monotonic() < (self._stop_at or 0.0):
            self._feed(link)
            if not self._queue and not self._session.inflight and not self._session.waiting and not link.busy:
                return
            link.turn(0.0 if self._queue and not link.busy else 0.1)

    def _feed(self, link: Link) -> None:
        """Hand queued operations to the link while it writes them at once; what does not fit stays in our own queue."""
        self._announce(link)
        session = self._session
        for _ in range(BATCH):
            if link.busy:
                return
            session.writing = None
            if session.waiting and len(session.inflight) < link.window:
                self._send(link, session.waiting.popleft())
                continue
            with self._lock:
                if not self._queue:
                    return
                op = self._queue.popleft()
                filters = self._filters.get(op.token, ()) if isinstance(op, _Subscribe) else ()
            if isinstance(op, _Publish) and op.qos > 0 and len(session.inflight) >= link.window:
                session.waiting.append(op)
            elif isinstance(op, _Publish):
                self._send(link, op)
            elif isinstance(op, _Unsubscribe):
                link.unsubscribe(op.filters)
            elif filters:
                session.subscribing[link.subscribe(filters)] = (op.token, filters)

    def _send(self, link: Link, op: _Publish) -> None:
        mid = link.publish(op.topic, op.payload, op.qos, op.retain)
        with self._lock:
            self._counts.published += 1
            self._counts.published_bytes += op.packet_bytes
            if op.qos == 0:
                self._session.writing = op
                self._queued_bytes -= op.packet_bytes
            else:
                self._session.inflight[mid] = op
        link.flush()

    # -- what arrives; called by the link on the network thread ------------------------------------------------------

    def on_message(self, topic: str, payload: bytes, qos: int) -> None:
        """Count a message and hand it over."""
        with self._lock:
            self._counts.received += 1
            self._counts.received_bytes += publish_bytes(topic, len(payload), qos)
        self._call(lambda: self._hear(topic, payload))

    def on_bad_topic(self) -> None:
        """Count a message whose topic is not UTF-8."""
        with self._lock:
            self._counts.bad += 1

    def on_acknowledged(self, mid: int, refusal: str | None) -> None:
        """Forget a QoS 1 message that the broker has taken or refused."""
        op = self._session.inflight.pop(mid, None)
        if op is None:
            return
        with self._lock:
            self._queued_bytes -= op.packet_bytes
        if refusal is not None:
            self._emit(Refused(None, (op.topic,), refusal))

    def on_subscribed(self, mid: int, refusals: tuple[str | None, ...]) -> None:
        """Tell which subscription the broker has acknowledged or refused."""
        if mid not in self._session.subscribing:
            return
        token, filters = self._session.subscribing.pop(mid)
        refused = [(name, why) for (name, _), why in zip(filters, refusals, strict=False) if why is not None]
        if refused:
            self._emit(Refused(token, tuple(name for name, _ in refused), str(refused[0][1])))
        else:
            self._emit(Subscribed(token))
        self._session.awaited.discard(token)

    def _emit(self, state: State) -> None:
        self._call(lambda: self._tell(state))

    def _call(self, callback: Callable[[], None]) -> None:
        try:
            callback()
        except Exception:
            # The connection must outlive a mistake in what it carries.
            _log.exception("%s: a callback failed", self.name)
            with self._lock:
                self._counts.bad += 1
