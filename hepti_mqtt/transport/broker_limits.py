"""What a broker can take: its largest packet, what it keeps for a slow client, and whether it lets everyone in.

What it announces is checked by sending to oneself, on connections of our own. Top to bottom: the largest packet, what a
device knows of it, the queue for one client, what a planner's requests do with it, and open brokers.
"""

from __future__ import annotations

import ipaddress
import logging
import queue
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import inf, isqrt
from typing import Any, Final, NamedTuple, Self

from hepti_mqtt.errors import BROKER_PACKET_SETTINGS, HeptiError, NetworkError, RefusedError
from hepti_mqtt.protocol.topics import MAX_PACKET_BYTES, publish_bytes
from hepti_mqtt.transport.base import Connected, Delivery, Disconnected, Receipt, Refused, State, Subscribed
from hepti_mqtt.transport.broker_connection import BrokerConnection
from hepti_mqtt.transport.url import BrokerUrl

SMALLEST: Final = 1024
WANTED_BYTES: Final = 4 << 20  # a packet that large is tried where the broker announces no limit
DOUBTED_BYTES: Final = 1 << 20  # and that large where it announces (MQTT 5) that it takes it
LOW_BYTES: Final = 1 << 20  # an exchange of a common model, or a tile of its weights, has less
MOST_IN_FLIGHT: Final = 1024  # a broker that sends more at once has no limit that matters here
ANSWER_S: Final = 10.0
OPEN_ANSWER_S: Final = 3.0
_PRECISION: Final = 16  # the answer may be a sixteenth below the true limit
_MARK: Final = b"hepti-mark"
_SMALL: Final = b"\0"
LOW_QUEUE: Final = 100  # messages beyond those in flight
KEPT_MESSAGES: Final = 2000  # that a broker should keep for a client that is away; Mosquitto as delivered keeps 1000


def low_packet_limit_warning(largest_bytes: int, place: str) -> str:
    """Return the warning for a broker that takes only small packets."""
    return (
        f"The broker at {place} rejects packets above about {largest_bytes} bytes, perhaps silently. "
        f"Raise {BROKER_PACKET_SETTINGS}."
    )


def low_queue_warning(in_flight: int, queued: int, place: str) -> str:
    """Return the warning for a broker that queues few messages for one client."""
    return (
        f"The broker at {place} queues only {queued} messages per client beyond {in_flight} in flight and silently "
        "drops the rest. Raise max_queued_messages in mosquitto.conf to 1000000."
    )


