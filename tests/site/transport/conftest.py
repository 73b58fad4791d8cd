"""Brokers, connections and meshes."""

from __future__ import annotations

import contextlib
import shutil
import ssl
import subprocess
import uuid

import pytest
from broker_kinds import broker_of
from mesh_nodes import Clock, Guests, Node, Played
from played_broker import PlayedBroker
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


@pytest.fixture
def encrypted(certificate):
    """The settings of a server with this certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    return context


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


@pytest.fixture
def topic():
    """A topic of the test's own."""
    return f"t/{uuid.uuid4().hex[:8]}"


@pytest.fixture
def closing():
    """Close what is made with the test's end; returns it."""
    with contextlib.ExitStack() as stack:
        yield lambda thing: stack.enter_context(contextlib.closing(thing))


@pytest.fixture
def peers():
    """Make connections; tensors: of the data plane."""
    with contextlib.ExitStack() as stack:

        def make(url, *, tensors=False, **how):
            peer = Voice(url, make=DataConnection if tensors else BrokerConnection, **how)
            stack.callback(peer.close, 0.2)
            return peer

        yield make


@pytest.fixture
def relays(mosquitto, closing):
    """Make relays to a port, by default the broker's."""
    return lambda port=mosquitto.port, tls=None: closing(Relay(port, tls))


@pytest.fixture
def proxy(relays):
    return relays()


@pytest.fixture
def fake(closing):
    """Make brokers that the test plays."""
    return lambda answer: closing(PlayedBroker(answer))


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def nodes(closing):
    """Make devices by name."""
    return lambda *users, **how: [closing(Node(user, **how)) for user in users]


@pytest.fixture
def node(nodes, clock):
    return nodes("b", clock=clock)[0]


@pytest.fixture
def site(closing):
    return closing(Guests())


@pytest.fixture
def played(closing):
    return closing(Played())
