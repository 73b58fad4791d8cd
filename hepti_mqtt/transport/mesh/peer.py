"""The subscription of this device at one peer's endpoint: one connection for every plan, which mends itself."""

from __future__ import annotations

import random
import select
import socket
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from hepti_mqtt.transport.mesh.buffers import Buffers
from hepti_mqtt.transport.mesh.events import Edge, Joined, Lost, MeshEvent, Place, Refused
from hepti_mqtt.transport.mesh.filters import matches
from hepti_mqtt.transport.mesh.intake import Intake
from hepti_mqtt.transport.mesh.lines import Line, SecureLine, begin, connected, low_water
from hepti_mqtt.transport.mesh.packets import (
    CONNACK,
    DISCONNECT,
    SUBACK,
    UNSUBACK,
    Malformed,
    connect,
    packet,
    subscribe,
    unsubscribe,
)

ANSWER_S: Final = 5.0  # for a handshake, and for an answer to SUBSCRIBE
BACKOFF_S: Final = (0.1, 5.0)
LOW_WATER: Final = 512 * 1024  # wake for so much of a payload, not for every segment
MAX_TOPICS: Final = 4096
MAX_READS: Final = 64  # of one connection before others have their turn
NEVER: Final = float("inf")


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
    packet_id: int = 0  # of its last SUBSCRIBE


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a peer has around it.

    user: this device. watch(fd, events, peer): wait for these events on this descriptor, 0: no more. timed: called
    after `due` was set. tell, hear: where events and messages (peer, topic, payload) go. again: call `ready` without
    waiting. secure: makes a TLS line of a connected socket, the other side known by its fingerprint.
    """

    user: str
    clock: Callable[[], float]
    watch: Callable[[int, int, Peer], None]
    timed: Callable[[], None]
    tell: Callable[[MeshEvent], None]
    hear: Callable[[tuple[str, str, memoryview]], None]
    again: Callable[[Peer], None]
    buffers: Buffers
    secure: Callable[[socket.socket, str], SecureLine] | None


class Peer:
    """Subscribes at one endpoint for every key that joined, and hears what it sends.

    The caller waits for its descriptor and calls `ready`; at `due` it calls `timer`. No name is looked up and nothing
    waits. edge: what it counts.
    """

    def __init__(self, name: str, place: Place, edge: Edge, around: Surroundings) -> None:
        self.name, self.edge, self.due = name, edge, NEVER
        self._place, self._around, self._clock = place, around, around.clock
        self._joins: dict[Hashable, _Join] = {}
        self._state = _State.IDLE
        self._sock: socket.socket | None = None
        self._line: Line | None = None  # the socket itself, or TLS over it
        self._secured: SecureLine | None = None  # the line, if it is TLS
        self._stood = False  # was up before
        self._deadline = NEVER  # of this state
        self._delay_s = BACKOFF_S[0]
        self._ids = self._tries = 0
        self._topics: dict[str, bool] = {}  # whether somebody has asked for it
        self._fd, self._low = -1, 1
        self._intake = self._new_intake()

    # -- what the caller wants ---------------------------------------------------------------------------------------

    def join(self, key: Hashable, place: Place, token: str, filters: Sequence[str], limit_bytes: int) -> None:
        """Subscribe for this key; limit_bytes: the largest packet that may come."""
        if place != self._place:
            self._place = place
            if self._state is not _State.IDLE:
                self._give_up("it listens elsewhere now")
        self._joins[key] = _Join(token, tuple(filters), limit_bytes)
        self._topics.clear()
        if bool(place.fingerprint) != (self._around.secure is not None):
            self._cannot(key)
            return
        self._intake.limit_bytes = self._limit_bytes()
        if self._state is _State.IDLE:
            self._delay_s = BACKOFF_S[0]
            self._try(self._connect)
        elif self._state in (_State.GREETING, _State.UP):
            self._try(lambda: self._ask(key))

    def _cannot(self, key: Hashable) -> None:
        """Say no ourselves: a token is never sent without TLS where there should be TLS."""
        with_tls, without = ("it has", "we have") if self._place.fingerprint else ("we have", "it has")
        self._deadline, self.edge.trouble = NEVER, f"{with_tls} TLS, {without} none"
        self._schedule()
        self._around.tell(Refused(self.name, key, self.edge.trouble))

    def leave(self, key: Hashable) -> bool:
        """End the subscriptions of a key, and the connection with the last one; return whether any key is left."""
        join = self._joins.pop(key, None)
        self._topics.clear()
        if not self._joins:
            if self._state is _State.UP:
                with suppress(Malformed, OSError):
                    self._say(packet(DISCONNECT))
            self._close()
        elif join is not None and self._state in (_State.GREETING, _State.UP):
            others = {name for other in self._joins.values() for name in other.filters}
            gone = [name for name in join.filters if name not in others]
            if gone:
                self._try(lambda: self._say(unsubscribe(self._next_id(), gone)))
        self._schedule()
        return bool(self._joins)

    def close(self) -> None:
        """Leave everything."""
        self._joins.clear()
        self._close()
        self._schedule()

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
        if self._late() and self._state is _State.UP and not self.edge.joined:
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
            raise Malformed(f"no answer from {self._place.host} port {self._place.port} within {ANSWER_S:g} s")
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
        self.edge.joined = self._state is _State.UP and all(join.state is _Asked.GRANTED for join in joins)
        if self.edge.joined:
            self.edge.trouble, self._delay_s = "", BACKOFF_S[0]
        if not self._joins:
            self.due = NEVER
        elif self._state is _State.UP:
            self.due = min(join.due for join in joins)
        else:
            self.due = self._deadline
        self._around.timed()

    # -- the connection ----------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        self._state, self._deadline = _State.CONNECTING, self._clock() + ANSWER_S
        self._intake, self._low = self._new_intake(), 1
        self._topics.clear()
        self._sock = self._line = begin(self._place.host, self._place.port)
        self._fd = self._sock.fileno()
        self._around.watch(self._fd, select.EPOLLOUT, self)

    def _greet(self) -> None:
        """Go on as far as it goes: connected, secured, and then CONNECT and SUBSCRIBE together."""
        assert self._sock is not None
        if self._state is _State.CONNECTING:
            connected(self._sock)
            self._around.watch(self._fd, select.EPOLLIN, self)
            self._state = _State.SECURING
            if self._around.secure is not None:
                self._line = self._secured = self._around.secure(self._sock, self._place.fingerprint)
        self._heard()
        if self._secured is not None:
            self._secured.shake()
        tokens = [join.token for join in reversed(self._joins.values())]
        self._state = _State.GREETING
        asked = [self._question(key) for key in self._joins]
        self._say(connect(self._around.user, tokens[self._tries % len(tokens)]) + b"".join(asked))

    def _give_up(self, reason: str) -> None:
        """Close the connection, and try again after a while."""
        was_up = self._state is _State.UP
        self._close()
        self.edge.trouble = reason
        self._deadline = self._clock() + self._delay_s * random.uniform(0.5, 1.0)
        self._delay_s = min(2 * self._delay_s, BACKOFF_S[1])
        self._tries += 1
        self._schedule()
        if was_up:
            self._around.tell(Lost(self.name, reason))

    def _close(self) -> None:
        if self._line is not None:
            self._around.watch(self._fd, 0, self)
            self._line.close()
        self._sock = self._line = self._secured = None
        self._state = _State.IDLE
        for join in self._joins.values():
            join.state, join.due, join.told = _Asked.NOT_YET, NEVER, False

    def _say(self, data: bytes) -> None:
        assert self._line is not None
        # An endpoint hears us while it has nothing to send, and these are few bytes: the kernel takes them.
        try:
            taken = self._line.send(data)
        except BlockingIOError:
            taken = 0
        if taken < len(data):
            raise Malformed("it does not take what we ask for")

    # -- what is asked for -------------------------------------------------------------------------------------------

    def _ask(self, key: Hashable) -> None:
        self._say(self._question(key))

    def _question(self, key: Hashable) -> bytes:
        join, packet_id = self._joins[key], self._next_id()
        join.state, join.due, join.packet_id = _Asked.WAITING, self._clock() + ANSWER_S, packet_id
        return subscribe(packet_id, join.filters)

    def _heard(self) -> None:
        """Give more time to whoever sends: its answer comes after what it sent before."""
        late = self._clock() + ANSWER_S
        if self._state is not _State.UP:
            self._deadline = late
        for join in self._joins.values():
            if join.state is _Asked.WAITING:
                join.due = late
        self._schedule()

    def _next_id(self) -> int:
        self._ids = self._ids % 65_535 + 1
        return self._ids

    def _on_control(self, first: int, body: bytes) -> None:
        if first == CONNACK and len(body) == 2 and self._state is _State.GREETING:
            self._let_in(body[1])
        elif first == SUBACK and len(body) > 2 and self._state is _State.UP:
            self._answered(int.from_bytes(body[:2], "big"), body[2:])
        elif first != UNSUBACK or self._state is not _State.UP:
            raise Malformed(f"packet {first:#x} is not for a subscriber")
        self._schedule()

    def _let_in(self, code: int) -> None:
        if code:
            reason = f"it does not let us in (code {code})"
            for key in self._joins:
                self._around.tell(Refused(self.name, key, reason))
            raise Malformed(reason)
        self._state = _State.UP
        self.edge.reconnections += self._stood
        self._stood = True

    def _answered(self, packet_id: int, codes: bytes) -> None:
        key, join = next(((k, j) for k, j in self._joins.items() if j.packet_id == packet_id), (None, None))
        if join is None or join.state is not _Asked.WAITING:
            return  # of a key that has left, or was joined anew
        if len(codes) != len(join.filters):
            raise Malformed(f"{len(codes)} answers to {len(join.filters)} filters")
        if any(code > 2 for code in codes):
            reason = f"it does not let us read {join.filters[[code > 2 for code in codes].index(True)]}"
            join.state, join.due = _Asked.REFUSED, self._clock() + join.delay_s * random.uniform(0.5, 1.0)
            join.delay_s = min(2 * join.delay_s, BACKOFF_S[1])
            self.edge.trouble = reason
            if not join.told:
                join.told = True
                self._around.tell(Refused(self.name, key, reason))
            return
        join.state, join.due, join.delay_s = _Asked.GRANTED, NEVER, BACKOFF_S[0]
        self._around.tell(Joined(self.name, key))

    # -- what comes --------------------------------------------------------------------------------------------------

    def _new_intake(self) -> Intake:
        return Intake(self._around.buffers, self._on_publish, self._on_control, self._limit_bytes())

    def _limit_bytes(self) -> int:
        return max((join.limit_bytes for join in self._joins.values()), default=0)

    def _receive(self) -> None:
        """Take what is there, at most one large payload."""
        intake, line, secured = self._intake, self._line, self._secured
        assert line is not None
        try:
            for _ in range(MAX_READS):
                room = intake.room()
                nbytes = line.recv_into(room)
                if not nbytes:
                    raise Malformed("it hung up")
                if not self.edge.joined:
                    self._heard()
                intake.took(nbytes)
                if secured is not None:
                    if not intake.missing and not secured.pending():
                        return
                elif not intake.missing or nbytes < room.nbytes:
                    break
            else:
                self._around.again(self)
        except BlockingIOError:
            pass
        if secured is None:
            self._wake_for(intake.missing)

    def _wake_for(self, nbytes: int) -> None:
        """Wake up once for the rest of a payload instead of once for every few segments."""
        low = min(max(nbytes, 1), LOW_WATER)
        if low != self._low:
            assert self._sock is not None
            low_water(self._sock, low)
            self._low = low

    def _on_publish(self, topic: str, payload: memoryview) -> None:
        wanted = self._topics.get(topic)
        if wanted is None:
            if self._state is not _State.UP:
                raise Malformed("a message before it let us in")
            if len(self._topics) >= MAX_TOPICS:
                self._topics.clear()
            filters = [name for join in self._joins.values() for name in join.filters]
            wanted = self._topics[topic] = any(matches(name, topic) for name in filters)
        if wanted:
            self.edge.frames_in += 1
            self.edge.bytes_in += payload.nbytes
            self._around.hear((self.name, topic, payload))
        else:
            self.edge.unwanted += 1
