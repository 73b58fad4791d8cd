"""The ways that tensors can take between processes: raw TCP as the floor, the mesh, and a broker with paho or ours."""

from __future__ import annotations

import select
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Any, Final

import numpy as np
from paho.mqtt.client import Client
from paho.mqtt.enums import CallbackAPIVersion

from benchmarks.errors import BenchError
from hepti_mqtt.kernels import Workers
from hepti_mqtt.kernels.calls import Call, Operand, received, sent
from hepti_mqtt.kernels.tape import Tape
from hepti_mqtt.kernels.transfers import Peers
from hepti_mqtt.protocol.messages import Endpoint
from hepti_mqtt.transport.base import Subscribed
from hepti_mqtt.transport.broker_connection import DataConnection
from hepti_mqtt.transport.codec import publish_head
from hepti_mqtt.transport.mesh import Mesh
from hepti_mqtt.transport.peer import MESH_VERSION, Joined, MeshEvent
from hepti_mqtt.transport.url import BrokerUrl

HEADER: Final = bytes(256)  # as a frame has one before its array
PATIENCE_S: Final = 30.0
AHEAD: Final = 2 << 20
AT_ONCE: Final = 33  # exchanges of compiled code
_PREFIX: Final = "hepti/v1/bench/x/m/0"

Array = np.ndarray[Any, Any]


class Way:
    """How one process reaches the others. port: where they find it, 0 if they need not.

    A message is HEADER and a body.
    """

    port = 0

    def expect(self, nbytes: int) -> None:
        """Say how large messages are from now on; packets say it themselves."""

    def connect(self, ports: Sequence[int]) -> None:
        """Reach everybody; ports: of this way in every process, by rank."""
        raise NotImplementedError

    def send(self, body: Array, to: int | None) -> None:
        """Send to one rank, or to all others."""
        raise NotImplementedError

    def receive(self) -> int:
        """Wait for a message and return its source, the buffer being free again; raises BenchError if none comes."""
        raise NotImplementedError

    def gather(self, body: Array, count: int, repeat: int) -> bool:  # noqa: ARG002
        """Exchange with all of `count` ranks again and again, if that is not done message by message."""
        return False

    def flush(self) -> None:
        """Hand everything to the kernel; others have a thread that does."""

    def close(self) -> None:
        """End it."""
        raise NotImplementedError


class Raw(Way):
    """Sockets of a full mesh, and messages of a size that both ends know: the least that Python can do."""

    def __init__(self, rank: int, largest_bytes: int, _broker: str, addresses: Sequence[str]) -> None:
        self._rank, self._nbytes, self._addresses = rank, 0, addresses
        self._listener = socket.create_server((addresses[rank], 0), backlog=16)
        self.port = self._listener.getsockname()[1]
        self._out: dict[int, socket.socket] = {}
        self._peers: dict[int, tuple[int, socket.socket, memoryview]] = {}
        self._have: dict[int, int] = {}
        self._done: deque[int] = deque()
        self._left: dict[int, memoryview] = {}
        self._largest = largest_bytes + len(HEADER)
        self._epoll = select.epoll()

    def connect(self, ports: Sequence[int]) -> None:
        others = [rank for rank in range(len(ports)) if rank != self._rank]
        for rank in others:
            self._out[rank] = socket.create_connection((self._addresses[rank], ports[rank]), PATIENCE_S)
            self._out[rank].sendall(bytes((self._rank,)))
        for _ in others:
            sock, _ = self._listener.accept()
            self._peers[sock.fileno()] = sock.recv(1)[0], sock, memoryview(bytearray(self._largest))
            self._have[sock.fileno()] = 0
            # As the mesh does, so that the kernel takes as much for a process that does not read.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, AHEAD)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
            self._epoll.register(sock, select.EPOLLIN)
        for sock in [*self._out.values(), *(sock for _, sock, _ in self._peers.values())]:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def expect(self, nbytes: int) -> None:
        self._nbytes = nbytes

    def send(self, body: Array, to: int | None) -> None:
        while self._left:
            self._turn(PATIENCE_S)
        for rank in self._out if to is None else (to,):
            sent = 0
            with suppress(BlockingIOError):
                sent = self._out[rank].send(body.data)
            if sent < body.nbytes:
                self._left[rank] = body.data[sent:]
                self._epoll.register(self._out[rank], select.EPOLLOUT)

    def receive(self) -> int:
        while not self._done:
            self._turn(PATIENCE_S)
        return self._done.popleft()

    def flush(self) -> None:
        while self._left:
            self._turn(PATIENCE_S)

    def close(self) -> None:
        for sock in (self._listener, *self._out.values(), *(sock for _, sock, _ in self._peers.values())):
            sock.close()
        self._epoll.close()

    def _write(self) -> None:
        for rank, view in list(self._left.items()):
            with suppress(BlockingIOError):
                view = self._left[rank] = view[self._out[rank].send(view) :]
            if not view.nbytes:
                del self._left[rank]
                self._epoll.unregister(self._out[rank])

    def _turn(self, timeout_s: float) -> None:
        found = self._epoll.poll(timeout_s)
        if not found:
            raise BenchError("nothing came by raw TCP")
        for fd, _ in found:
            if fd not in self._peers:
                self._write()
                continue
            source, sock, buffer = self._peers[fd]
            with suppress(BlockingIOError):
                got = sock.recv_into(buffer[self._have[fd] : self._nbytes])
                if not got:
                    raise BenchError("a process hung up")
                self._have[fd] = (self._have[fd] + got) % self._nbytes
                if not self._have[fd]:
                    self._done.append(source)


