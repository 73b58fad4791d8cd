"""What the rest of Hepti sees of a connection to a broker: a protocol, its events, its counters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol


@dataclass(frozen=True, slots=True)
class Connected:
    """The connection stands, and every subscription made before is acknowledged again.

    protocol: 4 (MQTT 3.1.1) or 5. largest_packet_bytes: the broker's word (MQTT 5 only), None without one. local: the
    broker is on this machine, both ends of the connection having one address. resumed: it knew our session.
    """

    protocol: int
    largest_packet_bytes: int | None
    local: bool = False
    resumed: bool = False


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The connection was lost; it is being made again."""

    reason: str


@dataclass(frozen=True, slots=True)
class Subscribed:
    """The broker acknowledged every filter of `subscribe`; sent for each SUBACK, so again after a reconnection."""

    token: int


@dataclass(frozen=True, slots=True)
class Refused:
    """The broker refused filters of a `subscribe`, or (token None) a publish of QoS 1.

    It refuses a publish in words of MQTT 5, or by hanging up on it time after time.
    """

    token: int | None
    topics: tuple[str, ...]
    reason: str


class Receipt(NamedTuple):
    """By what a message is acknowledged: the connection on which it came, by number, and its packet id."""

    connection: int
    packet: int


@dataclass(frozen=True, slots=True)
class Delivery:
    """A message that the broker keeps until it is acknowledged; it comes again on the next connection otherwise.

    receipt: None for a message of QoS 0, which nobody keeps. repeated: the broker has sent it before. retained: it is
    old, and comes with every subscription; what is published now has it unset, even if it is to be retained.
    """

    topic: str
    payload: bytes
    receipt: Receipt | None
    repeated: bool
    retained: bool = False


State = Connected | Disconnected | Subscribed | Refused
OnMessage = Callable[[str, Any], None]  # topic; payload: bytes, or of a connection for tensors a memoryview
OnDelivery = Callable[[Delivery], None]
OnState = Callable[[State], None]
OnTaken = Callable[[bool], None]  # whether somebody is subscribed to the topic


class Will(NamedTuple):
    """What the broker publishes for us if the connection breaks; also the form of a last publish before closing."""

    topic: str
    payload: bytes
    qos: int = 1
    retain: bool = True


@dataclass(slots=True)
class Counts:
    """PUBLISH packets and their bytes (as `publish_bytes` counts them) since the start.

    lost: published at QoS 0 without a connection or with a full queue, or still queued when closed. bad: received with
    a topic that is not UTF-8, or handed to a callback that failed.
    """

    published: int = 0
    published_bytes: int = 0
    received: int = 0
    received_bytes: int = 0
    lost: int = 0
    bad: int = 0
    reconnections: int = 0


class Transport(Protocol):
    """A connection to one broker that mends itself. All methods may be called from any thread."""

    @property
    def connected(self) -> bool:
        """Return whether the connection stands at this moment."""
        ...

    def connect(self, timeout_s: float = 5.0) -> None:
        """Connect once; later losses are mended. Raises NetworkError, RefusedError or ConfigError."""
        ...

    def publish(
        self, topic: str, payload: bytes, qos: int = 0, retain: bool = False, taken: OnTaken | None = None
    ) -> None:
        """Hand a message over; QoS 0 without a connection is counted as lost. taken: see `PahoTransport.publish`."""
        ...

    def send(self, topic: str, *parts: bytes | memoryview) -> None:
        """Publish at QoS 0 a payload in parts, which are the caller's again on return."""
        ...

    def subscribe(self, filters: Sequence[tuple[str, int]]) -> int:
        """Subscribe to (filter, QoS) and remember them; return the token of the later `Subscribed`."""
        ...

    def unsubscribe(self, filters: Sequence[str]) -> None:
        """Leave and forget filters."""
        ...

    def acknowledge(self, receipt: Receipt) -> None:
        """Let the broker forget a delivery; one of an earlier connection comes again instead."""
        ...

    def counts(self) -> Counts:
        """Return a snapshot of the counters."""
        ...

    def close(self, last: Will | None = None, timeout_s: float = 2.0) -> None:
        """Send what is queued, then `last`, and disconnect cleanly, so that the will is not published."""
        ...
