"""Brokers that the transport tests run over, and a connection between that a test can cut."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import uuid

import pytest
from broker_kinds import broker_of
from mesh_nodes import Node
from mesh_played import Clock, Played

from hepti_mqtt.embedded_broker import KINDS, start_broker
from hepti_mqtt.transport import BrokerUrl, Connected, DataConnection, PahoTransport

PATIENCE_S = 20.0  # how long a test waits for what must come; never how long it takes


@pytest.fixture(scope="session", params=KINDS)
def broker(request):
    """Every kind of broker that is installed; a test may restart it."""
    with broker_of(request.param) as running:
        yield running


@pytest.fixture(scope="session")
def mosquitto():
    """The broker that Hepti chooses, for what does not depend on its kind."""
    with start_broker() as running:
        yield running


class Peer:
    """A connected transport and what it has heard."""

    def __init__(self, url, *, connect=True, **options):
        self.messages = queue.SimpleQueue()
        self.states = queue.SimpleQueue()
        self.url = url if isinstance(url, BrokerUrl) else BrokerUrl.parse(url)
        make = DataConnection if options.pop("tensors", False) else PahoTransport
        self.transport = make(
            self.url,
            options.pop("client_id", "") or f"test-{uuid.uuid4().hex[:12]}",
            on_message=lambda topic, payload: self.messages.put((topic, payload)),
            on_state=self.states.put,
            **options,
        )
        if connect:
            self.transport.connect(PATIENCE_S)
            self.connected = self.await_state(Connected)

    def message(self):
        return self.messages.get(timeout=PATIENCE_S)

    def state(self):
        return self.states.get(timeout=PATIENCE_S)

    def await_state(self, kind):
        while not isinstance(state := self.state(), kind):
            continue
        return state

    def subscribe(self, *filters, qos=1):
        token = self.transport.subscribe([(f, qos) for f in filters])
        while getattr(self.state(), "token", None) != token:
            continue
        return token


@pytest.fixture
def peers():
    """Make peers that are closed when the test ends."""
    made = []

    def make(url, **options):
        made.append(Peer(url, **options))
        return made[-1]

    yield make
    for peer in made:
        peer.transport.close(timeout_s=0.2)


class Proxy:
    """A TCP relay to a broker: `cut` breaks its connections, `refusing` new ones; it reads while `flowing`."""

    def __init__(self, target_port):
        self.target_port = target_port
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"mqtt://127.0.0.1:{self.listener.getsockname()[1]}"
        self.refusing = False
        self.flowing = threading.Event()
        self.flowing.set()
        self.pairs = []
        self.threads = []
        self.spawn(self.accept)

    def spawn(self, target, *arguments):
        self.threads.append(threading.Thread(target=target, args=arguments, daemon=True))
        self.threads[-1].start()

    def accept(self):
        while True:
            try:
                near, _ = self.listener.accept()
            except OSError:
                return
            if self.refusing:
                near.close()
                continue
            try:
                far = socket.create_connection(("127.0.0.1", self.target_port))
            except OSError:
                near.close()
                continue
            self.pairs.append((near, far))
            self.spawn(self.relay, near, far)
            self.spawn(self.relay, far, near)

    def relay(self, source, target):
        with contextlib.suppress(OSError):
            while data := source.recv(65_536):
                self.flowing.wait()
                target.sendall(data)
        for sock in (source, target):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def cut(self):
        for pair in self.pairs:
            for sock in pair:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def close(self):
        self.flowing.set()
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.cut()
        for thread in self.threads:
            thread.join(PATIENCE_S)
        for pair in self.pairs:
            for sock in pair:
                sock.close()


@pytest.fixture
def proxy(mosquitto):
    relay = Proxy(mosquitto.port)
    yield relay
    relay.close()


class FakeBroker:
    """Answers a CONNECT of each version with given bytes (None: closes, b"": is silent)."""

    def __init__(self, answers):
        self.answers, self.levels, self.threads, self.socks = answers, queue.SimpleQueue(), [], []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.thread = threading.Thread(target=self.accept, daemon=True)
        self.thread.start()

    def accept(self):
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self.listener.accept()
                self.socks.append(sock)
                asked = sock.recv(1024)
                if not asked:
                    continue
                level = asked[8]
                self.levels.put(level)
                answer = self.answers[level] if not callable(self.answers[level]) else self.answers[level]()
                if answer is None:
                    sock.close()
                else:
                    sock.sendall(answer)

    def close(self):
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.thread.join(PATIENCE_S)
        for sock in self.socks:
            sock.close()


@pytest.fixture
def fake():
    made = []

    def make(answers):
        made.append(FakeBroker(answers))
        return made[-1]

    yield make
    for broker in made:
        broker.close()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def node(clock):
    made = Node("b", clock=clock)
    yield made
    made.mesh.close()


@pytest.fixture
def played():
    made = Played()
    yield made
    made.close()