class OverMesh(Way):
    """This project's endpoints."""

    def __init__(self, rank: int, largest_bytes: int, _broker: str, addresses: Sequence[str]) -> None:
        self._rank, self._limit, self._addresses = rank, largest_bytes + 4096, addresses
        self._done: deque[int] = deque()
        self._joined = 0
        self._mesh = Mesh(addresses[rank], 0, user=f"d{rank}", on_message=self._hear, on_event=self._event)
        self.port = self._mesh.port

    def connect(self, ports: Sequence[int]) -> None:
        others = [rank for rank in range(len(ports)) if rank != self._rank]
        for rank in others:
            self._mesh.admit(f"d{rank}", 0, "token", filters(self._rank, rank))
        for rank in others:
            there = Endpoint(self._addresses[rank], ports[rank])
            self._mesh.join(f"d{rank}", 0, there, "token", filters(rank, self._rank), limit_bytes=self._limit)
        until = time.monotonic() + PATIENCE_S
        while self._joined < len(others):
            self._wait(until)

    def send(self, body: Array, to: int | None) -> None:
        if not self._mesh.publish(topic(self._rank, to), HEADER, body):
            raise BenchError("the mesh has no subscriber, or dropped a message")

    def receive(self) -> int:
        until = time.monotonic() + PATIENCE_S
        while not self._done:
            self._wait(until)
        return self._done.popleft()

    def close(self) -> None:
        self._mesh.close()

    def _wait(self, until: float) -> None:
        left = until - time.monotonic()
        if left <= 0:
            raise BenchError("nothing came over the mesh")
        self._mesh.wait(left)

    def _hear(self, peer: str, _topic: str, _payload: memoryview) -> None:
        self._done.append(int(peer[1:]))

    def _event(self, event: MeshEvent) -> None:
        self._joined += isinstance(event, Joined)


class Compiled(OverMesh):
    """This project's endpoints, with compiled code at their sockets."""

    def __init__(self, rank: int, largest_bytes: int, broker: str, addresses: Sequence[str]) -> None:
        super().__init__(rank, largest_bytes, broker, addresses)
        self._tapes: dict[int, Tape] = {}

    def gather(self, body: Array, count: int, repeat: int) -> bool:
        if body.nbytes not in self._tapes:  # in the round that warms up
            self._tapes[body.nbytes] = self._bind(body, count)
        channels, tape = self._mesh.channels, self._tapes[body.nbytes]
        peers = Peers(1, channels.wake, int(1000 * PATIENCE_S))
        while repeat:
            now = min(repeat, AT_ONCE)
            with channels.hold() as is_held:
                if not is_held:  # the helper looks after the connections
                    continue
                tape.run((body,), stop=2 * (count - 1) * now, peers=peers)
            if tape.code:
                raise BenchError("compiled code has left an exchange to Python")
            repeat -= now
        return True

    def _bind(self, body: Array, count: int) -> Tape:
        """Return the tape of as many exchanges as a token of a decoder has."""
        channels, others = self._mesh.channels, [rank for rank in range(count) if rank != self._rank]
        mine = Operand(0, 0, body.shape, body.dtype)
        calls, ends = list[Call](), list[tuple[int, int]]()  # ends: source and target of each
        for slot in range(1, 1 + AT_ONCE * len(others), len(others)):
            calls += [Call(sent, (mine,)) for _ in others]
            calls += [Call(received, (replace(mine, memory=slot + i),)) for i in range(len(others))]
            ends += [(self._rank, rank) for rank in others] + [(rank, self._rank) for rank in others]
        tape, nbytes = Tape([calls], Workers(1), (0,)), len(HEADER) + body.nbytes
        for row, (source, to) in enumerate(ends):
            peer, name = f"d{to if source == self._rank else source}", topic(source, to)
            if source == self._rank and channels.route(peer, name, nbytes) is None:
                raise BenchError("the mesh has no subscriber")
            tape.learn(row, channels.channel(peer), publish_head(name, nbytes, MESH_VERSION) + HEADER, nbytes)
        return tape


