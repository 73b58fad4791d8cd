"""Connecting: a name of several addresses, a broker that does not answer yet, and errors of failed connections."""

import socket
import ssl
import threading

import pytest

from hepti_mqtt.core.errors import CertificateDateError, NetworkError, RefusedError
from hepti_mqtt.transport import base as transport
from hepti_mqtt.transport.base import SAY_S, wait_for_broker
from hepti_mqtt.transport.sockets import acknowledge_soon, connect_any
from hepti_mqtt.transport.url import BrokerUrl

PATIENCE_S = 30.0


@pytest.fixture
def places():
    """Yield addresses that accept, refuse, and do not answer (a full queue)."""
    good, full, gone = (socket.create_server(("127.0.0.1", 0), backlog=n) for n in (8, 0, 1))
    fillers = [socket.socket() for _ in range(4)]
    for filler in fillers:
        filler.setblocking(False)
        filler.connect_ex(full.getsockname())
    refused = gone.getsockname()
    gone.close()
    yield {"good": good.getsockname(), "dead": full.getsockname(), "refused": refused, "unusable": ("127.0.0.1", 0)}
    for sock in (good, full, *fillers):
        sock.close()


def named(monkeypatch, *addresses):
    infos = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", address) for address in addresses]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: infos)


@pytest.mark.parametrize(
    "order",
    [["good"], ["dead", "good"], ["refused", "good"], ["unusable", "dead", "refused", "good"], ["good", "dead"]],
)
def test_the_first_address_that_accepts_is_used(places, monkeypatch, order):
    named(monkeypatch, *(places[kind] for kind in order))
    with connect_any("broker", 1883, PATIENCE_S) as sock:
        assert sock.getpeername() == places["good"]
        assert sock.gettimeout() == PATIENCE_S


def test_without_an_accepting_address_the_last_error_is_raised(places, monkeypatch):
    named(monkeypatch, places["unusable"], places["refused"])
    with pytest.raises(ConnectionRefusedError):
        connect_any("broker", 1883, PATIENCE_S)
    named(monkeypatch, places["dead"])
    with pytest.raises(TimeoutError):
        connect_any("broker", 1883, 0.05)
    monkeypatch.undo()
    with pytest.raises(socket.gaierror):
        connect_any("no-such-host.invalid", 1883, 1.0)


@pytest.mark.skipif(not hasattr(socket, "TCP_QUICKACK"), reason="Linux alone")
def test_quick_acknowledgement_is_set_and_a_lost_connection_ignored():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as ours:
        ours.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 0)
        acknowledge_soon(ours)
        assert ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK) == 1
    acknowledge_soon(ours)


class Site:
    """A broker that answers after `up_s`; each attempt advances the clock by a second."""

    def __init__(self, up_s):
        self.now, self.up_s, self.lines = 0.0, up_s, []

    def clock(self):
        return self.now

    def connect(self, left_s):
        self.now += 1.0
        if self.now < self.up_s:
            raise NetworkError("no broker answers")
        return left_s


def test_a_wait_is_logged_at_intervals_and_ends_at_its_limit_a_stop_or_a_refusal(monkeypatch):
    monkeypatch.setattr(transport.Backoff, "pause_s", lambda _self: 0.0)
    site = Site(up_s=35.0)
    assert wait_for_broker(site.connect, site.lines.append, within_s=100.0, clock=site.clock) == 66.0
    assert len(site.lines) == 1 + 34 // SAY_S
    site = Site(up_s=35.0)
    with pytest.raises(NetworkError):
        wait_for_broker(site.connect, site.lines.append, within_s=20.0, clock=site.clock)
    assert site.now == 20.0
    stop, site = threading.Event(), Site(up_s=1e9)
    assert wait_for_broker(site.connect, lambda _line: stop.set(), stop=stop, clock=site.clock) is None

    def connect(_left_s):
        raise RefusedError("wrong password")

    with pytest.raises(RefusedError):
        wait_for_broker(connect, print)


URL = BrokerUrl.parse("mqtts://broker.home")


def certificate_error(code):
    error = ssl.SSLCertVerificationError(1, "certificate verify failed")
    error.verify_code, error.verify_message = code, "OpenSSL's message"
    return error


@pytest.mark.parametrize("code", [9, 10])
def test_a_certificate_of_another_time_names_both_clocks(monkeypatch, code):
    monkeypatch.setattr(ssl, "get_server_certificate", lambda *_, **__: "PEM")
    monkeypatch.setattr(ssl, "PEM_cert_to_DER_cert", lambda _: b"..\x30\x1e\x17\x0d991201103000Z\x17\x0d491203103000Z")
    error = transport.absent(URL, certificate_error(code))
    assert isinstance(error, CertificateDateError)
    assert all(date in str(error) for date in ("1999-12-01 10:30", "2049-12-03 10:30", "clock says 20"))


@pytest.mark.parametrize("error", [ConnectionResetError(), ssl.SSLError(1, "wrong version number"), ssl.SSLEOFError()])
def test_a_port_without_tls_is_named(error):
    assert "mqtt://" in str(transport.absent(URL, error))
    assert "mqtt://" not in str(transport.absent(URL, ConnectionRefusedError()))
