"""The mesh with TLS: peers know each other by fingerprint, and no token leaves without it."""

from __future__ import annotations

import contextlib
import datetime
import socket

import pytest
from mesh_nodes import HOST, PATIENCE_S, Node, filters, joined, pump, subscribe, topic

from hepti_mqtt.closed_site.certificates import make_self_signed
from hepti_mqtt.core.errors import ConfigError
from hepti_mqtt.transport.peer import Address, Joined, Refused
from hepti_mqtt.transport.sockets import MeshTls

KEY = ("bert", 1)


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
def device(files):
    """Make devices with TLS, or without; all are closed when the test ends."""
    devices = []

    def make(name, **options):
        tls = MeshTls.load(*files[name], **options)
        devices.append(Node(name, tls=tls))
        devices[-1].fingerprint = tls.fingerprint
        return devices[-1]

    yield make
    for node in devices:
        node.mesh.close()


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
    line = b.mesh._peers["a"]._connection
    assert line._sock.version() == ("TLSv1.3" if aes else "TLSv1.2")
    assert ("CHACHA20" in line._sock.cipher()[0]) is not aes


def test_another_certificate_gets_no_token(device, files):
    a, b = device("a"), device("b")
    a.mesh.admit("b", KEY, "secret", filters("a", "b"))
    b.mesh.join("a", KEY, Address(HOST, a.mesh.port, b.fingerprint), "secret", filters("a", "b"))
    pump((a, b), lambda: b.mesh.stats()["a"].trouble)
    assert "another certificate" in b.mesh.stats()["a"].trouble
    assert b.events == []
    b.mesh.join("a", KEY, Address(HOST, a.mesh.port, a.fingerprint), "secret", filters("a", "b"))
    pump((a, b), joined(b))


def test_never_plain_where_one_side_wants_tls(device):
    a, plain = device("a"), Node("b")
    try:
        a.mesh.admit("b", KEY, "secret", filters("a", "b"))
        plain.mesh.join("a", KEY, Address(HOST, a.mesh.port, a.fingerprint), "secret", filters("a", "b"))
        a.mesh.join("b", KEY, Address(HOST, plain.mesh.port), "secret", filters("b", "a"))
        pump((a, plain), lambda: a.events_of(Refused) and plain.events_of(Refused))
        assert plain.events_of(Refused) == [Refused("a", KEY, "it has TLS, we have none")]
        assert a.events_of(Refused) == [Refused("b", KEY, "we have TLS, it has none")]
        assert plain.mesh._by_fd == a.mesh._by_fd == {}
        assert a.events_of(Joined) == []
    finally:
        plain.mesh.close()


def test_who_speaks_no_tls_is_rejected(device):
    with socket.create_connection((HOST, device("a").mesh.port), PATIENCE_S) as sock:
        sock.sendall(b"\x10\x18\0\x04MQTT\x04\xc2\0\0\0\x01b\0\x01b\0\x06secret")
        with contextlib.suppress(ConnectionResetError):
            while sock.recv(100):  # an alert, and the end
                continue


def test_an_endpoint_that_speaks_no_tls_is_given_up(device):
    b = device("b")
    with socket.create_server((HOST, 0)) as listener:
        b.mesh.join("a", KEY, Address(HOST, listener.getsockname()[1], "00"), "secret", filters("a", "b"))
        pump((b,), lambda: b.mesh._peers["a"]._secured is not None)
        sock, _ = listener.accept()
        with sock:
            said = sock.recv(1000)
            sock.sendall(b"\x20\x02\0\0\x90\x03\0\x01\0")
            pump((b,), lambda: b.mesh.stats()["a"].trouble)
    assert b"secret" not in said
    assert "no TLS" in b.mesh.stats()["a"].trouble


def test_files_that_are_no_key_are_named(files, tmp_path):
    with pytest.raises(ConfigError, match="are not this device's certificate"):
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
