"""The control connection: paho's client with its own thread, reconnection and queue of unacknowledged messages.

What paho 2.2 does not do, and is done here:
- Its loop selects, which fails on descriptors from 1024 on, lets exceptions on malformed packets end its thread, and
  takes a broker for silent whose answer waits behind a message that takes long to send: `_Client`.
- It sends everything again at once after a reconnection, whatever the broker's Receive Maximum or Maximum Packet Size:
  unacknowledged messages are handed to it again on every connection, within the window.
- It tries the addresses of a name one after the other, each for the whole time.
- It falls back to MQTT 3.1 but not from 5 to 3.1.1: the version is chosen before each attempt.
- It bounds its queue by messages, not bytes, and forgets subscriptions.
- It would repeat a message on which a broker hangs up for ever: `_HangUps`.
"""

from __future__ import annotations

import logging
import queue
import select
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

from paho.mqtt.client import Client, ConnectFlags, DisconnectFlags, MQTTMessage, MQTTMessageInfo
from paho.mqtt.enums import CallbackAPIVersion, MQTTErrorCode, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode
from paho.mqtt.subscribeoptions import SubscribeOptions

from hepti_mqtt.errors import NetworkError, PacketLimitError
from hepti_mqtt.protocol.topics import publish_bytes
from hepti_mqtt.transport.base import (
    KEEPALIVE_S,
    MAX_QUEUED,
    MAX_QUEUED_BYTES,
    UNAVAILABLE,
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
    absent,
    check_filters,
    check_message,
    hung_up,
    refused,
    silent,
    unavailable,
    wrong_version,
)
from hepti_mqtt.transport.sockets import (
    acknowledge_soon,
    buffered,
    connect_any,
    linger,
    local,
    no_delay,
    unacknowledged,
)
from hepti_mqtt.transport.url import BrokerUrl

STALLED_S: Final = 2 * KEEPALIVE_S  # as long as paho takes to find out
ANSWER_S: Final = 1.0  # amqtt misreads some CONNECTs of MQTT 5 and waits for more instead of refusing
RECONNECT_TIMEOUT_S: Final = 5.0
SUBACK_S: Final = 5.0  # amqtt forgets one now and then when several connections begin at once
AWAY_S: Final = 0.3  # at least, for a DISCONNECT that the broker must read
LATE_S: Final = 2.0  # beyond what `connect` is given, for a name look-up, which nothing interrupts
SESSION_EXPIRY_S: Final = 3600
MAX_INFLIGHT: Final = 20
HANG_UPS: Final = 3
TURN_S: Final = 0.1

_WRONG_VERSION: Final = 132
_LEAVING: Final = frozenset({139, 142, 152})  # server shutting down, session taken over, administrative action
_FAILURE: Final = 128
_NOBODY: Final = 16  # no matching subscribers
_KEEPALIVE: Final = 141
_LOST: Final = MQTTErrorCode.MQTT_ERR_CONN_LOST
_log = logging.getLogger(__name__)

Filters = tuple[tuple[str, int], ...]


class Message(NamedTuple):
    """A message to be published; packet_bytes: of its PUBLISH packet. taken: see `PahoTransport.publish`."""

    topic: str
    payload: bytes
    qos: int
    retain: bool
    packet_bytes: int
    taken: OnTaken | None = None


@dataclass(slots=True)
class _Attempt:
    """One attempt to connect, and the connection that comes of it."""

    begun_at: float
    timeout_s: float
    up: bool = False
    up_at: float = 0.0
    heard_at: float = 0.0
    resumed: bool = False
    subscribing: dict[int, tuple[int, Filters]] = field(default_factory=dict)  # by packet id
    awaited: set[int] = field(default_factory=set)  # tokens whose SUBACK comes before Connected
    announced: Connected | None = None  # to be reported when these have come
    window: int = MAX_INFLIGHT  # QoS 1 messages that may wait for their acknowledgement now
    full_window: int = MAX_INFLIGHT
    error: Exception | None = None  # why the broker did not let us in
    reason: str = ""  # why it ended, where the broker or we say so
    hung_up: bool = True  # the broker, or what lies between, closed it, and does not say that it has to


