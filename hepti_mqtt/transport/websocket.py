"""MQTT over a WebSocket (RFC 6455): binary frames on a plain or TLS socket, coded by wsproto."""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from hepti_mqtt.core.errors import ConfigError
from hepti_mqtt.transport.codec import Buffer, Malformed
from hepti_mqtt.transport.sockets import BufferedConnection, Connection, TlsConnection

if TYPE_CHECKING:
    from wsproto import WSConnection

FRAME_BYTES: Final = 65_536  # some brokers refuse a frame above 1 MiB, so a large packet spans several frames
_READ_BYTES: Final = 65_536


def shake_hands(sock: socket.socket, place: str, path: str, timeout_s: float) -> WSConnection:
    """Open a WebSocket at `path` on a blocking socket.

    Raises OSError if the broker refuses or does not answer in time, ConfigError without wsproto.
    """
    try:
        from wsproto import ConnectionType, WSConnection
        from wsproto.events import AcceptConnection, RejectConnection, Request
        from wsproto.utilities import RemoteProtocolError
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"ws:// and wss:// need {error.name}: in the checkout, pip install '.[websocket]', or use the broker's "
            "port for mqtt:// or mqtts://"
        ) from error
    until = time.monotonic() + timeout_s
    websocket = WSConnection(ConnectionType.CLIENT)
    sock.sendall(websocket.send(Request(host=place, target=path, subprotocols=["mqtt"])))
    while True:
        sock.settimeout(max(until - time.monotonic(), 0.001))
        data = sock.recv(_READ_BYTES)
        try:
            websocket.receive_data(data or None)
            for event in websocket.events():
                if isinstance(event, AcceptConnection):
                    return websocket
                if isinstance(event, RejectConnection):
                    raise ConnectionRefusedError(f"no WebSocket at {path}: HTTP status {event.status_code}")
        except RemoteProtocolError as error:
            raise ConnectionRefusedError(f"no WebSocket at {path}: {error}") from error
        if not data:
            raise ConnectionRefusedError(f"no WebSocket at {path}: it hung up")


class WebSocketConnection(BufferedConnection):
    """Bytes of MQTT as binary frames."""

    fileno: Callable[[], int]
    close: Callable[[], None]

    def __init__(self, line: Connection, websocket: WSConnection) -> None:
        self._line, self._websocket = line, websocket
        self.fileno, self.close = line.fileno, line.close
        self._decrypted = line.pending if isinstance(line, TlsConnection) else None
        self._read: deque[memoryview] = deque()  #: decoded payloads for `recv_into`
        self._read_bytes = 0  #: of these payloads
        #: Encoded frames that are not sent yet, and the payload bytes in them that `sendmsg` has not reported.
        self._out = bytearray()
        self._owed = 0
        self._is_over = False

    def pending(self) -> int:
        """Return the number of buffered bytes, decoded or decrypted."""
        return self._read_bytes + (0 if self._decrypted is None else self._decrypted())

    def sendmsg(self, parts: Sequence[Buffer], /) -> int:
        """Send a prefix of the parts; return its length.

        After BlockingIOError call it again with the same bytes: part of their frame is sent.
        """
        from wsproto.events import BytesMessage

        if self._is_over:
            raise ConnectionResetError("it hung up")
        if not self._owed:
            payload = bytearray()
            for part in parts:
                payload += memoryview(part).cast("B")[: FRAME_BYTES - len(payload)]
                if len(payload) == FRAME_BYTES:
                    break
            self._out += self._websocket.send(BytesMessage(bytes(payload)))
            self._owed = len(payload)
        self._flush()
        sent, self._owed = self._owed, 0
        return sent

    def recv_into(self, room: memoryview, /) -> int:
        """Receive into memory; 0 at the end of the stream."""
        while not self._read:
            self._take()  # bytes may have arrived with the handshake
            if self._read:
                break
            if self._is_over:
                return 0
            self._websocket.receive_data(self._line.recv(_READ_BYTES) or None)
        payload = self._read[0]
        nbytes = min(room.nbytes, payload.nbytes)
        room[:nbytes] = payload[:nbytes]
        self._read_bytes -= nbytes
        if nbytes == payload.nbytes:
            self._read.popleft()
        else:
            self._read[0] = payload[nbytes:]
        return nbytes

    def _take(self) -> None:
        """Process received frames. Raises Malformed for a text frame."""
        from wsproto.events import BytesMessage, CloseConnection, Ping, TextMessage

        for event in self._websocket.events():
            match event:
                case BytesMessage(data=data):
                    if data:
                        self._read.append(memoryview(data))
                        self._read_bytes += len(data)
                case Ping() if not self._out:  # RFC 6455 requires an answer to the latest ping only
                    self._out += self._websocket.send(event.response())
                    with suppress(BlockingIOError):  # `sendmsg` sends the rest
                        self._flush()
                case CloseConnection():
                    self._is_over = True
                case TextMessage():
                    raise Malformed("MQTT in text frames")

    def _flush(self) -> None:
        while self._out:
            sent = self._line.send(self._out)
            del self._out[:sent]
