"""This device's subscription at one peer's endpoint: one connection for every plan, restored after a loss."""

from __future__ import annotations

import ipaddress
import random
import select
import socket
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from hepti_mqtt.errors import WireError
from hepti_mqtt.transport.buffers import Buffers
from hepti_mqtt.transport.client_protocol import ClientProtocol, Granted, Reader
from hepti_mqtt.transport.codec import (
    FROM_ENDPOINT,
    Connack,
    Connect,
    Decoder,
    Disconnect,
    Event,
    Malformed,
    Publish,
    matches,
)
from hepti_mqtt.transport.sockets import Connection, TlsConnection, begin, connected

MESH_VERSION: Final = 4  # of MQTT, with which a peer subscribes
ANSWER_S: Final = 5.0  # for a handshake, and for an answer to SUBSCRIBE
BACKOFF_S: Final = (0.1, 5.0)
MAX_TOPICS: Final = 4096
NEVER: Final = float("inf")


@dataclass(frozen=True, slots=True)
class Address:
    """Where an endpoint listens: an IP address, and the SHA-256 of its certificate in hex, "" without TLS.

    Raises WireError if a peer announced anything else.
    """

    host: str
    port: int
    fingerprint: str = ""

    def __post_init__(self) -> None:
        try:
            ipaddress.ip_address(self.host)
        except ValueError:
            # A name would have to be looked up, which blocks.
            raise WireError(f"a peer announced its endpoint at {self.host!r}, which is not an IP address") from None
        if not 0 < self.port < 65_536:
            raise WireError(f"a peer announced its endpoint on port {self.port}, which is not a port")


@dataclass(frozen=True, slots=True)
class Joined:
    """Every filter of this key is granted at this peer's endpoint, on an open connection."""

    peer: str
    key: Hashable


@dataclass(frozen=True, slots=True)
class Refused:
    """A peer's endpoint refused this key, reported once per connection; the subscription is retried."""

    peer: str
    key: Hashable
    reason: str


@dataclass(frozen=True, slots=True)
class Lost:
    """The connection to a peer's endpoint is lost with what was half received; it is being made again."""

    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class Dropped:
    """Messages for this subscriber were dropped whole: its queue was full, or it was disconnected."""

    peer: str
    nbytes: int


MeshEvent = Joined | Refused | Lost | Dropped


@dataclass(slots=True)
class PeerStats:
    """What went between this device and one peer since the mesh began; bytes are those of payloads.

    queued_bytes: what waits for the peer now. dropped: messages that it did not get. unwanted:
    messages from it that no filter here takes in (any more). reconnections: how often the
    connection to its endpoint was restored. joined: whether everything that was joined there is granted. trouble: why
    not, in words. timed_bytes: what came while this device waited for the rest of a payload and did nothing else, and
    timed_us, for how long; from several peers at once, what came from all of them counts for each.
    """

    frames_in: int = 0
    bytes_in: int = 0
    frames_out: int = 0
    bytes_out: int = 0
    queued_bytes: int = 0
    dropped: int = 0
    unwanted: int = 0
    reconnections: int = 0
    joined: bool = False
    trouble: str = ""
    timed_bytes: int = 0
    timed_us: int = 0


class _State(Enum):
    IDLE = auto()  # no connection
    CONNECTING = auto()
    SECURING = auto()  # the TLS handshake
    GREETING = auto()  # CONNECT and SUBSCRIBE are out
    UP = auto()


class _Asked(Enum):
    NOT_YET = auto()
    WAITING = auto()
    GRANTED = auto()
    REFUSED = auto()


@dataclass(slots=True)
class _Join:
    token: str
    filters: tuple[str, ...]
    limit_bytes: int
    state: _Asked = _Asked.NOT_YET
    due: float = NEVER  # when the answer is late, or when to ask again
    delay_s: float = BACKOFF_S[0]
    told: bool = False  # of a refusal on this connection


@dataclass(frozen=True, slots=True)
class Callbacks:
    """What a peer calls and shares.

    user: this device. watch(fd, events, peer): wait for these events on this descriptor, 0: no more. timed: called
    after `due` was set. tell, hear: where events and messages (peer, topic, payload) go. again: call `ready` without
    waiting. secure: starts TLS on a connected socket to the holder of this certificate's fingerprint.
    """

    user: str
    clock: Callable[[], float]
    watch: Callable[[int, int, Peer], None]
    timed: Callable[[], None]
    tell: Callable[[MeshEvent], None]
    hear: Callable[[tuple[str, str, memoryview]], None]
    again: Callable[[Peer], None]
    buffers: Buffers
    secure: Callable[[socket.socket, str], TlsConnection] | None


