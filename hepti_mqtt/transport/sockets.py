"""Non-blocking sockets for MQTT, plain or with TLS between devices, and a descriptor that wakes a poller.

Each device has its own TLS key; peers pin its certificate by the announced fingerprint.
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

from hepti_mqtt.core.errors import ConfigError
from hepti_mqtt.transport.codec import Buffer, Malformed

SEND_BUFFER: Final = 2 << 20  # takes whole payloads; the kernel caps it at net.core.wmem_max
RECEIVE_AHEAD: Final = 2 << 20  # bytes that the kernel may buffer during a computation
_KEEP_ALIVE: Final = (("NODELAY", 1), ("KEEPIDLE", 10), ("KEEPINTVL", 5), ("KEEPCNT", 3), ("USER_TIMEOUT", 15_000))
STAGGER_S: Final = 0.25  # between attempts at two addresses of a name
_QUICK: Final[int | None] = getattr(socket, "TCP_QUICKACK", None)
RECORD: Final = 16_384  # bytes of a TLS record
_CHACHA_FIRST: Final = "ECDHE+CHACHA20:ECDHE+AESGCM"
_CERTIFICATE: Final = re.compile("-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_WAIT: Final = (ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Connection(Protocol):
    """A connected socket, plain or with TLS; its methods raise BlockingIOError instead of waiting."""

    def fileno(self) -> int:
        """Return the descriptor to poll."""

    def sendmsg(self, parts: Sequence[Buffer], /) -> int:
        """Send a prefix of the parts; return its length."""

    def send(self, data: Buffer, /) -> int:
        """Send a prefix; return its length."""

    def recv(self, nbytes: int, /) -> bytes:
        """Receive at most `nbytes`; b"" at the end of the stream."""

    def recv_into(self, room: memoryview, /) -> int:
        """Receive into memory; 0 at the end of the stream."""

    def close(self) -> None:
        """Close it."""


class BufferedConnection(Connection, Protocol):
    """A connection that buffers decoded bytes: its socket may be empty although bytes are pending."""

    def pending(self) -> int:
        """Return the number of buffered bytes."""

    def send(self, data: Buffer, /) -> int:
        """Send a prefix; return its length."""
        return self.sendmsg((data,))

    def recv(self, nbytes: int, /) -> bytes:
        """Receive at most `nbytes`; b"" at the end of the stream."""
        room = bytearray(nbytes)
        return bytes(room[: self.recv_into(memoryview(room))])


def mesh_possible() -> bool:
    """Return whether this machine supports the mesh (Linux)."""
    return hasattr(select, "epoll") and hasattr(socket, "TCP_USER_TIMEOUT")


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; host "" means all IPv4 addresses."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=64)
    listener.setblocking(False)
    return listener


def tune_sender(sock: socket.socket) -> None:
    """Set the options of an endpoint's accepted socket."""
    tune(sock)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)


def tune_receiver(sock: socket.socket) -> None:
    """Set the options of a subscriber's socket."""
    tune(sock)
    # A high low-water mark enlarges the receive buffer permanently, so whole payloads fit during a computation.
    low_water(sock, RECEIVE_AHEAD)
    low_water(sock, 1)


def begin(host: str, port: int) -> socket.socket:
    """Start to connect to an address; `connected` checks the result when the socket becomes writable."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    tune_receiver(sock)
    sock.connect_ex((host, port))
    return sock


def connect_any(host: str, port: int, timeout_s: float) -> socket.socket:
    """Connect to the first address of a name that accepts; the socket has this timeout.

    Address families alternate; the next attempt starts after a failure or `STAGGER_S` (RFC 8305), so that a dead
    address does not use up the time. Raises the OSError of the last failed address, TimeoutError.
    """
    until = time.monotonic() + timeout_s
    addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    first = [address for address in addresses if address[0] == addresses[0][0]]
    others = [address for address in addresses if address[0] != addresses[0][0]]
    ahead = deque(address for pair in zip_longest(first, others) for address in pair if address is not None)
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
                except OSError as failed:  # address family unsupported
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


def low_water(sock: socket.socket, nbytes: int) -> None:
    """Make the socket readable only when `nbytes` have arrived."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)


def connected(sock: socket.socket) -> None:
    """Raise OSError unless the attempt of `begin` succeeded."""
    error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if error:
        raise OSError(error, os.strerror(error))
    sock.getpeername()


def tune(sock: socket.socket) -> None:
    """Make a socket non-blocking, disable Nagle's algorithm (delays of 40 ms), and detect dead hosts."""
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE:
        if (option := getattr(socket, f"TCP_{name}", None)) is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


def acknowledge_soon(sock: Any) -> None:
    """Acknowledge the next packets without delay; the kernel resets this, so call it after each read.

    Mosquitto uses Nagle's algorithm by default: it delays its next packet until our acknowledgement, up to 40 ms.
    """
    if _QUICK is not None:
        with suppress(OSError):  # the connection is lost
            sock.setsockopt(socket.IPPROTO_TCP, _QUICK, 1)


def linger(sock: Any, deadline: float) -> None:
    """Read until the broker closes: closing with unread bytes would reset the connection and publish the will."""
    try:
        sock.settimeout(0.1)
        sock.shutdown(socket.SHUT_WR)
        while time.monotonic() < deadline and sock.recv(65_536):
            continue
    except OSError:
        return


