"""A client's state in one MQTT connection, without I/O, and the loop that reads its socket.

The connection to the broker (`link.py`) and the subscription at a peer's endpoint (`peer.py`) use both.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from hepti_mqtt.transport import codec
from hepti_mqtt.transport.sockets import Connection, low_water

LOW_WATER: Final = 512 * 1024  # bytes of a payload that wake the reader, instead of every segment
MAX_READS: Final = 64  # of one connection before the next connection's turn


class Granted(NamedTuple):
    """The answer to a SUBSCRIBE."""

    key: Any  #: of `ClientProtocol.subscribe`
    filters: tuple[str, ...]
    codes: bytes  #: one per filter


class Acknowledged(NamedTuple):
    """The broker accepted or (MQTT 5) refused a message of QoS 1."""

    message: Any  #: of `ClientProtocol.publish`
    code: int


class ClientProtocol:
    """A client of MQTT 3.1.1 or 5: packet ids, unanswered packets, and the order of packets."""

    def __init__(self, decoder: codec.Decoder) -> None:
        self.decoder, self.version = decoder, decoder.version
        self.connack: codec.Connack | None = None  #: the answer to CONNECT, None before it
        self.inflight: dict[int, Any] = {}  #: unacknowledged messages of QoS 1 by packet id, in order
        self._subscribing: dict[int, tuple[Any, tuple[str, ...]]] = {}
        self._id = 0

    def encode(self, command: codec.Control) -> bytes:
        """Return a packet in the version of this connection."""
        return codec.encode(command, self.version)

    def subscribe(self, key: Any, filters: Sequence[tuple[str, int]]) -> bytes:
        """Return a SUBSCRIBE to (filter, QoS); its `Granted` carries the key."""
        packet_id = self._next_id()
        self._subscribing[packet_id] = (key, tuple(name for name, _ in filters))
        return self.encode(codec.Subscribe(packet_id, tuple(filters)))

    def unsubscribe(self, names: Sequence[str]) -> bytes:
        """Return an UNSUBSCRIBE."""
        return self.encode(codec.Unsubscribe(self._next_id(), tuple(names)))

    def publish(self, message: Any, topic: str, nbytes: int, qos: int = 0, retain: bool = False) -> bytes:
        """Return the PUBLISH header of a payload; at QoS 1 its `Acknowledged` carries the message."""
        packet_id = self._next_id() if qos else 0
        if qos:
            self.inflight[packet_id] = message
        return codec.publish_head(topic, nbytes, self.version, qos=qos, retain=retain, packet_id=packet_id)

    def accept(self, event: codec.Event) -> codec.Event | Granted | Acknowledged | None:
        """Match a decoder's event with its request; return None for an unexpected answer. Raises Malformed."""
        if (self.connack is None) is not isinstance(event, codec.Connack):
            raise codec.Malformed(f"{type(event).__name__.upper()} is out of place")
        match event:
            case codec.Connack():
                self.connack = event
            case codec.Suback(packet_id, codes):
                key, filters = self._subscribing.pop(packet_id, (None, ()))
                if key is None:
                    return None
                if len(codes) != len(filters):
                    raise codec.Malformed(f"{len(codes)} answers to {len(filters)} filters")
                return Granted(key, filters, codes)
            case codec.Puback(packet_id, code):
                message = self.inflight.pop(packet_id, None)
                return None if message is None else Acknowledged(message, code)
        return event

    def _next_id(self) -> int:
        while True:
            self._id = self._id % 65_535 + 1
            if self._id not in self.inflight and self._id not in self._subscribing:
                return self._id


class Reader:
    """Reads one connection. sock: its socket, for low-water marks; None with TLS or a WebSocket."""

    def __init__(self, decoder: codec.Decoder, connection: Connection, sock: socket.socket | None) -> None:
        self._decoder, self._connection, self._sock = decoder, connection, sock
        self.nbytes = 0  #: received bytes, headers included
        self.low = 1  #: the socket's low-water mark

    def read(self, take: Callable[[codec.Event], None], pending: Callable[[], int] | None = None) -> bool:
        """Read available bytes, at most one large payload; return whether more may be available.

        pending: returns the decrypted bytes that TLS buffers. Raises OSError at the end of the stream, Malformed.
        """
        decoder, receive = self._decoder, self._connection.recv_into
        is_left = False
        try:
            for _ in range(MAX_READS):
                room = decoder.buffer()
                nbytes = receive(room)
                if not nbytes:
                    raise ConnectionResetError("it hung up")
                self._handle(nbytes, take)
                if pending is not None:
                    if not decoder.missing and not pending():
                        break
                elif not decoder.missing or nbytes < room.nbytes:
                    break
            else:
                is_left = True
        except BlockingIOError:
            pass
        self._wake_for_the_rest()
        return is_left

    def take(self, data: memoryview, take: Callable[[codec.Event], None]) -> None:
        """Process bytes that other code read from the socket. Raises Malformed."""
        while data.nbytes:
            room = self._decoder.buffer()[: data.nbytes]
            room[:] = data[: room.nbytes]
            self._handle(room.nbytes, take)
            data = data[room.nbytes :]
        self._wake_for_the_rest()

    def _handle(self, nbytes: int, take: Callable[[codec.Event], None]) -> None:
        self.nbytes += nbytes
        event = self._decoder.received(nbytes)
        while event is not None:
            take(event)
            event = self._decoder.next_event()

    def _wake_for_the_rest(self) -> None:
        low = min(max(self._decoder.missing, 1), LOW_WATER)
        if self._sock is not None and low != self.low:
            low_water(self._sock, low)
            self.low = low
