"""A connection that mends itself: one network thread, a bounded queue, remembered subscriptions."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Final

from hepti_mqtt.errors import HeptiError, NetworkError
from hepti_mqtt.protocol.topics import publish_bytes
from hepti_mqtt.transport.backoff import Backoff
from hepti_mqtt.transport.base import (
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
    Will,
)
from hepti_mqtt.transport.data_link import DataLink, Unreadable, data_link_possible
from hepti_mqtt.transport.hang_ups import HANG_UPS, HangUps
from hepti_mqtt.transport.in_flight import Session
from hepti_mqtt.transport.link import Body, HungUp, Link, LinkLost
from hepti_mqtt.transport.outbox import MAX_QUEUED_BYTES, Message, Outbox, Unsubscription
from hepti_mqtt.transport.url import BrokerUrl
from hepti_mqtt.transport.versions import AnyLink, Versions
from hepti_mqtt.transport.wake import Wake

FAREWELL_S: Final = 2.0  # beyond what `close` is given, for a DISCONNECT that the broker must read
AWAY_S: Final = 0.3
LATE_S: Final = 2.0  # beyond what `connect` is given, for the look-up of a name, which nothing interrupts
RECONNECT_TIMEOUT_S: Final = 5.0
TURN_S: Final = 1.0
SUBACK_S: Final = 5.0  # amqtt forgets one now and then when several connections begin at once
BATCH: Final = 64  # queued messages handed over before the socket is read again

_log = logging.getLogger(__name__)


class PahoTransport:
    """A connection to one broker over MQTT 3.1.1 or 5, with its own network thread.

    client_id: made such that no other user can know it (`BrokerUrl.client_id`). protocol: 4 (3.1.1), 5, or None to try
    5 and fall back where the broker refuses the version. clean: forget the session of the last connection.
    on_message(topic, payload), on_state: called on the network thread; they must only hand over. name: of the thread.
    on_delivery: takes messages instead of on_message, and the broker keeps each of QoS 1 until it is acknowledged; how
    many may wait for that is the broker's affair (`max_inflight_messages` of Mosquitto).
    tensors: everything is of QoS 0 over 3.1.1 and nothing is retained, and a link of our own carries it, where it can;
    payloads that arrive are views of memory that is used again. A broker that it cannot read is left to paho.
    max_queued_bytes: bound of what waits for the network or, at QoS 1, for its acknowledgement; one message larger than
    that is taken when nothing else waits.

    A publish at QoS 0 that finds no connection or a full queue is counted as lost. At QoS 1 it waits for the
    connection, and a full queue raises NetworkError; it is sent again after a reconnection, so at least once, unless
    the broker hangs up on it time after time: that, too, is told as `Refused`.
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
        tensors: bool = False,
    ) -> None:
        self.url, self.client_id, self.name = url, url.client_id(client_id), name
        self._hear, self._tell, self._deliver = on_message, on_state, on_delivery
        self._connection = 0  # number of the last one that was tried
        self._versions = Versions((4,) if tensors else (5, 4) if protocol is None else (protocol,))
        self._own_link = tensors and data_link_possible()
        self._sending: DataLink | None = None  # through which other threads may send
        self._will, self._clean = will, clean
        self._outbox = Outbox(name, url.place, max_queued_bytes)
        self.on_bad_topic = self._outbox.bad  # a message whose topic is not UTF-8 is counted
        self._wake = Wake()
        self._thread: threading.Thread | None = None
        self._first: Future[None] | None = None  # attempt to connect whose outcome `connect` has not told yet
        self._session = Session()
        self._hang_ups = HangUps()

    # -- any thread --------------------------------------------------------------------------------------------------

    def connect(self, timeout_s: float = 5.0) -> None:
        """Connect once and start the network thread, which mends later losses for ever.

        Raises NetworkError (nobody answers at host:port), RefusedError (user, password, client id), ConfigError (CA
        file); then connect may be called again. Nothing runs but an attempt that is late: the next call waits for it,
        and whoever gives up must `close`. Raises ValueError if already connected or closed.
        """
        if self._stopping() or (self._thread is not None and self._first is None):
            raise ValueError("connect a transport once; make a new one after close")
        if self._thread is None or self._first is None:
            self._first = Future()
            self._thread = threading.Thread(
                target=self._run, args=(self._first, timeout_s), name=self.name, daemon=True
            )
            self._thread.start()
        if not wait([self._first], timeout_s + LATE_S).done:
            raise NetworkError(f"no broker answers at {self.url.place} within {timeout_s:g} s")
        error, self._first = self._first.exception(), None
        if error is not None:
            self._thread.join()
            self._thread = None
            raise error

    def publish(
        self, topic: str, payload: bytes, qos: int = 0, retain: bool = False, taken: OnTaken | None = None
    ) -> None:
        """Queue a message; the payload must not change afterwards.

        taken: called on the network thread when the broker has acknowledged it (QoS 1), or refused it for good; with
        False if the broker says that nobody was subscribed to its topic, or at a later connection that it takes nothing
        so large (MQTT 5 only).

        Raises NetworkError if the transport is closed, or at QoS 1 and 2 if the queue is full; PacketLimitError for
        what the broker says it does not take; TypeError for a payload that is not bytes; ValueError for a topic with a
        wildcard or a payload that no packet can carry.
        """
        self._outbox.publish(topic, payload, qos, retain, taken)
        self._wake.set()

    def send(self, topic: str, *parts: Body) -> None:
        """Publish at QoS 0 a payload in C-contiguous parts, which are the caller's again on return.

        Of a transport for tensors it goes out on this thread, as it lies, if nothing waits before it.
        """
        link, nbytes = self._sending, publish_bytes(topic, sum(memoryview(part).nbytes for part in parts), 0)
        if link is not None and link.publish_now(topic, parts, self._outbox.empty):
            self._outbox.sent_at_once(nbytes)
        else:
            self.publish(topic, b"".join(parts))

    def subscribe(self, filters: Sequence[tuple[str, int]]) -> int:
        """Subscribe to (filter, QoS), now and after every reconnection; return the token that `Subscribed` will carry.

        Raises ValueError without filters or for one that MQTT does not allow.
        """
        token = self._outbox.subscribe(filters)
        self._wake.set()
        return token

    def unsubscribe(self, filters: Sequence[str]) -> None:
        """Leave filters and forget them."""
        self._outbox.unsubscribe(filters)
        self._wake.set()

    def acknowledge(self, receipt: Receipt) -> None:
        """Let the broker forget a delivery; what came on an earlier connection comes again instead."""
        self._outbox.acknowledge(receipt)
        self._wake.set()

    def counts(self) -> Counts:
        """Return a snapshot of the counters."""
        return self._outbox.counts()

    @property
    def connected(self) -> bool:
        """Return whether the connection stands at this moment."""
        return self._outbox.up

    def close(self, last: Will | None = None, timeout_s: float = 2.0) -> None:
        """Send what is queued and `last` (if connected, for at most `timeout_s`), then disconnect cleanly.

        Blocks until the thread has ended, except when called on it or while it looks for a broker that is away: nothing
        interrupts that, and nobody waits for it. A second call does nothing.
        """
        patience_s = timeout_s + FAREWELL_S if self.connected else AWAY_S
        if not self._outbox.close(last, time.monotonic() + timeout_s):
            return
        self._wake.set()
        thread = self._thread
        if thread is None:
            self._wake.close()
        elif thread is not threading.current_thread():
            thread.join(patience_s)

    # -- the network thread ------------------------------------------------------------------------------------------

    def _run(self, first: Future[None], timeout_s: float) -> None:
        try:
            link = self._open(timeout_s)
        except Exception as error:
            first.set_exception(error)
            return
        first.set_result(None)
        backoff = Backoff()
        try:
            while True:
                since = time.monotonic()
                self._serve(link)
                backoff.lost(time.monotonic() - since)
                while not self._stopping():
                    self._wake.pause(backoff.pause_s(), self._stopping)
                    try:
                        link = self._open(RECONNECT_TIMEOUT_S)
                        break
                    except (HeptiError, OSError) as error:
                        _log.info("%s: not connected again yet: %s", self.name, error)
                        self._hang_ups.away()
                if self._stopping():
                    link.disconnect(AWAY_S)  # of a link that came after all; of the last one there is nothing left
                    return
                self._outbox.reconnected()
        finally:
            self._outbox.clear()
            self._wake.close()

    def _stopping(self) -> bool:
        return self._outbox.stop_at is not None

    def _open(self, timeout_s: float) -> AnyLink:
        return self._versions.open(self._link, timeout_s, self._stopping)

    def _link(self, protocol: int, answer_s: float) -> AnyLink:
        self._connection += 1
        if self._own_link:
            return DataLink(self.url, self.client_id, listener=self, wake=self._wake)
        return Link(
            self.url,
            self.client_id,
            protocol=protocol,
            will=self._will,
            clean=self._clean,
            manual=self._deliver is not None,
            answer_s=answer_s,
            listener=self,
            wake=self._wake,
        )

    def _serve(self, link: AnyLink) -> None:
        """Drive one connection until it is lost or the transport is closed."""
        reason, hung_up = "closed", False
        try:
            self._begin(link)
            while not self._stopping():
                link.turn(0.0 if self._ready(link) else TURN_S)
                self._feed(link)
                if self._session.awaited and self._session.silent_s(link) > SUBACK_S:
                    raise LinkLost(f"the broker has not acknowledged our subscriptions within {SUBACK_S:g} s")
            self._drain(link)
            link.disconnect(max((self._outbox.stop_at or 0.0) - time.monotonic(), 0.2))
        except LinkLost as error:
            reason, hung_up = str(error), isinstance(error, HungUp)
            if isinstance(error, Unreadable):
                _log.warning("%s: %s; paho carries it from now on", self.name, error)
                self._own_link = False
        except Exception as error:
            _log.exception("%s: the connection is made again", self.name)
            reason = repr(error)
        self._hang_ups.lost(self._session.first if hung_up else None)
        self._end(link)
        if not self._stopping():
            self._emit(Disconnected(reason))

    def _begin(self, link: AnyLink) -> None:
        if (unwanted := self._hang_ups.unwanted()) is not None:
            nbytes = unwanted.packet_bytes
            what = f"it hung up {HANG_UPS} times on end on these {nbytes} bytes, which may be more than it takes"
            for message in self._outbox.withdraw(unwanted):
                self._refuse(message, what)
        everything, too_large = self._outbox.connected(link.largest_packet_bytes)
        for message in too_large:
            what = f"it takes packets of at most {link.largest_packet_bytes} bytes, not {message.packet_bytes}"
            self._refuse(message, what, heard=False)
        self._session = session = Session(awaited=set(everything), alone=self._hang_ups.suspect is not None)
        for token, filters in everything.items():
            session.subscribing[link.subscribe(filters)] = (token, filters)
        self._announce(link)

    def _announce(self, link: AnyLink) -> None:
        if not self._session.awaited and not self._session.announced:
            self._session.announced = True
            self._sending = link if isinstance(link, DataLink) else None
            self._emit(Connected(link.protocol, link.largest_packet_bytes, link.local, link.resumed))

    def _end(self, link: AnyLink) -> None:
        """Count what is lost with the connection, and queue again what the broker has not acknowledged."""
        self._sending, session = None, self._session
        unfinished = session.writing is not None and link.busy
        link.close()  # it may stand: the broker only did not acknowledge our filters, or the mistake is ours
        unfinished = link.cut if isinstance(link, DataLink) else unfinished
        self._outbox.disconnected([*session.inflight.values(), *session.waiting], unfinished)

    def _drain(self, link: AnyLink) -> None:
        while time.monotonic() < (self._outbox.stop_at or 0.0):
            self._feed(link)
            if self._outbox.empty() and not self._session.inflight and not self._session.waiting and not link.busy:
                return
            link.turn(0.0 if self._ready(link) else 0.1)

    def _ready(self, link: AnyLink) -> bool:
        return not (self._outbox.empty() or link.busy or self._session.held)

    def _feed(self, link: AnyLink) -> None:
        """Hand queued operations to the link while it writes them at once; what does not fit stays in our own queue."""
        self._announce(link)
        session = self._session
        with link.sending:
            self._feed_on(link, session)

    def _feed_on(self, link: AnyLink, session: Session) -> None:
        for _ in range(BATCH):
            if link.busy or session.held:
                return
            session.writing = None
            if session.waiting and len(session.inflight) < link.window:
                self._send(link, session.waiting.popleft())
                continue
            op = self._outbox.take()
            if op is None:
                return
            if isinstance(op, Message) and op.qos > 0 and len(session.inflight) >= link.window:
                session.waiting.append(op)
            elif isinstance(op, Message):
                self._send(link, op)
            elif isinstance(op, Receipt):
                if op.connection == self._connection:
                    link.acknowledge(op.packet)
            elif isinstance(op, Unsubscription):
                link.unsubscribe(op.filters)
            elif op.filters:
                session.subscribing[link.subscribe(op.filters)] = (op.token, op.filters)

    def _send(self, link: AnyLink, op: Message) -> None:
        mid = link.publish(op.topic, op.payload, op.qos, op.retain)
        self._outbox.sent(op)
        if op.qos == 0:
            self._session.writing = op
        else:
            self._session.inflight[mid] = op
        link.flush()

    # -- what arrives; called by the link on the network thread ------------------------------------------------------

    def on_message(self, topic: str, payload: Body, qos: int, mid: int, repeated: bool, retained: bool = False) -> None:
        """Count a message and hand it over."""
        self._outbox.received(publish_bytes(topic, len(payload), qos))
        if (deliver := self._deliver) is None:
            self._call(lambda: self._hear(topic, payload))
            return
        receipt = Receipt(self._connection, mid) if qos else None
        self._call(lambda: deliver(Delivery(topic, bytes(payload), receipt, repeated, retained)))

    def on_acknowledged(self, mid: int, refusal: str | None, heard: bool) -> None:
        """Forget a QoS 1 message that the broker has taken or refused."""
        op = self._session.inflight.pop(mid, None)
        if op is None:
            return
        self._session.alone = False
        self._outbox.acknowledged(op)
        if refusal is not None:
            self._refuse(op, refusal, heard)
        elif (taken := op.taken) is not None:
            self._call(lambda: taken(heard))

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

    def _refuse(self, message: Message, why: str, heard: bool = True) -> None:
        if (taken := message.taken) is not None:
            self._call(lambda: taken(heard))
        self._emit(Refused(None, (message.topic,), why))

    def _emit(self, state: State) -> None:
        self._call(lambda: self._tell(state))

    def _call(self, callback: Callable[[], None]) -> None:
        try:
            callback()
        except Exception:
            # The connection must outlive a mistake in what it carries.
            _log.exception("%s: a callback failed", self.name)
            self._outbox.bad()
