"""A small MQTT server that only sends: what a device publishes goes straight from memory to its subscribers.

Top to bottom: who may come in and read what (`Acl`), what one client may say and is answered (`ClientSession`, without
I/O), and the sockets (`Endpoint`).
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
CONNECT_S: Final = 5.0  # a client that has not sent CONNECT after so long,
STALL_S: Final = 5.0  # or takes nothing of what waits, is disconnected
MAX_FLUSH: Final = 256 * 1024  # sent under the lock at once, so that a publish waits for 0.1 ms at most
MAX_CACHED: Final = 4096
MAX_ASKED: Final = 16_384  # the largest packet that a client may send
MAX_FILTERS: Final = 64
MAX_AT_ONCE: Final = 128  # packets in one read: a client that asks for more work at once is disconnected
IN, OUT = select.EPOLLIN, select.EPOLLOUT

# MQTT 5 alone has reasons; 3.1.1 has one code per packet.
_BAD_LOGIN, _BAD_METHOD, _NO_FILTER, _NOT_ALLOWED, _TOO_MANY = 0x86, 0x8C, 0x8F, 0x87, 0x97
_NOT_FOUND: Final = 0x11
# To a client of MQTT 5: QoS 0 only, nothing retained, no wildcards in shares, no subscription ids, 16 KB a packet.
_OFFERED: Final[Properties] = {0x24: 0, 0x25: 0, 0x29: 0, 0x2A: 0, MAXIMUM_PACKET_SIZE: MAX_ASKED}
_numbers = itertools.count(1)
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Grant:
    token: bytes
    filters: tuple[str, ...]
    limit_bytes: int


class Acl:
    """The access list of an endpoint: grants by user and key (a model's plan version), each with a token of its own."""

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
        """Return whether this user has any grant."""
        return user in self._by_user

    def knows(self, user: str, token: bytes) -> bool:
        """Return whether a live grant of this user has this token, in constant time."""
        found = [hmac.compare_digest(grant.token, token) for grant in self._by_user.get(user, {}).values()]
        return any(found)

    def allows(self, user: str, pattern: str) -> bool:
        """Return whether the live grants of this user cover a filter."""
        grants = self._by_user.get(user, {})
        return any(covers(allowed, pattern) for grant in grants.values() for allowed in grant.filters)

    def limit_bytes(self, user: str) -> int:
        """Return how much may wait for this user."""
        return max((grant.limit_bytes for grant in self._by_user.get(user, {}).values()), default=0)


class ClientSession:
    """One connection to an endpoint: `feed` it what came and send what it returns.

    version: 4 or 5 once it is let in, 0 before. filters: what it has subscribed to. largest_bytes: the largest packet
    that it takes. silence_s: how long it may say nothing. over: close the connection after the answer.
    """

    def __init__(self, rules: Acl) -> None:
        self.version, self.client, self.user = 0, "", ""
        self.filters: set[str] = set()
        self.silence_s = float("inf")
        self.largest_bytes = MAX_LENGTH
        self.over = False
        self._rules = rules
        self._decoder = Decoder(FROM_STRANGER, control_bytes=MAX_ASKED)

    def feed(self, data: bytes) -> bytes:
        """Return the answers to what came, whole packets or parts. Raises Malformed."""
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
            case Subscribe(packet_id, asked):
                codes = [self._grant(name) for name, _ in asked]
                if self.version == 4:
                    codes = [FAILURE if code else 0 for code in codes]
                return encode(Suback(packet_id, bytes(codes)), self.version)
            case Unsubscribe(packet_id, left):
                return encode(Unsuback(packet_id, bytes(map(self._leave, left))), self.version)
            case Pingreq():
                return encode(Pingresp())
        self.over = True  # DISCONNECT
        return b""

    def _connect(self, asked: Connect) -> bytes:
        if asked.version not in (4, 5):
            self.over = True
            return encode(Connack(1))  # as 3.1.1 refuses other versions
        if refusal := self._refusal(asked):
            self.over = True
            return encode(Connack(refusal), asked.version)
        self.version, self.client, self.user = asked.version, asked.client, asked.user or ""
        limit = asked.properties.get(MAXIMUM_PACKET_SIZE, MAX_LENGTH)
        assert isinstance(limit, int)
        self.largest_bytes, self.silence_s = limit, 1.5 * asked.keepalive_s or float("inf")
        self._decoder.reads, self._decoder.version = FROM_SUBSCRIBER, asked.version
        named = {} if asked.client else {ASSIGNED_CLIENT: f"client-{next(_numbers):08x}".encode()}
        return encode(Connack(0, properties={**_OFFERED, **named}), self.version)

    def _refusal(self, asked: Connect) -> int:
        if AUTHENTICATION_METHOD in asked.properties:
            return _BAD_METHOD
        if not self._rules.knows(asked.user or "", asked.password or b""):
            return 4 if asked.version == 4 else _BAD_LOGIN
        return 2 if asked.version == 4 and not asked.client and not asked.clean else 0

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
    """One connection: who it is, and what it has not taken yet."""

    connection: Connection
    session: ClientSession
    deadline: float  # to introduce itself; then to take something, or to be heard of
    stats: PeerStats = field(default_factory=PeerStats)
    limit_bytes: int = 0
    out: deque[memoryview] = field(default_factory=deque)
    out_bytes: int = 0
    left_bytes: int | None = None  # that the kernel had not delivered at the last look


class _Route(NamedTuple):
    """One reader of messages of one topic and size: what stands before the payload, and the bytes of both."""

    reader: _Subscriber
    head: bytes
    size: int


class Turns:
    """A lock that one thread may hold for long: others tell it to leave off before they wait."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._waiting: deque[None] = deque()
        #: called on a thread that is about to wait
        self.on_wait: Callable[[], None] = lambda: None

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
        """Take the lock until `release`; False, and it is not taken, if others wait or have it."""
        return not self._waiting and self._lock.acquire(blocking=False)

    def release(self) -> None:
        """Give back what `take` has taken."""
        self._lock.release()


class Endpoint:
    """Sends what is published to the subscribers that may read it; anything but a subscription is refused.

    A thread publishes, another one calls `turn` and `tick`. `publish` never waits for the network, and the payload is
    the caller's again when it returns: only what the kernel does not take at once is copied. secure: starts TLS on
    an accepted socket. stats_of: the counts of a user. on_drop(user, bytes): a message was dropped; called under a
    lock, on either thread. rejected: connections closed because a client broke a rule.
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
        self.rejected = 0
        self._clock, self._stats_of, self._on_drop, self._secure = clock, stats_of, on_drop, secure
        self.lock = Turns()
        #: changes with the readers of messages
        self.version = 1
        self._acl = Acl()
        self._subscribers: dict[int, _Subscriber] = {}
        #: by topic and bytes of the payload, until something changes
        self._routes: dict[tuple[str, int], list[_Route]] = {}
        self._full = False  # no descriptors left: new connections wait
        self._epoll = select.epoll()
        self._epoll.register(self._listener, IN)

    def head_for(self, user: str, topic: str, nbytes: int) -> bytes | None:
        """Return what stands before a payload, where a message goes to this user alone, and is not encrypted."""
        routes = self._find(topic, nbytes)
        if self._secure is not None or [route.reader.session.user for route in routes] != [user]:
            return None
        (route,) = routes
        return route.head if route.size <= route.reader.session.largest_bytes else None

    def open_readers(self) -> dict[str, int]:
        """Return the descriptors of those users with one connection, to which nothing waits to be sent."""
        found: dict[str, int] = {}
        for fd, reader in self._subscribers.items():
            found[reader.session.user] = -1 if reader.out or reader.session.user in found else fd
        return found

    def keep(self, user: str, parts: Sequence[Buffer], sent: int) -> None:
        """Send the rest of a message to a user, of which some bytes were sent."""
        reader = next(reader for reader in self._subscribers.values() if reader.session.user == user)
        self._keep(reader, parts, sent)
        reader.stats.frames_out += 1
        reader.stats.bytes_out += sum(memoryview(part).nbytes for part in parts[1:])

    def admit(self, user: str, key: Hashable, token: str, filters: Sequence[str], limit_bytes: int) -> None:
        """Let a user in with this token to read what these filters take in; limit_bytes: what may wait for it."""
        with self.lock:
            self._acl.admit(user, key, token, filters, limit_bytes)
            self._review()

    def expel(self, user: str, key: Hashable) -> None:
        """End one grant of a user, and its connections with the last one."""
        with self.lock:
            self._acl.expel(user, key)
            self._review()

    def publish(self, topic: str, *parts: Buffer) -> int:
        """Send one message, its payload in parts; return to how many it went or is on its way."""
        nbytes = went = 0
        for part in parts:
            nbytes += memoryview(part).nbytes
        with self.lock:
            routes = self._routes.get((topic, nbytes))
            for reader, head, size in self._find(topic, nbytes) if routes is None else routes:
                if self._send(reader, (head, *parts), size):
                    stats = reader.stats
                    stats.frames_out += 1
                    stats.bytes_out += nbytes
                    went += 1
        return went

    def turn(self, timeout_s: float | None) -> None:
        """Wait, then accept, answer, and write what is left over."""
        for fd, events in self._epoll.poll(timeout_s):
            with self.lock:
                subscriber = self._subscribers.get(fd)
                if fd == self._listener.fileno():
                    self._accept()
                elif subscriber is not None:
                    self._serve(subscriber, events)

    def tick(self, now: float) -> None:
        """Disconnect clients that send no CONNECT, take nothing or are silent."""
        with self.lock:
            for reader in self._subscribers.values():
                if reader.out:
                    self._look(reader, now)
            for subscriber in [s for s in self._subscribers.values() if s.deadline < now]:
                self._offend(subscriber)
            if self._full:
                self._full = False
                self._epoll.modify(self._listener, IN)

    def busy(self) -> bool:
        """Return whether `tick` has work."""
        return self._full or bool(self._subscribers)

    def queued_bytes(self) -> dict[str, int]:
        """Return what waits, by user."""
        found: dict[str, int] = {}
        with self.lock:
            for subscriber in self._subscribers.values():
                user = subscriber.session.user
                found[user] = found.get(user, 0) + subscriber.out_bytes
        return found

    def stop(self) -> None:
        """Accept no more connections, and let a `turn` that waits return; from any thread."""
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

    def _find(self, topic: str, nbytes: int) -> list[_Route]:
        """Return the readers of this topic and what they get before a payload of this size, and remember them."""
        allows = self._acl.allows
        found = [
            s
            for s in self._subscribers.values()
            if any(matches(f, topic) and allows(s.session.user, f) for f in s.session.filters)
        ]
        heads = [publish_head(topic, nbytes, s.session.version) for s in found]
        if len(self._routes) >= MAX_CACHED:
            self._routes.clear()
        routes = [_Route(s, head, len(head) + nbytes) for s, head in zip(found, heads, strict=True)]
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
        if not reader.out:  # else the packet before this one is not finished
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
            # It is not read until it has taken what waits, or it could ask for more answers than it takes. This
            # reaches a thread that is waiting in `turn` already.
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
        except OSError:  # no descriptors left: the next tick tries again
            self._full = True
            self._epoll.modify(self._listener, 0)
            return
        if len(self._subscribers) >= MAX_CLIENTS and not self._make_room():
            self.rejected += 1
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
        """Disconnect the oldest that has sent no CONNECT, so that silent ones keep nobody out."""
        for subscriber in self._subscribers.values():
            if not subscriber.session.version:
                self._offend(subscriber)
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
            self._offend(subscriber)
        except OSError:
            self._drop(subscriber)
        except Exception:
            # The others must outlive a mistake in serving one of them.
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

    def _look(self, reader: _Subscriber, now: float) -> None:
        """Give a reader time while it takes something: over a slow link the kernel asks for more only after seconds."""
        before, reader.left_bytes = reader.left_bytes, unacknowledged(reader.connection)
        if before is not None and reader.left_bytes is not None and reader.left_bytes < before:
            reader.deadline = now + STALL_S

    def _read(self, subscriber: _Subscriber) -> None:
        data, session = subscriber.connection.recv(MAX_ASKED), subscriber.session
        known = bool(session.version)
        if not data:
            self._drop(subscriber)
            return
        answer = session.feed(data)
        if session.version and not known:
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
        """Close an older connection of the same client, as MQTT requires."""
        session = subscriber.session
        subscriber.stats = self._stats_of(session.user)
        subscriber.limit_bytes = self._acl.limit_bytes(session.user)
        for old in list(self._subscribers.values()):
            same = (old.session.user, old.session.client) == (session.user, session.client)
            if old is not subscriber and session.client and old.session.version and same:
                self._drop(old)

    def _review(self) -> None:
        """Apply changed grants: a client reads what it subscribed to and its grants cover now."""
        self._forget_routes()
        for subscriber in [s for s in self._subscribers.values() if s.session.version]:
            subscriber.limit_bytes = self._acl.limit_bytes(subscriber.session.user)
            if not self._acl.holds(subscriber.session.user):
                self._drop(subscriber)

    def _offend(self, subscriber: _Subscriber) -> None:
        self.rejected += 1
        self._drop(subscriber)

    def _drop(self, subscriber: _Subscriber) -> None:
        self._subscribers.pop(subscriber.connection.fileno(), None)
        self._forget_routes()
        if subscriber.out:
            self._count_drop(subscriber, len(subscriber.out), subscriber.out_bytes)
            subscriber.out.clear()
        subscriber.connection.close()