def local(sock: Any) -> bool:
    """Return whether both ends have the same address; False without a connection."""
    try:
        return bool(sock.getpeername()[0] == sock.getsockname()[0])
    except (AttributeError, OSError):
        return False


def unacknowledged(sock: Any) -> int | None:
    """Return the unacknowledged bytes in the kernel's send buffer, None if unknown.

    Bytes flow while this number falls, even if the send buffer is full or complete.
    """
    try:
        left = fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4))
    except (AttributeError, OSError, ValueError):  # None or closed
        return None
    return int.from_bytes(left, sys.byteorder)


class Wake:
    """A descriptor that is readable from `set` until `clear`, for the thread that polls it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # reentrant: a signal handler may interrupt `set` and call it
        self._read, self._write = os.pipe()
        for end in (self._read, self._write):
            os.set_blocking(end, False)

    def fileno(self) -> int:
        """Return the descriptor to poll."""
        return self._read

    def set(self) -> None:
        """Wake the poller; any thread may call it, also after `close`."""
        with self._lock, suppress(BlockingIOError):  # after `close` the descriptor's number may be reused
            if self._write >= 0:
                os.write(self._write, b"\0")

    def clear(self) -> None:
        """Reset the wake-up; call it before checking for work."""
        with suppress(BlockingIOError):
            os.read(self._read, 4096)

    def pause(self, delay_s: float, stop: Callable[[], bool]) -> None:
        """Sleep for `delay_s` despite wake-ups, unless `stop()`."""
        until, poller = time.monotonic() + delay_s, select.poll()
        poller.register(self._read, select.POLLIN)
        while not stop() and (left := until - time.monotonic()) > 0:
            if poller.poll(left * 1000):
                self.clear()

    def close(self) -> None:
        """Close the descriptors."""
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
    """TLS settings of a mesh as a server and as a client, and the fingerprint of this device's certificate."""

    serving: ssl.SSLContext
    asking: ssl.SSLContext
    fingerprint: str

    @classmethod
    def load(cls, certificate: Path, key: Path, *, aes: bool | None = None) -> MeshTls:
        """Read this device's certificate (the first in its file) and key, both PEM.

        aes: whether the processor has AES instructions, None to detect them. Without them ChaCha20 is several times
        as fast; Python can prefer it up to TLS 1.2 only. Raises ConfigError for invalid files.
        """
        try:
            match = _CERTIFICATE.search(certificate.read_text(encoding="utf-8"))
            own = ssl.PEM_cert_to_DER_cert(match.group() if match else "")
            serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            serving.load_cert_chain(certificate, key)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{certificate} and {key} are not this device's certificate and its key: {error}; both are "
                "PEM files, the key without a password"
            ) from error
        serving.num_tickets = 0  # no resumption, because connections are few
        asking = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        asking.check_hostname = False
        asking.verify_mode = ssl.CERT_NONE  # the fingerprint replaces the authority
        aes = has_aes() if aes is None else aes
        if aes:
            serving.options &= ~ssl.OP_CIPHER_SERVER_PREFERENCE  # the client chooses, because it may lack AES
        for context in (serving, asking):
            context.options |= ssl.OP_NO_RENEGOTIATION
            if not aes:
                context.maximum_version = ssl.TLSVersion.TLSv1_2
                context.set_ciphers(_CHACHA_FIRST)
        return cls(serving, asking, hashlib.sha256(own).hexdigest())

    def serve(self, sock: socket.socket) -> TlsConnection:
        """Return the connection of an accepted socket; the first reads perform the handshake."""
        return TlsConnection(self.serving.wrap_socket(sock, server_side=True, do_handshake_on_connect=False))

    def ask(self, sock: socket.socket, fingerprint: str) -> TlsConnection:
        """Return the connection of a connected socket; send only after `handshake` has returned."""
        return TlsConnection(self.asking.wrap_socket(sock, do_handshake_on_connect=False), fingerprint)


class TlsConnection(BufferedConnection):
    """A non-blocking socket with TLS."""

    fileno: Callable[[], int]
    pending: Callable[[], int]
    close: Callable[[], None]

    def __init__(self, sock: ssl.SSLSocket, fingerprint: str = "") -> None:
        self._sock, self._fingerprint = sock, fingerprint
        self.fileno, self.pending, self.close = sock.fileno, sock.pending, sock.close

    def handshake(self) -> None:
        """Continue the handshake; return when it is complete. Raises Malformed for another certificate."""
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
        """Send a prefix of the parts; return its length."""
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
        """Receive into memory; 0 at the end of the stream."""
        try:
            return self._sock.recv_into(room)
        except _WAIT:
            raise BlockingIOError from None
        except ssl.SSLError as error:
            raise Malformed(f"TLS broken: {error.reason}") from error


def has_aes() -> bool:
    """Return whether the processor has AES instructions; True if unknown."""
    try:
        cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return True
    return re.search(r"^(flags|Features)\s*:.*\baes\b", cpuinfo, re.MULTILINE) is not None


def _records(parts: Sequence[Buffer]) -> list[memoryview]:
    """Join small parts, because each would become a TLS record."""
    joined, chunks = bytearray(), []
    for part in parts:
        view = memoryview(part)
        if len(joined) + view.nbytes <= RECORD:
            joined += view
            continue
        chunks += [memoryview(joined), view.cast("B")] if joined else [view.cast("B")]
        joined = bytearray()
    return [*chunks, memoryview(joined)]
