"""A broker that lets everyone in, and that others reach, is told loudly; any other is not."""

from __future__ import annotations

import socket
from dataclasses import replace

import psutil
import pytest

from hepti_mqtt.embedded_broker import start_broker
from hepti_mqtt.transport import BrokerUrl, is_loopback, open_broker_warning

pytestmark = pytest.mark.broker


@pytest.fixture(scope="module")
def address():
    for found in psutil.net_if_addrs().values():
        for a in found:
            if a.family == socket.AF_INET and not a.address.startswith("127."):
                return a.address
    pytest.skip("this machine has no address but the loopback one")


@pytest.mark.parametrize(
    ("host", "is_it"),
    [("127.0.0.1", True), ("127.1.2.3", True), ("::1", True), ("192.0.2.1", False), ("no-such-host.invalid", False)],
)
def test_loopback(host, is_it):
    assert is_loopback(host) is is_it


def test_only_an_open_broker_is_told(address):
    with start_broker(address=address) as broker:
        url = BrokerUrl.parse(broker.url)
        said = open_broker_warning(url)
        assert said is not None
        assert f"OPEN BROKER: {address}:{broker.port}" in said
        assert "hepti site init" in said
        # A password that nobody asks for closes nothing.
        assert open_broker_warning(replace(url, user="me", password="secret")) == said
    assert open_broker_warning(url) is None, "an absent broker is none"
    with start_broker(address=address, users={"me": "secret"}) as broker:
        assert open_broker_warning(replace(BrokerUrl.parse(broker.url), user="me", password="secret")) is None
    with start_broker() as broker:
        assert open_broker_warning(BrokerUrl.parse(broker.url)) is None
