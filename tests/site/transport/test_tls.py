"""TLS: the authority of the URL, certificates that nobody vouches for, ports without TLS."""

from __future__ import annotations

import contextlib
import ssl

import pytest
from broker_kinds import needs_mosquitto

from hepti_mqtt.core.errors import NetworkError
from hepti_mqtt.transport.url import BrokerUrl


@pytest.mark.parametrize(
    "options",
    [{"protocol": 4}, pytest.param({"protocol": 5}, marks=needs_mosquitto), {"tensors": True}],
    ids=["3.1.1", "5", "tensors"],
)
def test_tls_with_the_authority_of_the_url(options, relays, encrypted, certificate, peers):
    peer = peers(f"mqtts://127.0.0.1:{relays(tls=encrypted).port}?ca={certificate[0]}", **options)
    qos = 0 if "tensors" in options else 1
    peer.read("tls", qos=qos)
    payloads = [b"", b"x", bytes(3_000_000), b"y"]
    for payload in payloads:
        peer.transport.publish("tls", payload, qos)
    assert [peer.next()[1] for _ in payloads] == payloads


@pytest.mark.parametrize("tensors", [False, True])
@pytest.mark.parametrize("shown", [True, False])
def test_a_broker_that_wants_a_certificate_of_clients_gets_that_of_the_url(
    certificate, encrypted, relays, peers, tensors, shown
):
    encrypted.load_verify_locations(certificate[0])
    encrypted.verify_mode = ssl.CERT_REQUIRED
    own = f"&cert={certificate[0]}&key={certificate[1]}" if shown else ""
    url = f"mqtts://127.0.0.1:{relays(tls=encrypted).port}?ca={certificate[0]}{own}"
    with contextlib.nullcontext() if shown else pytest.raises(NetworkError):
        peers(url, tensors=tensors)


@pytest.mark.parametrize("tensors", [False, True])
def test_a_certificate_that_nobody_vouches_for_is_refused(tensors, relays, encrypted, peers):
    url = BrokerUrl("127.0.0.1", relays(tls=encrypted).port, tls=True)
    with pytest.raises(NetworkError, match=r"TLS.*certificate.*ca=FILE"):
        peers(url, tensors=tensors)


def test_tls_to_a_port_without_it_is_a_network_error(mosquitto, peers):
    url = BrokerUrl("127.0.0.1", mosquitto.port, tls=True)
    with pytest.raises(NetworkError, match=f"127.0.0.1:{mosquitto.port}"):
        peers(url, connect=False).transport.connect(5)