class PahoTransport:
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
        on_delivery: OnDelivery | None = None,
        receive_maximum: int | None = None,
    ) -> None:
        self.receive_maximum = receive_maximum
        self.url, self.client_id, self.name = url, url.client_id(client_id), name
        self.on_message, self._on_state, self.on_delivery = on_message, on_state, on_delivery
        self.clean, self.will, self._max_queued_bytes = clean, will, max_queued_bytes
        # The network thread must not take it while it holds paho's lock of messages: publishers do so the other way.
        self._changed = threading.Condition(threading.RLock())  # guards all that follows
        self._client: _Client | None = None
        self._inflight: dict[int, Message] = {}  # QoS > 0, sent and unacknowledged, by packet id, in order
        self._waiting: deque[Message] = deque()  # QoS > 0, for a connection or for the broker's window
        self._writing: deque[tuple[MQTTMessageInfo, Message]] = deque()  # QoS 0, not all written
        self._queued_bytes = 0
        self._filters: dict[int, Filters] = {}
        self._token = 0
        self._largest_bytes: int | None = None  # as the broker said on the last connection
        self._counts = Counts()
        self._connection = 0  # number of the last one
        self._closed = False
        # The network thread's alone:
        self._versions = _Versions((5, 4) if protocol is None else (protocol,))
        self._backoff, self._hang_ups = Backoff(), _HangUps()
        self._attempt = _Attempt(0.0, 0.0)
        self._opened = False  # a first attempt has reached somebody
        self._outcome: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()  # of the first attempts

    # -- any thread --------------------------------------------------------------------------------------------------

    def connect(self, timeout_s: float = 5.0) -> None:
        """Connect once and start the network thread, which repairs later losses for ever.

        Raises NetworkError (nobody answers at host:port), RefusedError (user, password, client id) or ConfigError (CA
        file); then connect may be called again. Raises ValueError if already connected or closed.
        """
        with self._changed:
            if self._closed or self._client is not None:
                raise ValueError("connect a transport once; make a new one after close")
            client = self._client = self._new_client(timeout_s)
            self._outcome, self._opened = queue.SimpleQueue(), False
            self._attempt = _Attempt(time.monotonic(), timeout_s)
        client.begin(self.url)
        error = self._outcome_within(timeout_s)
        if error is not None:
            with self._changed:
                self._client = None
            client.end()
            raise error

    def _outcome_within(self, timeout_s: float) -> Exception | None:
        with suppress(queue.Empty):
            return self._outcome.get(timeout=timeout_s)
        if self._opened:
            return silent(self.url, self._versions.current, timeout_s)
        with suppress(queue.Empty):
            return self._outcome.get(timeout=LATE_S)
        return NetworkError(f"no broker answers at {self.url.place} within {timeout_s:g} s")

    def publish(
        self, topic: str, payload: bytes, qos: int = 0, retain: bool = False, taken: OnTaken | None = None
    ) -> None:
        """Queue a message; the payload must not change afterwards.

        taken: called on the network thread when the broker has acknowledged it (QoS 1), or refused it for good; with
        False if the broker says that nobody was subscribed to its topic, or on a later connection that it takes nothing
        so large (MQTT 5 only).

        Raises NetworkError if the transport is closed, or at QoS 1 and 2 if the queue is full; PacketLimitError for
        what the broker announces not to take; TypeError for a payload that is not bytes; ValueError for a topic with a
        wildcard or a payload that no packet can carry.
        """
        check_message(topic, payload, qos)
        packet_bytes = publish_bytes(topic, len(payload), qos)
        message = Message(topic, payload, qos, retain, packet_bytes, taken)
        with self._changed:
            if self._closed:
                raise NetworkError(f"the connection {self.name} is closed; nothing can be published on it")
            if self._largest_bytes is not None and packet_bytes > self._largest_bytes:
                raise PacketLimitError.of(
                    "this message", packet_bytes, f"the broker at {self.url.place}", self._largest_bytes
                )
            full = self._unfinished() >= MAX_QUEUED or (
                self._queued_bytes > 0 and self._queued_bytes + packet_bytes > self._max_queued_bytes
            )
            if qos == 0 and (full or not self._attempt.up):
                self._counts.lost += 1
            elif full:
                raise NetworkError(
                    f"{self._queued_bytes} bytes wait for the broker at {self.url.place}, which is too slow or away; "
                    "send less, or try again later"
                )
            else:
                self._queued_bytes += packet_bytes
                self._put(message)

    def send(self, topic: str, *parts: Body) -> None:
        """Publish at QoS 0 a payload in C-contiguous parts, which are the caller's again on return."""
        self.publish(topic, b"".join(parts))

    def subscribe(self, filters: Sequence[tuple[str, int]]) -> int:
        """Subscribe to (filter, QoS), now and after every reconnection; return the token that `Subscribed` will carry.

        Raises ValueError without filters or for one that MQTT does not allow.
        """
        check_filters(filters)
        with self._changed:
            self._token += 1
            self._filters[self._token] = tuple(filters)
            if self._attempt.up and self._client is not None:
                self._subscribe(self._client, self._token)
            return self._token

    def unsubscribe(self, filters: Sequence[str]) -> None:
        """Leave filters and forget them."""
        gone = set(filters)
        with self._changed:
            kept = {token: tuple(f for f in own if f[0] not in gone) for token, own in self._filters.items()}
            self._filters = {token: own for token, own in kept.items() if own}
            if self._attempt.up and self._client is not None and gone:
                self._client.unsubscribe(sorted(gone))

    def acknowledge(self, receipt: Receipt) -> None:
        """Let the broker forget a delivery; what came on an earlier connection comes again instead."""
        with self._changed:
            if self._attempt.up and self._client is not None and receipt.connection == self._connection:
                self._client.ack(receipt.packet, 1)

    def counts(self) -> Counts:
        """Return a snapshot of the counters."""
        with self._changed:
            return replace(self._counts)

    @property
    def heard_s(self) -> float:
        """Return when bytes last came on this connection, by `time.monotonic`."""
        return max(self._attempt.heard_at, self._attempt.up_at)

    @property
    def connected(self) -> bool:
        """Return whether the connection is up at this moment."""
        return self._attempt.up

    def close(self, last: Will | None = None, timeout_s: float = 2.0) -> None:
        """Send what is queued and `last` (if connected, for at most `timeout_s`), then disconnect cleanly.

        Blocks until the connection is closed, except when called on the network thread or while that looks for a broker
        that is away. A second call does nothing.
        """
        stop_at = time.monotonic() + timeout_s
        with self._changed:
            if self._closed:
                return
            if last is not None:
                self._put(Message(*last, publish_bytes(last.topic, len(last.payload), last.qos)))
            self._closed, client, up = True, self._client, self._attempt.up
            here = client is not None and threading.current_thread() is client.thread
            if up and not here:
                self._changed.wait_for(lambda: not (self._attempt.up and self._unfinished()), timeout_s)
        if client is not None:
            client.end(max(stop_at, time.monotonic() + AWAY_S) if up else None)
        with self._changed:
            self._counts.lost += self._unfinished()

    def _unfinished(self) -> int:
        return len(self._inflight) + len(self._waiting) + len(self._writing)

    # -- under the lock ----------------------------------------------------------------------------------------------

    def _put(self, message: Message) -> None:
        """Send a message, or keep it until a connection is up and its window open."""
        if message.qos:
            self._waiting.append(message)
            self._feed()
            return
        info = None if self._client is None else self._hand_over(self._client, message)
        if info is None or info.rc:
            self._counts.lost += 1
            self._queued_bytes -= message.packet_bytes
        else:
            self._writing.append((info, message))

    def _feed(self) -> None:
        """Hand messages that wait to paho, as many as the broker's window allows: paho does not respect it."""
        client, attempt = self._client, self._attempt
        while client is not None and attempt.up and self._waiting and len(self._inflight) < attempt.window:
            message = self._waiting.popleft()
            self._inflight[self._hand_over(client, message).mid] = message

    def _hand_over(self, client: _Client, message: Message) -> MQTTMessageInfo:
        while True:
            info = client.publish(message.topic, message.payload, message.qos, message.retain)
            # paho counts packet ids in a circle and refuses one that still waits for its acknowledgement.
            if info.rc != MQTTErrorCode.MQTT_ERR_QUEUE_SIZE:
                break
        self._counts.published += 1
        self._counts.published_bytes += message.packet_bytes
        return info

    def _give_up(self, unwanted: Callable[[Message], bool]) -> list[Message]:
        gone = [message for message in self._waiting if unwanted(message)]
        self._waiting = deque(message for message in self._waiting if not unwanted(message))
        self._queued_bytes -= sum(message.packet_bytes for message in gone)
        return gone

    def _subscribe(self, client: _Client, token: int) -> None:
        filters = self._filters[token]
        if client.protocol == 5:
            _, mid = client.subscribe([(name, SubscribeOptions(qos=qos)) for name, qos in filters])
        else:
            _, mid = client.subscribe(list(filters))
        if mid is not None:
            self._attempt.subscribing[mid] = (token, filters)

    def _written(self) -> None:
        while self._writing and self._writing[0][0].is_published():
            self._queued_bytes -= self._writing.popleft()[1].packet_bytes

    # -- the network thread, called by `_Client` ---------------------------------------------------------------------

    def _new_client(self, timeout_s: float) -> _Client:
        client = _Client(self)
        client.connect_timeout = max(timeout_s, 0.001)
        if self.url.user is not None:
            client.username_pw_set(self.url.user, self.url.password)
        context = self.url.ssl_context()
        if context is not None:
            client.tls_set_context(context)
        if self.will is not None:
            client.will_set(self.will.topic, self.will.payload, self.will.qos, self.will.retain)
        return client

    def is_client(self, client: _Client) -> bool:
        """Return whether this client is in use."""
        return client is self._client

    def version(self) -> int:
        """Return the version of MQTT to try now."""
        return self._versions.current

    def opened(self) -> None:
        """TCP, and TLS, are there."""
        self._opened, self._attempt.begun_at = True, time.monotonic()

    def heard(self) -> None:
        """Bytes have come."""
        self._attempt.heard_at = time.monotonic()

    def patience(self, now: float) -> str | None:
        """Return why the connection is given up now, if it is: the broker answers CONNECT or SUBSCRIBE too late."""
        attempt = self._attempt
        if not attempt.up:
            patience_s = attempt.timeout_s if self._versions.last else min(ANSWER_S, attempt.timeout_s)
            if now - attempt.begun_at < patience_s:
                return None
            attempt.error = silent(self.url, self._versions.current, patience_s)
            return str(attempt.error)
        # What it kept for us comes before, and shows that it is at work. Where it kept nothing it may have forgotten
        # the acknowledgement, though it sends.
        heard_at = max(attempt.up_at, attempt.heard_at if attempt.resumed else 0.0)
        if attempt.awaited and now - heard_at > SUBACK_S:
            return f"the broker has not acknowledged our subscriptions within {SUBACK_S:g} s"
        return None

    def given_up(self, reason: str, hung_up: bool = False) -> None:
        """The connection ends, for this reason."""
        self._attempt.reason, self._attempt.hung_up = reason, hung_up

    def up(self, client: _Client, resumed: bool, properties: Properties | None) -> None:
        """CONNACK has come: subscribe, and hand over what waits."""
        attempt, refusals = self._attempt, list[tuple[Message, str, bool]]()
        self._versions.accepted()
        largest = getattr(properties, "MaximumPacketSize", None)
        largest = None if largest is None else largest - 1  # the byte that MQTT 5 adds to what we count
        attempt.window = attempt.full_window = min(getattr(properties, "ReceiveMaximum", MAX_INFLIGHT), MAX_INFLIGHT)
        attempt.up_at, attempt.resumed = time.monotonic(), resumed
        attempt.announced = Connected(int(client.protocol), largest, local(client.socket()), resumed)
        with self._changed:
            self._counts.reconnections += self._connection > 0
            self._connection += 1
            self._largest_bytes, attempt.up = largest, True
            client.drop_out_messages()  # or paho would send all at once
            self._waiting.extendleft(reversed(self._inflight.values()))
            self._inflight = {}
            if (bad := self._hang_ups.unwanted()) is not None:
                why = f"it hung up {HANG_UPS} times on end on these {bad.packet_bytes} bytes, which may be too many"
                same = self._give_up(lambda m: (m.topic, m.payload) == (bad.topic, bad.payload))
                refusals += [(message, why, True) for message in same]
            if largest is not None:
                for message in self._give_up(lambda m: m.packet_bytes > largest):
                    why = f"it takes packets of at most {largest} bytes, not {message.packet_bytes}"
                    refusals.append((message, why, False))
            attempt.awaited = set(self._filters)
            for token in self._filters:
                self._subscribe(client, token)
            if self._hang_ups.suspect is not None:
                attempt.window = 1  # until it is acknowledged
            self._feed()
        for refusal in refusals:
            self._refuse(*refusal)
        self._announce()
        self._outcome.put(None)

    def not_let_in(self, reason: ReasonCode) -> None:
        """The broker refuses our CONNECT."""
        attempt, code = self._attempt, reason.value
        if code == _WRONG_VERSION:
            attempt.error = wrong_version(self.url, self._versions.current)
            self._versions.refused = True
        elif code in UNAVAILABLE:
            attempt.error = unavailable(self.url, str(reason))
        else:
            attempt.error = refused(self.url, str(reason))

    def lost(self, client: _Client, reason: str) -> None:
        """The connection is lost, or there was none; say when paho may try again."""
        attempt, reason = self._attempt, self._attempt.reason or reason
        with self._changed:
            up, attempt.up = attempt.up, False
            self._written()
            first = next(iter(self._inflight.values()), None)
            if not self._closed:
                self._counts.lost += len(self._writing)
                self._queued_bytes -= sum(message.packet_bytes for _, message in self._writing)
                self._writing.clear()
            self._changed.notify_all()
        pause_s = 0.0
        if up:
            self._hang_ups.lost(first if attempt.hung_up and not attempt.awaited else None)
            self._backoff.lost(time.monotonic() - attempt.up_at)
            pause_s = self._backoff.pause_s()
            if not self._closed:
                self._emit(Disconnected(reason))
        else:
            if attempt.error is None:
                attempt.error = hung_up(self.url, reason)
                self._versions.refused = True
            if not (isinstance(attempt.error, VersionRefused) and self._versions.another()):
                self.failed(client, attempt.error)
                return
        self._next(client, pause_s)

    def failed(self, client: _Client, error: Exception) -> None:
        """No version gets a connection."""
        if self._connection:  # else `connect` raises it
            _log.info("%s: not connected again yet: %s", self.name, error)
        self._hang_ups.away()
        self._versions.begin()
        self._outcome.put(error)
        self._next(client, self._backoff.pause_s())

    def _next(self, client: _Client, pause_s: float) -> None:
        client.reconnect_delay_set(pause_s, pause_s)  # type: ignore[arg-type]
        first = self._attempt.timeout_s if self._connection == 0 else RECONNECT_TIMEOUT_S
        self._attempt = _Attempt(time.monotonic() + pause_s, first)

    def acknowledged(self, answers: Sequence[tuple[int, str | None, bool]]) -> None:
        """Forget messages that are written (QoS 0), and those that the broker has taken or refused."""
        done = list[tuple[Message, str | None, bool]]()
        with self._changed:
            self._written()
            for mid, refusal, heard in answers:
                message = self._inflight.pop(mid, None)
                if message is not None:
                    self._queued_bytes -= message.packet_bytes
                    self._attempt.window = self._attempt.full_window
                    done.append((message, refusal, heard))
            self._feed()
            self._changed.notify_all()
        for message, refusal, heard in done:
            if refusal is not None:
                self._refuse(message, refusal, heard)
            elif (taken := message.taken) is not None:
                self._call(taken, heard)

    def subscribed(self, mid: int, refusals: Sequence[str | None]) -> None:
        """Report which subscription the broker has acknowledged or refused."""
        with self._changed:
            token, filters = self._attempt.subscribing.pop(mid, (0, ()))
        if not token:
            return
        found = [(name, why) for (name, _), why in zip(filters, refusals, strict=False) if why is not None]
        if found:
            self._emit(Refused(token, tuple(name for name, _ in found), found[0][1]))
        else:
            self._emit(Subscribed(token))
        self._attempt.awaited.discard(token)
        self._announce()

    def arrived(self, message: MQTTMessage) -> bool:
        """Count a message and hand it over; return False if its topic is not UTF-8."""
        try:
            topic = message.topic
        except UnicodeDecodeError:
            with self._changed:
                self._counts.bad += 1
            return False
        payload = bytes(message.payload)  # no copy
        with self._changed:
            self._counts.received += 1
            self._counts.received_bytes += publish_bytes(topic, len(payload), message.qos)
        if self.on_delivery is None:
            self._call(self.on_message, topic, payload)
        else:
            receipt = Receipt(self._connection, message.mid) if message.qos else None
            self._call(self.on_delivery, Delivery(topic, payload, receipt, message.dup, message.retain))
        return True

    def _announce(self) -> None:
        connected = self._attempt.announced
        if connected is not None and not self._attempt.awaited:
            self._attempt.announced = None
            self._emit(connected)

    def _refuse(self, message: Message, why: str, heard: bool = True) -> None:
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
            with self._changed:
                self._counts.bad += 1


