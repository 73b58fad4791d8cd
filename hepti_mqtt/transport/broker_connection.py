"""A broker connection with a network thread that reconnects, resubscribes and repeats unacknowledged messages.

`_HangUps` isolates a message that makes the broker close connections. One connection is a `Link`.
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

from hepti_mqtt.core.errors import HeptiError, NetworkError, PacketLimitError
from hepti_mqtt.protocol.topics import publish_bytes
from hepti_mqtt.transport import codec
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
    OnAcknowledged,
    OnDelivery,
    OnMessage,
    OnState,
    Receipt,
    Refused,
    State,
    Subscribed,
    VersionRefused,
    Will,
)
from hepti_mqtt.transport.client_protocol import Acknowledged, Granted
from hepti_mqtt.transport.link import TURN_S, Link, Lost, Taken
from hepti_mqtt.transport.sockets import Wake
from hepti_mqtt.transport.url import BrokerUrl

ANSWER_S: Final = 1.0  # amqtt misreads some CONNECTs of MQTT 5 and waits for more bytes instead of refusing
RECONNECT_TIMEOUT_S: Final = 5.0
SUBACK_S: Final = 5.0  # amqtt sometimes loses a SUBACK when several connections start together
AWAY_S: Final = 0.3  # for the broker to read DISCONNECT, and for a reconnecting thread to end
LATE_S: Final = 2.0  # beyond the timeout of `connect`, for a name look-up, which cannot be interrupted
SESSION_EXPIRY_S: Final = 3600
MAX_INFLIGHT: Final = 20
HANG_UPS: Final = 3
_log = logging.getLogger(__name__)

Filters = tuple[tuple[str, int], ...]


class Message(NamedTuple):
    """A queued message of QoS 1; taken: see `BrokerConnection.publish`."""

    topic: str
    payload: bytes
    qos: int
    retain: bool
    packet_bytes: int
    taken: OnAcknowledged | None = None


class _First(NamedTuple):
    """The first attempt to connect; is_over: set if `connect` gives it up."""

    outcome: queue.SimpleQueue[Exception | None]
    is_over: threading.Event


class BrokerConnection:
    """A connection to one broker over MQTT 3.1.1 or 5, with its own network thread.

    client_id: extended to a secret id by `BrokerUrl.client_id`. name: for the log.
    protocol: 4 (3.1.1), 5, or None to try 5 and fall back to 4. will: may be set until `connect`.
    on_message(topic, payload), on_state(state): called on the network thread; they must not block.
    on_delivery: takes messages instead of on_message; the broker keeps those of QoS 1 until `acknowledge`.
    clean: start a new session. max_queued_bytes: of unsent and unacknowledged messages; one message may exceed it.
    receive_maximum: limit of unacknowledged messages from the broker (MQTT 5); None for the broker's own limit.

    A message of QoS 0 is lost without a connection or with a full queue. A message of QoS 1 waits for the connection
    and is repeated after a reconnection; if the broker hangs up on it repeatedly, it is reported as `Refused`.
    """

    bulk = False  #: whether received payloads are views of reused memory instead of copies
    versions: tuple[int, ...] = (5, 4)  #: versions of MQTT in the order of attempts

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
        self._lock = threading.RLock()  # guards the fields below and sending on a link
        self._link: Link | None = None  # None while disconnected
        self._waiting: deque[Message] = deque()  # QoS 1, not sent on this connection
        self._kept_bytes = 0  # of all messages of QoS 1
        self._window = self._full_window = MAX_INFLIGHT  # limits of unacknowledged messages: now, and without a suspect
        self._filters: dict[int, Filters] = {}
        self._token = 0
        self._largest_bytes: int | None = None  # announced on the last connection
        self._counts = Counts()
        self._connection = 0  # number of the last connection
        self._stop_at = inf  # the thread's deadline; finite after `close`
        self._thread: threading.Thread | None = None
        self._wake = Wake()
        # Only the network thread uses the fields below.
        self._versions = self.versions if protocol is None else (protocol,)  # in the order of attempts
        self._backoff, self._hang_ups = Backoff(), _HangUps()
        self._awaited: set[int] = set()  # tokens without SUBACK; `_connected` is reported after the last one
        self._connected: Connected | None = None
        self._resumed = False
        self._heard_s = 0.0  # on earlier connections

    # -- any thread --------------------------------------------------------------------------------------------------

    def connect(self, timeout_s: float = 5.0) -> None:
        """Connect and start the network thread, which reconnects after losses until `close`.

        Raises NetworkError (no broker at host:port), RefusedError (user, password, client id) or ConfigError (files);
        a second attempt is allowed. Raises ValueError if already connected or closed.
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
        self, topic: str, payload: bytes, qos: int = 0, retain: bool = False, taken: OnAcknowledged | None = None
    ) -> None:
        """Queue a message; the payload must not change afterwards.

        taken: called on the network thread after the broker acknowledged or finally refused a message of QoS 1;
        False means no subscribers or, after a reconnection, a packet above the broker's limit (MQTT 5).

        Raises NetworkError if the connection is closed or, at QoS 1, the queue is full; PacketLimitError above the
        broker's limit; TypeError for a payload other than bytes; ValueError for an invalid topic, QoS or length.
        """
        if not isinstance(payload, (bytes, bytearray)):
            raise TypeError(f"a payload is bytes, not {type(payload).__name__}")
        if not codec.is_topic(topic) or qos not in (0, 1):
            raise ValueError(f"cannot publish to {topic!r} at QoS {qos}")
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
        """Publish a payload in C-contiguous parts at QoS 0; the caller may reuse the parts afterwards."""
        self._send(topic, parts, False, copied=True)

    def subscribe(self, filters: Sequence[tuple[str, int]]) -> int:
        """Subscribe to (filter, QoS), now and after every reconnection; return the token of its `Subscribed`.

        Raises ValueError without filters or for an invalid filter.
        """
        if not filters:
            raise ValueError("name at least one filter")
        for name, qos in filters:
            if not codec.is_filter(name) or qos not in (0, 1):
                raise ValueError(f"cannot subscribe to {name!r} at QoS {qos}")
        with self._lock:
            self._token += 1
            self._filters[self._token] = tuple(filters)
            if self._link is not None:
                self._link.say(self._link.protocol.subscribe(self._token, filters))
            return self._token

    def unsubscribe(self, filters: Sequence[str]) -> None:
        """Unsubscribe from filters."""
        gone = set(filters)
        with self._lock:
            kept = {token: tuple(f for f in own if f[0] not in gone) for token, own in self._filters.items()}
            self._filters = {token: own for token, own in kept.items() if own}
            if self._link is not None and gone:
                self._link.say(self._link.protocol.unsubscribe(sorted(gone)))

    def acknowledge(self, receipt: Receipt) -> None:
        """Acknowledge a delivery; the broker repeats deliveries of earlier connections."""
        with self._lock:
            if self._link is not None and receipt.connection == self._connection:
                self._link.say(self._link.protocol.encode(codec.Puback(receipt.packet)))

    def counts(self) -> Counts:
        """Return a snapshot of the counters."""
        with self._lock:
            return replace(self._counts)

    @property
    def heard_s(self) -> float:
        """Return the time of the last received bytes, by `time.monotonic`."""
        link = self._link
        return self._heard_s if link is None else link.heard_at

    @property
    def received_bytes(self) -> int:
        """Return the number of received bytes on this connection, also of messages that are still arriving."""
        link = self._link
        return 0 if link is None else link.received_bytes

    @property
    def connected(self) -> bool:
        """Return whether the connection is up."""
        return self._link is not None

    def close(self, last: Will | None = None, timeout_s: float = 2.0) -> None:
        """Send the queue and `last` for at most `timeout_s` if connected, then disconnect cleanly.

        Waits for the network thread, except on this thread or while it reconnects. A second call does nothing.
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
        """Return whether the queue has room. Raises NetworkError and PacketLimitError as `publish`."""
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
        """Send waiting messages up to the window's limit."""
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
        """Connect in the first version of MQTT that the broker accepts. Raises as `connect`.

        This version comes first in later attempts if the broker clearly refused another one; silence may mean a slow
        broker.
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

    def _greeting(self, version: int) -> codec.Connect:
        will, options = None, 0
        if self.will is not None:
            will, options = (self.will.topic, self.will.payload), self.will.qos << 3 | self.will.retain << 5
        properties: dict[int, int | bytes] = {}
        if version == 5 and not self.clean:
            properties[codec.SESSION_EXPIRY] = SESSION_EXPIRY_S
        if version == 5 and self.receive_maximum is not None:
            properties[codec.RECEIVE_MAXIMUM] = self.receive_maximum
        user, password = self.url.user, self.url.password
        login = (user, None if password is None else password.encode())
        return codec.Connect(version, self.client_id, *login, self.clean, KEEPALIVE_S, will, properties, options)

    def _reopen(self) -> Link | None:
        """Reconnect; return None after `close`."""
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
        """Subscribe and send waiting messages."""
        connack, refusals = link.protocol.connack, list[tuple[Message, str, bool]]()
        assert connack is not None
        limit = connack.properties.get(codec.MAXIMUM_PACKET_SIZE)
        largest = limit - 1 if isinstance(limit, int) else None  # `publish_bytes` omits one byte of MQTT 5
        window = connack.properties.get(codec.RECEIVE_MAXIMUM, MAX_INFLIGHT)
        self._resumed = connack.present
        self._connected = Connected(link.protocol.version, largest, link.local, connack.present)
        with self._lock:
            self._counts.reconnections += self._connection > 0
            self._connection += 1
            self._largest_bytes, self._link = largest, link
            self._window = self._full_window = min(int(window), MAX_INFLIGHT)
            if (bad := self._hang_ups.unwanted()) is not None:
                why = (
                    f"it closed the connection {HANG_UPS} times after these {bad.packet_bytes} bytes, perhaps too many"
                )
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
                self._window = 1  # until the suspect is acknowledged
            self._feed()
        for refusal in refusals:
            self._refuse(*refusal)
        self._announce()

    def _serve(self, link: Link) -> Lost:
        """Drive a connection until its loss or `close`; return the reason."""
        try:
            while time.monotonic() < self._stop_at and not (self._is_closed() and not self._unfinished()):
                link.turn(TURN_S)
                # A resumed session's messages precede the SUBACK and prove progress. Without a session, received
                # messages do not exclude a lost SUBACK.
                heard_at = link.heard_at if self._resumed else link.up_at
                if self._awaited and time.monotonic() - heard_at > SUBACK_S:
                    return Lost(f"the broker has not acknowledged our subscriptions within {SUBACK_S:g} s")
            link.disconnect(time.monotonic() + AWAY_S)
        except Lost as lost:
            return lost
        except Exception as error:
            _log.exception("%s: reconnecting after an internal error", self.name)
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
            _log.info("%s: the broker sent a malformed packet: %s", self.name, lost)
            bad = link.protocol.version  # moves to the end of the attempts
            self._versions = (*(version for version in self._versions if version != bad), bad)
        if not self._is_closed():
            self._call(self._on_state, Disconnected(str(lost)))

    def _take(self, link: Link, event: Taken) -> None:
        match event:
            case codec.Publish():
                self._arrived(link, event)
            case Granted():
                self._granted(event)
            case Acknowledged(message, code):
                with self._lock:
                    self._kept_bytes -= message.packet_bytes
                    self._window = self._full_window
                    self._feed()
                if code >= codec.FAILURE:
                    self._refuse(message, codec.reason(code), True)
                elif message.taken is not None:
                    self._call(message.taken, code != codec.NO_SUBSCRIBERS)

    def _arrived(self, link: Link, event: codec.Publish) -> None:
        with self._lock:
            if event.topic:
                self._counts.received += 1
                self._counts.received_bytes += publish_bytes(event.topic, event.payload.nbytes, event.qos)
            else:  # an invalid topic
                self._counts.bad += 1
        if event.topic:
            payload: Any = event.payload if self.bulk else event.payload.tobytes()
            if self.on_delivery is not None:
                receipt = Receipt(self._connection, event.packet_id) if event.qos else None
                self._call(self.on_delivery, Delivery(event.topic, payload, receipt, event.repeated, event.retain))
                return
            self._call(self.on_message, event.topic, payload)
        if event.qos:
            link.say(link.protocol.encode(codec.Puback(event.packet_id)))

    def _granted(self, event: Granted) -> None:
        refused = [(name, code) for name, code in zip(event.filters, event.codes, strict=True) if code >= codec.FAILURE]
        state: State = Subscribed(event.key)
        if refused:
            state = Refused(event.key, tuple(name for name, _ in refused), codec.reason(refused[0][1]))
        self._call(self._on_state, state)
        self._awaited.discard(event.key)
        self._announce()

    def _announce(self) -> None:
        connected = self._connected
        if connected is not None and not self._awaited:
            self._connected = None
            self._call(self._on_state, connected)

    def _refuse(self, message: Message, why: str, heard: bool) -> None:
        if message.taken is not None:
            self._call(message.taken, heard)
        self._call(self._on_state, Refused(None, (message.topic,), why))

    def _call(self, callback: Callable[..., None], *arguments: object) -> None:
        try:
            callback(*arguments)
        except Exception:
            # A bug in a callback must not end the connection.
            _log.exception("%s: a callback failed", self.name)
            with self._lock:
                self._counts.bad += 1


class DataConnection(BrokerConnection):
    """A connection for tensors: QoS 0 over MQTT 3.1.1; received payloads are views of reused memory."""

    bulk = True
    versions = (4,)


class _HangUps:
    """Counts consecutive hang-ups of the broker on one message of QoS 1.

    A broker that refuses a message closes the connection and accepts the next one immediately. A restarting broker
    is unreachable for a while or announces its shutdown, and a failing link is silent; neither counts. After a
    hang-up, the oldest unacknowledged message is sent alone, to find the message that the broker refuses. Only hang-ups
    after all SUBACKs count.
    """

    def __init__(self) -> None:
        self.suspect: Message | None = None  # sent alone on the next connection
        self._count = 0

    def lost(self, first: Message | None) -> None:
        """Note a lost connection; first: the oldest unacknowledged message after a hang-up, else None."""
        if first is None or first is not self.suspect:
            self.suspect, self._count = first, 0
        else:
            self._count += 1

    def away(self) -> None:
        """Note an unreachable broker, i.e. a restart instead of a refusal."""
        self._count = 0

    def unwanted(self) -> Message | None:
        """Return the message to give up, once, or None."""
        if self._count < HANG_UPS:
            return None
        gone, self.suspect, self._count = self.suspect, None, 0
        return gone
