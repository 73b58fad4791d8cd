"""A small MQTT server that only sends: what a device publishes goes straight from memory to those who subscribed."""

from __future__ import annotations

import logging
import select
import socket
import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from hepti_mqtt.transport.mesh.events import Edge
from hepti_mqtt.transport.mesh.filters import matches
from hepti_mqtt.transport.mesh.grants import Grants
from hepti_mqtt.transport.mesh.guest import MAX_ASKED, Guest
from hepti_mqtt.transport.mesh.lines import Buffer, Line, listen, tune_sender
from hepti_mqtt.transport.mesh.packets import Malformed, publish_head
from hepti_mqtt.transport.sockets import unacknowledged

MAX_GUESTS: Final = 64
INTRODUCE_S: Final = 5.0  # who does not introduce itself for so long,
STALL_S: Final = 5.0  # or takes nothing of what waits, is sent away
MAX_FLUSH: Final = 256 * 1024  # sent under the lock at once, so that a publish waits for 0.1 ms at most
MAX_CACHED: Final = 4096
IN, OUT = select.EPOLLIN, select.EPOLLOUT
_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Subscriber:
    """One connection: who it is, and what it has not taken yet."""

    line: Line
    guest: Guest
    deadline: float  # to introduce itself; then to take something, or to be heard of
    edge: Edge = field(default_factory=Edge)
    limit_bytes: int = 0
    out: deque[memoryview] = field(default_factory=deque)
    out_bytes: int = 0
    left_bytes: int | None = None  # that the kernel had not delivered at the last look


class _Way(NamedTuple):
    """How messages of one topic and size get to one reader: what stands before the payload, and the bytes of both."""

    reader: _Subscriber
    head: bytes
    size: int


