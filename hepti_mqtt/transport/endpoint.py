"""A small MQTT server that sends one device's messages directly from memory to subscribers.

`Acl` is its access list, `ClientSession` the state of one client without I/O, `Endpoint` drives the sockets.
"""

from __future__ import annotations

import hmac
import itertools
import logging
import select
import socket
import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from hepti_mqtt.transport.codec import (
    ASSIGNED_CLIENT,
    AUTHENTICATION_METHOD,
    FAILURE,
    FROM_STRANGER,
    FROM_SUBSCRIBER,
    MAX_LENGTH,
    MAXIMUM_PACKET_SIZE,
    Buffer,
    Connack,
    Connect,
    Decoder,
    Event,
    Malformed,
    Pingreq,
    Pingresp,
    Properties,
    Suback,
    Subscribe,
    Unsuback,
    Unsubscribe,
    covers,
    encode,
    is_filter,
    matches,
    publish_head,
)
from hepti_mqtt.transport.peer import PeerStats
from hepti_mqtt.transport.sockets import Connection, listen, tune_sender, unacknowledged

MAX_CLIENTS: Final = 64
CONNECT_S: Final = 5.0  # limit for CONNECT
STALL_S: Final = 5.0  # longest stall of a client with queued messages
MAX_FLUSH: Final = 256 * 1024  # bytes of one send under the lock, so that a publish waits 0.1 ms at most
MAX_CACHED: Final = 4096
MAX_ASKED: Final = 16_384  # bytes of the largest packet from a client
MAX_FILTERS: Final = 64
MAX_AT_ONCE: Final = 128  # packets in one read
IN, OUT = select.EPOLLIN, select.EPOLLOUT

# Reason codes of MQTT 5; 3.1.1 has one code per packet.
_BAD_LOGIN, _BAD_METHOD, _NO_FILTER, _NOT_ALLOWED, _TOO_MANY = 0x86, 0x8C, 0x8F, 0x87, 0x97
_NOT_FOUND: Final = 0x11
# For clients of MQTT 5: QoS 0 only, no RETAIN, no subscription ids, no shared subscriptions, packets of 16 KB.
_OFFERED: Final[Properties] = {0x24: 0, 0x25: 0, 0x29: 0, 0x2A: 0, MAXIMUM_PACKET_SIZE: MAX_ASKED}
_numbers = itertools.count(1)
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Grant:
    token: bytes
    filters: tuple[str, ...]
    limit_bytes: int


class Acl:
    """The access list of an endpoint: grants by user and key (a model's plan version), each with its own token."""

    def __init__(self) -> None:
        self._by_user: dict[str, dict[Hashable, _Grant]] = {}

    def admit(self, user: str, key: Hashable, token: str, filters: Sequence[str], limit_bytes: int) -> None:
        """Add a grant, or replace the one with this key."""
        self._by_user.setdefault(user, {})[key] = _Grant(token.encode(), tuple(filters), limit_bytes)

    def expel(self, user: str, key: Hashable) -> None:
        """End a grant, if there is one."""
        grants = self._by_user.get(user, {})
        grants.pop(key, None)
        if not grants:
            self._by_user.pop(user, None)

    def holds(self, user: str) -> bool:
        """Return whether a user has a grant."""
        return user in self._by_user

    def knows(self, user: str, token: bytes) -> bool:
        """Return whether a grant of this user has this token, in constant time."""
        matching = [hmac.compare_digest(grant.token, token) for grant in self._by_user.get(user, {}).values()]
        return any(matching)

    def allows(self, user: str, pattern: str) -> bool:
        """Return whether one grant of this user covers a filter."""
        grants = self._by_user.get(user, {})
        return any(covers(allowed, pattern) for grant in grants.values() for allowed in grant.filters)

    def limit_bytes(self, user: str) -> int:
        """Return the limit of queued bytes for a user."""
        return max((grant.limit_bytes for grant in self._by_user.get(user, {}).values()), default=0)


