"""This device's subscription at one peer's endpoint: one connection for all plans, restored after a loss."""

from __future__ import annotations

import random
import select
import socket
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from hepti_mqtt.core.recent import Recent
from hepti_mqtt.protocol.messages import Endpoint
from hepti_mqtt.transport import codec
from hepti_mqtt.transport.base import BACKOFF_S
from hepti_mqtt.transport.buffers import Buffers
from hepti_mqtt.transport.client_protocol import ClientProtocol, Granted, Reader
from hepti_mqtt.transport.sockets import Connection, TlsConnection, begin, connected

MESH_VERSION: Final = 4  # of MQTT, with which a peer subscribes
ANSWER_S: Final = 5.0  # for a handshake, and for an answer to SUBSCRIBE
MAX_TOPICS: Final = 4096
NEVER: Final = float("inf")


@dataclass(frozen=True, slots=True)
class Joined:
    """A peer's endpoint granted all filters of a key."""

    peer: str
    key: Hashable


@dataclass(frozen=True, slots=True)
class Refused:
    """A peer's endpoint refused a key; reported once per connection and retried."""

    peer: str
    key: Hashable
    reason: str


@dataclass(frozen=True, slots=True)
class Lost:
    """The connection to a peer's endpoint is lost with any incomplete payload; it will be restored."""

    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class Dropped:
    """Whole messages for a subscriber were dropped, because its queue was full or its connection ended."""

    peer: str
    nbytes: int


MeshEvent = Joined | Refused | Lost | Dropped


@dataclass(slots=True)
class PeerStats:
    """Counters for one peer since the start of the mesh; bytes are payload bytes."""

    frames_in: int = 0
    bytes_in: int = 0
    frames_out: int = 0
    bytes_out: int = 0
    queued_bytes: int = 0
    dropped: int = 0  #: messages to the peer
    reconnections: int = 0
    joined: bool = False  #: whether the peer granted all keys
    trouble: str = ""  #: reason if not joined
    timed_bytes: int = 0  #: bytes received from all peers while this device only waited for this peer's payload
    timed_us: int = 0  #: duration of these waits


class _State(Enum):
    IDLE = auto()  # no connection
    CONNECTING = auto()
    SECURING = auto()  # the TLS handshake
    GREETING = auto()  # CONNECT and SUBSCRIBE are sent
    UP = auto()


class _Request(Enum):
    NOT_YET = auto()
    WAITING = auto()
    GRANTED = auto()
    REFUSED = auto()


@dataclass(slots=True)
class _Join:
    token: str
    filters: tuple[str, ...]
    limit_bytes: int
    state: _Request = _Request.NOT_YET
    due: float = NEVER  # deadline of the answer, or time of the next request
    delay_s: float = BACKOFF_S[0]
    is_reported: bool = False  # whether a refusal on this connection was reported


@dataclass(frozen=True, slots=True)
class Callbacks:
    """The mesh's callbacks and resources for its peers."""

    user: str  #: this device's name
    clock: Callable[[], float]
    watch: Callable[[int, int, Peer], None]  #: (fd, events, peer): poll this descriptor for events, 0 to stop
    timed: Callable[[], None]  #: called after `Peer.due` changed
    tell: Callable[[MeshEvent], None]  #: takes events
    hear: Callable[[tuple[str, str, memoryview]], None]  #: takes messages (peer, topic, payload)
    again: Callable[[Peer], None]  #: requests a call of `Peer.ready` without waiting
    buffers: Buffers
    #: starts TLS on a socket and pins this certificate fingerprint
    secure: Callable[[socket.socket, str], TlsConnection] | None