class Endpoint:
    """Sends what is published to who subscribed and may read it; whatever is not a subscription is refused.

    A thread publishes, another one calls `turn` and `tick`. `publish` never waits for the network, and the payload is
    the caller's again when it returns: only what the kernel does not take at once is copied. secure: makes a TLS line
    of an accepted socket. edge_of: the counts of a user. on_drop(user, bytes): a message was dropped; called under a
    lock, on either thread. sent_away: connections closed because they broke a rule.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        clock: Callable[[], float],
        edge_of: Callable[[str], Edge],
        on_drop: Callable[[str, int], None],
        secure: Callable[[socket.socket], Line] | None = None,
    ) -> None:
        self._listener = listen(host, port)
        self.port: int = self._listener.getsockname()[1]
        self.sent_away = 0
        self._clock, self._edge_of, self._on_drop, self._secure = clock, edge_of, on_drop, secure
        self._lock = threading.RLock()
        self._grants = Grants()
        self._subscribers: dict[int, _Subscriber] = {}
        self._ways: dict[tuple[str, int], list[_Way]] = {}  # by topic and bytes of the payload, until something changes
        self._full = False  # no more descriptors: who knocks has to wait
        self._epoll = select.epoll()
        self._epoll.register(self._listener, IN)

    def admit(self, user: str, key: Hashable, token: str, filters: Sequence[str], limit_bytes: int) -> None:
        """Let a user in with this token to read what these filters take in; limit_bytes: what may wait for it."""
        with self._lock:
            self._grants.admit(user, key, token, filters, limit_bytes)
            self._review()

    def expel(self, user: str, key: Hashable) -> None:
        """End one grant of a user, and its connections with the last one."""
        with self._lock:
            self._grants.expel(user, key)
            self._review()

    def publish(self, topic: str, *parts: Buffer) -> int:
        """Send one message, its payload in parts; return to how many it went or is on its way."""
        nbytes = went = 0
        for part in parts:
            nbytes += memoryview(part).nbytes
        with self._lock:
            ways = self._ways.get((topic, nbytes))
            for reader, head, size in self._find(topic, nbytes) if ways is None else ways:
                if self._send(reader, (head, *parts), size):
                    edge = reader.edge
                    edge.frames_out += 1
                    edge.bytes_out += nbytes
                    went += 1
        return went

    def turn(self, timeout_s: float | None) -> None:
        """Wait, then accept, answer, and write what is left over."""
        for fd, events in self._epoll.poll(timeout_s):
            with self._lock:
                subscriber = self._subscribers.get(fd)
                if fd == self._listener.fileno():
                    self._accept()
                elif subscriber is not None:
                    self._serve(subscriber, events)

    def tick(self, now: float) -> None:
        """Send away who does not introduce itself, takes nothing or is silent."""
        with self._lock:
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
        with self._lock:
            for subscriber in self._subscribers.values():
                user = subscriber.guest.user
                found[user] = found.get(user, 0) + subscriber.out_bytes
        return found

    def stop(self) -> None:
        """Accept nobody any more, and let a `turn` that waits return; from any thread."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close every connection."""
        with self._lock:
            for subscriber in list(self._subscribers.values()):
                self._drop(subscriber)
            self._listener.close()
            self._epoll.close()

    # -- publishing --------------------------------------------------------------------------------------------------

    def _find(self, topic: str, nbytes: int) -> list[_Way]:
        """Return the ways of messages of this size to those who read the topic, and remember them."""
        allows = self._grants.allows
        found = [
            s
            for s in self._subscribers.values()
            if any(matches(f, topic) and allows(s.guest.user, f) for f in s.guest.filters)
        ]
        heads = [publish_head(topic, nbytes, s.guest.version) for s in found]
        if len(self._ways) >= MAX_CACHED:
            self._ways.clear()
        ways = [_Way(s, head, len(head) + nbytes) for s, head in zip(found, heads, strict=True)]
        self._ways[topic, nbytes] = ways
        return ways

    def _send(self, reader: _Subscriber, parts: Sequence[Buffer], size: int) -> bool:
        sent = 0
        if size > reader.guest.largest_bytes or (reader.out and reader.out_bytes + size > reader.limit_bytes):
            self._count_drop(reader, 1, size)
            return False
        if not reader.out:  # else the packet before this one is not finished
            try:
                sent = reader.line.sendmsg(parts)
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
            # It is not heard until it has taken what waits, or it could ask for more answers than it takes. This
            # reaches a thread that is waiting in `turn` already.
            self._epoll.modify(reader.line, OUT)
        reader.out.append(memoryview(rest))
        reader.out_bytes += len(rest)

    def _count_drop(self, reader: _Subscriber, messages: int, nbytes: int) -> None:
        reader.edge.dropped += messages
        self._on_drop(reader.guest.user, nbytes)

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
        if len(self._subscribers) >= MAX_GUESTS and not self._make_room():
            self.sent_away += 1
            sock.close()
            return
        with suppress(OSError):
            tune_sender(sock)
            line: Line = self._secure(sock) if self._secure else sock
            self._subscribers[line.fileno()] = _Subscriber(line, Guest(self._grants), self._clock() + INTRODUCE_S)
            self._epoll.register(line, IN)

    def _make_room(self) -> bool:
        """Send away the oldest that has not introduced itself, so that silent ones keep nobody out."""
        for subscriber in self._subscribers.values():
            if not subscriber.guest.version:
                self._offend(subscriber)
                return True
        return False

    def _serve(self, subscriber: _Subscriber, events: int) -> None:
        try:
            if events & OUT:
                self._flush(subscriber)
            else:
                self._hear(subscriber)
        except BlockingIOError:
            pass
        except Malformed:
            self._offend(subscriber)
        except OSError:
            self._drop(subscriber)
        except Exception:
            # The others must outlive a mistake in serving one of them.
            _log.exception("a subscriber of this device is sent away")
            self._drop(subscriber)

    def _flush(self, reader: _Subscriber) -> None:
        if reader.out:
            sent = reader.line.send(reader.out[0][:MAX_FLUSH])
            reader.deadline = self._clock() + STALL_S
            reader.out_bytes -= sent
            reader.out[0] = reader.out[0][sent:]
            if not reader.out[0].nbytes:
                reader.out.popleft()
        if not reader.out:
            reader.deadline = self._clock() + reader.guest.silence_s
            self._epoll.modify(reader.line, IN)

    def _look(self, reader: _Subscriber, now: float) -> None:
        """Give time to who takes something: over a slow link the kernel asks for more only after many seconds."""
        before, reader.left_bytes = reader.left_bytes, unacknowledged(reader.line)
        if before is not None and reader.left_bytes is not None and reader.left_bytes < before:
            reader.deadline = now + STALL_S

    def _hear(self, subscriber: _Subscriber) -> None:
        data, guest, here = subscriber.line.recv(MAX_ASKED), subscriber.guest, bool(subscriber.guest.version)
        if not data:
            self._drop(subscriber)
            return
        answer = guest.feed(data)
        if guest.version and not here:
            self._welcome(subscriber)
        self._ways.clear()
        if answer:
            with suppress(BlockingIOError):
                sent = 0 if subscriber.out else subscriber.line.send(answer)
                answer = answer[sent:]
            if answer:
                self._keep(subscriber, (answer,), 0)
        if guest.over:
            self._drop(subscriber)
        elif guest.version and not subscriber.out:
            subscriber.deadline = self._clock() + guest.silence_s

    def _welcome(self, subscriber: _Subscriber) -> None:
        """As MQTT has it, the old connection of a client that comes again is closed."""
        guest = subscriber.guest
        subscriber.edge = self._edge_of(guest.user)
        subscriber.limit_bytes = self._grants.limit_bytes(guest.user)
        for old in list(self._subscribers.values()):
            same = (old.guest.user, old.guest.client) == (guest.user, guest.client)
            if old is not subscriber and guest.client and old.guest.version and same:
                self._drop(old)

    def _review(self) -> None:
        """Act on changed grants: what a guest reads is what it subscribed to and its grants cover now."""
        self._ways.clear()
        for subscriber in [s for s in self._subscribers.values() if s.guest.version]:
            subscriber.limit_bytes = self._grants.limit_bytes(subscriber.guest.user)
            if not self._grants.holds(subscriber.guest.user):
                self._drop(subscriber)

    def _offend(self, subscriber: _Subscriber) -> None:
        self.sent_away += 1
        self._drop(subscriber)

    def _drop(self, subscriber: _Subscriber) -> None:
        self._subscribers.pop(subscriber.line.fileno(), None)
        self._ways.clear()
        if subscriber.out:
            self._count_drop(subscriber, len(subscriber.out), subscriber.out_bytes)
            subscriber.out.clear()
        subscriber.line.close()
