"""The largest packet that gets through a broker: its own word, checked by sending to oneself."""

from __future__ import annotations

import queue
from math import isqrt
from typing import Final

from hepti_mqtt.errors import NetworkError, RefusedError
from hepti_mqtt.protocol.topics import MAX_PACKET_BYTES, publish_bytes
from hepti_mqtt.transport.base import Connected, Disconnected, Refused, State, Subscribed
from hepti_mqtt.transport.client import PahoTransport
from hepti_mqtt.transport.url import BrokerUrl

SMALLEST: Final = 1024
_PRECISION: Final = 16  # the answer may be a sixteenth below the true limit
_MARK: Final = b"hepti-mark"


def largest_packet(
    url: BrokerUrl,
    *,
    client_id: str,
    topic: str,
    wanted_bytes: int,
    protocol: int | None = None,
    timeout_s: float = 10.0,
) -> int:
    """Return the bytes of the largest PUBLISH, at most `wanted_bytes`, that comes back from the broker.

    It makes connections of its own as `client_id`, because a broker closes the one that sends too much; `topic` must be
    one on which the user may write and read (a device's probe topic). Usually one round trip. Below `wanted_bytes` the
    answer is exact to a sixteenth. timeout_s: for each size tried. Raises NetworkError, or RefusedError if not even
    1 KiB comes back.
    """
    probe = _Probe(url, client_id, topic, protocol, timeout_s)
    try:
        wanted = max(SMALLEST, min(wanted_bytes, probe.announced() or MAX_PACKET_BYTES))
        if probe.passes(wanted):
            return wanted
        if not probe.passes(SMALLEST):
            raise RefusedError(
                f"the broker at {url.place} does not give back what is published to {topic}; let user {url.user!r} "
                "write and read it (see broker/acl.example)"
            )
        low, high = SMALLEST, wanted
        while high - low > max(low // _PRECISION, 1):
            middle = min(max(isqrt(low * high), low + 1), high - 1)
            low, high = (middle, high) if probe.passes(middle) else (low, middle)
        return low
    finally:
        probe.close()


class _Probe:
    """A connection to send to oneself with, made again whenever the broker has closed it."""

    def __init__(self, url: BrokerUrl, client_id: str, topic: str, protocol: int | None, timeout_s: float) -> None:
        self._url, self._client_id, self._topic, self._protocol = url, client_id, topic, protocol
        self._timeout_s = timeout_s
        self._transport: PahoTransport | None = None
        self._said: int | None = None
        self._events: queue.SimpleQueue[State | bytes] = queue.SimpleQueue()

    def announced(self) -> int | None:
        """Return the broker's own word, None without one."""
        self._connected()
        return self._said

    def passes(self, packet_bytes: int) -> bool:
        """Return whether a PUBLISH of that size comes back."""
        # The mark follows on the same connection: if it comes back alone, the large one was dropped without a word.
        transport, payload_bytes = self._connected(), _payload_bytes(self._topic, packet_bytes)
        transport.publish(self._topic, bytes(payload_bytes))
        transport.publish(self._topic, _MARK)
        came = False
        while True:
            event = self._next()
            if isinstance(event, Disconnected):
                self.close()
                return False
            if event == _MARK:
                return came
            came = came or (isinstance(event, bytes) and len(event) == payload_bytes)

    def close(self) -> None:
        """End the connection, if there is one."""
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close(timeout_s=0.5)

    def _connected(self) -> PahoTransport:
        if self._transport is not None:
            return self._transport
        events: queue.SimpleQueue[State | bytes] = queue.SimpleQueue()
        self._events = events
        transport = self._transport = PahoTransport(
            self._url,
            self._client_id,
            on_message=lambda _topic, payload: events.put(payload),
            on_state=events.put,
            protocol=self._protocol,
            name="hepti-probe",
            max_queued_bytes=MAX_PACKET_BYTES,
        )
        transport.connect(self._timeout_s)
        transport.subscribe([(self._topic, 0)])
        while True:
            event = self._next()
            if isinstance(event, Connected):
                self._said = event.largest_packet_bytes
            elif isinstance(event, Subscribed):
                return transport
            elif isinstance(event, Refused):
                raise RefusedError(f"the broker at {self._url.place} refused to send {self._topic}: {event.reason}")
            elif isinstance(event, Disconnected):
                raise NetworkError(f"the broker at {self._url.place} closed the connection: {event.reason}")

    def _next(self) -> State | bytes:
        try:
            return self._events.get(timeout=self._timeout_s)
        except queue.Empty:
            raise NetworkError(
                f"nothing came back from the broker at {self._url.place} on {self._topic} within {self._timeout_s:g} s"
            ) from None


def _payload_bytes(topic: str, packet_bytes: int) -> int:
    """Return the payload with which a PUBLISH at QoS 0 has `packet_bytes` (or one less, where the header grows)."""
    payload = packet_bytes - publish_bytes(topic, 0, 0)
    while publish_bytes(topic, payload, 0) > packet_bytes:
        payload -= 1
    return payload
