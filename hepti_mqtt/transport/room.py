"""How much a broker keeps for a client that is slow: what is more it drops, though it has acknowledged that too."""

from __future__ import annotations

import queue
import time
from typing import Final, NamedTuple

from hepti_mqtt.errors import NetworkError, RefusedError
from hepti_mqtt.transport.base import Connected, Delivery, Refused, State, Subscribed
from hepti_mqtt.transport.control import PahoTransport
from hepti_mqtt.transport.url import BrokerUrl

MOST_IN_FLIGHT: Final = 1024  # a broker that sends more at once has no limit that matters here
_MARK: Final = b"hepti-mark"
_SMALL: Final = b"\0"


class Room(NamedTuple):
    """in_flight: messages of QoS 1 on their way to one client. queued: those kept beyond; what is more is dropped."""

    in_flight: int
    queued: int


def queue_room(url: BrokerUrl, *, client_id: str, topic: str, wanted: int, timeout_s: float = 10.0) -> Room | None:
    """Return how many messages the broker keeps for one client, None if those are `wanted` beyond the ones in flight.

    It sends small messages to itself on `topic`, where its user may write and read, and acknowledges none until the
    broker has taken all. A broker of MQTT 3.1.1 alone is not asked: amqtt sends nothing more before each
    acknowledgement. Raises NetworkError if that takes longer than timeout_s in all, or RefusedError if the broker does
    not let it read the topic.
    """
    probe = _Probe(url, client_id, topic, timeout_s)
    try:
        probe.open()
        if probe.protocol < 5:
            return None
        sent = 0
        while probe.arrived == sent and sent <= MOST_IN_FLIGHT:
            sent += probe.send(wanted)
        if (in_flight := probe.arrived) == sent:
            return None
        probe.send(wanted - (sent - in_flight))
        kept = probe.fetch() - in_flight
        return None if kept >= wanted else Room(in_flight, kept)
    finally:
        probe.close()


class _Probe:
    """A connection to send to oneself with; arrived: messages of QoS 1 that have come."""

    def __init__(self, url: BrokerUrl, client_id: str, topic: str, timeout_s: float) -> None:
        self._place, self._topic, self._timeout_s = url.place, topic, timeout_s
        self._until_s = time.monotonic() + timeout_s
        self._events: queue.SimpleQueue[State | Delivery | bool] = queue.SimpleQueue()
        self._unacknowledged: list[Delivery] = []
        self.arrived = self.protocol = 0
        self._transport = PahoTransport(
            url,
            client_id,
            on_message=lambda _topic, _payload: None,
            on_delivery=self._events.put,
            on_state=self._events.put,
            name="hepti-room",
        )

    def open(self) -> None:
        """Connect and subscribe; whatever comes of it, `close` follows."""
        self._transport.connect(self._timeout_s)
        self._transport.subscribe([(self._topic, 1)])
        subscribed = False
        while not (self.protocol and subscribed):  # either may come first
            event = self._next()
            subscribed |= isinstance(event, Subscribed)
            if isinstance(event, Connected):
                self.protocol = event.protocol

    def send(self, count: int) -> int:
        """Send so many messages and return when the broker has taken all of them."""
        for _ in range(count):
            self._transport.publish(self._topic, _SMALL, 1, taken=self._events.put)
        taken = 0
        while taken < count:
            taken += isinstance(self._next(), bool)
        return max(count, 0)

    def fetch(self) -> int:
        """Acknowledge what has come until nothing more does; return how many came in all."""
        while self._unacknowledged:
            for delivery in self._unacknowledged:
                assert delivery.receipt is not None
                self._transport.acknowledge(delivery.receipt)
            self._unacknowledged.clear()
            # What these acknowledgements make room for comes before what we send after them.
            self._transport.publish(self._topic, _MARK)
            while not (isinstance(event := self._next(), Delivery) and event.payload == _MARK):
                continue
        return self.arrived

    def close(self) -> None:
        """End the connection."""
        self._transport.close(timeout_s=0.5)

    def _next(self) -> State | Delivery | bool:
        try:
            event = self._events.get(timeout=max(self._until_s - time.monotonic(), 0.0))
        except queue.Empty:
            raise NetworkError(
                f"the broker at {self._place} does not give back what is published to {self._topic} within "
                f"{self._timeout_s:g} s"
            ) from None
        if isinstance(event, Delivery) and event.receipt is not None:
            self.arrived += 1
            self._unacknowledged.append(event)
        elif isinstance(event, Refused):
            raise RefusedError(f"the broker at {self._place} refused to send {self._topic}: {event.reason}")
        return event
