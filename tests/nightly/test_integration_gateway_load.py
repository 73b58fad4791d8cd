"""The gateway under many connections and many requests, before a real site with a tiny model."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
from collections import Counter

import psutil
import pytest
from site_processes import PATIENCE_S, ask_http, client_of, site_of

CONNECTIONS = 1000
REQUESTS_PER_S = 200
SECONDS = 20
GROWTH_BYTES = 24 << 20  # after the first quarter


BODY = b'{"inputs": "a warm room"}'
site = site_of({"tiny": "tiny-bert"}, {"a": "100MiB"})
hepti = client_of()


@pytest.fixture(scope="module")
def port(site, hepti):
    return site.serve("gateway")


class Load:
    """Connections that stay open, each asked again and again; `statuses` counts the answers."""

    def __init__(self, port):
        self._port = port
        self.statuses = Counter()
        body = json.dumps({"model": "tiny", "input": "a warm room"}).encode()
        head = (
            f"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        self._request = head.encode() + b"\r\n\r\n" + body

    async def ask(self, reader, writer):
        writer.write(self._request)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        await reader.readexactly(int(head.partition(b"content-length:")[2].split()[0]))
        self.statuses[int(head.split()[1])] += 1

    async def run(self, process):
        """Return the process's resident bytes after each quarter."""
        streams = [await asyncio.open_connection("127.0.0.1", self._port) for _ in range(CONNECTIONS)]
        idle = asyncio.Queue()
        for connection in streams:
            idle.put_nowait(connection)
        clock, sizes = asyncio.get_running_loop(), []
        begun = clock.time()

        async def one():
            connection = await idle.get()
            await self.ask(*connection)
            idle.put_nowait(connection)

        async with asyncio.timeout(SECONDS + PATIENCE_S), asyncio.TaskGroup() as group:
            for number in range(REQUESTS_PER_S * SECONDS):
                await asyncio.sleep(max(begun + number / REQUESTS_PER_S - clock.time(), 0))
                group.create_task(one())
                if (number + 1) % (REQUESTS_PER_S * SECONDS // 4) == 0:
                    sizes.append(process.memory_info().rss)
        for _, writer in streams:
            writer.close()
        return sizes


def test_many_connections_and_requests_end_in_no_error_and_in_no_growth(site, port):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2 * CONNECTIONS:
        pytest.skip(f"this user may open {hard} files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * CONNECTIONS), hard))
    load = Load(port)
    sizes = asyncio.run(load.run(psutil.Process(site.running["gateway"].pid)))
    assert load.statuses == {200: REQUESTS_PER_S * SECONDS}
    assert sizes[-1] - sizes[0] < GROWTH_BYTES, sizes
    print(load.statuses, [size >> 20 for size in sizes])


def test_many_who_send_too_slowly_leave_others_served_and_are_sent_away(port):
    head = b"POST /embed HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n"
    slow = [socket.create_connection(("127.0.0.1", port), PATIENCE_S) for _ in range(300)]
    for number, client in enumerate(slow):
        client.sendall((b"", head[:30], head + b"\r\n{")[number % 3])
    assert ask_http(port, "/embed", BODY)[0] == 200
    ends = []
    for client in slow:
        try:
            ends.append(client.recv(1 << 16)[9:12])
        except ConnectionResetError:
            ends.append(b"")
        client.close()
    assert set(ends) == {b"408", b""}
    assert ask_http(port, "/embed", BODY)[0] == 200
