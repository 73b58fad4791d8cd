"""Sockets as the mesh wants them: never blocking, no Nagle, and dead hosts noticed by the kernel."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Sequence
from typing import Any, Final, Protocol

SEND_BUFFER: Final = 2 << 20  # so that the kernel takes whole payloads at once; it caps this at net.core.wmem_max
RECEIVE_AHEAD: Final = 2 << 20  # what it may hold while we compute
_KEEP_ALIVE: Final = (("NODELAY", 1), ("KEEPIDLE", 10), ("KEEPINTVL", 5), ("KEEPCNT", 3), ("USER_TIMEOUT", 15_000))

Buffer = Any  # what has the buffer protocol, C-contiguous: bytes, a memoryview, an array


class Line(Protocol):
    """A connected socket, plain or with TLS. All raise BlockingIOError where the kernel would let them wait."""

    def fileno(self) -> int:
        """Return the descriptor to wait for."""

    def sendmsg(self, parts: Sequence[Buffer], /) -> int:
        """Send the beginning of these parts; return how many bytes."""

    def send(self, data: Buffer, /) -> int:
        """Send the beginning of this; return how many bytes."""

    def recv(self, nbytes: int, /) -> bytes:
        """Receive at most so much; b"" when the other side has hung up."""

    def recv_into(self, room: memoryview, /) -> int:
        """Receive into memory; 0 when the other side has hung up."""

    def close(self) -> None:
        """Close it."""


class SecureLine(Line, Protocol):
    """A line with TLS."""

    def shake(self) -> None:
        """Return once the handshake is done; raises Malformed if the other side is not who it should be."""

    def pending(self) -> int:
        """Return how many bytes are decrypted and not received."""


def mesh_possible() -> bool:
    """Return whether this machine has what the mesh needs: Linux."""
    return hasattr(select, "epoll") and hasattr(os, "eventfd") and hasattr(socket, "TCP_USER_TIMEOUT")


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; host "" is every address of IPv4."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=64)
    listener.setblocking(False)
    return listener


def tune_sender(sock: socket.socket) -> None:
    """Make an accepted socket as an endpoint wants it."""
    _tune(sock)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)


def tune_receiver(sock: socket.socket) -> None:
    """Make a socket as a subscriber wants it."""
    _tune(sock)
    # The receive buffer grows with the low-water mark and stays: it takes whole payloads while we compute.
    low_water(sock, RECEIVE_AHEAD)
    low_water(sock, 1)


def begin(host: str, port: int) -> socket.socket:
    """Begin to connect to an address, without waiting."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    tune_receiver(sock)
    sock.connect_ex((host, port))  # what comes of it is asked for once the socket can be written
    return sock


def low_water(sock: socket.socket, nbytes: int) -> None:
    """Let the socket be readable only once so much is there."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)


def connected(sock: socket.socket) -> None:
    """Raise OSError, in its own words, unless the connection that was begun stands."""
    error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if error:
        raise OSError(error, os.strerror(error))
    sock.getpeername()


def _tune(sock: socket.socket) -> None:
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE:
        sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{name}"), value)
