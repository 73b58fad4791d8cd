"""A broker that a test tells what to do with each publish: take it, hang up, or say goodbye."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading

TAKE, HANG_UP, LEAVE = "take", "hang up", "leave"


class Picky:
    """A broker of MQTT 3.1.1 and 5; what(connection, topic): what to do with a publish of QoS 1.

    open_to(connection): whether that connection, counted from 0, is answered. limit: its packet limit, told in MQTT 5.
    """

    def __init__(self, what, open_to=lambda _n: True, limit=None):
        self.what, self.open_to, self.limit = what, open_to, limit
        self.came = queue.SimpleQueue()  # (connection, topic)
        self.longest = 0  # packet
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.sock = None
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()

    def serve(self):
        connection = 0
        with contextlib.suppress(OSError):
            while True:
                self.sock, _ = self.listener.accept()
                with self.sock, contextlib.suppress(EOFError, ConnectionError):
                    if self.open_to(connection):
                        self.talk(connection)
                connection += 1

    def talk(self, connection):
        version = 0
        with self.sock.makefile("rb") as stream:
            while True:
                first, body = packet(stream)
                size = 2 + sum(len(body) >= bound for bound in (1 << 7, 1 << 14, 1 << 21)) + len(body)
                self.longest = max(self.longest, size)
                if first == 0x10:
                    version = body[6]
                    limit = b"" if self.limit is None else b"\x27" + self.limit.to_bytes(4, "big")
                    properties = bytes([len(limit)]) + limit if version == 5 else b""
                    self.sock.sendall(bytes([0x20, 2 + len(properties)]) + b"\0\0" + properties)
                elif first & 0xF6 == 0x32:
                    topic = body[2 : 2 + body[1]].decode()
                    self.came.put((connection, topic))
                    what = self.what(connection, topic)
                    if what == LEAVE:
                        self.sock.sendall(b"\xe0\x01\x8b")
                    if what != TAKE:
                        return
                    self.sock.sendall(b"\x40\x02" + body[2 + body[1] : 4 + body[1]])
                elif first == 0x82:
                    codes = b"\0\1" if version == 5 else b"\1"
                    self.sock.sendall(bytes([0x90, 2 + len(codes)]) + body[:2] + codes)
                elif first == 0xC0:
                    self.sock.sendall(b"\xd0\0")
                elif first == 0xE0:
                    return

    def close(self):
        for sock in (self.listener, self.sock):
            if sock is not None:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.thread.join(20)


def packet(stream):
    """Read one packet: its first byte, and what follows its length."""
    first, length, shift = stream.read(1), 0, 0
    while first and (byte := stream.read(1)):
        length, shift = length | (byte[0] & 127) << shift, shift + 7
        if byte[0] < 128:
            return first[0], stream.read(length)
    raise EOFError
