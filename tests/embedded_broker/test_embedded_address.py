"""A broker listens where it is told to, and nowhere else."""

from __future__ import annotations

import socket

import pytest

from hepti_mqtt.embedded_broker import start_broker


@pytest.mark.broker
def test_it_listens_on_the_address_alone_and_on_the_port_that_it_is_given():
    with socket.create_server(("127.0.0.9", 0)) as probe:
        port = probe.getsockname()[1]
    with start_broker(address="127.0.0.9", port=port) as broker:
        assert broker.url == f"mqtt://127.0.0.9:{port}"
        socket.create_connection(("127.0.0.9", port), 5).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), 5)