def largest_packet(
    url: BrokerUrl,
    *,
    client_id: str,
    topic: str,
    wanted_bytes: int,
    protocol: int | None = None,
    timeout_s: float = ANSWER_S,
) -> int:
    """Return the bytes of the largest PUBLISH, at most `wanted_bytes`, that comes back from the broker.

    It makes connections of its own as `client_id`, because a broker closes the one that sends too much; `topic` must be
    one on which the user may write and read (a device's probe topic). Usually one round trip. Below `wanted_bytes` the
    answer is exact to a sixteenth. timeout_s: for each size tried. Raises NetworkError, or RefusedError if not even
    1 KiB comes back.
    """
    make = partial(Echo, url, client_id, topic, timeout_s, protocol=protocol, max_queued_bytes=MAX_PACKET_BYTES)

    def passes(packet_bytes: int) -> bool:
        with make() as echo:
            echo.open()
            return echo.gives_back(packet_bytes)

    with make() as echo:
        wanted = max(SMALLEST, min(wanted_bytes, echo.open().largest_packet_bytes or MAX_PACKET_BYTES))
        if echo.gives_back(wanted):
            return wanted
    if not passes(SMALLEST):
        raise RefusedError(
            f"the broker at {url.place} does not give back what is published to {topic}; let user {url.user!r} "
            "write and read it; `hepti site` writes such an access list"
        )
    low, high = SMALLEST, wanted
    while high - low > max(low // _PRECISION, 1):
        middle = min(max(isqrt(low * high), low + 1), high - 1)
        low, high = (middle, high) if passes(middle) else (low, middle)
    return low


class Echo:
    """A connection on which a user sends to itself on `topic`; timeout_s: for each answer, until `until_s` at most.

    Errors are NetworkError where nothing comes back, RefusedError where the broker does not let the user read.
    """

    def __init__(
        self,
        url: BrokerUrl,
        client_id: str,
        topic: str,
        timeout_s: float = ANSWER_S,
        *,
        qos: int = 0,
        until_s: float = inf,
        **options: Any,
    ) -> None:
        self._place, self._user, self._topic, self._qos = url.place, url.user, topic, qos
        self._timeout_s, self._until_s = timeout_s, until_s
        self._events: queue.SimpleQueue[State | bytes | Delivery | bool] = queue.SimpleQueue()
        self._transport = BrokerConnection(
            url,
            client_id,
            on_message=lambda _topic, payload: self._events.put(payload),
            on_state=self._events.put,
            on_delivery=self._events.put if qos else None,
            name="hepti-probe",
            **options,
        )
        self.acknowledge = self._transport.acknowledge

    def open(self) -> Connected:
        """Connect and subscribe; whatever comes of it, `close` follows."""
        self._transport.connect(self._timeout_s)
        self._transport.subscribe([(self._topic, self._qos)])
        connected, is_subscribed = None, False
        while connected is None or not is_subscribed:  # either may come first
            event = self.next()
            is_subscribed |= isinstance(event, Subscribed)
            connected = event if isinstance(event, Connected) else connected
            if isinstance(event, Disconnected):
                raise NetworkError(f"the broker at {self._place} closed the connection: {event.reason}")
        return connected

    def send(self, payload: bytes, qos: int = 0) -> None:
        """Send a message; of QoS 1 True comes when the broker has taken it."""
        self._transport.publish(self._topic, payload, qos, taken=self._events.put if qos else None)

    def next(self) -> State | bytes | Delivery | bool:
        """Return what comes next: a payload (a delivery where it subscribed at QoS 1), or a state of the connection."""
        try:
            event = self._events.get(timeout=max(min(self._timeout_s, self._until_s - time.monotonic()), 0.0))
        except queue.Empty:
            raise NetworkError(
                f"the broker at {self._place} does not give back what is published to {self._topic} within "
                f"{self._timeout_s:g} s: let user {self._user!r} write and read it, or take another login"
            ) from None
        if (
            isinstance(event, Refused) and self._topic in event.topics
        ):  # a refusal of another topic is news for the caller
            raise RefusedError(f"the broker at {self._place} refused to send {self._topic}: {event.reason}")
        return event

    def subscribe(self, filters: Iterable[str]) -> None:
        """Read more topics, at QoS 0."""
        if several := [(one, 0) for one in filters]:
            self._transport.subscribe(several)

    def clear(self, topic: str) -> None:
        """Clear what is retained on a topic."""
        self._transport.publish(topic, b"", 1, retain=True)

    def gives_back(self, packet_bytes: int) -> bool:
        """Return whether a PUBLISH of that size comes back, or of one byte less where its header grows."""
        payload_bytes = packet_bytes - publish_bytes(self._topic, 0, 0)
        while publish_bytes(self._topic, payload_bytes, 0) > packet_bytes:
            payload_bytes -= 1
        self.send(bytes(payload_bytes))
        self.send(_MARK)  # if it comes back alone, the large one was dropped without a word
        is_back = False
        while (event := self.next()) != _MARK:
            if isinstance(event, Disconnected):
                return False
            is_back = is_back or (isinstance(event, bytes) and len(event) == payload_bytes)
        return is_back

    def close(self) -> None:
        """End the connection."""
        self._transport.close(timeout_s=0.5)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class PacketLimit:
    """What a device knows of its broker's largest packet; what was tried once is not tried again.

    client_id, topic: as for `largest_packet`. complain(code, text): called where the limit is low or unknown.
    """

    def __init__(self, url: BrokerUrl, client_id: str, topic: str, complain: Callable[[str, str], None]) -> None:
        self._url, self._client_id, self._topic, self._complain = url, client_id, topic, complain
        self._largest: int | None = None

    def largest(self, protocol: int, announced: int | None) -> tuple[int | None, int | None]:
        """Return the largest packet known to pass and the limit, if any: as announced, or (3.1.1) by trying."""
        # Mosquitto drops what is over its message_size_limit without a word, and does not announce it.
        wanted = WANTED_BYTES if protocol != 5 else min(announced or DOUBTED_BYTES, DOUBTED_BYTES)
        if self._largest is None:
            try:
                self._largest = largest_packet(
                    self._url, client_id=self._client_id, topic=self._topic, wanted_bytes=wanted
                )
            except HeptiError as exc:
                self._complain("packet_size_unknown", f"cannot find the broker's largest packet: {exc}")
                return announced, announced
            if self._largest < wanted:
                self._complain("packet_limit", low_packet_limit_warning(self._largest, self._url.place))
        if self._largest < wanted:
            return self._largest, self._largest
        if protocol == 5:
            return (MAX_PACKET_BYTES, None) if announced is None else (announced, announced)
        return self._largest, None


class QueueCapacity(NamedTuple):
    """in_flight: messages of QoS 1 on their way to one client. queued: those kept beyond; what is more is dropped."""

    in_flight: int
    queued: int


def queue_capacity(
    url: BrokerUrl,
    *,
    client_id: str,
    topic: str,
    wanted: int,
    receive_maximum: int | None = None,
    timeout_s: float = ANSWER_S,
) -> QueueCapacity | None:
    """Return how many messages the broker keeps for one client, None if those are `wanted` beyond the ones in flight.

    It sends small messages to itself on `topic`, where its user may write and read, and acknowledges none until the
    broker has taken all. A broker of MQTT 3.1.1 alone is not asked: amqtt sends nothing more before each
    acknowledgement. Raises NetworkError if that takes longer than timeout_s in all, or RefusedError if the broker does
    not let it read the topic.
    """
    until_s = time.monotonic() + timeout_s
    with _QueueProbe(
        url, client_id, topic, timeout_s, qos=1, until_s=until_s, receive_maximum=receive_maximum
    ) as probe:
        if probe.open().protocol < 5:
            return None
        sent = 0
        while probe.arrived == sent and sent <= MOST_IN_FLIGHT:
            sent += probe.fill(wanted)
        if (in_flight := probe.arrived) == sent:
            return None
        probe.fill(wanted - (sent - in_flight))
        kept = probe.fetch() - in_flight
        return None if kept >= wanted else QueueCapacity(in_flight, kept)


class _QueueProbe(Echo):
    """Sends messages of QoS 1 to itself and acknowledges none until `fetch`; arrived: those that have come."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._unacknowledged: list[Receipt] = []
        self.arrived = 0

    def fill(self, count: int) -> int:
        """Send so many messages and return when the broker has taken all of them."""
        for _ in range(count):
            self.send(_SMALL, 1)
        taken = 0
        while taken < count:
            taken += isinstance(self.next(), bool)
        return max(count, 0)

    def fetch(self) -> int:
        """Acknowledge what has come until nothing more does; return how many came in all."""
        while self._unacknowledged:
            for receipt in self._unacknowledged:
                self.acknowledge(receipt)
            self._unacknowledged.clear()
            # What these acknowledgements make room for comes before what we send after them.
            self.send(_MARK)
            while not (isinstance(event := self.next(), Delivery) and event.payload == _MARK):
                continue
        return self.arrived

    def next(self) -> State | bytes | Delivery | bool:
        """Return what comes next, and count the messages."""
        event = super().next()
        if isinstance(event, Delivery) and event.receipt is not None:
            self.arrived += 1
            self._unacknowledged.append(event.receipt)
        return event


def warn_of_limits(
    url: BrokerUrl, name: str, topic: str, log: logging.Logger, receive_maximum: int
) -> QueueCapacity | None:
    """Log where the broker's limits are lower than models need; return its queue's capacity if that is small.

    name: for connections of its own. topic: one on which the planner may write and read. receive_maximum: of the
    connection that brings requests. It takes some round trips and a message of 1 MiB: do not wait for it at start-up.
    """
    try:
        largest = largest_packet(url, client_id=f"{name}-size", topic=topic, wanted_bytes=LOW_BYTES)
        if largest < LOW_BYTES:
            log.warning("%s", low_packet_limit_warning(largest, url.place))
        capacity = queue_capacity(
            url, client_id=f"{name}-queue", topic=topic, wanted=LOW_QUEUE, receive_maximum=receive_maximum
        )
    except HeptiError as error:
        log.warning("cannot find the limits of the broker: %s", error)
        return None
    if capacity is not None:
        log.warning("%s", low_queue_warning(*capacity, url.place))
    return capacity


class DeliveryWindow:
    """Unacknowledged requests of the current connection; all methods may be called from any thread.

    spilled: called when all are acknowledged after there had been as many as the broker hands over at once: it may have
    dropped what came beyond. limit: how many that is, None where the broker keeps enough beyond.
    """

    def __init__(self, spilled: Callable[[], None]) -> None:
        self._spilled = spilled
        self.limit: int | None = None
        self._lock = threading.Lock()  # guards all that follows
        self._connection = 0
        self._waiting: dict[int, float] = {}  # by packet id: when it came
        self._full = False

    def __len__(self) -> int:
        return len(self._waiting)

    def opened(self, receipt: Receipt, now: float) -> None:
        """Note a request."""
        with self._lock:
            if receipt.connection != self._connection:
                self._connection = receipt.connection
                self._waiting.clear()
            self._waiting[receipt.packet] = now
            self._full |= self.limit is not None and len(self._waiting) >= self.limit

    def begun(self, receipt: Receipt, now: float) -> None:
        """Note that a request is read."""
        with self._lock:
            if receipt.connection == self._connection and receipt.packet in self._waiting:
                self._waiting[receipt.packet] = now

    def is_of_earlier(self, receipt: Receipt) -> bool:
        """Return whether requests of a later connection have come."""
        return receipt.connection < self._connection

    def closed(self, receipt: Receipt) -> None:
        """Note an acknowledgement."""
        with self._lock:
            if receipt.connection != self._connection:
                return
            self._waiting.pop(receipt.packet, None)
            spilled = self._full and not self._waiting
            self._full &= not spilled
        if spilled:
            self._spilled()

    def opened_before(self, then_s: float) -> set[Receipt]:
        """Return the unacknowledged requests that came before a time."""
        with self._lock:
            return {Receipt(self._connection, packet) for packet, came_s in self._waiting.items() if came_s < then_s}


def open_broker_warning(url: BrokerUrl) -> str | None:
    """Return one loud line if others than this machine reach the broker and it lets everyone in, None otherwise.

    It tries, without user and password; whatever goes wrong with that says nothing of the broker.
    """
    return None if is_loopback(url.host) or not _lets_everyone_in(url) else open_line(url.place)


def open_line(place: str) -> str:
    """Return the line about an open broker at host:port."""
    return (
        f"OPEN BROKER: {place} lets everyone in without a password: whoever reaches it can read requests, answer them "
        "and command devices; close it with `hepti site init`"
    )


def is_loopback(host: str) -> bool:
    """Return whether a host's name or address stands for this machine alone."""
    with suppress(OSError, UnicodeError, ValueError):
        found = {str(info[4][0]).partition("%")[0] for info in socket.getaddrinfo(host, None)}
        return bool(found) and all(ipaddress.ip_address(address).is_loopback for address in found)
    return False


def _lets_everyone_in(url: BrokerUrl) -> bool:
    nobody = replace(url, user=None, password=None)
    name = f"hepti-open-{uuid.uuid4().hex[:12]}"
    transport = BrokerConnection(nobody, name, name="open-check")
    try:
        transport.connect(OPEN_ANSWER_S)
    except HeptiError:
        return False
    finally:
        transport.close(timeout_s=0.5)
    return True
