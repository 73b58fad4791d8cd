"""Limits of a broker: its largest packet, its queue for a slow client, and access without a password.

A separate connection measures the limits by sending messages to itself.
"""

from __future__ import annotations

import ipaddress
import logging
import queue
import socket
import time
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import inf, isqrt
from typing import Any, Final, NamedTuple, Self

from hepti_mqtt.core.errors import BROKER_PACKET_SETTINGS, HeptiError, NetworkError, RefusedError
from hepti_mqtt.protocol.topics import MAX_PACKET_BYTES, publish_bytes
from hepti_mqtt.transport.base import Connected, Delivery, Disconnected, Receipt, Refused, State, Subscribed
from hepti_mqtt.transport.broker_connection import BrokerConnection
from hepti_mqtt.transport.url import BrokerUrl

SMALLEST: Final = 1024
WANTED_BYTES: Final = 4 << 20  # packet to try if the broker announces no limit
DOUBTED_BYTES: Final = 1 << 20  # packet to try below an announced limit (MQTT 5)
LOW_BYTES: Final = 1 << 20  # larger than an exchange of a common model or a tile of its weights
MOST_IN_FLIGHT: Final = 1024  # more unacknowledged messages count as unlimited
ANSWER_S: Final = 10.0
LOOK_S: Final = 0.25  # between two looks at a message that is arriving
OPEN_ANSWER_S: Final = 3.0
_PRECISION: Final = 16  # relative error of the largest packet: 1/16
_MARK: Final = b"hepti-mark"
_SMALL: Final = b"\0"
LOW_QUEUE: Final = 100  # messages beyond those in flight
KEPT_MESSAGES: Final = 2000  # wanted queue for a disconnected client; Mosquitto's default is 1000


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
    url: BrokerUrl, *, client_id: str, topic: str, wanted_bytes: int, protocol: int | None = None
) -> int:
    """Return the bytes of the largest PUBLISH that the broker returns, at most `wanted_bytes`.

    Uses separate connections as `client_id`, because a broker closes a connection after too large a packet.
    topic: the user must be allowed to publish and read it.
    A result below `wanted_bytes` may be 1/16 too small; otherwise one round trip is enough.
    Raises NetworkError, or RefusedError if not even 1 KiB returns.
    """
    new_echo = partial(Echo, url, client_id, topic, protocol=protocol, max_queued_bytes=MAX_PACKET_BYTES)

    def passes(packet_bytes: int) -> bool:
        with new_echo() as echo:
            echo.open()
            return echo.gives_back(packet_bytes)

    with new_echo() as echo:
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


Heard = State | bytes | Delivery | bool


