"""Brokers behind a WebSocket, plain and with TLS: Mosquitto's own listener, and ports that have none."""

from __future__ import annotations

import socket
import threading
from types import SimpleNamespace

import pytest
from limited_broker import mosquitto_with
from site_processes import PATIENCE_S, Site, free_port, listens, poll

from hepti_mqtt.checkpoint import make_model
from hepti_mqtt.client import Hepti
from hepti_mqtt.core.errors import NetworkError
from hepti_mqtt.transport.base import Connected, Disconnected


@pytest.fixture(scope="module")
def ports(tmp_path_factory):
    """The ports of a Mosquitto for MQTT and for WebSockets; skips the tests where its package has none of these."""
    websocket, directory = free_port(), tmp_path_factory.mktemp("websocket")
    lines = (f"listener {websocket} 127.0.0.1", "protocol websockets", "allow_anonymous true")
    with mosquitto_with(directory, *lines, needs="WebSockets") as broker:
        poll(lambda: listens(websocket), "the second listener")
        yield broker.port, websocket


@pytest.fixture
def urls(ports, relays, encrypted, certificate):
    """Make a relay to the WebSockets, with TLS or without; returns it and its URL."""

    def make(secure):
        relay = relays(ports[1], encrypted if secure else None)
        place = f"127.0.0.1:{relay.port}"
        return relay, f"wss://{place}?ca={certificate[0]}" if secure else f"ws://{place}"

    return make


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize(
    "options", [{"protocol": 4}, {"protocol": 5}, {"tensors": True}], ids=["3.1.1", "5", "tensors"]
)
def test_messages_pass_through_a_websocket(options, secure, ports, urls, peers):
    peer, other = peers(urls(secure)[1], **options), peers(f"mqtt://127.0.0.1:{ports[0]}")
    qos = 0 if "tensors" in options else 1
    # Mosquitto 2.0 sends 40 kB/s through a WebSocket: what is large goes the other way.
    for receiver, payloads in (
        (peer, [b"", b"x", bytes(range(256)) * 16]),
        (other, [bytes(range(256)) * 12_000, b"y" * 65_536, b"z"]),
    ):
        receiver.read(receiver.transport.client_id, qos=qos)
        for payload in payloads:
            peer.transport.publish(receiver.transport.client_id, payload, qos)
        assert [receiver.next()[1] for _ in payloads] == payloads


def test_planner_agent_and_client_meet_over_wss(urls, tmp_path):
    broker = SimpleNamespace(url=urls(True)[1])
    with Site(tmp_path, broker, {"m": make_model("tiny-minilm", tmp_path / "m", layers=1)}) as site:
        site.planner()
        site.agent("a")
        with Hepti.connect(site.url, site.name) as hepti:
            answer = hepti.infer("m", ids=[7, 8, 9], timeout_s=PATIENCE_S)
    assert list(answer.plan["devices"]) == ["a"]
    assert answer.embedding.size


def test_a_websocket_that_is_cut_comes_back_with_its_subscriptions(urls, peers):
    relay, url = urls(False)
    peer = peers(url)
    peer.read("a")
    relay.cut()
    peer.state_of(Disconnected)
    peer.state_of(Connected)
    peer.say("a", b"after")
    assert peer.next() == ("a", b"after")


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: upgrade\r\n"
        b"Sec-WebSocket-Accept: x\r\n\r\n",
        b"\x20\x02\x00\x05",
        b"",
    ],
    ids=["404", "wrong key", "MQTT", "hang-up"],
)
def test_what_is_no_websocket_is_a_network_error(answer, peers):
    def serve():
        sock, _ = listener.accept()
        with sock:
            sock.recv(65_536)
            sock.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(NetworkError):
            peers(f"ws://127.0.0.1:{listener.getsockname()[1]}", protocol=5)
        thread.join(PATIENCE_S)