class ClientSession:
    """A client's session at an endpoint: `feed` takes received bytes and returns the answers."""

    def __init__(self, rules: Acl) -> None:
        #: 4 or 5 after the login, 0 before
        self.version = 0
        self.client = self.user = ""
        self.filters: set[str] = set()
        #: longest silence that its keep-alive allows
        self.silence_s = float("inf")
        #: largest packet that the client accepts
        self.largest_bytes = MAX_LENGTH
        #: whether to close the connection after the answer
        self.over = False
        self._rules = rules
        self._decoder = Decoder(FROM_STRANGER, control_bytes=MAX_ASKED)

    def feed(self, data: bytes) -> bytes:
        """Return the answers to received bytes, whole packets or parts. Raises Malformed."""
        answers, rest, packets = bytearray(), memoryview(data), 0
        while rest.nbytes and not self.over:
            fits = min(rest.nbytes, self._decoder.buffer().nbytes)
            event = self._decoder.feed(rest[:fits])
            rest = rest[fits:]
            while event is not None:
                packets += 1
                if packets > MAX_AT_ONCE:
                    raise Malformed(f"more than {MAX_AT_ONCE} packets at once")
                answers += self._answer(event)
                event = None if self.over else self._decoder.next_event()
        return bytes(answers)

    def _answer(self, event: Event) -> bytes:
        match event:
            case Connect():
                return self._connect(event)
            case Subscribe(packet_id, filters):
                codes = [self._grant(name) for name, _ in filters]
                if self.version == 4:
                    codes = [FAILURE if code else 0 for code in codes]
                return encode(Suback(packet_id, bytes(codes)), self.version)
            case Unsubscribe(packet_id, names):
                return encode(Unsuback(packet_id, bytes(map(self._leave, names))), self.version)
            case Pingreq():
                return encode(Pingresp())
        self.over = True  # DISCONNECT
        return b""

    def _connect(self, connect: Connect) -> bytes:
        if connect.version not in (4, 5):
            self.over = True
            return encode(Connack(1))  # refusal of a version in 3.1.1
        if refusal := self._refusal(connect):
            self.over = True
            return encode(Connack(refusal), connect.version)
        self.version, self.client, self.user = connect.version, connect.client, connect.user or ""
        limit = connect.properties.get(MAXIMUM_PACKET_SIZE, MAX_LENGTH)
        assert isinstance(limit, int)
        self.largest_bytes, self.silence_s = limit, 1.5 * connect.keepalive_s or float("inf")
        self._decoder.reads, self._decoder.version = FROM_SUBSCRIBER, connect.version
        assigned = {} if connect.client else {ASSIGNED_CLIENT: f"client-{next(_numbers):08x}".encode()}
        return encode(Connack(0, properties={**_OFFERED, **assigned}), self.version)

    def _refusal(self, connect: Connect) -> int:
        if AUTHENTICATION_METHOD in connect.properties:
            return _BAD_METHOD
        if not self._rules.knows(connect.user or "", connect.password or b""):
            return 4 if connect.version == 4 else _BAD_LOGIN
        return 2 if connect.version == 4 and not connect.client and not connect.clean else 0

    def _grant(self, pattern: str) -> int:
        if not is_filter(pattern):
            return _NO_FILTER
        if not self._rules.allows(self.user, pattern):
            return _NOT_ALLOWED
        if len(self.filters) >= MAX_FILTERS and pattern not in self.filters:
            return _TOO_MANY
        self.filters.add(pattern)
        return 0

    def _leave(self, pattern: str) -> int:
        if pattern not in self.filters:
            return _NOT_FOUND
        self.filters.discard(pattern)
        return 0


@dataclass(slots=True, eq=False)
class _Subscriber:
    """One connection and its queue."""

    connection: Connection
    session: ClientSession
    deadline: float  # for CONNECT, then for progress of the queue, or for the keep-alive
    stats: PeerStats = field(default_factory=PeerStats)
    limit_bytes: int = 0
    out: deque[memoryview] = field(default_factory=deque)
    out_bytes: int = 0
    left_bytes: int | None = None  # unacknowledged in the kernel at the last tick


