"""The mesh with TLS: peers know each other by fingerprint, and no token leaves without it."""

from __future__ import annotations

import contextlib
import datetime
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
from mesh_nodes import GRANTED, HOST, IN, KEY, PATIENCE_S, TOKEN, filters, joined, pump, readable, subscribe, topic

from hepti_mqtt.closed_site.certificates import make_self_signed
from hepti_mqtt.core.errors import ConfigError
from hepti_mqtt.protocol.messages import Endpoint
from hepti_mqtt.transport.peer import Joined, Refused
from hepti_mqtt.transport.sockets import MeshTls


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Return the paths of certificate and key of two devices."""
    folder, pairs = tmp_path_factory.mktemp("keys"), {}
    for name in ("a", "b"):
        pair = make_self_signed(name, datetime.datetime.now(datetime.UTC))
        pairs[name] = folder / f"{name}.crt", folder / f"{name}.key"
        pairs[name][0].write_bytes(pair.certificate)
        pairs[name][1].write_bytes(pair.key)
    return pairs


@pytest.fixture
def device(files, nodes):
    """Make a device with TLS."""

    def make(name, **options):
        tls = MeshTls.load(*files[name], **options)
        (node,) = nodes(name, tls=tls)
        node.fingerprint = tls.fingerprint
        return node

    return make


@pytest.mark.parametrize("aes", [True, False])
def test_tensors_travel_encrypted(device, aes):
    a, b = device("a"), device("b", aes=aes)
    subscribe(a, b)
    subscribe(b, a)
    pump((a, b), lambda: joined(a)() and joined(b)())
    sizes = [0, 5, 16_000, 16_384, 16_385, 100_000, 3_000_000, 9]
    sent = [bytes([i + 1]) * nbytes for i, nbytes in enumerate(sizes)]
    for data in sent:
        assert a.mesh.publish(topic("a"), b"header", data) == 1
    b.mesh.publish(topic("b"), b"back")
    pump((a, b), lambda: len(b.messages) == len(sent) and a.messages)
    assert [data for _, _, data in b.messages] == [b"header" + data for data in sent]


@pytest.mark.parametrize("aes", [True, False])
def test_who_lacks_aes_asks_for_what_is_fast_without_it(device, files, aes):
    b, serving = device("b", aes=aes), MeshTls.load(*files["a"], aes=True).serving
    with socket.create_server((HOST, 0)) as listener:
        b.mesh.join("a", KEY, Endpoint(HOST, listener.getsockname()[1], "00"), TOKEN, filters("a", "b"))
        pump((b,), lambda: readable(listener))
        with ThreadPoolExecutor(1) as pool, listener.accept()[0] as plain:
            secured = pool.submit(serving.wrap_socket, plain, server_side=True)
            pump((b,), secured.done)
            with secured.result() as sock:
                assert sock.version() == ("TLSv1.3" if aes else "TLSv1.2")
                assert ("CHACHA20" in sock.cipher()[0]) is not aes


def test_another_certificate_gets_no_token(device, files):
    a, b = device("a"), device("b")
    a.mesh.admit("b", KEY, TOKEN, filters("a", "b"))
    b.mesh.join("a", KEY, Endpoint(HOST, a.mesh.port, b.fingerprint), TOKEN, filters("a", "b"))
    pump((a, b), lambda: b.mesh.stats()["a"].trouble)
    assert "another certificate" in b.mesh.stats()["a"].trouble
    assert b.events == []
    b.mesh.join("a", KEY, Endpoint(HOST, a.mesh.port, a.fingerprint), TOKEN, filters("a", "b"))
    pump((a, b), joined(b))


@pytest.mark.parametrize(("is_plain", "fingerprint"), [(True, "00"), (False, "")])
def test_never_plain_where_one_side_wants_tls(device, nodes, is_plain, fingerprint):
    asking = nodes("b")[0] if is_plain else device("b")
    with socket.create_server((HOST, 0)) as listener:
        place = Endpoint(HOST, listener.getsockname()[1], fingerprint)
        asking.mesh.join("a", KEY, place, TOKEN, filters("a", "b"))
        pump((asking,), lambda: asking.events_of(Refused))
        assert not readable(listener), "it does not even connect"
    assert not asking.events_of(Joined)


def test_who_speaks_no_tls_is_rejected(device):
    with socket.create_connection((HOST, device("a").mesh.port), PATIENCE_S) as sock:
        sock.sendall(b"\x10\x18\0\x04MQTT\x04\xc2\0\0\0\x01b\0\x01b\0\x06secret")
        with contextlib.suppress(ConnectionResetError):
            while sock.recv(100):  # an alert, and the end
                continue


def test_an_endpoint_that_speaks_no_tls_is_given_up(device, played):
    b = device("b")
    b.mesh.join("a", KEY, Endpoint(HOST, played.place.port, "00"), TOKEN, filters("a", "b"))
    assert TOKEN.encode() not in played.accept(b)
    played.sock.sendall(IN + GRANTED)
    pump((b,), lambda: "no TLS" in b.mesh.stats()["a"].trouble)


def test_files_that_are_no_key_are_named(files, tmp_path):
    with pytest.raises(ConfigError, match=str(files["a"][0])):
        MeshTls.load(files["a"][0], files["b"][1])
    with pytest.raises(ConfigError, match="nothing here"):
        MeshTls.load(tmp_path / "nothing here", files["a"][1])


def test_what_tls_has_read_ahead_is_read_in_turns(device, monkeypatch):
    monkeypatch.setattr("hepti_mqtt.transport.client_protocol.MAX_READS", 1)
    a, b = device("a"), device("b")
    subscribe(b, a)
    pump((a, b), joined(b))
    for i in range(200):
        assert a.mesh.publish(topic("a"), i.to_bytes(2, "big"), bytes(300)) == 1
    assert a.mesh.publish(topic("a"), bytes(100_000)) == 1
    pump((b,), lambda: len(b.messages) == 201)
    assert [int.from_bytes(data[:2], "big") for _, _, data in b.messages[:-1]] == list(range(200))
