"""Sockets for MQTT: never blocking, no Nagle, dead hosts noticed by the kernel; plain, or with TLS between devices.

Each device has a TLS key of its own, and peers pin its certificate by the fingerprint that it announces.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import hmac
import os
import re
import select
import socket
import ssl
import sys
import termios
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from math import inf
from pathlib import Path
from typing import Any, Final, Protocol

from hepti_mqtt.errors import ConfigError
from hepti_mqtt.transport.codec import Buffer, Malformed

SEND_BUFFER: Final = 2 << 20  # so that the kernel takes whole payloads at once; it caps this at net.core.wmem_max
RECEIVE_AHEAD: Final = 2 << 20  # what it may hold while we compute
_KEEP_ALIVE: Final = (("NODELAY", 1), ("KEEPIDLE", 10), ("KEEPINTVL", 5), ("KEEPCNT", 3), ("USER_TIMEOUT", 15_000))
STAGGER_S: Final = 0.25  # before the next address of a name is tried, too
_QUICK: Final[int | None] = getattr(socket, "TCP_QUICKACK", None)
RECORD: Final = 16_384  # what one TLS record holds
_CHACHA_FIRST: Final = "ECDHE+CHACHA20:ECDHE+AESGCM"
_CERTIFICATE: Final = re.compile("-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_WAIT: Final = (ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Connection(Protocol):
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


class BufferedConnection(Connection, Protocol):
    """A connection that decodes what it reads: the socket may be empty while bytes are left, so its user asks."""

    def pending(self) -> int:
        """Return how many bytes are decoded and not received."""

    def send(self, data: Buffer, /) -> int:
        """Send the beginning of this; return how many bytes."""
        return self.sendmsg((data,))

    def recv(self, nbytes: int, /) -> bytes:
        """Receive at most so much; b"" when the other side has hung up."""
        room = bytearray(nbytes)
        return bytes(room[: self.recv_into(memoryview(room))])


def mesh_possible() -> bool:
    """Return whether this machine has what the mesh needs: Linux."""
    return hasattr(select, "epoll") and hasattr(socket, "TCP_USER_TIMEOUT")


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; host "" is every address of IPv4."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=64)
    listener.setblocking(False)
    return listener


def tune_sender(sock: socket.socket) -> None:
    """Make an accepted socket as an endpoint wants it."""
    tune(sock)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)


def tune_receiver(sock: socket.socket) -> None:
    """Make a socket as a subscriber wants it."""
    tune(sock)
    # The receive buffer grows with the low-water mark and stays: it takes whole payloads while we compute.
    low_water(sock, RECEIVE_AHEAD)
    low_water(sock, 1)


def begin(host: str, port: int) -> socket.socket:
    """Begin to connect to an address, without waiting."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    tune_receiver(sock)
    sock.connect_ex((host, port))  # what comes of it is asked for once the socket can be written
    return sock


def connect_any(host: str, port: int, timeout_s: float) -> socket.socket:
    """Return a socket that is connected to the first address of a name that accepts, with this timeout.

    Addresses of both families in turn, the next one when one fails or `STAGGER_S` after it (RFC 8305): a dead one
    before a good one must not take all the time. Raises OSError of the last one that failed, TimeoutError.
    """
    until = time.monotonic() + timeout_s
    ahead = deque(_in_turn(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)))
    tried: dict[int, socket.socket] = {}
    poller, next_s = select.poll(), -inf
    error = OSError(f"{host} has no address")
    try:
        while ahead or tried:
            if (now := time.monotonic()) >= until:
                raise TimeoutError("timed out")
            if ahead and (now >= next_s or not tried):
                family, _, protocol, _, address = ahead.popleft()
                next_s = now + STAGGER_S
                try:
                    sock = socket.socket(family, socket.SOCK_STREAM, protocol)
                except OSError as failed:  # no such family here
                    error = failed
                    continue
                sock.setblocking(False)
                if (code := sock.connect_ex(address)) not in (0, errno.EINPROGRESS):
                    error, next_s = OSError(code, os.strerror(code)), -inf
                    sock.close()
                    continue
                tried[sock.fileno()] = sock
                poller.register(sock, select.POLLOUT)
            wait_s = (min(next_s, until) if ahead else until) - now
            for descriptor, _ in poller.poll(max(wait_s, 0.0) * 1000):
                poller.unregister(descriptor)
                sock = tried[descriptor]
                if not (code := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)):
                    del tried[descriptor]
                    sock.settimeout(timeout_s)
                    return sock
                error, next_s = OSError(code, os.strerror(code)), -inf
                tried.pop(descriptor).close()
        raise error
    finally:
        for sock in tried.values():
            sock.close()