class Echo:
    """A connection that sends messages to itself on `topic`.

    timeout_s: for each answer. until_s: deadline for all answers.
    Raises NetworkError if no answer arrives, RefusedError if the user may not read the topic.
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
        self._events: queue.SimpleQueue[Heard] = queue.SimpleQueue()
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
        """Connect and subscribe; call `close` also after an error."""
        self._transport.connect(self._timeout_s)
        self._transport.subscribe([(self._topic, self._qos)])
        connected, is_subscribed = None, False
        while connected is None or not is_subscribed:  # in either order
            event = self.next()
            is_subscribed |= isinstance(event, Subscribed)
            connected = event if isinstance(event, Connected) else connected
            if isinstance(event, Disconnected):
                raise NetworkError(f"the broker at {self._place} closed the connection: {event.reason}")
        return connected

    def send(self, payload: bytes, qos: int = 0) -> None:
        """Send a message; at QoS 1 `next` returns a bool after its acknowledgement."""
        self._transport.publish(self._topic, payload, qos, taken=self._events.put if qos else None)

    def next(self) -> Heard:
        """Return the next payload (QoS 0), delivery (QoS 1), connection state or acknowledgement (a bool)."""
        event = self._next_unless(inf)
        assert event is not None
        return event

    def _next_unless(self, received_bytes: float) -> Heard | None:
        """Return the next event; None if more bytes have come on this connection, and no event."""
        until_s = min(time.monotonic() + self._timeout_s, self._until_s)
        while True:
            left_s = until_s - time.monotonic()
            with suppress(queue.Empty):
                event = self._events.get(timeout=max(min(LOOK_S, left_s), 0.0))
                break
            if self._transport.received_bytes > received_bytes:
                return None
            if left_s <= 0:
                raise NetworkError(
                    f"the broker at {self._place} does not give back what is published to {self._topic} within "
                    f"{self._timeout_s:g} s: let user {self._user!r} write and read it, or take another login"
                )
        if isinstance(event, Refused) and self._topic in event.topics:  # the caller handles other topics
            raise RefusedError(f"the broker at {self._place} refused to send {self._topic}: {event.reason}")
        return event

    def subscribe(self, filters: Iterable[str]) -> None:
        """Subscribe to more filters at QoS 0."""
        if added := [(name, 0) for name in filters]:
            self._transport.subscribe(added)

    def clear(self, topic: str) -> None:
        """Clear the retained message of a topic."""
        self._transport.publish(topic, b"", 1, retain=True)

    def gives_back(self, packet_bytes: int) -> bool:
        """Return whether a PUBLISH of this size returns; one byte less if no payload length fits exactly."""
        payload_bytes = packet_bytes - publish_bytes(self._topic, 0, 0)
        while publish_bytes(self._topic, payload_bytes, 0) > packet_bytes:
            payload_bytes -= 1
        before = self._transport.received_bytes
        self.send(bytes(payload_bytes))
        self.send(_MARK)  # if only the mark returns, the broker silently dropped the large message
        is_back = False
        # Mosquitto 2.0 sends 40 kB/s through a WebSocket, so the beginning of a large message is enough.
        while (event := self._next_unless(before + SMALLEST)) != _MARK:
            if event is None:
                return True
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
    """The broker's largest packet for a device, measured once.

    client_id, topic: as for `largest_packet`. complain(code, text): called if the limit is low or unknown.
    """

    def __init__(self, url: BrokerUrl, client_id: str, topic: str, complain: Callable[[str, str], None]) -> None:
        self._url, self._client_id, self._topic, self._complain = url, client_id, topic, complain
        self._largest: int | None = None

    def largest(self, protocol: int, announced: int | None) -> tuple[int | None, int | None]:
        """Return the largest packet that passes and the limit, if any: announced (MQTT 5) or measured."""
        # Mosquitto does not announce its message_size_limit, and silently drops larger messages.
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
    """Messages of QoS 1 that a broker keeps for one client; it drops further messages."""

    in_flight: int  #: sent and unacknowledged
    queued: int  #: kept beyond them


def queue_capacity(url: BrokerUrl, *, client_id: str, topic: str, wanted: int) -> QueueCapacity | None:
    """Return the broker's queue for one client, None if it keeps `wanted` messages beyond those in flight.

    Sends small messages to itself on `topic` and acknowledges none until the broker has accepted all.
    Returns None for MQTT 3.1.1, because amqtt waits for each acknowledgement.
    Raises NetworkError after `ANSWER_S` in all, or RefusedError if the user may not read the topic.
    """
    until_s = time.monotonic() + ANSWER_S
    with _QueueProbe(url, client_id, topic, qos=1, until_s=until_s) as probe:
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
    """Sends messages of QoS 1 to itself and acknowledges none until `fetch`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._unacknowledged: list[Receipt] = []
        self.arrived = 0  #: received messages

    def fill(self, count: int) -> int:
        """Send messages, wait until the broker has accepted all, and return their number."""
        for _ in range(count):
            self.send(_SMALL, 1)
        accepted = 0
        while accepted < count:
            accepted += isinstance(self.next(), bool)
        return max(count, 0)

    def fetch(self) -> int:
        """Acknowledge messages until no more arrive; return the number of all received messages."""
        while self._unacknowledged:
            for receipt in self._unacknowledged:
                self.acknowledge(receipt)
            self._unacknowledged.clear()
            # Messages that these acknowledgements release arrive before the mark.
            self.send(_MARK)
            while not (isinstance(event := self.next(), Delivery) and event.payload == _MARK):
                continue
        return self.arrived

    def next(self) -> Heard:
        """Return the next event, and count messages."""
        event = super().next()
        if isinstance(event, Delivery) and event.receipt is not None:
            self.arrived += 1
            self._unacknowledged.append(event.receipt)
        return event


def warn_of_limits(url: BrokerUrl, name: str, topic: str, log: logging.Logger) -> None:
    """Log low limits of the broker.

    name: prefix of client ids. topic: the planner must be allowed to publish and read it.
    Takes several round trips and a message of 1 MiB, so do not wait for it at start-up.
    """
    try:
        largest = largest_packet(url, client_id=f"{name}-size", topic=topic, wanted_bytes=LOW_BYTES)
        if largest < LOW_BYTES:
            log.warning("%s", low_packet_limit_warning(largest, url.place))
        capacity = queue_capacity(url, client_id=f"{name}-queue", topic=topic, wanted=LOW_QUEUE)
    except HeptiError as error:
        log.warning("cannot find the limits of the broker: %s", error)
        return
    if capacity is not None:
        log.warning("%s", low_queue_warning(*capacity, url.place))


def open_broker_warning(url: BrokerUrl) -> str | None:
    """Return a warning if a broker on the network admits a connection without a password, else None."""
    if is_loopback(url.host):
        return None
    name = f"hepti-open-{uuid.uuid4().hex[:12]}"
    transport = BrokerConnection(replace(url, user=None, password=None), name, name="open-check")
    try:
        transport.connect(OPEN_ANSWER_S)
    except HeptiError:
        return None
    finally:
        transport.close(timeout_s=0.5)
    return open_line(url.place)


def open_line(place: str) -> str:
    """Return the warning about an open broker at host:port."""
    return (
        f"OPEN BROKER: {place} lets everyone in without a password: whoever reaches it can read requests, answer them "
        "and command devices; close it with `hepti site init`"
    )


def is_loopback(host: str) -> bool:
    """Return whether all addresses of a host are loopback addresses."""
    with suppress(OSError, UnicodeError, ValueError):
        addresses = {str(info[4][0]).partition("%")[0] for info in socket.getaddrinfo(host, None)}
        return bool(addresses) and all(ipaddress.ip_address(address).is_loopback for address in addresses)
    return False