class _Client(Client):
    """paho's client on its own thread; see the top of this file for what is different.

    Of paho's private parts it uses the loop and its wake-up, the beginning and the end of a connection, and the version
    to speak, which paho itself changes when it falls back to 3.1.
    """

    def __init__(self, owner: PahoTransport) -> None:
        super().__init__(
            CallbackAPIVersion.VERSION2,
            client_id=owner.client_id,
            clean_session=owner.clean,
            protocol=MQTTProtocolVersion.MQTTv311,
            manual_ack=owner.on_delivery is not None,
        )
        self.thread: threading.Thread | None = None
        self._owner, self._expiry = owner, 0 if owner.clean else SESSION_EXPIRY_S
        self._flow, self._misc_at = _Flow(time.monotonic()), 0.0
        self._answers: list[tuple[int, str | None, bool]] = []
        self._reading = self._wrote = False
        self._ends_at: float | None = None  # when the connection must have ended
        self.max_inflight_messages_set(0)
        self.on_pre_connect = self._before
        self.on_connect_fail = self._no_connection
        self.on_socket_open = self._opened
        self.on_connect = self._let_in
        self.on_disconnect = self._lost
        self.on_message = self._arrived
        self.on_publish = self._published
        self.on_subscribe = self._subscribed
        self.on_socket_close = self._closing

    def begin(self, url: BrokerUrl) -> None:
        """Start the network thread, which connects."""
        properties = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
        if self._expiry:
            properties.SessionExpiryInterval = self._expiry
        if self._owner.receive_maximum is not None:
            properties.ReceiveMaximum = self._owner.receive_maximum
        self.connect_async(url.host, url.port, KEEPALIVE_S, clean_start=self._owner.clean, properties=properties)
        self.loop_start()
        self.thread = self._thread

    def end(self, deadline: float | None = None) -> None:
        """Disconnect, and wait for the thread until the deadline, unless this is the thread; None: do not wait."""
        self._ends_at = time.monotonic() + AWAY_S if deadline is None else deadline
        self.disconnect()
        if deadline is not None and self.thread not in (None, threading.current_thread()):
            assert self.thread is not None
            self.thread.join(max(deadline - time.monotonic(), 0.0))
            if not self.thread.is_alive():
                self._reset_sockets(sockpair_only=True)  # paho leaves its wake-up to the garbage collector

    def _create_socket_connection(self) -> socket.socket:
        return connect_any(self.host, self.port, self.connect_timeout)

    # -- the loop ----------------------------------------------------------------------------------------------------

    def _loop(self, timeout: float = 1.0) -> MQTTErrorCode:
        sock, wake = self.socket(), self._sockpairR
        if sock is None or wake is None:
            return MQTTErrorCode.MQTT_ERR_NO_CONN
        ahead, poll = buffered(sock), select.poll()
        poll.register(sock.fileno(), select.POLLIN | (select.POLLOUT if self.want_write() else 0))
        poll.register(wake.fileno(), select.POLLIN)
        wait_s = 0.0 if ahead else timeout if self._owner.connected else min(timeout, TURN_S)
        found = dict(poll.poll(wait_s * 1000))
        events = found.get(sock.fileno(), 0)
        if wake.fileno() in found:
            with suppress(BlockingIOError):
                wake.recv(10_000)
        rc = MQTTErrorCode.MQTT_ERR_SUCCESS
        if ahead or events & ~select.POLLOUT:  # hang-ups and errors show when reading
            rc = self.loop_read()
            acknowledge_soon(sock)
        if not rc and self.socket() is not None and self.want_write():
            self._wrote = self._wrote or bool(events & select.POLLOUT)
            rc = self.loop_write()
        answers, self._answers = self._answers, []
        self._owner.acknowledged(answers)
        return rc if rc or self.socket() is None else self.loop_misc()

    def loop_read(self, max_packets: int = 1) -> MQTTErrorCode:
        """Read what has come."""
        self._owner.heard()
        self._reading = True
        try:
            return super().loop_read(max_packets)
        except Exception as error:  # paho raises struct.error, IndexError, ... on malformed packets
            _log.info(
                "%s: the connection is made again, as the broker sent what cannot be read: %s", self._owner.name, error
            )
            _log.debug("%s", self._owner.name, exc_info=True)  # or the mistake is ours
            self._owner.given_up(f"the broker sent what paho cannot read: {error!r}")
            return self._loop_rc_handle(_LOST)
        finally:
            self._reading = False

    def loop_write(self) -> MQTTErrorCode:
        """Write what the socket takes; where paho asks for it while it reads, afterwards."""
        # paho holds its lock of messages then, which `PahoTransport` must not meet the wrong way round.
        return MQTTErrorCode.MQTT_ERR_SUCCESS if self._reading else super().loop_write()

    def loop_misc(self) -> MQTTErrorCode:
        """Let paho ping the broker, or give it up, unless bytes still leave."""
        now = time.monotonic()
        if (reason := self._owner.patience(now)) is not None:
            return self._give_up(reason)
        if now - self._misc_at < TURN_S:
            return MQTTErrorCode.MQTT_ERR_SUCCESS
        self._misc_at, busy = now, self.want_write()
        self._flow.look(now, busy or self._wrote, self._wrote, unacknowledged(self.socket()) or 0)
        self._wrote, still_s = False, now - self._flow.moved_at
        if busy and still_s >= STALLED_S:
            return self._give_up(f"the broker has taken nothing for {STALLED_S} s")
        # A PINGREQ would wait behind what is on its way, for longer than paho waits for the answer, and paho takes a
        # packet for sent only when all of it is.
        if not self._flow.waiting or (still_s >= KEEPALIVE_S and not busy):
            return super().loop_misc()
        return MQTTErrorCode.MQTT_ERR_SUCCESS

    def _give_up(self, reason: str) -> MQTTErrorCode:
        self._owner.given_up(reason)
        return self._loop_rc_handle(_LOST)

    # -- callbacks ---------------------------------------------------------------------------------------------------

    def _before(self, _client: Client, _data: Any) -> None:
        if self._ends_at is not None:
            self.disconnect()
        self._protocol = MQTTProtocolVersion(self._owner.version())
        self._flow, self._wrote = _Flow(time.monotonic()), False

    def _no_connection(self, _client: Client, _data: Any) -> None:
        error = sys.exc_info()[1]  # paho calls this where it has caught it
        if self._ends_at is None:
            self._owner.failed(self, absent(self._owner.url, error if isinstance(error, Exception) else OSError()))

    def _opened(self, _client: Client, _data: Any, sock: Any) -> None:
        no_delay(sock)  # paho never does
        if self._ends_at is not None:
            sock.shutdown(socket.SHUT_RDWR)
        else:
            self._owner.opened()

    def _let_in(
        self, _client: Client, _data: Any, flags: ConnectFlags, reason: ReasonCode, properties: Properties | None
    ) -> None:
        if self._ends_at is not None:
            self.disconnect()
        elif reason.is_failure:
            self._owner.not_let_in(reason)
        else:
            self._owner.up(self, flags.session_present, properties)

    def _lost(
        self, _client: Client, _data: Any, flags: DisconnectFlags, reason: ReasonCode, _properties: Properties | None
    ) -> None:
        if flags.is_disconnect_packet_from_server:
            self._owner.given_up(f"the broker closed the connection: {reason}", reason.value not in _LEAVING)
        elif reason.value == _KEEPALIVE:
            self._owner.given_up(f"the broker has not answered for {KEEPALIVE_S} s")
        if self._owner.is_client(self):
            self._owner.lost(self, "the connection was lost")

    def _arrived(self, _client: Client, _data: Any, message: MQTTMessage) -> None:
        if not self._owner.arrived(message):
            self.ack(message.mid, message.qos)  # or it would come again for ever, where we acknowledge

    def _published(
        self, _client: Client, _data: Any, mid: int, reason: ReasonCode, _properties: Properties | None
    ) -> None:
        # paho also calls this when a QoS 0 packet is written; packet ids of those may repeat one that still waits.
        if self._reading:
            refusal = str(reason) if reason.value >= _FAILURE else None
            self._answers.append((mid, refusal, reason.value != _NOBODY))

    def _subscribed(
        self, _client: Client, _data: Any, mid: int, reasons: list[ReasonCode], _properties: Properties | None
    ) -> None:
        self._owner.subscribed(mid, [str(r) if r.value >= _FAILURE else None for r in reasons])

    def _closing(self, _client: Client, _data: Any, sock: Any) -> None:
        if self._ends_at is not None:
            linger(sock, self._ends_at)


