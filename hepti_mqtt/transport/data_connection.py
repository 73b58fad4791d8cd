"""The data connection to a broker, for tensors alone: QoS 0 over MQTT 3.1.1, without a copy that can be spared.

paho joins a message with its header, and reads what comes in pieces that it joins again. Here a payload goes out as it
lies, on the thread that sends it, and what comes is received where it stays, in memory that is used again.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

from hepti_mqtt.errors import HeptiError, NetworkError
from hepti_mqtt.protocol.topics import publish_bytes
from hepti_mqtt.transport.base import (
    KEEPALIVE_S,
    MAX_QUEUED_BYTES,
    UNAVAILABLE,
    Backoff,
    Body,
    Connected,
    Counts,
    Disconnected,
    OnMessage,
    OnState,
    OnTaken,
    Receipt,
    Refused,
    State,
    Subscribed,
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
from hepti_mqtt.transport.codec import (
    FAILURE,
    FROM_BROKER,
    Connack,
    Connect,
    Control,
    Decoder,
    Disconnect,
    Event,
    Malformed,
    Pingreq,
    Pingresp,
    Puback,
    Publish,
    Suback,
    Subscribe,
    Unsuback,
    Unsubscribe,
    encode,
    publish_head,
)
from hepti_mqtt.transport.sockets import (
    Connection,
    TlsConnection,
    acknowledge_soon,
    connect_any,
    local,
    low_water,
    mesh_possible,
    tune_receiver,
    tune_sender,
    unacknowledged,
)
from hepti_mqtt.transport.url import BrokerUrl

PROTOCOL: Final = 4
LOW_WATER: Final = 512 * 1024  # wake for so much of a payload, not for every segment
MAX_READS: Final = 64  # before the caller has its turn
TURN_S: Final = 1.0
SUBACK_S: Final = 5.0
RECONNECT_TIMEOUT_S: Final = 5.0
FAREWELL_S, AWAY_S = 2.0, 0.3  # how long `close` waits for the thread beyond its time-out, and while there is no broker
_REASONS: Final = {2: "client identifier rejected", 4: "bad user name or password", 5: "not authorised"}
_WRONG_VERSION: Final = 1
_log = logging.getLogger(__name__)


class Lost(Exception):
    """The connection ended; the text says why."""


class DataConnection:
    """A connection to one broker for tensors, with its own network thread; it is restored after a loss.

    on_message(topic, payload): payloads are views of memory that is used again once nobody refers to it. on_message,
    on_state: called on the network thread; they must only hand over. max_queued_bytes: bound of what waits for the
    network; one message larger than that is taken when nothing else waits. Every message, and every subscription, is of
    QoS 0: a message without a connection, or beyond the bound, is counted as lost.
    """

    def __init__(
        self,
        url: BrokerUrl,
        client_id: str,
        *,
        on_message: OnMessage,
        on_state: OnState,
        name: str = "data",
        max_queued_bytes: int = MAX_QUEUED_BYTES,
    ) -> None:
        self.url, self.client_id, self.name = url, url.client_id(client_id), name
        self._on_message, self._on_state, self._max_queued_bytes = on_message, on_state, max_queued_bytes
        self._lock = threading.RLock()  # guards what follows, and sending on a link
        self._link: Link | None = None  # that is up
        self._filters: dict[int, tuple[str, ...]] = {}
        self._subscribing: dict[int, int] = {}  # token by packet id
        self._token = 0
        self._counts = Counts()
        self._stop_at: float | None = None  # when the thread must have ended
        self._thread: threading.Thread | None = None
        self._awaited: set[int] = set()  # tokens whose SUBACK comes before Connected
        self._wake = _Wake()

    # -- any thread --------------------------------------------------------------------------------------------------

    def connect(self, timeout_s: float = 5.0) -> None:
        """Connect once and start the network thread, which repairs later losses for ever.

        Raises NetworkError (nobody answers at host:port), RefusedError (user, password, client id) or ConfigError (CA
        file); then connect may be called again. Raises ValueError if already connected or closed.
        """
        if self._stop_at is not None or self._thread is not None:
            raise ValueError("connect a transport once; make a new one after close")
        link = self._open(timeout_s)
        self._thread = threading.Thread(target=self._run, args=(link,), name=self.name, daemon=True)
        self._thread.start()

    def publish(
        self, topic: str, payload: bytes, qos: int = 0, retain: bool = False, taken: OnTaken | None = None
    ) -> None:
        """Send a message; the payload must not change afterwards.

        Raises NetworkError if closed; TypeError for a payload that is not bytes; ValueError for a topic with a
        wildcard, a payload that no packet can carry, QoS above 0 or a message to be retained.
        """
        check_message(topic, payload, qos)
        if qos or retain or taken is not None:
            raise ValueError("tensors are published at QoS 0 and not retained")
        self._send(topic, (payload,), copied=False)

    def send(self, topic: str, *parts: Body) -> None:
        """Send a payload in C-contiguous parts, which are the caller's again on return."""
        self._send(topic, parts, copied=True)

    def _send(self, topic: str, parts: Sequence[Body], copied: bool) -> None:
        views = [memoryview(part) for part in parts]
        nbytes = sum(view.nbytes for view in views)
        head = publish_head(topic, nbytes, PROTOCOL)
        with self._lock:
            if self._stop_at is not None:
                raise NetworkError(f"the connection {self.name} is closed; nothing can be published on it")
            link, size = self._link, len(head) + nbytes
            waiting = 0 if link is None else link.waiting
            if link is None or (waiting and waiting + size > self._max_queued_bytes):
                self._counts.lost += 1
                return
            link.send([memoryview(head), *(view.cast("B") for view in views if view.nbytes)], copied)
            self._counts.published += 1
            self._counts.published_bytes += size

    def subscribe(self, filters: Sequence[tuple[str, int]]) -> int:
        """Subscribe at QoS 0, now and after every reconnection; return the token that `Subscribed` will carry.

        Raises ValueError without filters or for one that MQTT does not allow.
        """
        check_filters(filters)
        with self._lock:
            self._token += 1
            self._filters[self._token] = tuple(name for name, _ in filters)
            if self._link is not None:
                self._subscribe(self._link, self._token)
            return self._token

    def unsubscribe(self, filters: Sequence[str]) -> None:
        """Leave filters and forget them."""
        gone = set(filters)
        with self._lock:
            kept = {token: tuple(f for f in own if f not in gone) for token, own in self._filters.items()}
            self._filters = {token: own for token, own in kept.items() if own}
            if self._link is not None and gone:
                self._link.say(Unsubscribe(self._link.next_id(), tuple(sorted(gone))))

    def acknowledge(self, receipt: Receipt) -> None:
        """Do nothing: no message of QoS 0 is acknowledged."""

    def counts(self) -> Counts:
        """Return a snapshot of the counters."""
        with self._lock:
            return replace(self._counts)

    @property
    def connected(self) -> bool:
        """Return whether the connection is up at this moment."""
        return self._link is not None

    def close(self, last: Will | None = None, timeout_s: float = 2.0) -> None:
        """Send what is queued and `last` (if connected, for at most `timeout_s`), then disconnect cleanly.

        Blocks until the thread has ended, except when called on it or while it looks for a broker that is away. A
        second call does nothing.
        """
        with self._lock:
            if self._stop_at is not None:
                return
            if last is not None:
                self._send(last.topic, (last.payload,), copied=False)
            patience_s = timeout_s + FAREWELL_S if self.connected else AWAY_S
            self._stop_at = time.monotonic() + timeout_s
        self._wake.set()
        thread = self._thread
        if thread is None:
            self._wake.close()
        elif thread is not threading.current_thread():
            thread.join(patience_s)

    # -- the network thread ------------------------------------------------------------------------------------------

    def _stopping(self) -> bool:
        return self._stop_at is not None

    def _open(self, timeout_s: float) -> Link:
        link = Link(self.url, self.client_id, self._lock, self._wake, self._heard)
        link.open(timeout_s, self._stopping)
        return link

    def _run(self, first: Link) -> None:
        backoff, link = Backoff(), first
        try:
            while not self._stopping():
                since = time.monotonic()
                reason = self._serve(link)
                backoff.lost(time.monotonic() - since)
                with self._lock:
                    self._link = None
                    self._counts.lost += link.close()
                    self._subscribing.clear()
                if self._stopping():
                    return
                self._call(self._on_state, Disconnected(reason))
                while not self._stopping():
                    self._wake.pause(backoff.pause_s(), self._stopping)
                    try:
                        link = self._open(RECONNECT_TIMEOUT_S)
                    except (HeptiError, OSError) as error:
                        _log.info("%s: not connected again yet: %s", self.name, error)
                    else:
                        self._counts.reconnections += 1
                        break
        finally:
            link.close()
            self._wake.close()

    def _serve(self, link: Link) -> str:
        """Drive one connection until it is lost or we are closed; return why."""
        since = time.monotonic()
        try:
            with self._lock:
                self._link, self._awaited = link, set(self._filters)
                for token in self._filters:
                    self._subscribe(link, token)
            self._announce(link)
            while not self._stopping():
                link.turn(TURN_S)
                if self._awaited and time.monotonic() - since > SUBACK_S:
                    raise Lost(f"the broker has not acknowledged our subscriptions within {SUBACK_S:g} s")
            link.disconnect(self._stop_at or 0.0)
        except Lost as error:
            return str(error)
        except Exception as error:
            _log.exception("%s: the connection is made again", self.name)
            return repr(error)
        return "closed"

    def _subscribe(self, link: Link, token: int) -> None:
        packet_id = link.next_id()
        self._subscribing[packet_id] = token
        link.say(Subscribe(packet_id, tuple((name, 0) for name in self._filters[token])))

    def _heard(self, link: Link, event: Event) -> None:
        if isinstance(event, Publish):
            self._counts.received += 1
            self._counts.received_bytes += publish_bytes(event.topic, event.payload.nbytes, 0)
            self._call(self._on_message, event.topic, event.payload)
        elif isinstance(event, Suback):
            with self._lock:
                token = self._subscribing.pop(event.packet_id, 0)
                filters = self._filters.get(token, ())
            refusals = [name for name, code in zip(filters, event.codes, strict=False) if code >= FAILURE]
            if token:
                why = "the broker does not allow it"
                self._call(self._on_state, Refused(token, tuple(refusals), why) if refusals else Subscribed(token))
            self._awaited.discard(token)
            self._announce(link)

    def _announce(self, link: Link) -> None:
        if not self._awaited and not link.announced:
            link.announced = True
            self._call(self._on_state, Connected(PROTOCOL, None, link.local))

    def _call(self, callback: Callable[..., None], *arguments: State | str | memoryview) -> None:
        try:
            callback(*arguments)
        except Exception:
            # The connection must outlive a mistake in what it carries.
            _log.exception("%s: a callback failed", self.name)
            self._counts.bad += 1


