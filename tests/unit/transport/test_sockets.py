"""Connecting to a name of several addresses, and options of sockets."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from hepti_mqtt.transport.sockets import acknowledge_soon, connect_any

PATIENCE_S = 30.0


@pytest.fixture
def places() -> Iterator[dict[str, tuple[str, int]]]:
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


def named(monkeypatch: pytest.MonkeyPatch, *addresses: tuple[str, int]) -> None:
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