class Peer:
    """Subscribes at one endpoint for every key that joined, and receives what it sends.

    The caller waits for its descriptor and calls `ready`; at `due` it calls `timer`. No name is looked up and nothing
    waits. stats: what it counts.
    """

    def __init__(self, name: str, address: Address, stats: PeerStats, callbacks: Callbacks) -> None:
        self.name, self.stats, self.due = name, stats, NEVER
        self._address, self._callbacks, self._clock = address, callbacks, callbacks.clock
        self._joins: dict[Hashable, _Join] = {}
        self._state = _State.IDLE
        self._sock: socket.socket | None = None
        self._connection: Connection | None = None  # the socket itself, or TLS over it
        self._secured: TlsConnection | None = None  # the line, if it is TLS
        self._stood = False  # was up before
        self._deadline = NEVER  # of this state
        self._delay_s = BACKOFF_S[0]
        self._tries = 0
        self._topics: dict[str, bool] = {}  # whether somebody has asked for it
        self._fd = -1
        self._earlier_bytes = 0  # of earlier connections
        self._protocol = self._new_protocol()
        self._reader: Reader | None = None

    # -- what the caller wants ---------------------------------------------------------------------------------------

    def join(self, key: Hashable, address: Address, token: str, filters: Sequence[str], limit_bytes: int) -> None:
        """Subscribe for this key; limit_bytes: the largest packet that may come."""
        if address != self._address:
            self._address = address
            if self._state is not _State.IDLE:
                self._give_up("it moved to another address")
        self._joins[key] = _Join(token, tuple(filters), limit_bytes)
        self._topics.clear()
        if bool(address.fingerprint) != (self._callbacks.secure is not None):
            self._cannot(key)
            return
        self._protocol.decoder.limit_bytes = self._limit_bytes()
        if self._state is _State.IDLE:
            self._delay_s = BACKOFF_S[0]
            self._try(self._connect)
        elif self._state in (_State.GREETING, _State.UP):
            self._try(lambda: self._ask(key))

    def _cannot(self, key: Hashable) -> None:
        """Refuse without asking: a token is never sent without TLS where TLS is expected."""
        with_tls, without = ("it has", "we have") if self._address.fingerprint else ("we have", "it has")
        self._deadline, self.stats.trouble = NEVER, f"{with_tls} TLS, {without} none"
        self._schedule()
        self._callbacks.tell(Refused(self.name, key, self.stats.trouble))

    def leave(self, key: Hashable) -> bool:
        """End the subscriptions of a key, and the connection with the last one; return whether any key is left."""
        join = self._joins.pop(key, None)
        self._topics.clear()
        if not self._joins:
            if self._state is _State.UP:
                with suppress(Malformed, OSError):
                    self._say(self._protocol.encode(Disconnect()))
            self._close()
        elif join is not None and self._state in (_State.GREETING, _State.UP):
            others = {name for other in self._joins.values() for name in other.filters}
            gone = [name for name in join.filters if name not in others]
            if gone:
                self._try(lambda: self._say(self._protocol.unsubscribe(gone)))
        self._schedule()
        return bool(self._joins)

    def close(self) -> None:
        """Leave everything."""
        self._joins.clear()
        self._close()
        self._schedule()

    @property
    def missing(self) -> int:
        """Return how many bytes of a payload on its way have not come yet."""
        return self._protocol.decoder.missing if self._state is _State.UP else 0

    def open_descriptor(self) -> int:
        """Return the socket's descriptor; -1 if it is encrypted, not granted all, or a message has come in part."""
        is_open = self.stats.joined and self._secured is None and self._protocol.decoder.is_empty
        return self._fd if is_open else -1

    def take(self, data: memoryview) -> None:
        """Take what was read of the socket elsewhere."""
        reader = self._reader
        assert reader is not None
        try:
            reader.take(data, self._accept)
        except (Malformed, OSError, MemoryError) as error:
            self._give_up(str(error) or repr(error))

    # -- what happens ------------------------------------------------------------------------------------------------

    def ready(self) -> None:
        """Act on a descriptor that is ready."""
        try:
            if self._state is _State.UP or self._state is _State.GREETING:
                self._receive()
            elif self._state is not _State.IDLE:
                self._greet()
        except BlockingIOError:
            pass
        except (Malformed, OSError, MemoryError) as error:
            self._give_up(str(error) or repr(error))

    def timer(self) -> None:
        """Do what is due."""
        if self._late() and self._state is _State.UP and not self.stats.joined:
            self.ready()  # something may have come, only less than wakes us
        if self._late():
            self._try(self._act)

    def _late(self) -> bool:
        return self._clock() >= self.due

    def _act(self) -> None:
        if self._state is _State.IDLE:
            self._connect()
            return
        if self._state is not _State.UP:
            raise Malformed(f"no answer from {self._address.host} port {self._address.port} within {ANSWER_S:g} s")
        for key, join in self._joins.items():
            if join.due <= self._clock():
                if join.state is _Asked.WAITING:
                    raise Malformed(f"no answer to SUBSCRIBE within {ANSWER_S:g} s")
                self._ask(key)

    def _try(self, action: Callable[[], None]) -> None:
        """Do what may fail, as `ready` does."""
        try:
            action()
        except (Malformed, OSError) as error:
            self._give_up(str(error))
        self._schedule()

    def _schedule(self) -> None:
        """Work out when something is due, and whether all is well."""
        joins = self._joins.values()
        self.stats.joined = self._state is _State.UP and all(join.state is _Asked.GRANTED for join in joins)
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
        """Go on as far as it goes: connected, secured, and then CONNECT and SUBSCRIBE together."""
        assert self._sock is not None
        if self._state is _State.CONNECTING:
            connected(self._sock)
            self._callbacks.watch(self._fd, select.EPOLLIN, self)
            self._state = _State.SECURING
            if self._callbacks.secure is not None:
                self._connection = self._secured = self._callbacks.secure(self._sock, self._address.fingerprint)
        self._heard()
        if self._secured is not None:
            self._secured.handshake()
        tokens = [join.token.encode() for join in reversed(self._joins.values())]
        self._state, user = _State.GREETING, self._callbacks.user
        login = (user, tokens[self._tries % len(tokens)]) if user else (None, None)
        assert self._connection is not None
        plain = self._sock if self._secured is None else None
        self._reader = Reader(self._protocol.decoder, self._connection, plain)
        greeting = self._protocol.encode(Connect(MESH_VERSION, user, *login))
        self._say(greeting + b"".join([self._question(key) for key in self._joins]))

    def _give_up(self, reason: str) -> None:
        """Close the connection, and try again after a while."""
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
            join.state, join.due, join.told = _Asked.NOT_YET, NEVER, False

    def _say(self, data: bytes) -> None:
        assert self._connection is not None
        # An endpoint reads while it has nothing to send, and these are few bytes: the kernel takes them.
        try:
            taken = self._connection.send(data)
        except BlockingIOError:
            taken = 0
        if taken < len(data):
            raise Malformed("it does not take what we ask for")

    # -- what is asked for -------------------------------------------------------------------------------------------

    def _ask(self, key: Hashable) -> None:
        self._say(self._question(key))

    def _question(self, key: Hashable) -> bytes:
        join = self._joins[key]
        join.state, join.due = _Asked.WAITING, self._clock() + ANSWER_S
        return self._protocol.subscribe(join, [(name, 0) for name in join.filters])

    def _heard(self) -> None:
        """Allow an endpoint that sends more time: its answer comes after what it sent before."""
        late = self._clock() + ANSWER_S
        if self._state is not _State.UP:
            self._deadline = late
        for join in self._joins.values():
            if join.state is _Asked.WAITING:
                join.due = late
        self._schedule()

    def _accept(self, event: Event) -> None:
        match self._protocol.accept(event):
            case Publish() as message:
                self._on_publish(message.topic, message.payload)
                return
            case Connack(code):
                self._let_in(code)
            case Granted(join, _, codes):
                self._answered(join, codes)
        self._schedule()

    def _let_in(self, code: int) -> None:
        if code:
            reason = f"it does not let us in (code {code})"
            for key in self._joins:
                self._callbacks.tell(Refused(self.name, key, reason))
            raise Malformed(reason)
        self._state = _State.UP
        self.stats.reconnections += self._stood
        self._stood = True

    def _answered(self, join: _Join, codes: bytes) -> None:
        key = next((key for key, own in self._joins.items() if own is join), None)
        if key is None or join.state is not _Asked.WAITING:
            return  # of a key that has left, or was joined again
        if any(code > 2 for code in codes):
            reason = f"it does not let us read {join.filters[[code > 2 for code in codes].index(True)]}"
            join.state, join.due = _Asked.REFUSED, self._clock() + join.delay_s * random.uniform(0.5, 1.0)
            join.delay_s = min(2 * join.delay_s, BACKOFF_S[1])
            self.stats.trouble = reason
            if not join.told:
                join.told = True
                self._callbacks.tell(Refused(self.name, key, reason))
            return
        join.state, join.due, join.delay_s = _Asked.GRANTED, NEVER, BACKOFF_S[0]
        self._callbacks.tell(Joined(self.name, key))

    # -- what comes --------------------------------------------------------------------------------------------------

    def _new_protocol(self) -> ClientProtocol:
        return ClientProtocol(Decoder(FROM_ENDPOINT, limit_bytes=self._limit_bytes(), buffers=self._callbacks.buffers))

    def _limit_bytes(self) -> int:
        return max((join.limit_bytes for join in self._joins.values()), default=0)

    @property
    def received_bytes(self) -> int:
        """Return how many bytes have come, headers included."""
        return self._earlier_bytes + (0 if self._reader is None else self._reader.nbytes)

    def _receive(self) -> None:
        """Take what is there, at most one large payload."""
        reader = self._reader
        assert reader is not None
        before = reader.nbytes
        is_left = reader.read(self._accept, None if self._secured is None else self._secured.pending)
        if reader.nbytes > before and not self.stats.joined:
            self._heard()
        if is_left:
            self._callbacks.again(self)

    def _on_publish(self, topic: str, payload: memoryview) -> None:
        wanted = self._topics.get(topic)
        if wanted is None:
            if len(self._topics) >= MAX_TOPICS:
                self._topics.clear()
            filters = [name for join in self._joins.values() for name in join.filters]
            wanted = self._topics[topic] = any(matches(name, topic) for name in filters)
        if wanted:
            self.stats.frames_in += 1
            self.stats.bytes_in += payload.nbytes
            self._callbacks.hear((self.name, topic, payload))
        else:
            self.stats.unwanted += 1