class Link:
    """One connection, from CONNECT to its loss: `open` it, then `turn` on one thread until `Lost`.

    lock: its holder may send, from any thread. heard(link, event): called with what comes after CONNACK.
    """

    def __init__(
        self, url: BrokerUrl, client_id: str, lock: threading.RLock, wake: _Wake, heard: Callable[[Link, Event], None]
    ) -> None:
        self._url, self._client_id, self._lock, self._wake, self._heard = url, client_id, lock, wake, heard
        self.announced = False
        self._decoder = Decoder(FROM_BROKER)
        self._connack: int | None = None
        self._out: list[memoryview] = []
        self._ends: deque[int] = deque()  # where messages end among the bytes of all packets
        self._queued = self._written = 0  # bytes of all packets, and those that the kernel has taken
        self._sock: socket.socket | None = None
        self._connection: Connection | None = None
        self._secured: TlsConnection | None = None
        self._poll = select.poll()
        self._poll.register(wake.fileno(), select.POLLIN)
        self._events, self._low, self._id = 0, 1, 0
        self._ping_at = self._answer_by = float("inf")
        self._ping_end = self._gone = 0  # where PINGREQ ends, and how far the broker's kernel was at the last look
        self._flowed = False  # whether bytes came, or the kernel took some of what waited, since the last look

    @property
    def local(self) -> bool:
        """Return whether the broker is on this machine."""
        return local(self._sock)

    @property
    def waiting(self) -> int:
        """Return how many bytes wait for the kernel."""
        return self._queued - self._written

    def open(self, timeout_s: float, stop: Callable[[], bool]) -> None:
        """Connect and wait for the CONNACK; raises NetworkError or RefusedError."""
        deadline = time.monotonic() + timeout_s
        self._connect(timeout_s)
        while self._connack is None:
            left = deadline - time.monotonic()
            if left <= 0 or stop():
                self.close()
                raise silent(self._url, PROTOCOL, timeout_s)
            try:
                self.turn(left)
            except Lost as error:
                raise hung_up(self._url, error) from error
        if code := self._connack:
            self.close()
            if code == _WRONG_VERSION:
                raise wrong_version(self._url, PROTOCOL)
            raise (
                unavailable(self._url, f"code {code}")
                if code in UNAVAILABLE
                else refused(self._url, _REASONS.get(code, f"code {code}"))
            )
        self._ping_at = time.monotonic() + KEEPALIVE_S / 2

    def turn(self, timeout_s: float) -> None:
        """Wait for the socket or a wake-up, read and write. Raises `Lost`."""
        if self._connection is None:
            raise Lost("the socket is closed")
        events = select.POLLIN | (select.POLLOUT if self._out else 0)
        if events != self._events:
            self._poll.register(self._connection.fileno(), events)
            self._events = events
        pending = self._secured is not None and self._secured.pending() > 0
        # Low water must not hide that bytes flow: over a slow link it may take longer than an answer may.
        readable = pending or self._answer_by < float("inf")
        for fd, found in self._poll.poll(0 if pending else min(timeout_s, TURN_S) * 1000):
            if fd == self._wake.fileno():
                self._wake.clear()
            else:
                self._flowed |= bool(found & select.POLLOUT)
                readable = readable or bool(found & ~select.POLLOUT)  # hang-ups and errors show when reading
        if readable:
            self._guarded(self._read)
            acknowledge_soon(self._sock)
        self._flush()
        self._keep_alive()

    def send(self, parts: list[memoryview], copied: bool) -> None:
        """Send a message, on this thread if nothing waits before it; copied: its payload is the caller's again.

        Over TLS the network thread sends everything: one connection cannot read and write at once. A loss is seen by
        that thread.
        """
        self._queued += sum(part.nbytes for part in parts)
        self._ends.append(self._queued)
        if self._out or self._secured is not None or self._connection is None:
            self._out += [memoryview(b"".join(parts))] if copied else parts
            self._wake.set()
            return
        self._out = parts
        try:
            self._write()
        except BlockingIOError:
            if copied:
                self._out = [memoryview(b"".join(self._out))]
            self._wake.set()
        except OSError:
            self._out = []

    def say(self, command: Control) -> None:
        """Send a control packet, from any thread."""
        data = encode(command)
        with self._lock:
            self._queued += len(data)
            self._out.append(memoryview(data))
            self._wake.set()

    def next_id(self) -> int:
        """Return a packet id."""
        self._id = self._id % 65_535 + 1
        return self._id

    def disconnect(self, deadline: float) -> None:
        """Write what is queued, until the deadline, and DISCONNECT."""
        self.say(Disconnect())
        while self._out and time.monotonic() < deadline:
            self.turn(max(deadline - time.monotonic(), 0.0))

    def close(self) -> int:
        """Close the socket without a word; return how many messages had not all been written."""
        with self._lock:
            if self._connection is not None:
                with suppress(KeyError):
                    self._poll.unregister(self._connection.fileno())
                self._connection.close()
            elif self._sock is not None:
                self._sock.close()
            self._sock = self._connection = self._secured = None
            lost = len(self._ends)
            self._out.clear()
            self._ends.clear()
            return lost

    def _connect(self, timeout_s: float) -> None:
        url = self._url
        try:
            self._sock = sock = connect_any(url.host, url.port, timeout_s)
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
        self.say(Connect(PROTOCOL, self._client_id, url.user, password, keepalive_s=KEEPALIVE_S))

    def _guarded(self, step: Callable[[], None]) -> None:
        try:
            step()
        except BlockingIOError:
            return
        except (Malformed, MemoryError, OSError) as error:
            self._shut()
            raise Lost(str(error) or repr(error)) from error

    def _shut(self) -> None:
        """Hang up; what was queued is counted by `close`."""
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
        while self._out:
            sent = self._connection.sendmsg(self._out[:64])
            self._written += sent
            while self._out and sent >= self._out[0].nbytes:
                sent -= self._out.pop(0).nbytes
            if sent:
                self._out[0] = self._out[0][sent:]
            while self._ends and self._ends[0] <= self._written:
                self._ends.popleft()

    def _keep_alive(self) -> None:
        now = time.monotonic()
        if self._answer_by < float("inf") and (self._goes_out() or self._flowed):
            # PINGREQ waits behind what we send, and PINGRESP behind what the broker has for us: both may take long.
            self._answer_by = now + KEEPALIVE_S
        self._flowed = False
        if now >= self._answer_by:
            self._shut()
            raise Lost(f"the broker has not answered for {KEEPALIVE_S} s")
        if now >= self._ping_at:
            self._ping_at = now + KEEPALIVE_S / 2
            with self._lock:
                self.say(Pingreq())
                if self._answer_by == float("inf"):
                    self._answer_by, self._ping_end = now + KEEPALIVE_S, self._queued
                self._flush()
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
                event = decoder.received(nbytes)
                while event is not None:
                    self._take(event)
                    event = decoder.next_event()
                if not decoder.missing and nbytes < room.nbytes and self._secured is None:
                    break
        finally:
            low = min(max(decoder.missing, 1), LOW_WATER)
            if low != self._low and self._secured is None and self._sock is not None:
                low_water(self._sock, low)
                self._low = low

    def _take(self, event: Event) -> None:
        match event:
            case Publish():
                if event.qos:  # though every subscription is of QoS 0
                    self.say(Puback(event.packet_id))
                self._heard(self, event)
            case Suback():
                self._heard(self, event)
            case Pingresp():
                self._answer_by = float("inf")
            case Connack(code) if self._connack is None:
                self._connack = code
            case Unsuback():
                pass
            case _:
                raise Malformed(f"{type(event).__name__.upper()} is out of place")


class _Wake:
    """A descriptor that is readable from `set` until `clear`, for the thread that polls it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """Return the descriptor to poll."""
        return self._fd

    def set(self) -> None:
        """Wake the poller; from any thread, also after `close`."""
        with self._lock:  # the descriptor may be another file's once it is closed
            if self._fd >= 0:
                os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        """Take the wake-up; call it before looking for what it announces."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._fd)

    def pause(self, delay_s: float, stop: Callable[[], bool]) -> None:
        """Sleep for `delay_s`, however often woken, unless `stop()`."""
        until, poller = time.monotonic() + delay_s, select.poll()
        poller.register(self._fd, select.POLLIN)
        while not stop() and (left := until - time.monotonic()) > 0:
            if poller.poll(left * 1000):
                self.clear()

    def close(self) -> None:
        """Give the descriptor back."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def __del__(self) -> None:
        self.close()


def data_connection_possible() -> bool:
    """Return whether this machine has what the data connection needs: Linux."""
    return mesh_possible()