class _Route(NamedTuple):
    """One subscriber of the messages of one topic and size."""

    reader: _Subscriber
    head: bytes  # PUBLISH header
    size: int  # bytes of header and payload


class Turns:
    """A lock that one thread may hold for long; other threads call `on_wait` to request it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._waiting: deque[None] = deque()
        #: called by a thread before it waits
        self.on_wait: Callable[[], None] = lambda: None
        #: releases the lock of `take`
        self.release = self._lock.release

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self._waiting.append(None)
            try:
                self.on_wait()
                self._lock.acquire()
            finally:
                self._waiting.pop()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def take(self) -> bool:
        """Take the lock until `release`; return False if another thread holds it or waits."""
        return not self._waiting and self._lock.acquire(blocking=False)


class Endpoint:
    """Sends published messages to the subscribers that may read them; clients may only subscribe.

    One thread publishes, another one calls `turn` and `tick`. `publish` never waits for the network: it copies the
    bytes that the kernel does not accept immediately, so the caller may reuse the payload.
    stats_of: returns the counters of a user. on_drop(user, bytes): called under the lock for a dropped message.
    secure: starts TLS on an accepted socket.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        clock: Callable[[], float],
        stats_of: Callable[[str], PeerStats],
        on_drop: Callable[[str, int], None],
        secure: Callable[[socket.socket], Connection] | None = None,
    ) -> None:
        self._listener = listen(host, port)
        self.port: int = self._listener.getsockname()[1]
        self._clock, self._stats_of, self._on_drop, self._secure = clock, stats_of, on_drop, secure
        self.lock = Turns()
        #: changes with the routes
        self.version = 1
        self._acl = Acl()
        self._subscribers: dict[int, _Subscriber] = {}
        #: cache by topic and bytes of the payload
        self._routes: dict[tuple[str, int], list[_Route]] = {}
        self._full = False  # no descriptors left, so new connections wait
        self._epoll = select.epoll()
        self._epoll.register(self._listener, IN)

    def head_for(self, user: str, topic: str, nbytes: int) -> bytes | None:
        """Return the PUBLISH header for a user; None unless the user is the only reader and the socket is plain."""
        routes = self._routes_of(topic, nbytes)
        if self._secure is not None or [route.reader.session.user for route in routes] != [user]:
            return None
        (route,) = routes
        return route.head if route.size <= route.reader.session.largest_bytes else None

    def open_readers(self) -> dict[str, int]:
        """Return descriptors by user; -1 for a user with queued messages or several connections."""
        descriptors: dict[str, int] = {}
        for fd, reader in self._subscribers.items():
            descriptors[reader.session.user] = -1 if reader.out or reader.session.user in descriptors else fd
        return descriptors

    def keep(self, user: str, parts: Sequence[Buffer], sent: int) -> None:
        """Send the rest of a message to a user after its first `sent` bytes."""
        reader = next(reader for reader in self._subscribers.values() if reader.session.user == user)
        self._keep(reader, parts, sent)
        reader.stats.frames_out += 1
        reader.stats.bytes_out += sum(memoryview(part).nbytes for part in parts[1:])

    def admit(self, user: str, key: Hashable, token: str, filters: Sequence[str], limit_bytes: int) -> None:
        """Add a grant: a user with this token may read these filters; limit_bytes: of its queue."""
        with self.lock:
            self._acl.admit(user, key, token, filters, limit_bytes)
            self._review()

    def expel(self, user: str, key: Hashable) -> None:
        """Remove a grant; close the user's connections after its last grant."""
        with self.lock:
            self._acl.expel(user, key)
            self._review()

    def publish(self, topic: str, *parts: Buffer) -> int:
        """Send one message with its payload in parts; return the number of its subscribers."""
        nbytes = sent = 0
        for part in parts:
            nbytes += memoryview(part).nbytes
        with self.lock:
            for reader, head, size in self._routes_of(topic, nbytes):
                if self._send(reader, (head, *parts), size):
                    stats = reader.stats
                    stats.frames_out += 1
                    stats.bytes_out += nbytes
                    sent += 1
        return sent

    def turn(self, timeout_s: float | None) -> None:
        """Wait, then accept connections, answer, and flush queues."""
        for fd, events in self._epoll.poll(timeout_s):
            with self.lock:
                subscriber = self._subscribers.get(fd)
                if fd == self._listener.fileno():
                    self._accept()
                elif subscriber is not None:
                    self._serve(subscriber, events)

    def tick(self, now: float) -> None:
        """Disconnect clients after their deadlines: no CONNECT, no progress, no keep-alive."""
        with self.lock:
            for reader in self._subscribers.values():
                if reader.out:
                    self._extend_if_flowing(reader, now)
            for subscriber in [s for s in self._subscribers.values() if s.deadline < now]:
                self._drop(subscriber)
            if self._full:
                self._full = False
                self._epoll.modify(self._listener, IN)

    def busy(self) -> bool:
        """Return whether to call `tick`."""
        return self._full or bool(self._subscribers)

    def queued_bytes(self) -> dict[str, int]:
        """Return the queued bytes by user."""
        queued: dict[str, int] = {}
        with self.lock:
            for subscriber in self._subscribers.values():
                user = subscriber.session.user
                queued[user] = queued.get(user, 0) + subscriber.out_bytes
        return queued

    def stop(self) -> None:
        """Accept no more connections and end a waiting `turn`; any thread may call it."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close every connection."""
        with self.lock:
            for subscriber in list(self._subscribers.values()):
                self._drop(subscriber)
            self._listener.close()
            self._epoll.close()

    # -- publishing --------------------------------------------------------------------------------------------------

    def _routes_of(self, topic: str, nbytes: int) -> list[_Route]:
        """Return the routes of a topic and payload size from the cache, or compute them."""
        if (cached := self._routes.get((topic, nbytes))) is not None:
            return cached
        routes = list[_Route]()
        for subscriber in self._subscribers.values():
            session = subscriber.session
            if any(matches(name, topic) and self._acl.allows(session.user, name) for name in session.filters):
                head = publish_head(topic, nbytes, session.version)
                routes.append(_Route(subscriber, head, len(head) + nbytes))
        if len(self._routes) >= MAX_CACHED:
            self._routes.clear()
        self._routes[topic, nbytes] = routes
        return routes

    def _forget_routes(self) -> None:
        self._routes.clear()
        self.version += 1

    def _send(self, reader: _Subscriber, parts: Sequence[Buffer], size: int) -> bool:
        sent = 0
        if size > reader.session.largest_bytes or (reader.out and reader.out_bytes + size > reader.limit_bytes):
            self._count_drop(reader, 1, size)
            return False
        if not reader.out:  # otherwise an earlier packet is unfinished
            try:
                sent = reader.connection.sendmsg(parts)
            except BlockingIOError:
                pass
            except OSError:
                self._drop(reader)
                return False
        if sent < size:
            self._keep(reader, parts, sent)
        return True

    def _keep(self, reader: _Subscriber, parts: Sequence[Buffer], sent: int) -> None:
        rest = bytearray()
        for part in parts:
            view = memoryview(part)
            if view.nbytes > sent:
                rest += view.cast("B")[sent:]
            sent = max(sent - view.nbytes, 0)
        if not reader.out:
            reader.deadline = self._clock() + STALL_S
            # Read nothing until the queue is empty; otherwise requests could pile up answers.
            # The change also reaches a thread that waits in `turn`.
            self._epoll.modify(reader.connection, OUT)
        reader.out.append(memoryview(rest))
        reader.out_bytes += len(rest)

    def _count_drop(self, reader: _Subscriber, messages: int, nbytes: int) -> None:
        reader.stats.dropped += messages
        self._on_drop(reader.session.user, nbytes)

    # -- connections -------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:  # no descriptors left; the next tick retries
            self._full = True
            self._epoll.modify(self._listener, 0)
            return
        if len(self._subscribers) >= MAX_CLIENTS and not self._make_room():
            sock.close()
            return
        with suppress(OSError):
            tune_sender(sock)
            connection: Connection = self._secure(sock) if self._secure else sock
            self._subscribers[connection.fileno()] = _Subscriber(
                connection, ClientSession(self._acl), self._clock() + CONNECT_S
            )
            self._epoll.register(connection, IN)

    def _make_room(self) -> bool:
        """Disconnect the oldest client without CONNECT; return False if there is none."""
        for subscriber in self._subscribers.values():
            if not subscriber.session.version:
                self._drop(subscriber)
                return True
        return False

    def _serve(self, subscriber: _Subscriber, events: int) -> None:
        try:
            if events & OUT:
                self._flush(subscriber)
            else:
                self._read(subscriber)
        except BlockingIOError:
            pass
        except Malformed:
            self._drop(subscriber)
        except OSError:
            self._drop(subscriber)
        except Exception:
            # A bug in serving one client must not stop the others.
            _log.exception("a subscriber of this device is disconnected")
            self._drop(subscriber)

    def _flush(self, reader: _Subscriber) -> None:
        if reader.out:
            sent = reader.connection.send(reader.out[0][:MAX_FLUSH])
            reader.deadline = self._clock() + STALL_S
            reader.out_bytes -= sent
            reader.out[0] = reader.out[0][sent:]
            if not reader.out[0].nbytes:
                reader.out.popleft()
        if not reader.out:
            reader.deadline = self._clock() + reader.session.silence_s
            self._epoll.modify(reader.connection, IN)

    def _extend_if_flowing(self, reader: _Subscriber, now: float) -> None:
        """Extend a reader's deadline if bytes flow: on a slow link the socket becomes writable only after seconds."""
        before, reader.left_bytes = reader.left_bytes, unacknowledged(reader.connection)
        if before is not None and reader.left_bytes is not None and reader.left_bytes < before:
            reader.deadline = now + STALL_S

    def _read(self, subscriber: _Subscriber) -> None:
        data, session = subscriber.connection.recv(MAX_ASKED), subscriber.session
        was_admitted = bool(session.version)
        if not data:
            self._drop(subscriber)
            return
        answer = session.feed(data)
        if session.version and not was_admitted:
            self._welcome(subscriber)
        self._forget_routes()
        if answer:
            with suppress(BlockingIOError):
                sent = 0 if subscriber.out else subscriber.connection.send(answer)
                answer = answer[sent:]
            if answer:
                self._keep(subscriber, (answer,), 0)
        if session.over:
            self._drop(subscriber)
        elif session.version and not subscriber.out:
            subscriber.deadline = self._clock() + session.silence_s

    def _welcome(self, subscriber: _Subscriber) -> None:
        """Set the client's limits, and close its older connection, as MQTT requires."""
        session = subscriber.session
        subscriber.stats = self._stats_of(session.user)
        subscriber.limit_bytes = self._acl.limit_bytes(session.user)
        for old in list(self._subscribers.values()):
            same = (old.session.user, old.session.client) == (session.user, session.client)
            if old is not subscriber and session.client and old.session.version and same:
                self._drop(old)

    def _review(self) -> None:
        """Apply changed grants to subscribers."""
        self._forget_routes()
        for subscriber in [s for s in self._subscribers.values() if s.session.version]:
            subscriber.limit_bytes = self._acl.limit_bytes(subscriber.session.user)
            if not self._acl.holds(subscriber.session.user):
                self._drop(subscriber)

    def _drop(self, subscriber: _Subscriber) -> None:
        self._subscribers.pop(subscriber.connection.fileno(), None)
        self._forget_routes()
        if subscriber.out:
            self._count_drop(subscriber, len(subscriber.out), subscriber.out_bytes)
            subscriber.out.clear()
        subscriber.connection.close()
