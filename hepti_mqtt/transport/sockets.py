"""What a link asks of its socket."""

from __future__ import annotations

import fcntl
import socket
import ssl
import sys
import termios
import time
from typing import Any


def no_delay(sock: Any) -> None:
    """Switch Nagle's algorithm off, which holds small packets back for 40 ms."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def linger(sock: Any, deadline: float) -> None:
    """Let the broker read our DISCONNECT: closing with unread bytes resets the connection, and the will goes out."""
    try:
        sock.settimeout(0.1)
        sock.shutdown(socket.SHUT_WR)
        while time.monotonic() < deadline and sock.recv(65_536):
            continue
    except OSError:
        return


def buffered(sock: Any) -> bool:
    """Return whether bytes have been read from the kernel that nobody has taken yet."""
    return isinstance(sock, ssl.SSLSocket) and sock.pending() > 0


def local(sock: Any) -> bool:
    """Return whether both ends have one address; False without a connection."""
    try:
        return bool(sock.getpeername()[0] == sock.getsockname()[0])
    except (AttributeError, OSError):
        return False  # lost meanwhile


def unacknowledged(sock: Any) -> int | None:
    """Return how many bytes the kernel has taken and the other side's has not acknowledged; None where nobody tells.

    What falls here flows, also while the kernel takes nothing more of ours, or has taken everything.
    """
    try:
        told = fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4))
    except (AttributeError, OSError, ValueError):  # no such socket, or closed
        return None
    return int.from_bytes(told, sys.byteorder)
