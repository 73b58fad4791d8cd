"""A broker as a child process: Mosquitto where it is installed, else amqtt."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import json
import os
import pwd
import random
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Final, Literal, Self, get_args

from hepti_mqtt.embedded_broker.settings import closed_configuration, configuration, password_lines
from hepti_mqtt.errors import ConfigError, NetworkError

BrokerKind = Literal["mosquitto", "amqtt"]
KINDS: Final[tuple[BrokerKind, ...]] = get_args(BrokerKind)

HOST: Final = "127.0.0.1"
SBIN: Final = ("/usr/sbin", "/usr/local/sbin", "/usr/local/bin", "/opt/homebrew/sbin")
START_TIMEOUT_S: Final = 20.0
STOP_TIMEOUT_S: Final = 6.0
_TRIES: Final = 5
_PORTS: Final = (16_384, 32_768)  # Linux gives outgoing connections ports from 32,768 on, other systems from 49,152 on
_LOOKS: Final = 64
_LOOK_S: Final = 0.02
_WATCH_S: Final = 1.0
# CONNECT of MQTT 3.1.1: clean session, keep-alive 10 s, client id "hepti-ready".
_CONNECT: Final = b"\x10\x17\x00\x04MQTT\x04\x02\x00\x0a\x00\x0bhepti-ready"
_CONNACK: Final = 0x20
_DISCONNECT: Final = b"\xe0\x00"


def find_mosquitto() -> str | None:
    """Return the path of the installed Mosquitto; None if there is none, or HEPTI_NO_MOSQUITTO hides it."""
    if os.environ.get("HEPTI_NO_MOSQUITTO"):
        return None
    return shutil.which("mosquitto", path=os.pathsep.join((os.environ.get("PATH", ""), *SBIN)))


def start_broker(
    only: str | None = None,
    *,
    users: Mapping[str, str] | None = None,
    max_packet_bytes: int | None = None,
    address: str = HOST,
    port: int = 0,
    closed: Path | None = None,
    stored: Path | None = None,
) -> EmbeddedBroker:
    """Start Mosquitto, or amqtt where that is not installed, or the `only` kind; return it when it answers.

    users: user -> password; None lets everyone in who reaches `address`. max_packet_bytes: Mosquitto's max_packet_size
    instead of 32 MiB; amqtt has no limit. port: 0 for a free one. closed: the directory of a closed site's broker,
    instead of users; Mosquitto only. stored: the directory of what Mosquitto keeps over its restarts; None for one that
    ends with this process. Raises ConfigError if `only` is unknown, no broker is installed or the port is taken, and
    NetworkError if the broker does not start.
    """
    if only is not None and only not in KINDS:
        raise ConfigError(f"unknown broker {only!r}; choose one of {', '.join(KINDS)}")
    if closed is not None and only == "amqtt":
        raise ConfigError("amqtt has no access lists, which a closed site needs; use mosquitto")
    program = None if only == "amqtt" else find_mosquitto()
    if program is None and (only == "mosquitto" or closed is not None):
        raise ConfigError(
            "mosquitto is not installed; install it (Debian, Ubuntu, Raspberry Pi OS: apt install mosquitto)"
        )
    if program is None and importlib.util.find_spec("amqtt") is None:
        raise ConfigError(
            "no broker is installed; install mosquitto, run pip install 'hepti[broker]', or name a running broker with "
            "--broker or HEPTI_BROKER"
        )
    broker = EmbeddedBroker(
        program,
        users=users,
        max_packet_bytes=max_packet_bytes,
        address=address,
        port=port,
        closed=closed,
        stored=stored,
    )
    try:
        broker.start()
    except BaseException:
        broker.close()
        raise
    return broker


class EmbeddedBroker:
    """A broker that ends with this process, even if that is killed; a context manager that closes it.

    program: the path of Mosquitto, None for amqtt. port: 0 until it is started for the first time, if any is right.
    closed: the directory of a closed site's broker (passwd, acl, broker.crt, broker.key). stored: the directory of what
    it keeps over restarts, made if missing; None for one that `close` deletes.
    """

    def __init__(
        self,
        program: str | None,
        *,
        users: Mapping[str, str] | None = None,
        max_packet_bytes: int | None = None,
        address: str = HOST,
        port: int = 0,
        closed: Path | None = None,
        stored: Path | None = None,
    ) -> None:
        if stored is not None:
            _make_writable(stored)
        self.kind: BrokerKind = "amqtt" if program is None else "mosquitto"
        self.reason = f"mosquitto ({program})" if program else "amqtt, since mosquitto is not installed"
        self.address, self.port = address, port
        self._program, self._users, self._max_packet_bytes, self._closed = program, users, max_packet_bytes, closed
        self._process: subprocess.Popen[bytes] | None = None
        self._directory = Path(tempfile.mkdtemp(prefix="hepti-broker-"))  # readable by us alone
        self._stored = self._directory if stored is None else stored.resolve()

    @property
    def url(self) -> str:
        """Return the broker's URL, without user and password."""
        place = f"[{self.address}]" if ":" in self.address else self.address
        return f"{'mqtt' if self._closed is None else 'mqtts'}://{place}:{self.port}"

    @property
    def running(self) -> bool:
        """Return whether the process lives."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start it, on the same port as before if it has been stopped, and return when it answers.

        Raises NetworkError with its last words if it does not, ConfigError if the requested port is taken.
        """
        if self.running:
            return
        if self.port and not _is_free(self.address, self.port):
            raise ConfigError(
                f"port {self.port} of {self.address} is taken, perhaps by a broker; choose another --port"
            )
        for _ in range(_TRIES):
            port = self.port or _free_port(self.address)
            self._spawn(port)
            if self._answers(port):
                self.port = port
                return
            self.stop()
        raise NetworkError(f"{self.kind} does not start: {self.log() or 'it says nothing'}")

    def stop(self) -> None:
        """End the process; `start` brings it back on the same port."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def serve(self, stop: threading.Event) -> None:
        """Return when `stop` is set; raises NetworkError with the broker's last words if it ends before."""
        while not stop.wait(_WATCH_S):
            if not self.running:
                raise NetworkError(
                    f"{self.kind} has ended by itself, and with it every connection to {self.url}: "
                    f"{self.log() or 'it says nothing, so it was killed or has crashed'}; start it again"
                )

    def restart(self) -> None:
        """Stop it and start it on the same port; Mosquitto restores its sessions and retained messages."""
        self.stop()
        self.start()

    def close(self) -> None:
        """End the process and delete its files, except those in `stored`. A second call does nothing."""
        self.stop()
        shutil.rmtree(self._directory, ignore_errors=True)

    def log(self) -> str:
        """Return the last lines that the broker wrote."""
        try:
            return " / ".join((self._directory / "log").read_text(errors="replace").splitlines()[-5:])
        except OSError:
            return ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _spawn(self, port: int) -> None:
        keeper = [sys.executable, "-I", "-S", str(Path(__file__).with_name("child.py")), str(os.getpid())]
        path = [str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        with open(self._directory / "log", "wb") as log:
            self._process = subprocess.Popen(
                [*keeper, *self._command(port)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
                start_new_session=True,  # Ctrl-C in a terminal is for us; `stop` ends the broker
            )

    def _command(self, port: int) -> list[str]:
        if self._program is None:
            users = [self._private("users", json.dumps(self._users))] if self._users else []
            return [
                *(sys.executable, "-m", "hepti_mqtt.embedded_broker.child", "amqtt", self.address, str(port)),
                *users,
            ]
        user, stored = _account(), f"{self._stored}/"
        if self._closed is not None:
            text = closed_configuration(str(self._closed.resolve()), port, self.address, user, stored)
        else:
            text = configuration(
                self.address,
                port,
                user=user,
                stored_in=stored,
                password_file=None if self._users is None else self._private("passwd", password_lines(self._users)),
                max_packet_bytes=self._max_packet_bytes,
            )
        return [self._program, "-c", self._private("mosquitto.conf", text)]

    def _private(self, name: str, text: str) -> str:
        path = self._directory / name
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(text)
        return str(path)

    def _answers(self, port: int) -> bool:
        """Return whether the process answers a CONNECT before it ends; raises NetworkError if it does neither."""
        process = self._process
        assert process is not None
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if _answers_connect(self.address, port, tls=self._closed is not None):
                return process.poll() is None
            try:
                process.wait(_LOOK_S)
            except subprocess.TimeoutExpired:
                continue
            return False  # most likely another process has taken the port meanwhile
        self.stop()
        raise NetworkError(f"{self.kind} does not answer within {START_TIMEOUT_S:g} s: {self.log() or 'no word'}")


def _account() -> str:
    """Return the name of this process's account, whatever the environment says; "" if it has none."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return ""


def _make_writable(stored: Path) -> None:
    """Make the directory, for us alone; raises ConfigError if Mosquitto, which runs as we do, could not save there."""
    try:
        stored.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in (stored, *stored.iterdir()):
            if not os.access(path, os.R_OK | os.W_OK):
                raise PermissionError(errno.EACCES, f"{path} belongs to another account")
    except OSError as error:
        raise ConfigError(
            f"the broker cannot keep anything in {stored}: {error.strerror or error}; give it to this account, or "
            "delete it and what it keeps"
        ) from error


def _free_port(address: str) -> int:
    """Return a port below those of outgoing connections: one of them would keep a stopped broker from its port."""
    found = (random.randrange(*_PORTS) for _ in range(_LOOKS))
    return next((port for port in found if _is_free(address, port)), 0) or _any_port(address)


def _any_port(address: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as sock:
        sock.bind((address, 0))
        port: int = sock.getsockname()[1]
        return port


def _is_free(address: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that have just ended do not count
        try:
            sock.bind((address, port))
        except OSError as error:
            return error.errno != errno.EADDRINUSE
    return True


def _answers_connect(address: str, port: int, tls: bool) -> bool:
    host = {"0.0.0.0": HOST, "::": "::1"}.get(address, address)
    try:
        with socket.create_connection((host, port), timeout=1.0) as plain:
            with _encrypted(plain) if tls else contextlib.nullcontext(plain) as sock:
                sock.sendall(_CONNECT)
                answer = sock.recv(1)
                with contextlib.suppress(OSError):
                    sock.sendall(_DISCONNECT)
            return answer == bytes([_CONNACK])
    except OSError:
        return False


def _encrypted(sock: socket.socket) -> ssl.SSLSocket:
    """Return a connection that checks no certificate: the question is only whether our own child answers."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context.wrap_socket(sock)