class _Versions:
    """The versions to try, first the one that the broker took when it had refused another.

    refused: since `begin` the broker has refused a version, and was not only silent, as a slow one is.
    """

    def __init__(self, order: tuple[int, ...]) -> None:
        self.order, self._at, self.refused = order, 0, False

    @property
    def current(self) -> int:
        """Return the version to try now."""
        return self.order[self._at]

    @property
    def last(self) -> bool:
        """Return whether there is no other version to try after this one."""
        return self._at == len(self.order) - 1

    def begin(self) -> None:
        """Begin with the first version again."""
        self._at, self.refused = 0, False

    def another(self) -> bool:
        """Go on to the next version; return whether there is one."""
        if self.last:
            return False
        self._at += 1
        return True

    def accepted(self) -> None:
        """The broker speaks this version."""
        if self.refused:
            self.order = (self.current, *(p for p in self.order if p != self.current))
        self.begin()


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


class _Flow:
    """Whether what we send reaches the other end: whether bytes leave our queue, or the kernel's.

    The kernel may hold megabytes, and says nothing while it sends them: over a slow link that takes longer than an
    answer may.
    """

    def __init__(self, now: float) -> None:
        self.waiting = False  # whether something is on its way
        self.moved_at = now  # when bytes were last seen to leave, or nothing waited
        self._kept = 0

    def look(self, now: float, queued: bool, wrote: bool, kept: int) -> None:
        """Take what waits now; queued: in our own queue. wrote: the kernel took some of that. kept: bytes in its."""
        self.waiting = queued or kept > 0
        if not self.waiting or wrote or kept < self._kept:
            self.moved_at = now
        self._kept = kept
