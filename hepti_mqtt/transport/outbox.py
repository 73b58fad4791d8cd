"""What waits for a connection: shared by those who publish and subscribe and the network thread, under one lock."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from hepti_mqtt.errors import NetworkError
from hepti_mqtt.protocol.limits import packet_limit_error
from hepti_mqtt.protocol.topics import publish_bytes
from hepti_mqtt.transport.base import Counts, OnTaken, Receipt, Will

MAX_QUEUED_BYTES: Final = 64 * 2**20
MAX_QUEUED: Final = 10_000

Filters = tuple[tuple[str, int], ...]


class Message(NamedTuple):
    """A message to be published; packet_bytes: of its PUBLISH packet. taken: see `PahoTransport.publish`."""

    topic: str
    payload: bytes
    qos: int
    retain: bool
    packet_bytes: int
    taken: OnTaken | None = None


class Subscription(NamedTuple):
    """Filters to subscribe to, none if they have been left meanwhile."""

    token: int
    filters: Filters = ()


class Unsubscription(NamedTuple):
    """Filters to leave."""

    filters: tuple[str, ...]


Operation = Message | Subscription | Unsubscription | Receipt


class Outbox:
    """A bounded queue of what is to be sent, the filters that are wanted, and the counters of one transport.

    name: of the transport. place: host and port of the broker, for texts. stop_at: when the transport must have ended,
    None before `close`. up: whether a connection stands.
    """

    def __init__(self, name: str, place: str, max_queued_bytes: int = MAX_QUEUED_BYTES) -> None:
        self._name, self._place, self._max_queued_bytes = name, place, max_queued_bytes
        self._lock = threading.Lock()  # guards all that follows
        self._queue: deque[Operation] = deque()
        self._queued_bytes = 0
        self._filters: dict[int, Filters] = {}
        self._token = 0
        self._largest_bytes: int | None = None  # as the broker said at the last connection
        self._counts = Counts()
        self.up = False
        self.stop_at: float | None = None

    # -- any thread --------------------------------------------------------------------------------------------------

    def publish(self, topic: str, payload: bytes, qos: int, retain: bool, taken: OnTaken | None = None) -> None:
        """Queue a message, or count it as lost; raises as `PahoTransport.publish` does."""
        if not isinstance(payload, (bytes, bytearray)):
            raise TypeError(f"a payload is bytes, not {type(payload).__name__}")
        if not topic or set(topic) & {"+", "#", "\0"} or qos not in (0, 1, 2):
            raise ValueError(f"cannot publish to {topic!r} at QoS {qos}")
        packet_bytes = publish_bytes(topic, len(payload), qos)
        with self._lock:
            if self.stop_at is not None:
                raise NetworkError(f"the connection {self._name} is closed; nothing can be published on it")
            if self._largest_bytes is not None and packet_bytes > self._largest_bytes:
                raise packet_limit_error(
                    self._largest_bytes, packet_bytes, "this message", f"the broker at {self._place}"
                )
            full = len(self._queue) >= MAX_QUEUED or (
                self._queued_bytes > 0 and self._queued_bytes + packet_bytes > self._max_queued_bytes
            )
            if qos == 0 and (full or not self.up):
                self._counts.lost += 1
                return
            if full:
                raise NetworkError(
                    f"{self._queued_bytes} bytes wait for the broker at {self._place}, which is too slow or away; "
                    "send less, or try again later"
                )
            self._queue.append(Message(topic, payload, qos, retain, packet_bytes, taken))
            self._queued_bytes += packet_bytes

    def subscribe(self, filters: Sequence[tuple[str, int]]) -> int:
        """Remember filters, and queue them if a connection stands; raises as `PahoTransport.subscribe` does."""
        if not filters:
            raise ValueError("name at least one filter")
        for name, qos in filters:
            levels = name.split("/")
            wild = any(len(level) > 1 and set(level) & {"+", "#"} for level in levels) or "#" in levels[:-1]
            if not name or wild or "\0" in name or qos not in (0, 1, 2):
                raise ValueError(f"cannot subscribe to {name!r} at QoS {qos}")
        with self._lock:
            self._token += 1
            self._filters[self._token] = tuple(filters)
            if self.up:  # otherwise they go out with the others, once there is a connection
                self._queue.append(Subscription(self._token))
            return self._token

    def unsubscribe(self, filters: Sequence[str]) -> None:
        """Forget filters, and queue that they are left if a connection stands."""
        gone = set(filters)
        with self._lock:
            kept = {token: tuple(f for f in own if f[0] not in gone) for token, own in self._filters.items()}
            self._filters = {token: own for token, own in kept.items() if own}
            if self.up and gone:
                self._queue.append(Unsubscription(tuple(sorted(gone))))

    def acknowledge(self, receipt: Receipt) -> None:
        """Queue an acknowledgement if a connection stands."""
        with self._lock:
            if self.up:
                self._queue.append(receipt)

    def close(self, last: Will | None, stop_at: float) -> bool:
        """Take nothing after `last`; return False if the outbox is closed already."""
        with self._lock:
            if self.stop_at is not None:
                return False
            self.stop_at = stop_at
            if last is not None:
                self._queue.append(Message(*last, publish_bytes(last.topic, len(last.payload), last.qos)))
            return True

    def counts(self) -> Counts:
        """Return a snapshot of the counters."""
        with self._lock:
            return replace(self._counts)

    # -- the network thread ------------------------------------------------------------------------------------------

    def empty(self) -> bool:
        """Return whether nothing is queued."""
        return not self._queue

    def take(self) -> Operation | None:
        """Return what comes next, None if nothing is queued."""
        with self._lock:
            if not self._queue:
                return None
            op = self._queue.popleft()
            return Subscription(op.token, self._filters.get(op.token, ())) if isinstance(op, Subscription) else op

    def connected(self, largest_bytes: int | None) -> tuple[dict[int, Filters], list[Message]]:
        """A connection stands, to a broker that takes packets so large; return all filters and what is too large.

        That was published while the broker took more, or before it said how much. It is no longer queued.
        """
        with self._lock:
            self.up, self._largest_bytes = True, largest_bytes
            limit = float("inf") if largest_bytes is None else largest_bytes
            return dict(self._filters), self._take_out(lambda message: message.packet_bytes > limit)

    def withdraw(self, message: Message) -> list[Message]:
        """Give up a message; return it, and copies of it that were published since it began to wait."""
        with self._lock:
            return self._take_out(lambda other: other.topic == message.topic and other.payload == message.payload)

    def _take_out(self, unwanted: Callable[[Message], bool]) -> list[Message]:
        gone: list[Message] = []
        for _ in range(len(self._queue)):  # once round: what stays keeps its order
            op = self._queue.popleft()
            if isinstance(op, Message) and unwanted(op):
                gone.append(op)
            else:
                self._queue.append(op)
        self._queued_bytes -= sum(op.packet_bytes for op in gone)
        return gone

    def disconnected(self, unacknowledged: Sequence[Message], unfinished: bool) -> None:
        """The connection is lost: queue again what the broker has not acknowledged, and count the rest as lost.

        unfinished: a message was being written.
        """
        with self._lock:
            self.up = False
            lost = [op for op in self._queue if isinstance(op, Message) and op.qos == 0]
            kept = [op for op in self._queue if isinstance(op, Message) and op.qos > 0]
            self._queue = deque([*unacknowledged, *kept])
            self._queued_bytes -= sum(op.packet_bytes for op in lost)
            self._counts.lost += len(lost) + unfinished

    def clear(self) -> None:
        """Give up what is queued and count it as lost."""
        with self._lock:
            self._counts.lost += sum(isinstance(op, Message) for op in self._queue)
            self._queue.clear()

    def sent(self, message: Message) -> None:
        """Count a message that goes out; at QoS 0 it needs no room any more."""
        with self._lock:
            self._counts.published += 1
            self._counts.published_bytes += message.packet_bytes
            if message.qos == 0:
                self._queued_bytes -= message.packet_bytes

    def sent_at_once(self, packet_bytes: int) -> None:
        """Count a message that never waited."""
        with self._lock:
            self._counts.published += 1
            self._counts.published_bytes += packet_bytes

    def acknowledged(self, message: Message) -> None:
        """A message of QoS 1 needs no room any more."""
        with self._lock:
            self._queued_bytes -= message.packet_bytes

    def received(self, packet_bytes: int) -> None:
        """Count a message that has come."""
        with self._lock:
            self._counts.received += 1
            self._counts.received_bytes += packet_bytes

    def bad(self) -> None:
        """Count what could not be dealt with."""
        with self._lock:
            self._counts.bad += 1

    def reconnected(self) -> None:
        """Count a connection after the first."""
        with self._lock:
            self._counts.reconnections += 1
