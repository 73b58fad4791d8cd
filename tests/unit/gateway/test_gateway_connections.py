"""Connections whose client does not keep up, on a virtual clock."""

import asyncio
import socket

import pytest
import uvicorn
from gateway_client import Unfinished
from uvicorn.server import ServerState

from hepti_mqtt.cli.gateway import listen
from hepti_mqtt.gateway.app import create_app
from hepti_mqtt.gateway.connections import LEAST_BYTES_PER_S, STALLED_S, Connection
from hepti_mqtt.gateway.site import Site

STEP_S = 5.0
HEAD = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n"
FAST, SLOW = 2 * LEAST_BYTES_PER_S * STEP_S, LEAST_BYTES_PER_S * STEP_S / 2


class Transport(asyncio.Transport):
    unread = 0.0
    aborted = False

    def get_extra_info(self, name, default=None):
        return default

    def get_write_buffer_size(self):
        return int(self.unread)

    def is_closing(self):
        return self.aborted

    def write(self, data):
        """Send nowhere."""

    def abort(self):
        self.aborted = True

    close = abort


async def answer_at_once(_scope, _receive, send):
    await send({"type": "http.response.start", "status": 413, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


async def answer_never(_scope, receive, _send):
    while (await receive())["type"] != "http.disconnect":
        pass


def connected(app):
    config = uvicorn.Config(app, http=Connection, log_config=None, lifespan="off")
    config.load()
    connection, transport = Connection(config, ServerState(), {}, asyncio.get_running_loop()), Transport()
    connection.connection_made(transport)
    return connection, transport


async def seconds_until_abort(app, sent, unread):
    """Return when a connection is aborted, swept every five seconds while `unread` bytes wait for the client."""
    connection, transport = connected(app)
    if sent:
        connection.data_received(sent)
    for _ in range(5):
        await asyncio.sleep(0)  # the application's turn
    begun, found = asyncio.get_running_loop().time(), None
    for number, transport.unread in enumerate(unread, 1):
        connection.sweep(begun + number * STEP_S)
        if transport.aborted:
            found = number * STEP_S
            break
    connection.connection_lost(OSError())
    return found


SOON = STALLED_S + STEP_S
LONG = 40
CASES = {
    "nothing comes": (answer_never, b"", [0] * LONG, SOON),
    "half a head": (answer_never, HEAD, [0] * LONG, SOON),
    "the rest of a refused body": (answer_at_once, HEAD + b"\r\n1", [0] * LONG, SOON),
    "an answer is computed": (answer_never, HEAD + b"\r\n123456789", [0] * LONG, None),
    "a body comes": (answer_never, HEAD + b"\r\n1", [0] * LONG, None),
    "between two requests": (answer_at_once, HEAD + b"\r\n123456789", [0] * LONG, None),
    "not read": (answer_never, HEAD + b"\r\n123456789", [1e6] * LONG, SOON),
    "read slowly": (answer_never, HEAD + b"\r\n123456789", [1e6 - SLOW * i for i in range(LONG)], SOON),
    "read fast": (answer_never, HEAD + b"\r\n123456789", [1e6 - FAST * i for i in range(LONG)], None),
    "read fast, then not": (
        answer_never, HEAD + b"\r\n123456789", [1e6 - FAST * min(i, 5) for i in range(LONG)], SOON + 6 * STEP_S,
    ),
}  # fmt: skip


async def text_of_who_reads_nothing():
    """Return the text of a chat whose client reads nothing."""
    client = Unfinished("x")
    connection, transport = connected(create_app(Site(client, 600.0)))
    body = b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": true}'
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    connection.data_received(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    while not client.streams:
        await asyncio.sleep(0)
    connection.pause_writing()
    begun, transport.unread = asyncio.get_running_loop().time(), 1e6
    for number in range(1, LONG):
        client.streams[0].put({"index": number, "token": 7, "text": "x"})
        await asyncio.sleep(0)
        connection.sweep(begun + number * STEP_S)
    assert transport.aborted
    connection.connection_lost(None)
    for _ in range(1000):
        if client.streams[0].cancelled():
            break
        await asyncio.sleep(0)
    return client.streams[0]


def test_the_text_of_a_client_who_reads_nothing_is_taken_back():
    assert asyncio.run(text_of_who_reads_nothing()).cancelled()


@pytest.mark.parametrize("case", CASES)
def test_who_is_behind_is_sent_away(case):
    app, sent, unread, expected = CASES[case]
    found = asyncio.run(seconds_until_abort(app, sent, unread))
    assert (found is None) == (expected is None)
    assert found is None or abs(found - (expected or 0)) <= 2 * STEP_S


def test_an_answer_does_not_wait_for_an_acknowledgement_of_its_head():
    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
