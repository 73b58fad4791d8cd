"""A connection to a broker that restores itself: network thread, reconnection, subscriptions, unacknowledged messages.

A message on which a broker hangs up is kept apart (`_HangUps`). One connection is a `Link`.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from typing import Any, Final, NamedTuple

from hepti_mqtt.errors import HeptiError, NetworkError, PacketLimitError
from hepti_mqtt.protocol.topics import publish_bytes
from hepti_mqtt.transport.base import (
    KEEPALIVE_S,
    MAX_QUEUED,
    MAX_QUEUED_BYTES,
    Backoff,
    Body,
    Connected,
    Counts,
    Delivery,
    Disconnected,
    OnDelivery,
    OnMessage,
    OnState,
    OnTaken,
    Receipt,
    Refused,
    State,
    Subscribed,
    VersionRefused,
    Will,
    check_filters,
    check_message,
)
from hepti_mqtt.transport.client_protocol import Acknowledged, Granted
from hepti_mqtt.transport.codec import (
    FAILURE,
    MAXIMUM_PACKET_SIZE,
    NO_SUBSCRIBERS,
    RECEIVE_MAXIMUM,
    SESSION_EXPIRY,
    Connect,
    Puback,
    Publish,
    reason,
)
from hepti_mqtt.transport.link import TURN_S, Link, Lost, Taken
from hepti_mqtt.transport.sockets import Wake
from hepti_mqtt.transport.url import BrokerUrl

ANSWER_S: Final = 1.0  # amqtt misreads some CONNECTs of MQTT 5 and waits for more instead of refusing
RECONNECT_TIMEOUT_S: Final = 5.0
SUBACK_S: Final = 5.0  # amqtt forgets one now and then when several connections begin at once
AWAY_S: Final = 0.3  # for a DISCONNECT that the broker must read, and for a thread that looks for a broker to end
LATE_S: Final = 2.0  # beyond what `connect` is given, for a name look-up, which nothing interrupts
SESSION_EXPIRY_S: Final = 3600
MAX_INFLIGHT: Final = 20
HANG_UPS: Final = 3
_log = logging.getLogger(__name__)

Filters = tuple[tuple[str, int], ...]


class Message(NamedTuple):
    """A message to be published; packet_bytes: of its PUBLISH packet. taken: see `BrokerConnection.publish`."""

    topic: str
    payload: bytes
    qos: int
    retain: bool
    packet_bytes: int
    taken: OnTaken | None = None


class _First(NamedTuple):
    """The first attempt to connect: its outcome, and whether `connect` has given it up."""

    outcome: queue.SimpleQueue[Exception | None]
    is_over: threading.Event


class BrokerConnection:
    """A connection to one broker over MQTT 3.1.1 or 5, with its own network thread.

    client_id: made such that no other user can know it (`BrokerUrl.client_id`). protocol: 4 (3.1.1), 5, or None to try
    5 and fall back where the broker refuses the version. will: may be set until `connect`. clean: forget the session of
    the last connection. on_message(topic, payload), on_state: called on the network thread; they must only hand over.
    name: for the log.
    on_delivery: takes messages instead of on_message, and the broker keeps each of QoS 1 until it is acknowledged; how
    many may wait for that is the broker's limit (`max_inflight_messages` of Mosquitto).
    max_queued_bytes: bound of what waits for the network or, at QoS 1, for its acknowledgement; one message larger than
    that is taken when nothing else waits. receive_maximum: messages of QoS 1 that the broker may send before any is
    acknowledged (MQTT 5; Mosquitto takes it in place of its own limit); None for the broker's limit.

    A publish at QoS 0 without a connection or with a full queue is counted as lost. At QoS 1 it waits for the
    connection, and a full queue raises NetworkError; it is sent again after a reconnection, so at least once, unless
    the broker hangs up on it repeatedly: then it is reported as `Refused`.
    """

    #: payloads that come are views of memory that is used again, instead of copies
    bulk = False
    #: of MQTT, to try in this order
    versions: tuple[int, ...] = (5, 4)

    def __init__(
        self,
        url: BrokerUrl,
        client_id: str,
        *,
        on_message: OnMessage = lambda _topic, _payload: None,
        on_state: OnState = lambda _state: None,
        protocol: int | None = None,
        will: Will | None = None,
        clean: bool = True,
        name: str = "mqtt",
        max_queued_bytes: int = MAX_QUEUED_BYTES,
        on_delivery: OnDelivery | None = None,
        receive_maximum: int | None = None,
    ) -> None:
        self.url, self.client_id, self.name = url, url.client_id(client_id), name
        self.on_message, self._on_state, self.on_delivery = on_message, on_state, on_delivery
        self.clean, self.will, self.receive_maximum = clean, will, receive_maximum
        self._max_queued_bytes = max_queued_bytes
        self._lock = threading.RLock()  # guards all that follows, and sending on a link
        self._link: Link | None = None  # that is up
        self._waiting: deque[Message] = deque()  # QoS 1, for a connection or for the broker's window
        self._kept_bytes = 0  # of messages of QoS 1
        self._window = self._full_window = MAX_INFLIGHT  # messages of QoS 1 that may wait for an acknowledgement now
        self._filters: dict[int, Filters] = {}
        self._token = 0
        self._largest_bytes: int | None = None  # as the broker said on the last connection
        self._counts = Counts()
        self._connection = 0  # number of the last one
        self._stop_at = inf  # when the thread must have ended; finite once closed
        self._thread: threading.Thread | None = None
        self._wake = Wake()
        # The network thread's alone:
        self._versions = self.versions if protocol is None else (protocol,)  # to try, in this order
        self._backoff, self._hang_ups = Backoff(), _HangUps()
        self._awaited: set[int] = set()  # tokens whose SUBACK comes before `_connected` is reported
        self._connected: Connected | None = None
        self._resumed = False
        self._heard_s = 0.0  # on earlier connections

    # -- any thread --------------------------------------------------------------------------------------------------

    def connect(self, timeout_s: float = 5.0) -> None:
        """Connect once and start the network thread, which repairs later losses for ever.

        Raises NetworkError (nobody answers at host:port), RefusedError (user, password, client id) or ConfigError (CA
        file); then connect may be called again. Raises ValueError if already connected or closed.
        """
        first = _First(queue.SimpleQueue(), threading.Event())
        with self._lock:
            if self._is_closed() or self._thread is not None:
                raise ValueError("connect a transport once; make a new one after close")
            self._thread = threading.Thread(target=self._run, args=(timeout_s, first), name=self.name, daemon=True)
            self._thread.start()
        try:
            error = first.outcome.get(timeout=timeout_s + LATE_S)
        except queue.Empty:
            with self._lock:
                first.is_over.set()
                late = NetworkError(f"no broker answers at {self.url.place} within {timeout_s:g} s")
                error = None if self._link is not None else late
        if error is not None:
            self._thread = None
            raise error

    def publish(
        self, topic: str, payload: bytes, qos: int = 0, retain: bool = False, taken: OnTaken | None = None
    ) -> None:
        """Queue a message; the payload must not change afterwards.

        taken: called on the network thread when the broker has acknowledged it (QoS 1), or refused it for good; with
        False if the broker says that nobody was subscribed to its topic, or on a later connection that it takes nothing
        so large (MQTT 5 only).

        Raises NetworkError if the transport is closed, or at QoS 1 if the queue is full; PacketLimitError for what the
        broker announces not to take; TypeError for a payload that is not bytes; ValueError for a topic with a wildcard,
        another QoS, or a payload that no packet can carry.
        """
        check_message(topic, payload, qos)
        if not qos:
            self._send(topic, (payload,), retain, copied=False)
            return
        message = Message(topic, payload, qos, retain, publish_bytes(topic, len(payload), qos), taken)
        with self._lock:
            if not self._has_room(message.packet_bytes):
                raise NetworkError(
                    f"{self._queued_bytes()} bytes wait for the broker at {self.url.place}, which is too slow or away; "
                    "send less, or try again later"
                )
            self._keep(message)

    def send(self, topic: str, *parts: Body) -> None:
        """Publish at QoS 0 a payload in C-contiguous parts, which are the caller's again on return."""
        self._send(topic, parts, False, copied=True)

    def subscribe(self, filters: Sequence[tuple[str, int]]) -> int:
        """Subscribe to (filter, QoS), now and after every reconnection; return the token that `Subscribed` will carry.

        Raises ValueError without filters or for one that MQTT does not allow.
        """
        check_filters(filters)
        with self._lock:
            self._token += 1
            self._filters[self._token] = tuple(filters)
            if self._link is not None:
                self._link.say(self._link.protocol.subscribe(self._token, filters))
            return self._token

    def unsubscribe(self, filters: Sequence[str]) -> None:
        """Leave filters and forget them."""
        gone = set(filters)
        with self._lock:
            kept = {token: tuple(f for f in own if f[0] not in gone) for token, own in self._filters.items()}
            self._filters = {token: own for token, own in kept.items() if own}
            if self._link is not None and gone:
                self._link.say(self._link.protocol.unsubscribe(sorted(gone)))

    def acknowledge(self, receipt: Receipt) -> None:
        """Let the broker forget a delivery; what came on an earlier connection comes again instead."""
        with self._lock:
            if self._link is not None and receipt.connection == self._connection:
                self._link.say(self._link.protocol.encode(Puback(receipt.packet)))

    def counts(self) -> Counts:
        """Return a snapshot of the counters."""
        with self._lock:
            return replace(self._counts)

    @property
    def heard_s(self) -> float:
        """Return when bytes last came on this connection, by `time.monotonic`."""
        link = self._link
        return self._heard_s if link is None else link.heard_at

    @property
    def connected(self) -> bool:
        """Return whether the connection is up at this moment."""
        return self._link is not None

    def close(self, last: Will | None = None, timeout_s: float = 2.0) -> None:
        """Send what is queued and `last` (if connected, for at most `timeout_s`), then disconnect cleanly.

        Blocks until the connection is closed, except when called on the network thread or while that looks for a broker
        that is away. A second call does nothing.
        """
        with self._lock:
            if self._is_closed():
                return
            if last is not None:
                nbytes = publish_bytes(last.topic, len(last.payload), last.qos)
                if last.qos:
                    self._keep(Message(*last, nbytes))
                else:
                    self._send(last.topic, (last.payload,), last.retain, copied=False)
            patience_s = (timeout_s if self.connected else 0.0) + AWAY_S
            self._stop_at = time.monotonic() + timeout_s
        self._wake.set()
        thread = self._thread
        if thread is None:
            self._wake.close()
        elif thread is not threading.current_thread():
            thread.join(patience_s)
        with self._lock:
            self._counts.lost += self._unfinished()

    # -- under the lock ----------------------------------------------------------------------------------------------

    def _is_closed(self) -> bool:
        return self._stop_at < inf

    def _unfinished(self) -> int:
        link = self._link
        return len(self._waiting) + (0 if link is None else len(link.protocol.inflight) + link.unwritten)

    def _queued_bytes(self) -> int:
        return self._kept_bytes + (0 if self._link is None else self._link.unwritten_bytes)

    def _has_room(self, packet_bytes: int) -> bool:
        """Return whether a message may be queued; raises NetworkError and PacketLimitError as `publish`."""
        if self._is_closed():
            raise NetworkError(f"the connection {self.name} is closed; nothing can be published on it")
        if self._largest_bytes is not None and packet_bytes > self._largest_bytes:
            place = f"the broker at {self.url.place}"
            raise PacketLimitError.of("this message", packet_bytes, place, self._largest_bytes)
        queued = self._queued_bytes()
        return self._unfinished() < MAX_QUEUED and (not queued or queued + packet_bytes <= self._max_queued_bytes)

    def _send(self, topic: str, parts: Sequence[Body], retain: bool, *, copied: bool) -> None:
        views = [memoryview(part).cast("B") for part in parts if memoryview(part).nbytes]
        nbytes = sum(view.nbytes for view in views)
        packet_bytes = publish_bytes(topic, nbytes, 0)
        with self._lock:
            if not self._has_room(packet_bytes) or self._link is None:
                self._counts.lost += 1
                return
            head = self._link.protocol.publish(None, topic, nbytes, 0, retain)
            self._link.send([memoryview(head), *views], copied)
            self._count_published(packet_bytes)

    def _count_published(self, packet_bytes: int) -> None:
        self._counts.published += 1
        self._counts.published_bytes += packet_bytes

    def _keep(self, message: Message) -> None:
        self._kept_bytes += message.packet_bytes
        self._waiting.append(message)
        self._feed()

    def _feed(self) -> None:
        """Send messages that wait, as many as the broker's window allows."""
        link = self._link
        while link is not None and self._waiting and len(link.protocol.inflight) < self._window:
            message = self._waiting.popleft()
            topic, payload, qos, retain = message[:4]
            head = link.protocol.publish(message, topic, len(payload), qos, retain)
            link.send([memoryview(head), memoryview(payload)], copied=False, counted=False)
            self._count_published(message.packet_bytes)

    def _give_up(self, unwanted: Callable[[Message], bool]) -> list[Message]:
        gone = [message for message in self._waiting if unwanted(message)]
        self._waiting = deque(message for message in self._waiting if not unwanted(message))
        self._kept_bytes -= sum(message.packet_bytes for message in gone)
        return gone

    # -- the network thread ------------------------------------------------------------------------------------------

    def _run(self, timeout_s: float, first: _First) -> None:
        try:
            link = self._open(timeout_s, lambda: self._is_closed() or first.is_over.is_set())
        except Exception as error:
            first.outcome.put(error)
            return
        with self._lock:
            if first.is_over.is_set():
                link.close()
                return
            self._up(link)
        first.outcome.put(None)
        while True:
            self._lost(link, self._serve(link))
            next_link = self._reopen()
            if next_link is None:
                break
            link = next_link
            self._up(link)
        self._wake.close()

    def _open(self, timeout_s: float, stop: Callable[[], bool]) -> Link:
        """Connect in the first version of MQTT that the broker speaks; raises as `connect`.

        A version that it took when it had refused another, and was not only silent as a slow broker is, comes first in
        later attempts.
        """
        until, is_refused, versions = time.monotonic() + timeout_s, False, self._versions
        for version in versions[:-1]:
            left = max(until - time.monotonic(), 0.001)
            try:
                link = self._open_in(version, left, min(ANSWER_S, left / 2), stop)
            except VersionRefused as error:
                is_refused |= error.is_sure
            else:
                break
        else:
            version, left = versions[-1], max(until - time.monotonic(), 0.001)
            link = self._open_in(version, left, left, stop)
        if is_refused:
            self._versions = (version, *(other for other in versions if other != version))
        return link

    def _open_in(self, version: int, timeout_s: float, patience_s: float, stop: Callable[[], bool]) -> Link:
        link = Link(self.url, self._greeting(version), self._lock, self._wake, self._take, bulk=self.bulk)
        link.open(timeout_s, patience_s, stop)
        return link

    def _greeting(self, version: int) -> Connect:
        will, options = None, 0
        if self.will is not None:
            will, options = (self.will.topic, self.will.payload), self.will.qos << 3 | self.will.retain << 5
        properties: dict[int, int | bytes] = {}
        if version == 5 and not self.clean:
            properties[SESSION_EXPIRY] = SESSION_EXPIRY_S
        if version == 5 and self.receive_maximum is not None:
            properties[RECEIVE_MAXIMUM] = self.receive_maximum
        user, password = self.url.user, self.url.password
        login = (user, None if password is None else password.encode())
        return Connect(version, self.client_id, *login, self.clean, KEEPALIVE_S, will, properties, options)

    def _reopen(self) -> Link | None:
        """Return the next connection, None once closed."""
        while not self._is_closed():
            self._wake.pause(self._backoff.pause_s(), self._is_closed)
            if self._is_closed():
                break
            try:
                return self._open(RECONNECT_TIMEOUT_S, self._is_closed)
            except (HeptiError, OSError) as error:
                _log.info("%s: not connected again yet: %s", self.name, error)
                self._hang_ups.away()
        return None

    def _up(self, link: Link) -> None:
        """Subscribe, and send what waits."""
        connack, refusals = link.protocol.connack, list[tuple[Message, str, bool]]()
        assert connack is not None
        limit = connack.properties.get(MAXIMUM_PACKET_SIZE)
        largest = limit - 1 if isinstance(limit, int) else None  # the byte that MQTT 5 adds to what we count
        window = connack.properties.get(RECEIVE_MAXIMUM, MAX_INFLIGHT)
        self._resumed, self._connected = (
            connack.present,
            Connected(link.protocol.version, largest, link.local, connack.present),
        )
        with self._lock:
            self._counts.reconnections += self._connection > 0
            self._connection += 1
            self._largest_bytes, self._link = largest, link
            self._window = self._full_window = min(int(window), MAX_INFLIGHT)
            if (bad := self._hang_ups.unwanted()) is not None:
                why = f"it hung up {HANG_UPS} times on end on these {bad.packet_bytes} bytes, which may be too many"
                same = self._give_up(lambda m: (m.topic, m.payload) == (bad.topic, bad.payload))
                refusals += [(message, why, True) for message in same]
            if largest is not None:
                for message in self._give_up(lambda m: m.packet_bytes > largest):
                    why = f"it takes packets of at most {largest} bytes, not {message.packet_bytes}"
                    refusals.append((message, why, False))
            self._awaited = set(self._filters)
            for token, filters in self._filters.items():
                link.say(link.protocol.subscribe(token, filters))
            if self._hang_ups.suspect is not None:
                self._window = 1  # until it is acknowledged
            self._feed()
        for refusal in refusals:
            self._refuse(*refusal)
        self._announce()

    def _serve(self, link: Link) -> Lost:
        """Drive a connection until it is lost or we are closed; return why it ended."""
        try:
            while time.monotonic() < self._stop_at and not (self._is_closed() and not self._unfinished()):
                link.turn(TURN_S)
                # What it kept for us comes before, and shows that it is at work. Where it kept nothing it may have
                # forgotten the acknowledgement, though it sends.
                heard_at = link.heard_at if self._resumed else link.up_at
                if self._awaited and time.monotonic() - heard_at > SUBACK_S:
                    return Lost(f"the broker has not acknowledged our subscriptions within {SUBACK_S:g} s")
            link.disconnect(time.monotonic() + AWAY_S)
        except Lost as lost:
            return lost
        except Exception as error:
            _log.exception("%s: the connection is made again", self.name)
            return Lost(repr(error))
        return Lost("closed")

    def _lost(self, link: Link, lost: Lost) -> None:
        up_s = time.monotonic() - link.up_at
        with self._lock:
            self._link, self._heard_s = None, link.heard_at
            inflight = list(link.protocol.inflight.values())
            self._waiting.extendleft(reversed(inflight))
            self._counts.lost += link.close()
        self._hang_ups.lost(inflight[0] if inflight and lost.hung_up and not self._awaited else None)
        self._backoff.lost(up_s)
        if lost.malformed:
            _log.info("%s: the broker sent what cannot be read: %s", self.name, lost)
            bad = link.protocol.version  # the last to try
            self._versions = (*(version for version in self._versions if version != bad), bad)
        if not self._is_closed():
            self._emit(Disconnected(str(lost)))

    def _take(self, link: Link, event: Taken) -> None:
        match event:
            case Publish():
                self._arrived(link, event)
            case Granted():
                self._granted(event)
            case Acknowledged(message, code):
                with self._lock:
                    self._kept_bytes -= message.packet_bytes
                    self._window = self._full_window
                    self._feed()
                if code >= FAILURE:
                    self._refuse(message, reason(code), True)
                elif message.taken is not None:
                    self._call(message.taken, code != NO_SUBSCRIBERS)

    def _arrived(self, link: Link, event: Publish) -> None:
        with self._lock:
            self._counts.bad += not event.topic  # no UTF-8
            self._counts.received += bool(event.topic)
            self._counts.received_bytes += bool(event.topic) and publish_bytes(
                event.topic, event.payload.nbytes, event.qos
            )
        payload: Any = event.payload if self.bulk else event.payload.tobytes()
        acknowledges = self.on_delivery is not None and event.topic
        if not event.topic:
            pass
        elif self.on_delivery is None:
            self._call(self.on_message, event.topic, payload)
        else:
            receipt = Receipt(self._connection, event.packet_id) if event.qos else None
            self._call(self.on_delivery, Delivery(event.topic, payload, receipt, event.repeated, event.retain))
        if event.qos and not acknowledges:
            link.say(link.protocol.encode(Puback(event.packet_id)))

    def _granted(self, event: Granted) -> None:
        refused = [(name, code) for name, code in zip(event.filters, event.codes, strict=True) if code >= FAILURE]
        if refused:
            self._emit(Refused(event.key, tuple(name for name, _ in refused), reason(refused[0][1])))
        else:
            self._emit(Subscribed(event.key))
        self._awaited.discard(event.key)
        self._announce()

    def _announce(self) -> None:
        connected = self._connected
        if connected is not None and not self._awaited:
            self._connected = None
            self._emit(connected)

    def _refuse(self, message: Message, why: str, heard: bool) -> None:
        if message.taken is not None:
            self._call(message.taken, heard)
        self._emit(Refused(None, (message.topic,), why))

    def _emit(self, state: State) -> None:
        self._call(self._on_state, state)

    def _call(self, callback: Callable[..., None], *arguments: object) -> None:
        try:
            callback(*arguments)
        except Exception:
            # The connection must outlive a mistake in what it carries.
            _log.exception("%s: a callback failed", self.name)
            with self._lock:
                self._counts.bad += 1