Address = tuple[Any, Any, int, str, Any]


def _in_turn(found: Sequence[Address]) -> list[Address]:
    """Return addresses in their order, those of the two families by turns."""
    first = [a for a in found if a[0] == found[0][0]]
    others = [a for a in found if a[0] != found[0][0]]
    return [a for pair in zip_longest(first, others) for a in pair if a is not None]


def low_water(sock: socket.socket, nbytes: int) -> None:
    """Let the socket be readable only once so much is there."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)


def connected(sock: socket.socket) -> None:
    """Raise OSError, in its own words, unless the connection that was begun stands."""
    error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if error:
        raise OSError(error, os.strerror(error))
    sock.getpeername()


def tune(sock: socket.socket) -> None:
    """Let a socket never block, hold nothing back (Nagle's algorithm does, for 40 ms), and notice a dead host."""
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE:
        if (option := getattr(socket, f"TCP_{name}", None)) is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


def acknowledge_soon(sock: Any) -> None:
    """Let the kernel acknowledge what comes next at once, where it can: a broker whose Nagle's algorithm is on, as is
    Mosquitto's unless it is switched off, holds its next packet back until then, for up to 40 ms.

    The kernel forgets it, so it is said after each look.
    """
    if _QUICK is not None:
        with suppress(OSError):  # the connection has just ended
            sock.setsockopt(socket.IPPROTO_TCP, _QUICK, 1)


def linger(sock: Any, deadline: float) -> None:
    """Let the broker read our DISCONNECT: closing with unread bytes resets the connection, and the will goes out."""
    try:
        sock.settimeout(0.1)
        sock.shutdown(socket.SHUT_WR)
        while time.monotonic() < deadline and sock.recv(65_536):
            continue
    except OSError:
        return


def local(sock: Any) -> bool:
    """Return whether both ends have one address; False without a connection."""
    try:
        return bool(sock.getpeername()[0] == sock.getsockname()[0])
    except (AttributeError, OSError):
        return False  # lost meanwhile


def unacknowledged(sock: Any) -> int | None:
    """Return how many bytes the kernel has taken and the other side's has not acknowledged; None if unknown.

    While this number falls, bytes flow, even if the kernel takes nothing more of ours or has taken everything.
    """
    try:
        left = fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4))
    except (AttributeError, OSError, ValueError):  # no such socket, or closed
        return None
    return int.from_bytes(left, sys.byteorder)


