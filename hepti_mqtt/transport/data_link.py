"""One connection to a broker for tensors alone: QoS 0 over MQTT 3.1.1, without a copy that can be spared.

paho joins a message with its header, and reads what comes in pieces that it joins again. Here a payload goes out as it
lies, and what comes is received where it stays, in memory that is used again. It is driven as `Link` is.
"""

from __future__ import annotations

import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from hepti_mqtt.errors import NetworkError
from hepti_mqtt.transport.codec import (
    FAILURE,
    FROM_BROKER,
    Connack,
    Connect,
    Control,
    Decoder,
    Disconnect,
    Malformed,
    Pingreq,
    Pingresp,
    Puback,
    Publish,
    Suback,
    Subscribe,
    Unsubscribe,
    encode,
    publish_head,
)
from hepti_mqtt.transport.link import (
    KEEPALIVE_S,
    MISC_S,
    Body,
    LinkLost,
    Listener,
    VersionRefused,
    absent,
    hung_up,
    refused,
)
from hepti_mqtt.transport.link import silent as silent_broker
from hepti_mqtt.transport.sockets import (
    Connection,
    TlsConnection,
    local,
    low_water,
    mesh_possible,
    tune_receiver,
    tune_sender,
    unacknowledged,
)
from hepti_mqtt.transport.url import BrokerUrl
from hepti_mqtt.transport.wake import Wake

LOW_WATER: Final = 512 * 1024  # wake for so much of a payload, not for every segment
MAX_READS: Final = 64  # before the caller has its turn
_REASONS: Final = {2: "client identifier rejected", 4: "bad user name or password", 5: "not authorised"}
_WRONG_VERSION, _UNAVAILABLE = 1, 3


class Unreadable(LinkLost):
    """The broker sent what this link does not read; paho may."""


