"""TLS between devices: each has a key of its own, and peers know its certificate by the fingerprint that it told."""

from __future__ import annotations

import hashlib
import hmac
import re
import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hepti_mqtt.errors import ConfigError
from hepti_mqtt.transport.mesh.lines import Buffer
from hepti_mqtt.transport.mesh.packets import Malformed

RECORD: Final = 16_384  # what one TLS record holds
_CHACHA_FIRST: Final = "ECDHE+CHACHA20:ECDHE+AESGCM"
_CERTIFICATE: Final = re.compile("-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_WAIT: Final = (ssl.SSLWantReadError, ssl.SSLWantWriteError)


@dataclass(frozen=True, slots=True)
class MeshTls:
    """How a mesh encrypts: this device's certificate as a server, and the fingerprint that its peers are to be told."""

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
        serving.num_tickets = 0  # every connection shakes hands in full: they are few
        asking = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        asking.check_hostname = False
        asking.verify_mode = ssl.CERT_NONE  # the fingerprint says more than any authority
        aes = has_aes() if aes is None else aes
        if aes:
            serving.options &= ~ssl.OP_CIPHER_SERVER_PREFERENCE  # as a peer wants it, which may have no AES
        for context in (serving, asking):
            context.options |= ssl.OP_NO_RENEGOTIATION
            if not aes:
                context.maximum_version = ssl.TLSVersion.TLSv1_2
                context.set_ciphers(_CHACHA_FIRST)
        return cls(serving, asking, hashlib.sha256(own).hexdigest())

    def serve(self, sock: socket.socket) -> TlsLine:
        """Return the line of an accepted socket; it shakes hands while it receives."""
        return TlsLine(self.serving.wrap_socket(sock, server_side=True, do_handshake_on_connect=False))

    def ask(self, sock: socket.socket, fingerprint: str) -> TlsLine:
        """Return the line of a connected socket; nothing may be sent before `shake` has returned."""
        return TlsLine(self.asking.wrap_socket(sock, do_handshake_on_connect=False), fingerprint)


class TlsLine:
    """A socket with TLS that never blocks: see `lines.SecureLine`."""

    def __init__(self, sock: ssl.SSLSocket, fingerprint: str = "") -> None:
        self._sock, self._fingerprint = sock, fingerprint
        self.fileno, self.pending, self.close = sock.fileno, sock.pending, sock.close

    def shake(self) -> None:
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
                f"it shows another certificate ({shown[:12]}...) than it told ({self._fingerprint[:12]}...)"
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

    def send(self, data: Buffer, /) -> int:
        """Send the beginning of this; return how many bytes."""
        return self.sendmsg((data,))

    def recv(self, nbytes: int, /) -> bytes:
        """Receive at most so much; b"" when the other side has hung up."""
        room = bytearray(nbytes)
        return bytes(room[: self.recv_into(memoryview(room))])

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