class DataConnection(BrokerConnection):
    """A connection for tensors: QoS 0 over MQTT 3.1.1; payloads that come are views of memory that is used again."""

    bulk = True
    versions = (4,)


class _HangUps:
    """Counts how often in a row the broker has hung up on one message of QoS 1.

    A connection that is lost for other reasons says nothing of the message under way, however often it happens. A
    broker that restarts is away for a while, or says that it leaves; a link that fails ends in silence. A broker that
    does not want the message closes the connection, and accepts the next one at once. What was sent after the message
    may have been the reason too, since acknowledgements can get lost with the connection. So after a hang-up the
    message goes alone, and only hang-ups after the broker has acknowledged the subscriptions are counted.
    """

    def __init__(self) -> None:
        self.suspect: Message | None = None  # the next to go alone
        self._count = 0

    def lost(self, first: Message | None) -> None:
        """A connection is lost; first: the message that was longest under way if the broker hung up, else None."""
        if first is None or first is not self.suspect:
            self.suspect, self._count = first, 0
        else:
            self._count += 1

    def away(self) -> None:
        """The broker could not be reached at first: it was not the message on which it hung up."""
        self._count = 0

    def unwanted(self) -> Message | None:
        """Return a message to be given up, once."""
        if self._count < HANG_UPS:
            return None
        gone, self.suspect, self._count = self.suspect, None, 0
        return gone