class DataLink:
    """A connection as `Link` is one; payloads that arrive are views, whose memory is used again once nobody has them.

    Every message, and every subscription, is of QoS 0.
    """

    protocol: Final = 4
    largest_packet_bytes: Final = None
    resumed: Final = False  # nothing is kept for a link of tensors
    window: Final = 0

    def __init__(self, url: BrokerUrl, client_id: str, *, listener: Listener, wake: Wake) -> None:
        self._url, self._client_id, self._listener, self._wake = url, client_id, listener, wake
        self._decoder = Decoder(FROM_BROKER)
        self._connack: int | None = None
        self.sending = threading.RLock()  # who has it may send: any thread, but one at a time
        self._out: list[memoryview] = []
        self._sock: socket.socket | None = None
        self._connection: Connection | None = None
        self._secured: TlsConnection | None = None
        self._poll = select.poll()
        self._poll.register(wake.fileno(), select.POLLIN)
        self._events, self._low, self._id = 0, 1, 0
        self._ping_at = self._answer_by = float("inf")
        self._written = 0  # bytes that the kernel has taken
        self._ping_end = self._gone = 0  # where PINGREQ ends among them, and how far the broker's kernel was at a look
        self.cut = False  # whether a message was only half out when the socket was closed
        self._flowed = False  # whether bytes came, or the kernel took some of what waited, since the last look

    def open(self, timeout_s: float, stop: Callable[[], bool]) -> None:
        """Connect and wait for the CONNACK; raises as `Link.open` does."""
        deadline = time.monotonic() + timeout_s
        self._connect(timeout_s)
        while self._connack is None:
            left = deadline - time.monotonic()
            if left <= 0 or stop():
                self.close()
                raise silent_broker(self._url, self.protocol, timeout_s)
            try:
                self.turn(left)
            except LinkLost as error:
                raise hung_up(self._url, error) from error
        if self._connack:
            self.close()
            if self._connack == _WRONG_VERSION:
                raise VersionRefused(f"the broker at {self._url.place} does not speak MQTT 3.1.1")
            if self._connack == _UNAVAILABLE:
                raise NetworkError(f"the broker at {self._url.place} cannot take us now; try again later")
            raise refused(self._url, _REASONS.get(self._connack, f"code {self._connack}"))
        self._ping_at = time.monotonic() + KEEPALIVE_S / 2

    @property
    def local(self) -> bool:
        """Return whether the broker is on this machine."""
        return local(self._sock)

    @property
    def busy(self) -> bool:
        """Return whether something is still to be written."""
        return bool(self._out)

    def turn(self, timeout_s: float) -> bool:
        """Wait for the socket or a wake-up, read and write; return whether it was woken. Raises `LinkLost`."""
        if self._connection is None:
            raise LinkLost("the socket is closed")
        events = select.POLLIN | (select.POLLOUT if self._out else 0)
        if events != self._events:
            self._poll.register(self._connection.fileno(), events)
            self._events = events
        pending = self._secured is not None and self._secured.pending() > 0
        # Low water must not hide that bytes flow: over a slow link it may take longer than an answer may.
        woken, readable = False, pending or self._answer_by < float("inf")
        for fd, found in self._poll.poll(0 if pending else min(timeout_s, MISC_S) * 1000):
            if fd == self._wake.fileno():
                self._wake.clear()
                woken = True
            else:
                self._flowed |= bool(found & select.POLLOUT)
                readable = readable or bool(found & ~select.POLLOUT)  # hang-ups and errors show when reading
        if readable:
            self._guarded(self._read)
        self.flush()
        self._keep_alive()
        return woken

    def publish_now(self, topic: str, parts: Sequence[Body], first: Callable[[], bool]) -> bool:
        """Send a message from any thread, its parts as they lie; return whether it was taken, False if others wait.

        first: whether no message waits before this one. What the kernel does not take at once is copied, and the
        thread that turns sends it. Over TLS that thread sends everything: one connection cannot read and write at once.
        """
        with self.sending:
            if self._connection is None or self._secured is not None or self._out or not first():
                return False
            views = [memoryview(part) for part in parts]
            head = memoryview(publish_head(topic, sum(view.nbytes for view in views), self.protocol))
            self._out = [head, *(view.cast("B") for view in views if view.nbytes)]
            try:
                self._write()
            except BlockingIOError:
                self._out = [memoryview(b"".join(self._out))]
                self._wake.set()
            except OSError:  # the thread that turns sees it too
                self._out.clear()
                return False
            return True

    def publish(self, topic: str, payload: bytes, qos: int, retain: bool) -> int:
        """Queue a message for `flush`; its payload must not change until it is written."""
        if qos or retain:
            raise ValueError("tensors are published at QoS 0 and not retained")
        self._out += [memoryview(publish_head(topic, len(payload), self.protocol)), memoryview(payload)]
        return 0

    def subscribe(self, filters: tuple[tuple[str, int], ...]) -> int:
        """Send a SUBSCRIBE at QoS 0; return its packet id."""
        self._say(encode(Subscribe(self._next_id(), tuple((name, 0) for name, _ in filters))))
        return self._id

    def unsubscribe(self, filters: tuple[str, ...]) -> None:
        """Send an UNSUBSCRIBE."""
        self._say(encode(Unsubscribe(self._next_id(), filters)))

    def acknowledge(self, mid: int) -> None:
        """Do nothing: what comes at QoS 0 is kept by nobody."""

    def flush(self) -> None:
        """Write what the socket takes. Raises `LinkLost`."""
        with self.sending:
            if self._out and self._connection is not None:
                self._guarded(self._write)

    def disconnect(self, timeout_s: float) -> None:
        """Write what is queued and DISCONNECT, for at most `timeout_s`, and close the socket."""
        deadline = time.monotonic() + timeout_s
        try:
            self._say(encode(Disconnect()))
            while self._out and time.monotonic() < deadline:
                self.turn(max(deadline - time.monotonic(), 0.0))
        except LinkLost:
            return
        finally:
            self.close()

    def close(self) -> None:
        """Close the socket without a word."""
        with self.sending:
            if self._connection is not None:
                with suppress(KeyError):
                    self._poll.unregister(self._connection.fileno())
                self._connection.close()
            elif self._sock is not None:
                self._sock.close()
            self._sock = self._connection = self._secured = None
            self.cut = self.cut or self.busy
            self._out.clear()

    # -- the connection ----------------------------------------------------------------------------------------------

    def _connect(self, timeout_s: float) -> None:
        url = self._url
        try:
            self._sock = sock = socket.create_connection((url.host, url.port), timeout_s)
            context = url.ssl_context()
            if context is not None:  # shakes hands at once, within the same time
                self._sock = secured = context.wrap_socket(sock, server_hostname=url.host)
                self._connection = self._secured = TlsConnection(secured)
            else:
                self._connection = sock
            tune_sender(self._sock)
            tune_receiver(self._sock)
        except (OSError, UnicodeError) as error:
            self.close()
            raise absent(url, error) from error
        password = None if url.password is None else url.password.encode()
        asked = Connect(self.protocol, self._client_id, url.user, password, keepalive_s=KEEPALIVE_S)
        self._out.append(memoryview(encode(asked)))

    def _guarded(self, step: Callable[[], None]) -> None:
        try:
            step()
        except BlockingIOError:
            return
        except (Malformed, ssl.SSLError, OSError) as error:
            self.close()
            lost = Unreadable if isinstance(error, Malformed) else LinkLost
            raise lost(str(error) or repr(error)) from error

    def _say(self, data: bytes) -> None:
        with self.sending:
            if self._connection is None:
                raise LinkLost("the socket is closed")
            self._out.append(memoryview(data))
            self.flush()

    def _next_id(self) -> int:
        self._id = self._id % 65_535 + 1
        return self._id

    def _write(self) -> None:
        assert self._connection is not None
        while self._out:
            sent = self._connection.sendmsg(self._out[:64])
            self._written += sent
            while self._out and sent >= self._out[0].nbytes:
                sent -= self._out.pop(0).nbytes
            if sent:
                self._out[0] = self._out[0][sent:]

    def _keep_alive(self) -> None:
        now = time.monotonic()
        if self._answer_by < float("inf") and (self._goes_out() or self._flowed):
            # PINGREQ waits behind what we send, and PINGRESP behind what the broker has for us: both may take long.
            self._answer_by = now + KEEPALIVE_S
        self._flowed = False
        if now >= self._answer_by:
            self.close()
            raise LinkLost(f"the broker has not answered for {KEEPALIVE_S} s")
        if now >= self._ping_at:
            self._ping_at = now + KEEPALIVE_S / 2
            self._ping(now)

    def _ping(self, now: float) -> None:
        with self.sending:
            self._say(encode(Pingreq()))
            if self._answer_by == float("inf"):
                self._answer_by = now + KEEPALIVE_S
                self._ping_end = self._written + sum(part.nbytes for part in self._out)
        self._goes_out()

    def _goes_out(self) -> bool:
        """Return whether the broker's kernel has taken more of what ends with PINGREQ since the last look.

        It may lie behind megabytes in our own, which asks for nothing more meanwhile. What is sent after it proves
        nothing: kernels take that for long after a broker has stopped.
        """
        left = None if self._connection is None else unacknowledged(self._connection)
        if left is None:
            return False
        before, self._gone = self._gone, min(self._written - left, self._ping_end)
        return self._gone > before

    # -- what comes --------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        """Take what is there, at most one large payload."""
        decoder, connection = self._decoder, self._connection
        assert connection is not None
        try:
            for _ in range(MAX_READS):
                room = decoder.buffer()
                nbytes = connection.recv_into(room)
                if not nbytes:
                    raise OSError("it hung up")
                self._flowed = True
                decoder.received(nbytes)
                while (event := decoder.next_event()) is not None:
                    if isinstance(event, Publish):
                        self._on_publish(event)
                    else:
                        self._on_control(event)
                if not decoder.missing and nbytes < room.nbytes and self._secured is None:
                    break
        finally:
            low = min(max(decoder.missing, 1), LOW_WATER)
            if low != self._low and self._secured is None and self._sock is not None:
                low_water(self._sock, low)
                self._low = low

    def _on_publish(self, message: Publish) -> None:
        if message.qos:  # though every subscription is of QoS 0
            self._say(encode(Puback(message.packet_id)))
        self._listener.on_message(message.topic, message.payload, 0, 0, False)

    def _on_control(self, event: Control) -> None:
        match event:
            case Connack(code) if self._connack is None:
                self._connack = code
            case Suback(packet_id, codes):
                refusals = tuple("the broker does not allow it" if code >= FAILURE else None for code in codes)
                self._listener.on_subscribed(packet_id, refusals)
            case Pingresp():
                self._answer_by = float("inf")
            case Connack() | Puback() | Disconnect():
                raise Malformed(f"{type(event).__name__.upper()} is out of place")


def data_link_possible() -> bool:
    """Return whether this machine has what such a link needs: Linux."""
    return mesh_possible()
