"""Brokers that the transport tests run over, and a connection between that a test can cut."""

from __future__ import annotations

import contextlib
import queue
import shutil
import socket
import subprocess
import threading

import pytest
from broker_kinds import broker_of
from endpoint_site import Site
from mesh_nodes import PATIENCE_S, Clock, Node, Played
from relay import Relay
from site_processes import Voice

from hepti_mqtt.embedded_broker import KINDS, start_broker
from hepti_mqtt.transport.broker_connection import BrokerConnection, DataConnection


@pytest.fixture(scope="session")
def certificate(tmp_path_factory):
    """A certificate of 127.0.0.1 signed by itself."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl here to make a certificate with")
    root = tmp_path_factory.mktemp("tls")
    request = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=test -addext"
    subprocess.run(
        [*request.split(), "subjectAltName=IP:127.0.0.1", "-keyout", root / "key.pem", "-out", root / "cert.pem"],
        check=True,
        capture_output=True,
    )
    return root / "cert.pem", root / "key.pem"


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


class Peer(Voice):
    """A connected transport, its messages and its states; tensors: of the data plane."""

    def __init__(self, url, *, tensors=False, **options):
        super().__init__(url, make=DataConnection if tensors else BrokerConnection, **options)
        self.messages, self.await_state = self.heard, self.state_of

    def hear(self, topic, payload):
        self.heard.put((topic, payload))

    def message(self):
        return self.messages.get(timeout=PATIENCE_S)

    def state(self):
        return self.states.get(timeout=PATIENCE_S)

    def subscribe(self, *filters, qos=1):
        token = self.transport.subscribe([(f, qos) for f in filters])
        while getattr(self.state(), "token", None) != token:
            continue
        return token


@pytest.fixture
def peers():
    """Make peers that are closed when the test ends."""
    connections = []

    def make(url, **options):
        connections.append(Peer(url, **options))
        return connections[-1]

    yield make
    for peer in connections:
        peer.transport.close(timeout_s=0.2)


@pytest.fixture
def proxy(mosquitto):
    relay = Relay(mosquitto.port)
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
                packet = sock.recv(1024)
                if not packet:
                    continue
                level = packet[8]
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
    brokers = []

    def make(answers):
        brokers.append(FakeBroker(answers))
        return brokers[-1]

    yield make
    for broker in brokers:
        broker.close()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def node(clock):
    new_node = Node("b", clock=clock)
    yield new_node
    new_node.mesh.close()


@pytest.fixture
def nodes():
    """Make devices by name; all are closed when the test ends."""
    new_node = []

    def make(*users, **options):
        new = [Node(user, **options) for user in users]
        new_node.extend(new)
        return new

    yield make
    for each in new_node:
        each.mesh.close()


@pytest.fixture
def site():
    new_site = Site()
    yield new_site
    new_site.close()


@pytest.fixture
def played():
    scene = Played()
    yield scene
    scene.close()
