"""One connection to a broker, from CONNECT to its loss, on a non-blocking socket.

The sending thread writes a message without a copy if the kernel accepts it. Payloads are received into reused memory.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from math import inf
from typing import Final

from hepti_mqtt.core.errors import ConfigError, HeptiError, NetworkError, RefusedError
from hepti_mqtt.transport import codec, sockets
from hepti_mqtt.transport.base import KEEPALIVE_S, UNAVAILABLE, VersionRefused, absent
from hepti_mqtt.transport.client_protocol import Acknowledged, ClientProtocol, Granted, Reader
from hepti_mqtt.transport.url import BrokerUrl
from hepti_mqtt.transport.websocket import WebSocketConnection, shake_hands

TURN_S: Final = 1.0
CONTROL_BYTES: Final = 70_000  # the longest topic that MQTT allows, with its header
SENT_TOGETHER: Final = 64  # parts of one sendmsg call
_VERSIONS: Final = {4: "3.1.1", 5: "5"}
_CHECK: Final = "check the URL's port and scheme (mqtt, mqtts, ws or wss)"
_WRONG_VERSION: Final = frozenset({1, 132})
_LEAVING: Final = frozenset({139, 142, 152})  # server shutting down, session taken over, administrative action

Taken = codec.Publish | Granted | Acknowledged


class Lost(Exception):
    """The connection ended; the text is the reason."""

    def __init__(self, text: str, *, hung_up: bool = False, malformed: bool = False) -> None:
        super().__init__(text)
        self.hung_up = hung_up  #: the broker closed it without a shutdown reason
        self.malformed = malformed  #: the broker sent a malformed packet


class Link:
    """One connection: `open` it, then call `turn` on one thread until `Lost`.

    lock: any thread that holds it may send. take(link, event): called with each event after CONNACK.
    bulk: for tensors, i.e. large socket buffers and short topics only.
    """

    def __init__(
        self,
        url: BrokerUrl,
        connect: codec.Connect,
        lock: threading.RLock,
        wake: sockets.Wake,
        take: Callable[[Link, Taken], None],
        *,
        bulk: bool = False,
    ) -> None:
        self._url, self._connect_packet, self._lock, self._wake, self._take = url, connect, lock, wake, take
        self._bulk, self._version = bulk, _VERSIONS[connect.version]
        control_bytes = codec.MAX_CONTROL if bulk else CONTROL_BYTES
        decoder = codec.Decoder(codec.FROM_BROKER, version=connect.version, control_bytes=control_bytes, any_topic=True)
        self.protocol = ClientProtocol(decoder)
        self.up_at = self.heard_at = -inf  #: when CONNACK came, and when bytes last came, by `time.monotonic`
        self._is_up = False
        self._early: list[Taken] = []  # events that arrived together with CONNACK
        self._ended = Lost("the socket is closed")
        self._out: deque[memoryview] = deque()
        #: End positions of QoS 0 messages in the outgoing stream, and their bytes.
        self._ends: deque[tuple[int, int]] = deque()
        self.unwritten_bytes = 0  #: bytes of queued QoS 0 messages
        self._queued = self._written = 0  # stream positions: end of the queue, end of the kernel's part
        self._sock: socket.socket | None = None
        self._connection: sockets.Connection | None = None
        self._buffered: sockets.BufferedConnection | None = None  # the connection, if it is TLS or a WebSocket
        self._reader: Reader | None = None
        self._poll = select.poll()
        self._poll.register(wake.fileno(), select.POLLIN)
        self._events = 0
        self._ping_at = self._answer_by = inf
        self._ping_end = self._gone = 0  # stream positions: end of PINGREQ, last one that the broker's host received
        self._flowed = False  # whether bytes arrived or the kernel accepted bytes since the last check

    @property
    def local(self) -> bool:
        """Return whether the broker is on this machine."""
        return sockets.local(self._sock)

    @property
    def unwritten(self) -> int:
        """Return the number of queued QoS 0 messages."""
        return len(self._ends)

    @property
    def received_bytes(self) -> int:
        """Return the number of received bytes, also of messages that have not arrived completely."""
        reader = self._reader
        return 0 if reader is None else reader.nbytes

    def open(self, timeout_s: float, patience_s: float, stop: Callable[[], bool]) -> None:
        """Connect within `timeout_s` and wait `patience_s` for the CONNACK.

        Raises NetworkError, RefusedError, or VersionRefused if another version may help.
        """
        until = time.monotonic() + timeout_s
        self._connect(timeout_s)
        deadline = min(until, time.monotonic() + patience_s)
        while (connack := self.protocol.connack) is None:
            left = deadline - time.monotonic()
            if left <= 0 or stop():
                self.close()
                raise VersionRefused(
                    f"{self._url.place} accepts connections but does not answer as a broker of MQTT {self._version} "
                    f"within {patience_s:.2g} s; {_CHECK}",
                    is_sure=False,
                )
            try:
                self.turn(left)
            except Lost as error:
                self._ended = error
                if self.protocol.connack is None:
                    self.close()
                    raise VersionRefused(
                        f"{self._url.place} closed the connection before answering ({error}); {_CHECK}",
                        is_sure=error.hung_up,
                    ) from error
        if connack.code:
            self.close()
            raise self._not_let_in(connack.code)
        self._is_up, self.up_at = True, time.monotonic()
        self.heard_at = self.up_at
        self._ping_at = self.up_at + KEEPALIVE_S / 2

    def _not_let_in(self, code: int) -> HeptiError:
        broker, user = f"the broker at {self._url.place}", self._url.user
        if code in _WRONG_VERSION:
            return VersionRefused(f"{broker} does not speak MQTT {self._version}", is_sure=True)
        if code in UNAVAILABLE:
            return NetworkError(f"{broker} cannot take us now ({codec.reason(code)}); try again later")
        who = f"user {user!r}" if user else "a connection without user"
        return RefusedError(
            f"{broker} refused {who}: {codec.reason(code)}; check user and password in the broker's URL"
        )

    def turn(self, timeout_s: float) -> None:
        """Wait for the socket or a wake-up, then read and write. Raises `Lost`."""
        if self._is_up:
            early, self._early = self._early, []
            for taken in early:
                self._take(self, taken)
        if self._connection is None:
            raise self._ended
        events = select.POLLIN | (select.POLLOUT if self._out else 0)
        if events != self._events:
            self._poll.register(self._connection.fileno(), events)
            self._events = events
        pending = self._buffered is not None and self._buffered.pending() > 0
        # While PINGRESP is due, read below the low-water mark too: a slow link may need longer than the deadline.
        readable = pending or self._answer_by < inf
        for fd, occurred in self._poll.poll(0 if pending else min(timeout_s, TURN_S) * 1000):
            if fd == self._wake.fileno():
                self._wake.clear()
            else:
                self._flowed |= bool(occurred & select.POLLOUT)
                readable = readable or bool(occurred & ~select.POLLOUT)  # reading raises hang-ups and errors
        if readable:
            self._guarded(self._read)
            sockets.acknowledge_soon(self._sock)
        self._flush()
        self._keep_alive()

    def send(self, parts: list[memoryview], copied: bool, counted: bool = True) -> None:
        """Send a message, on the calling thread if the queue is empty.

        copied: copy unsent bytes, so that the caller may reuse the payload. counted: QoS 0, i.e. `close` counts a loss.
        Over TLS or a WebSocket only the network thread sends, because it cannot read and write concurrently.
        The network thread reports a lost connection.
        """
        nbytes = sum(part.nbytes for part in parts)
        self._queued += nbytes
        if counted:
            self._ends.append((self._queued, nbytes))
            self.unwritten_bytes += nbytes
        if self._out or self._buffered is not None or self._connection is None:
            self._out.extend((memoryview(b"".join(parts)),) if copied else parts)
            self._wake.set()
            return
        self._out.extend(parts)
        try:
            self._write()
        except BlockingIOError:
            if copied:
                self._out = deque((memoryview(b"".join(self._out)),))
            self._wake.set()
        except OSError:
            self._out.clear()

    def say(self, data: bytes) -> None:
        """Queue a control packet; any thread may call it."""
        with self._lock:
            self._queued += len(data)
            self._out.append(memoryview(data))
            self._wake.set()

    def disconnect(self, deadline: float) -> None:
        """Write the queue and DISCONNECT until the deadline, and wait for the broker to close."""
        self.say(self.protocol.encode(codec.Disconnect()))
        while self._out and time.monotonic() < deadline:
            self.turn(max(deadline - time.monotonic(), 0.0))
        sockets.linger(self._sock, deadline)

    def close(self) -> int:
        """Close the socket without DISCONNECT; return the number of queued QoS 0 messages."""
        with self._lock:
            if self._connection is not None:
                with suppress(KeyError):
                    self._poll.unregister(self._connection.fileno())
                self._connection.close()
            elif self._sock is not None:
                self._sock.close()
            self._sock = self._connection = self._buffered = self._reader = None
            lost = len(self._ends)
            self._out.clear()
            self._ends.clear()
            return lost

    def _connect(self, timeout_s: float) -> None:
        url = self._url
        try:
            self._sock = sock = sockets.connect_any(url.host, url.port, timeout_s)
            connection: sockets.Connection = sock
            context = url.ssl_context()
            if context is not None:  # the handshake has the socket's timeout
                self._sock = sock = secured = context.wrap_socket(sock, server_hostname=url.host)
                connection = self._buffered = sockets.TlsConnection(secured)
            if url.path:
                websocket = shake_hands(sock, url.place, url.path, timeout_s)
                connection = self._buffered = WebSocketConnection(connection, websocket)
            self._connection = connection
            sockets.tune(sock)
            if self._bulk:
                sockets.tune_sender(sock)
                sockets.tune_receiver(sock)
        except ConfigError:
            self.close()
            raise
        except (OSError, UnicodeError) as error:
            self.close()
            raise absent(url, error) from error
        plain = self._sock if self._buffered is None else None
        self._reader = Reader(self.protocol.decoder, self._connection, plain)
        self.say(self.protocol.encode(self._connect_packet))

    def _guarded(self, step: Callable[[], None]) -> None:
        try:
            step()
        except BlockingIOError:
            return
        except Lost:
            self._shut()
            raise
        except (codec.Malformed, MemoryError, OSError) as error:
            self._shut()
            by_broker = isinstance(error, OSError) and not isinstance(error, TimeoutError)
            raise Lost(
                str(error) or repr(error), hung_up=by_broker, malformed=isinstance(error, codec.Malformed)
            ) from error

    def _shut(self) -> None:
        """Close the connection; `close` counts the queue later."""
        assert self._connection is not None
        with self._lock, suppress(KeyError):
            self._poll.unregister(self._connection.fileno())
            self._connection.close()
            self._connection = None

    def _flush(self) -> None:
        with self._lock:
            if self._out:
                self._guarded(self._write)

    def _write(self) -> None:
        assert self._connection is not None
        out = self._out
        while out:
            sent = self._connection.sendmsg(list(islice(out, SENT_TOGETHER)))
            self._written += sent
            while out and sent >= out[0].nbytes:
                sent -= out.popleft().nbytes
            if sent:
                out[0] = out[0][sent:]
            while self._ends and self._ends[0][0] <= self._written:
                self.unwritten_bytes -= self._ends.popleft()[1]

    def _keep_alive(self) -> None:
        now = time.monotonic()
        if self._answer_by < inf and (self._goes_out() or self._flowed):
            # Large messages may delay PINGREQ in our queue and PINGRESP in the broker's queue.
            self._answer_by = now + KEEPALIVE_S
        self._flowed = False
        if now >= self._answer_by:
            self._shut()
            raise Lost(f"the broker has not answered for {KEEPALIVE_S} s")
        if now >= self._ping_at:
            self._ping_at = now + KEEPALIVE_S / 2
            with self._lock:
                self.say(self.protocol.encode(codec.Pingreq()))
                if self._answer_by == inf:
                    self._answer_by, self._ping_end = now + KEEPALIVE_S, self._queued
                self._flush()
            self._goes_out()

    def _goes_out(self) -> bool:
        """Return whether the broker's host acknowledged more bytes up to PINGREQ since the last call.

        Megabytes in our send buffer may precede PINGREQ. Bytes after PINGREQ prove nothing: the kernel of a stopped
        broker still accepts them.
        """
        left = None if self._connection is None else sockets.unacknowledged(self._connection)
        if left is None:
            return False
        before, self._gone = self._gone, min(self._written - left, self._ping_end)
        return self._gone > before

    def _read(self) -> None:
        reader = self._reader
        assert reader is not None
        before = reader.nbytes
        try:
            reader.read(self._accept, None if self._buffered is None else self._buffered.pending)
        finally:
            if reader.nbytes > before:
                self._flowed, self.heard_at = True, time.monotonic()

    def _accept(self, event: codec.Event) -> None:
        match self.protocol.accept(event):
            case codec.Publish() | Granted() | Acknowledged() as taken:
                if self._is_up:
                    self._take(self, taken)
                else:
                    self._early.append(taken)
            case codec.Pingresp():
                self._answer_by = inf
            case codec.Disconnect(code):
                text = f"the broker closed the connection: {codec.reason(code)}"
                raise Lost(text, hung_up=code not in _LEAVING)
            case codec.Connack(properties=properties):
                largest = properties.get(codec.MAXIMUM_PACKET_SIZE, 1)
                if not isinstance(largest, int) or not 0 < largest <= codec.MAX_LENGTH:
                    self.protocol.connack = None
                    raise codec.Malformed(f"a broker that takes packets of at most {largest!r} bytes")