class ByBroker(Way):
    """A broker between; header and body are joined, since a client takes one payload."""

    def __init__(self, rank: int, _largest_bytes: int, broker: str, _addresses: Sequence[str]) -> None:
        self._rank, self._broker = rank, BrokerUrl.parse(broker)
        self._queue: SimpleQueue[str] = SimpleQueue()
        self._up: SimpleQueue[None] = SimpleQueue()
        self._publish: Callable[..., object]
        self._end: Callable[[], object] = lambda: None

    def connect(self, ports: Sequence[int]) -> None:
        others = [rank for rank in range(len(ports)) if rank != self._rank]
        self._start([f"{self._kind}/{name}" for rank in others for name in filters(rank, self._rank)])
        try:
            self._up.get(timeout=PATIENCE_S)
        except Empty:
            raise BenchError("the broker does not acknowledge subscriptions") from None

    @property
    def _kind(self) -> str:
        return type(self).__name__  # two ways over one broker must not hear each other

    def _start(self, names: Sequence[str]) -> None:
        raise NotImplementedError

    def _hear(self, name: str, _payload: bytes | bytearray | memoryview) -> None:
        self._queue.put(name)

    def send(self, body: Array, to: int | None) -> None:
        self._publish(f"{self._kind}/{topic(self._rank, to)}", b"".join((HEADER, body.data)))

    def receive(self) -> int:
        try:
            name = self._queue.get(timeout=PATIENCE_S)
        except Empty:
            raise BenchError("nothing came through the broker") from None
        return int(name.split("/")[-2][1:])

    def close(self) -> None:
        self._end()


class StockPaho(ByBroker):
    """paho's client as anybody would use it, with Nagle's algorithm off."""

    def _start(self, names: Sequence[str]) -> None:
        client = Client(CallbackAPIVersion.VERSION2, client_id=f"{self._kind}-{self._rank}")
        client.on_message = lambda _client, _data, message: self._hear(message.topic, message.payload)

        def come_in(*_: Any) -> None:
            client.subscribe([(name, 0) for name in names])

        client.on_socket_open = _no_delay
        client.on_connect = come_in
        client.on_subscribe = lambda *_: self._up.put(None)
        client.connect(self._broker.host, self._broker.port)
        client.loop_start()
        self._publish, self._end = client.publish, client.disconnect


class OwnTransport(ByBroker):
    """This project's connection to a broker, as tensors take it."""

    def _start(self, names: Sequence[str]) -> None:
        transport = DataConnection(
            self._broker,
            f"{self._kind}-{self._rank}",
            on_message=self._hear,
            on_state=lambda state: self._up.put(None) if isinstance(state, Subscribed) else None,
        )
        transport.connect(PATIENCE_S)
        transport.subscribe([(name, 0) for name in names])
        self._publish, self._end = transport.publish, lambda: transport.close(timeout_s=0.5)
        self._transport = transport

    def send(self, body: Array, to: int | None) -> None:
        self._transport.send(f"{self._kind}/{topic(self._rank, to)}", HEADER, body.data)


# By name: what makes a rank's end of it, from its number, the largest message in bytes, the broker and all addresses.
WAYS: Final[Mapping[str, Callable[[int, int, str, Sequence[str]], Way]]] = {
    "raw TCP": Raw,
    "mesh": OverMesh,
    "mesh, compiled": Compiled,
    "broker, paho": StockPaho,
    "broker, ours": OwnTransport,
}


def _no_delay(_client: Client, _data: Any, sock: Any) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def topic(source: int, to: int | None) -> str:
    """Return the topic of a message."""
    return f"{_PREFIX}/d{source}/{'all' if to is None else f'd{to}'}"


def filters(source: int, reader: int) -> list[str]:
    """Return what a rank reads of another one."""
    return [topic(source, reader), topic(source, None)]
