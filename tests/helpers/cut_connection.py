"""Cutting a TCP connection between two other processes of ours, as a switch does that is turned off and on."""

from __future__ import annotations

import ctypes
import os
import socket

import psutil
import pytest

_PIDFD_GETFD = 438  # of Linux since 5.6, on every architecture
_libc = ctypes.CDLL(None, use_errno=True)


def cut(pid: int, other: int) -> int:
    """End every connection between two processes; return how many there were. Skips where that is forbidden."""
    ends = {c.laddr for c in psutil.Process(other).net_connections("tcp") if c.status == psutil.CONN_ESTABLISHED}
    connections = [c for c in psutil.Process(pid).net_connections("tcp") if c.raddr in ends]
    for connection in connections:
        process = os.pidfd_open(pid)
        try:
            fd = _libc.syscall(_PIDFD_GETFD, process, connection.fd, 0)
        finally:
            os.close(process)
        if fd < 0:
            pytest.skip(f"no descriptor of another process can be had: {os.strerror(ctypes.get_errno())}")
        with socket.socket(fileno=fd) as sock:
            sock.shutdown(socket.SHUT_RDWR)
    return len(connections)
