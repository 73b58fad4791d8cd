"""Bytes through a WebSocket on a socket pair, the other end played by wsproto's server."""

import random
import socket

import pytest

pytest.importorskip("wsproto")

from wsproto import ConnectionType, WSConnection
from wsproto.events import AcceptConnection, BytesMessage, CloseConnection, Ping, Pong, Request, TextMessage

from hepti_mqtt.transport.codec import Malformed
from hepti_mqtt.transport.websocket import WebSocketConnection, shake_hands


class Server:
    """The broker's end of the connection."""

    def __init__(self, sock):
        self.sock, self.websocket, self.heard, self.pongs = sock, WSConnection(ConnectionType.SERVER), bytearray(), 0

    def say(self, *events):
        return b"".join(self.websocket.send(event) for event in events)

    def hear(self):
        """Process received bytes; return the request for a WebSocket, if it arrived."""
        request = None
        while True:
            try:
                data = self.sock.recv(65_536)
            except BlockingIOError:
                return request
            self.websocket.receive_data(data or None)
            for event in self.websocket.events():
                match event:
                    case Request():
                        request = event
                    case BytesMessage(data=part):
                        self.heard += part
                    case Pong():
                        self.pongs += 1
            if not data:
                return request


@pytest.fixture
def ends(monkeypatch):
    """A connection and the server that it talks to."""
    near, far = socket.socketpair()
    with near, far:
        far.setblocking(False)
        server = Server(far)

        class Answering:
            """The near end; the server answers before each read."""

            def recv(self, nbytes):
                request = server.hear()
                assert (request.target, request.subprotocols) == ("/mqtt", ["mqtt"])
                # The first message comes together with the handshake.
                far.sendall(server.say(AcceptConnection(subprotocol="mqtt"), BytesMessage(b"early")))
                return near.recv(nbytes)

            sendall, settimeout = near.sendall, near.settimeout

        websocket = shake_hands(Answering(), "broker:80", "/mqtt", 5.0)
        near.setblocking(False)
        yield WebSocketConnection(near, websocket), server


def received(connection, nbytes):
    room = bytearray(nbytes)
    at = 0
    while at < nbytes:
        try:
            count = connection.recv_into(memoryview(room)[at : at + random.randint(1, 5000)])
        except BlockingIOError:
            break
        if not count:
            break
        at += count
    return bytes(room[:at])


def test_frames_are_received_in_any_pieces(ends):
    connection, server = ends
    assert received(connection, 100) == b"early"
    payload = random.Random(1).randbytes(300_000)
    sent = server.say(BytesMessage(payload[:200_000], message_finished=False), Ping(b"?"), Ping(b"?"))
    sent += server.say(BytesMessage(payload[200_000:]), BytesMessage(b""))
    out = b""
    for at in range(0, len(sent), 7_001):
        server.sock.sendall(sent[at : at + 7_001])
        out += received(connection, len(payload))
    assert out == payload
    assert connection.pending() == 0
    server.hear()
    assert server.pongs


def test_a_blocked_send_continues_where_it_stopped(ends):
    connection, server = ends
    payload = random.Random(2).randbytes(1_000_000)
    parts, at, stops = memoryview(payload), 0, 0
    while at < len(payload):
        try:
            at += connection.sendmsg((parts[at : at + 10], parts[at + 10 :]))
        except BlockingIOError:
            stops += 1
            server.hear()
    server.hear()
    assert stops
    assert server.heard == payload


def test_text_is_refused(ends):
    connection, server = ends
    server.sock.sendall(server.say(TextMessage("x")))
    assert received(connection, 5) == b"early"
    with pytest.raises(Malformed):
        connection.recv(100)


def test_bytes_before_the_end_are_received(ends):
    connection, server = ends
    assert received(connection, 5) == b"early"
    server.sock.sendall(server.say(BytesMessage(b"last"), CloseConnection(1000)))
    assert connection.recv(100) == b"last"
    assert connection.recv(100) == b""
    with pytest.raises(ConnectionResetError):
        connection.sendmsg((b"x",))