class Wake:
    """A descriptor that is readable from `set` until `clear`, for the thread that polls it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal may come while its thread is waking already, and wake too
        self._read, self._write = os.pipe()
        for end in (self._read, self._write):
            os.set_blocking(end, False)

    def fileno(self) -> int:
        """Return the descriptor to poll."""
        return self._read

    def set(self) -> None:
        """Wake the poller; from any thread, also after `close`."""
        with self._lock, suppress(BlockingIOError):  # the descriptor may be another file's once it is closed
            if self._write >= 0:
                os.write(self._write, b"\0")

    def clear(self) -> None:
        """Take the wake-up; call it before looking for what it announces."""
        with suppress(BlockingIOError):
            os.read(self._read, 4096)

    def pause(self, delay_s: float, stop: Callable[[], bool]) -> None:
        """Sleep for `delay_s`, however often woken, unless `stop()`."""
        until, poller = time.monotonic() + delay_s, select.poll()
        poller.register(self._read, select.POLLIN)
        while not stop() and (left := until - time.monotonic()) > 0:
            if poller.poll(left * 1000):
                self.clear()

    def close(self) -> None:
        """Give the descriptors back."""
        with self._lock:
            if self._write >= 0:
                os.close(self._read)
                os.close(self._write)
                self._read = self._write = -1

    def __del__(self) -> None:
        self.close()


# -- TLS between devices ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MeshTls:
    """How a mesh encrypts: this device's certificate as a server, and its fingerprint for peers."""

    serving: ssl.SSLContext
    asking: ssl.SSLContext
    fingerprint: str

    @classmethod
    def load(cls, certificate: Path, key: Path, *, aes: bool | None = None) -> MeshTls:
        """Read this device's certificate and key (PEM); its own is the first certificate in the file, as in a login.

        aes: whether the processor has AES instructions; None: look. Without them ChaCha20 is several times as fast, and
        Python can ask for it up to TLS 1.2 only. Raises ConfigError if the files are not a certificate and its key.
        """
        try:
            found = _CERTIFICATE.search(certificate.read_text(encoding="utf-8"))
            own = ssl.PEM_cert_to_DER_cert(found.group() if found else "")
            serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            serving.load_cert_chain(certificate, key)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{certificate} and {key} are not this device's certificate and its key: {error}; both are "
                "PEM files, the key without a password"
            ) from error
        serving.num_tickets = 0  # no resumption: connections are few
        asking = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        asking.check_hostname = False
        asking.verify_mode = ssl.CERT_NONE  # the fingerprint says more than any authority
        aes = has_aes() if aes is None else aes
        if aes:
            serving.options &= ~ssl.OP_CIPHER_SERVER_PREFERENCE  # the peer chooses: it may have no AES
        for context in (serving, asking):
            context.options |= ssl.OP_NO_RENEGOTIATION
            if not aes:
                context.maximum_version = ssl.TLSVersion.TLSv1_2
                context.set_ciphers(_CHACHA_FIRST)
        return cls(serving, asking, hashlib.sha256(own).hexdigest())

    def serve(self, sock: socket.socket) -> TlsConnection:
        """Return the connection of an accepted socket; its handshake happens while it receives."""
        return TlsConnection(self.serving.wrap_socket(sock, server_side=True, do_handshake_on_connect=False))

    def ask(self, sock: socket.socket, fingerprint: str) -> TlsConnection:
        """Return the connection of a connected socket; nothing may be sent before `handshake` has returned."""
        return TlsConnection(self.asking.wrap_socket(sock, do_handshake_on_connect=False), fingerprint)


class TlsConnection(BufferedConnection):
    """A socket with TLS that never blocks."""

    fileno: Callable[[], int]
    pending: Callable[[], int]
    close: Callable[[], None]

    def __init__(self, sock: ssl.SSLSocket, fingerprint: str = "") -> None:
        self._sock, self._fingerprint = sock, fingerprint
        self.fileno, self.pending, self.close = sock.fileno, sock.pending, sock.close

    def handshake(self) -> None:
        """Return once the handshake is done; raises Malformed if the other side has another certificate."""
        try:
            self._sock.do_handshake()
        except _WAIT:
            raise BlockingIOError from None
        except ssl.SSLError as error:
            raise Malformed(f"no TLS with it: {error.reason}") from error
        shown = hashlib.sha256(self._sock.getpeercert(binary_form=True) or b"").hexdigest()
        if not hmac.compare_digest(shown, self._fingerprint):
            raise Malformed(
                f"it shows another certificate ({shown[:12]}...) than it announced ({self._fingerprint[:12]}...)"
            )

    def sendmsg(self, parts: Sequence[Buffer], /) -> int:
        """Send the beginning of these parts; return how many bytes."""
        sent = 0
        try:
            for chunk in _records(parts):
                done = 0
                while done < chunk.nbytes:  # one record at a time
                    record = self._sock.send(chunk[done:])
                    done, sent = done + record, sent + record
        except _WAIT:
            if not sent:
                raise BlockingIOError from None
        return sent

    def recv_into(self, room: memoryview, /) -> int:
        """Receive into memory; 0 when the other side has hung up."""
        try:
            return self._sock.recv_into(room)
        except _WAIT:
            raise BlockingIOError from None
        except ssl.SSLError as error:
            raise Malformed(f"TLS broken: {error.reason}") from error


def has_aes() -> bool:
    """Return whether the processor has instructions for AES."""
    try:
        said = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return True
    return re.search(r"^(flags|Features)\s*:.*\baes\b", said, re.MULTILINE) is not None


def _records(parts: Sequence[Buffer]) -> list[memoryview]:
    """Return the parts, small ones joined: each would be a record of its own."""
    joined, chunks = bytearray(), []
    for part in parts:
        view = memoryview(part)
        if len(joined) + view.nbytes <= RECORD:
            joined += view
            continue
        chunks += [memoryview(joined), view.cast("B")] if joined else [view.cast("B")]
        joined = bytearray()
    return [*chunks, memoryview(joined)]