class Peer:
    """Subscribes at one endpoint for all joined keys, and receives its messages.

    The caller polls its descriptor and calls `ready`, and calls `timer` at `due`. No method blocks.
    """

    def __init__(self, name: str, address: Endpoint, stats: PeerStats, callbacks: Callbacks) -> None:
        self.name, self.stats, self.due = name, stats, NEVER
        self._address, self._callbacks, self._clock = address, callbacks, callbacks.clock
        self._joins: dict[Hashable, _Join] = {}
        self._state = _State.IDLE
        self._sock: socket.socket | None = None
        self._connection: Connection | None = None  # the socket itself, or TLS over it
        self._secured: TlsConnection | None = None  # the connection, if it is TLS
        self._was_up = False
        self._deadline = NEVER  # of this state
        self._delay_s = BACKOFF_S[0]
        self._tries = 0
        self._topics = Recent[str, bool](MAX_TOPICS)  # cache: whether a filter matches a topic
        self._fd = -1
        self._earlier_bytes = 0  # received on earlier connections
        self._protocol = self._new_protocol()
        self._reader: Reader | None = None

    # -- keys --------------------------------------------------------------------------------------------------------

    def join(self, key: Hashable, address: Endpoint, token: str, filters: Sequence[str], limit_bytes: int) -> None:
        """Subscribe for a key; limit_bytes: of the largest packet."""
        if address != self._address:
            self._address = address
            if self._state is not _State.IDLE:
                self._give_up("it moved to another address")
        self._joins[key] = _Join(token, tuple(filters), limit_bytes)
        self._topics.clear()
        if bool(address.fingerprint) != (self._callbacks.secure is not None):
            self._refuse_tls(key)
            return
        self._protocol.decoder.limit_bytes = self._limit_bytes()
        if self._state is _State.IDLE:
            self._delay_s = BACKOFF_S[0]
            self._try(self._connect)
        elif self._state in (_State.GREETING, _State.UP):
            self._try(lambda: self._say(self._request(key)))

    def _refuse_tls(self, key: Hashable) -> None:
        """Report that only one side has TLS; a token must not be sent without the expected TLS."""
        with_tls, without = ("it has", "we have") if self._address.fingerprint else ("we have", "it has")
        self._deadline, self.stats.trouble = NEVER, f"{with_tls} TLS, {without} none"
        self._schedule()
        self._callbacks.tell(Refused(self.name, key, self.stats.trouble))

    def leave(self, key: Hashable) -> bool:
        """End the subscriptions of a key, and the connection after the last key; return whether keys remain."""
        join = self._joins.pop(key, None)
        self._topics.clear()
        if not self._joins:
            if self._state is _State.UP:
                with suppress(codec.Malformed, OSError):
                    self._say(self._protocol.encode(codec.Disconnect()))
            self._close()
        elif join is not None and self._state in (_State.GREETING, _State.UP):
            others = {name for other in self._joins.values() for name in other.filters}
            gone = [name for name in join.filters if name not in others]
            if gone:
                self._try(lambda: self._say(self._protocol.unsubscribe(gone)))
        self._schedule()
        return bool(self._joins)

    def close(self) -> None:
        """Leave all keys."""
        self._joins.clear()
        self._close()
        self._schedule()

    @property
    def missing(self) -> int:
        """Return the missing bytes of an incomplete payload."""
        return self._protocol.decoder.missing if self._state is _State.UP else 0

    def open_descriptor(self) -> int:
        """Return the socket's descriptor; -1 if it uses TLS, is not joined, or holds a partial message."""
        is_open = self.stats.joined and self._secured is None and self._protocol.decoder.is_empty
        return self._fd if is_open else -1

    def take(self, data: memoryview) -> None:
        """Process bytes that other code read from the socket."""
        reader = self._reader
        assert reader is not None
        try:
            reader.take(data, self._accept)
        except (codec.Malformed, OSError, MemoryError) as error:
            self._give_up(str(error) or repr(error))

    # -- input and timers --------------------------------------------------------------------------------------------

    def ready(self) -> None:
        """Handle a ready descriptor."""
        try:
            if self._state in (_State.UP, _State.GREETING):
                self._receive()
            elif self._state is not _State.IDLE:
                self._greet()
        except BlockingIOError:
            pass
        except (codec.Malformed, OSError, MemoryError) as error:
            self._give_up(str(error) or repr(error))

    def timer(self) -> None:
        """Connect, repeat requests and enforce deadlines that are due."""
        if self._clock() >= self.due and self._state is _State.UP and not self.stats.joined:
            self.ready()  # fewer bytes than the low-water mark may have arrived
        if self._clock() >= self.due:
            self._try(self._act)

    def _act(self) -> None:
        if self._state is _State.IDLE:
            self._connect()
            return
        if self._state is not _State.UP:
            raise codec.Malformed(
                f"no answer from {self._address.host} port {self._address.port} within {ANSWER_S:g} s"
            )
        for key, join in self._joins.items():
            if join.due <= self._clock():
                if join.state is _Request.WAITING:
                    raise codec.Malformed(f"no answer to SUBSCRIBE within {ANSWER_S:g} s")
                self._say(self._request(key))

    def _try(self, action: Callable[[], None]) -> None:
        """Run an action; close the connection if it fails."""
        try:
            action()
        except (codec.Malformed, OSError) as error:
            self._give_up(str(error))
        self._schedule()

    def _schedule(self) -> None:
        """Update `due` and `stats.joined`."""
        joins = self._joins.values()
        self.stats.joined = self._state is _State.UP and all(join.state is _Request.GRANTED for join in joins)
        if self.stats.joined:
            self.stats.trouble, self._delay_s = "", BACKOFF_S[0]
        if not self._joins:
            self.due = NEVER
        elif self._state is _State.UP:
            self.due = min(join.due for join in joins)
        else:
            self.due = self._deadline
        self._callbacks.timed()

    # -- the connection ----------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        self._state, self._deadline = _State.CONNECTING, self._clock() + ANSWER_S
        self._earlier_bytes, self._reader = self.received_bytes, None
        self._protocol = self._new_protocol()
        self._topics.clear()
        self._sock = self._connection = begin(self._address.host, self._address.port)
        self._fd = self._sock.fileno()
        self._callbacks.watch(self._fd, select.EPOLLOUT, self)

    def _greet(self) -> None:
        """Continue the connection: TCP, the TLS handshake, then CONNECT and SUBSCRIBE together."""
        assert self._sock is not None
        if self._state is _State.CONNECTING:
            connected(self._sock)
            self._callbacks.watch(self._fd, select.EPOLLIN, self)
            self._state = _State.SECURING
            if self._callbacks.secure is not None:
                self._connection = self._secured = self._callbacks.secure(self._sock, self._address.fingerprint)
        self._extend_deadlines()
        if self._secured is not None:
            self._secured.handshake()
        tokens = [join.token.encode() for join in reversed(self._joins.values())]
        self._state, user = _State.GREETING, self._callbacks.user
        login = (user, tokens[self._tries % len(tokens)]) if user else (None, None)
        assert self._connection is not None
        plain = self._sock if self._secured is None else None
        self._reader = Reader(self._protocol.decoder, self._connection, plain)
        greeting = self._protocol.encode(codec.Connect(MESH_VERSION, user, *login))
        self._say(greeting + b"".join([self._request(key) for key in self._joins]))

    def _give_up(self, reason: str) -> None:
        """Close the connection and schedule the next attempt."""
        was_up = self._state is _State.UP
        self._close()
        self.stats.trouble = reason
        self._deadline = self._clock() + self._delay_s * random.uniform(0.5, 1.0)
        self._delay_s = min(2 * self._delay_s, BACKOFF_S[1])
        self._tries += 1
        self._schedule()
        if was_up:
            self._callbacks.tell(Lost(self.name, reason))

    def _close(self) -> None:
        if self._connection is not None:
            self._callbacks.watch(self._fd, 0, self)
            self._connection.close()
        self._sock = self._connection = self._secured = None
        self._state = _State.IDLE
        for join in self._joins.values():
            join.state, join.due, join.is_reported = _Request.NOT_YET, NEVER, False

    def _say(self, data: bytes) -> None:
        assert self._connection is not None
        # The kernel accepts these few bytes, because an endpoint with an empty queue reads.
        try:
            sent = self._connection.send(data)
        except BlockingIOError:
            sent = 0
        if sent < len(data):
            raise codec.Malformed("it does not read our requests")

    # -- requests and answers ----------------------------------------------------------------------------------------

    def _request(self, key: Hashable) -> bytes:
        join = self._joins[key]
        join.state, join.due = _Request.WAITING, self._clock() + ANSWER_S
        return self._protocol.subscribe(join, [(name, 0) for name in join.filters])

    def _extend_deadlines(self) -> None:
        """Extend deadlines after received bytes: an endpoint answers only after its earlier messages."""
        deadline = self._clock() + ANSWER_S
        if self._state is not _State.UP:
            self._deadline = deadline
        for join in self._joins.values():
            if join.state is _Request.WAITING:
                join.due = deadline
        self._schedule()

    def _accept(self, event: codec.Event) -> None:
        match self._protocol.accept(event):
            case codec.Publish() as message:
                self._on_publish(message.topic, message.payload)
                return
            case codec.Connack(code):
                self._on_connack(code)
            case Granted(join, _, codes):
                self._on_suback(join, codes)
        self._schedule()

    def _on_connack(self, code: int) -> None:
        if code:
            reason = f"it does not let us in (code {code})"
            for key in self._joins:
                self._callbacks.tell(Refused(self.name, key, reason))
            raise codec.Malformed(reason)
        self._state = _State.UP
        self.stats.reconnections += self._was_up
        self._was_up = True

    def _on_suback(self, join: _Join, codes: bytes) -> None:
        key = next((key for key, own in self._joins.items() if own is join), None)
        if key is None or join.state is not _Request.WAITING:
            return  # the key has left or joined again
        if any(code > 2 for code in codes):
            reason = f"it does not let us read {join.filters[[code > 2 for code in codes].index(True)]}"
            join.state, join.due = _Request.REFUSED, self._clock() + join.delay_s * random.uniform(0.5, 1.0)
            join.delay_s = min(2 * join.delay_s, BACKOFF_S[1])
            self.stats.trouble = reason
            if not join.is_reported:
                join.is_reported = True
                self._callbacks.tell(Refused(self.name, key, reason))
            return
        join.state, join.due, join.delay_s = _Request.GRANTED, NEVER, BACKOFF_S[0]
        self._callbacks.tell(Joined(self.name, key))

    # -- messages ----------------------------------------------------------------------------------------------------

    def _new_protocol(self) -> ClientProtocol:
        return ClientProtocol(
            codec.Decoder(codec.FROM_ENDPOINT, limit_bytes=self._limit_bytes(), buffers=self._callbacks.buffers)
        )

    def _limit_bytes(self) -> int:
        return max((join.limit_bytes for join in self._joins.values()), default=0)

    @property
    def received_bytes(self) -> int:
        """Return the received bytes, headers included."""
        return self._earlier_bytes + (0 if self._reader is None else self._reader.nbytes)

    def _receive(self) -> None:
        """Read available bytes, at most one large payload."""
        reader = self._reader
        assert reader is not None
        before = reader.nbytes
        is_left = reader.read(self._accept, None if self._secured is None else self._secured.pending)
        if reader.nbytes > before and not self.stats.joined:
            self._extend_deadlines()
        if is_left:
            self._callbacks.again(self)

    def _on_publish(self, topic: str, payload: memoryview) -> None:
        wanted = self._topics.get(topic)
        if wanted is None:
            filters = [name for join in self._joins.values() for name in join.filters]
            wanted = self._topics[topic] = any(codec.matches(name, topic) for name in filters)
        if wanted:
            self.stats.frames_in += 1
            self.stats.bytes_in += payload.nbytes
            self._callbacks.hear((self.name, topic, payload))
