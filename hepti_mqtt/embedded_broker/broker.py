"""A broker as a child process, Mosquitto or amqtt, and Mosquitto's configuration for tensors."""

from __future__ import annotations

import base64
import contextlib
import errno
import hashlib
import importlib.util
import json
import logging
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, Self, get_args

from hepti_mqtt.core.errors import ConfigError, NetworkError

BrokerKind = Literal["mosquitto", "amqtt"]
_log: Final = logging.getLogger("hepti.broker")
KINDS: Final[tuple[BrokerKind, ...]] = get_args(BrokerKind)

HOST: Final = "127.0.0.1"
SBIN: Final = ("/usr/sbin", "/usr/local/sbin", "/usr/local/bin", "/opt/homebrew/sbin")
START_TIMEOUT_S: Final = 20.0
STOP_TIMEOUT_S: Final = 6.0
_TRIES: Final = 5
_PORTS: Final = (16_384, 32_768)  # below the ports of outgoing connections: 32,768 on Linux, 49,152 on other systems
_LOOKS: Final = 64
_LOOK_S: Final = 0.02
_WATCH_S: Final = 1.0
# CONNECT of MQTT 3.1.1: clean session, keep-alive 10 s, client id "hepti-ready".
_CONNECT: Final = b"\x10\x17\x00\x04MQTT\x04\x02\x00\x0a\x00\x0bhepti-ready"
_CONNACK: Final = 0x20
_DISCONNECT: Final = b"\xe0\x00"


def find_mosquitto() -> str | None:
    """Return the path of Mosquitto; None if it is not installed or HEPTI_NO_MOSQUITTO is set."""
    if os.environ.get("HEPTI_NO_MOSQUITTO"):
        return None
    return shutil.which("mosquitto", path=os.pathsep.join((os.environ.get("PATH", ""), *SBIN)))


def start_broker(only: str | None = None, **options: Any) -> EmbeddedBroker:
    """Start the `only` kind of broker, by default Mosquitto or else amqtt; return when it answers.

    options: of EmbeddedBroker. Raises ConfigError if `only` is unknown, no broker is installed or the port is in use,
    NetworkError if the broker does not start.
    """
    closed = options.get("closed") is not None
    if only is not None and only not in KINDS:
        raise ConfigError(f"unknown broker {only!r}; choose one of {', '.join(KINDS)}")
    if closed and only == "amqtt":
        raise ConfigError("amqtt has no access lists, which a closed site needs; use mosquitto")
    program = None if only == "amqtt" else find_mosquitto()
    if program is None and (only == "mosquitto" or closed):
        raise ConfigError(
            "mosquitto is not installed; install it (Debian, Ubuntu, Raspberry Pi OS: apt install mosquitto)"
        )
    if program is None and importlib.util.find_spec("amqtt") is None:
        raise ConfigError(
            "no broker is installed; install mosquitto, run pip install '.[broker]' in the checkout, or name a "
            "running broker with --broker or HEPTI_BROKER"
        )
    broker = EmbeddedBroker(program, **options)
    try:
        broker.start()
    except BaseException:
        broker.close()
        raise
    return broker


@dataclass(eq=False)
class EmbeddedBroker:
    """A broker that ends with this process, even if this process is killed; a context manager."""

    program: str | None  #: path of Mosquitto, None for amqtt
    users: Mapping[str, str] | None = None  #: user -> password; None admits everybody
    max_packet_bytes: int | None = None  #: Mosquitto's max_packet_size, None for 32 MiB; amqtt has no limit
    address: str = HOST
    port: int = 0  #: 0 until the first start chooses a free port
    #: directory of a closed site's broker (passwd, acl, broker.crt, broker.key), replaces users; Mosquitto only
    closed: Path | None = None
    #: directory of Mosquitto's persistent state, created if missing; None for a temporary one
    stored: Path | None = None

    def __post_init__(self) -> None:
        if self.stored is not None:
            _make_writable(self.stored)
        self.kind: BrokerKind = "amqtt" if self.program is None else "mosquitto"
        self.reason = f"mosquitto ({self.program})" if self.program else "amqtt, since mosquitto is not installed"
        self._process: subprocess.Popen[bytes] | None = None
        self._directory = Path(tempfile.mkdtemp(prefix="hepti-broker-"))  # only this account may read it
        self._kept = self._directory if self.stored is None else self.stored.resolve()

    @property
    def url(self) -> str:
        """Return the broker's URL, without user and password."""
        place = f"[{self.address}]" if ":" in self.address else self.address
        return f"{'mqtt' if self.closed is None else 'mqtts'}://{place}:{self.port}"

    @property
    def running(self) -> bool:
        """Return whether the process runs."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the broker, on its earlier port after a stop, and return when it answers.

        Raises NetworkError with its last log lines, ConfigError if the requested port is in use.
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
            self._set_damaged_aside()
        raise NetworkError(f"{self.kind} does not start: {self.log() or 'it says nothing'}")

    def _set_damaged_aside(self) -> None:
        """Rename a database that Mosquitto cannot restore, e.g. after a power cut, so that it starts without it."""
        database = self._kept / "mosquitto.db"
        if "persistent database" in self.log() and database.is_file():
            renamed = database.with_suffix(".damaged")
            database.replace(renamed)
            _log.warning(
                "%s is damaged and was renamed to %s: its requests, answers and retained messages are lost; devices "
                "and planner publish their messages again",
                database,
                renamed.name,
            )

    def stop(self) -> None:
        """End the process; `start` restarts it on the same port, with its sessions and retained messages."""
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
        """Wait for `stop`. Raises NetworkError with the broker's last log lines if it ends before."""
        while not stop.wait(_WATCH_S):
            if not self.running:
                raise NetworkError(
                    f"{self.kind} has ended unexpectedly, and all connections to {self.url}: "
                    f"{self.log() or 'it logged nothing, so it was killed or has crashed'}; start it again"
                )

    def close(self) -> None:
        """End the process and delete its files, except those in `stored`. A second call does nothing."""
        self.stop()
        shutil.rmtree(self._directory, ignore_errors=True)

    def log(self) -> str:
        """Return the broker's last log lines."""
        try:
            return " / ".join((self._directory / "log").read_text(errors="replace").splitlines()[-5:])
        except OSError:
            return ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
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
                start_new_session=True,  # so that Ctrl-C reaches only this process; `stop` ends the broker
            )

    def _command(self, port: int) -> list[str]:
        if self.program is None:
            command = [sys.executable, "-m", "hepti_mqtt.embedded_broker.child", "amqtt", self.address, str(port)]
            return [*command, *([self._private("users", json.dumps(self.users))] if self.users else [])]
        user, stored = _account(), f"{self._kept}/"
        if self.closed is not None:
            text = closed_configuration(str(self.closed.resolve()), port, self.address, user, stored)
        else:
            text = configuration(
                self.address,
                port,
                user=user,
                stored_in=stored,
                password_file=None if self.users is None else self._private("passwd", password_lines(self.users)),
                max_packet_bytes=self.max_packet_bytes,
            )
        return [self.program, "-c", self._private("mosquitto.conf", text)]

    def _private(self, name: str, text: str) -> str:
        path = self._directory / name
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(text)
        return str(path)

    def _answers(self, port: int) -> bool:
        """Return whether the process answers a CONNECT before it ends. Raises NetworkError if it does neither."""
        process = self._process
        assert process is not None
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if _answers_connect(self.address, port, tls=self.closed is not None):
                return process.poll() is None
            try:
                process.wait(_LOOK_S)
            except subprocess.TimeoutExpired:
                continue
            return False  # probably another process uses the port now
        self.stop()
        raise NetworkError(f"{self.kind} does not answer within {START_TIMEOUT_S:g} s: {self.log() or 'no word'}")


def _account() -> str:
    """Return the name of this process's account without using the environment, "" if it has no name."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return ""


def _make_writable(stored: Path) -> None:
    """Create a private directory. Raises ConfigError if Mosquitto, under this account, could not write there."""
    try:
        stored.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in (stored, *stored.iterdir()):
            if not os.access(path, os.R_OK | os.W_OK):
                raise PermissionError(errno.EACCES, f"{path} belongs to another account")
    except OSError as error:
        raise ConfigError(
            f"the broker cannot store anything in {stored}: {error.strerror or error}; give it to this account, or "
            "delete it with its content"
        ) from error


def _free_port(address: str) -> int:
    """Return a free port in _PORTS, so that an outgoing connection cannot occupy a stopped broker's port."""
    candidates = (random.randrange(*_PORTS) for _ in range(_LOOKS))
    return next(port for port in candidates if _is_free(address, port))


def _is_free(address: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ignore connections in TIME_WAIT
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
    """Return a TLS connection that checks no certificate, because only our own child's answer matters."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context.wrap_socket(sock)


# ----------------------------------------------------------------------------------------------------------------------
# Settings of Mosquitto for tensors, each with its reason, and its password file.


STORED_IN: Final = "/var/lib/mosquitto/"  # as in distributions' packages; Mosquitto requires the final slash
_ITERATIONS: Final = 20_000
_SALT_BYTES: Final = 12
CLOSED_PORT: Final = 8883
_CLOSED_HEAD: Final = (
    "# Mosquitto for a closed site: runs on 2.0 and 2.1. `hepti site init` writes it, with the files that it names;",
    "# README.md in broker/ says what each of them is for.",
    "",
)


class Setting(NamedTuple):
    """One line of mosquitto.conf and its reason."""

    name: str
    value: str
    why: str


# broker/mosquitto.conf holds the same lines; a test compares them.
SETTINGS: Final[tuple[Setting, ...]] = (
    Setting("set_tcp_nodelay", "true", "Nagle's algorithm holds small packets back for 40 ms, once per exchange"),
    Setting(
        "max_packet_size", "33554432", "2.1 refuses more than 2,000,000 bytes by default; this is 4096 rows of f32"
    ),
    Setting(
        "max_queued_messages",
        "1000000",
        "messages beyond are dropped silently, also after they were acknowledged; with 0 some releases drop everything",
    ),
    Setting("max_queued_bytes", "134217728", "bounds what waits at QoS 1 for one client; what is beyond is dropped"),
    Setting(
        "memory_limit",
        "536870912",
        "the bound of everything: beyond it a publisher is disconnected before its message is acknowledged",
    ),
    Setting(
        "max_inflight_messages",
        "512",
        "requests that wait for their answers: the planner acknowledges each when it is answered",
    ),
    Setting("queue_qos0_messages", "false", "an activation that comes late is worth nothing"),
    Setting("persistence", "true", "requests and answers at QoS 1 outlive a restart; activations are never stored"),
    Setting(
        "autosave_interval",
        "10",
        "seconds between two saves, besides that at the end: what a power cut or a kill may cost",
    ),
    Setting("persistent_client_expiration", "1d", "sessions of clients that never come back do not stay for ever"),
    Setting("sys_interval", "60", "statistics once a minute are enough; a small computer has other work"),
)


def configuration(
    address: str, port: int, *, user: str, stored_in: str, password_file: str | None, max_packet_bytes: int | None
) -> str:
    """Return a mosquitto.conf for one listener.

    user: account to run as, because Mosquitto started by root would change its account; "" for an account without a
    name. stored_in: directory of the persistent state. password_file: None admits everybody.
    """
    lines = [f"listener {port} {address}", "log_dest stderr", "log_type error", "log_type warning"]
    if user:
        lines.append(f"user {user}")
    lines.append("allow_anonymous true" if password_file is None else "allow_anonymous false")
    if password_file is not None:
        lines.append(f"password_file {password_file}")
    own = {} if max_packet_bytes is None else {"max_packet_size": str(max_packet_bytes)}
    lines.append(f"persistence_location {stored_in}")
    lines += [f"{s.name} {own.get(s.name, s.value)}" for s in SETTINGS]
    return "\n".join(lines) + "\n"


def closed_configuration(
    files: str, port: int = CLOSED_PORT, address: str = "", user: str = "", stored_in: str = STORED_IN
) -> str:
    """Return the commented mosquitto.conf of a closed site with TLS, passwords and an access list.

    files: directory of passwd, acl, broker.crt and broker.key. address: "" for all addresses. user: account to run
    as, "" for Mosquitto's own. stored_in: directory of the persistent state.
    """
    lines = [
        *_CLOSED_HEAD,
        *([f"user {user}"] if user else []),
        f"listener {port} {address}".strip(),
        f"certfile {files}/broker.crt",
        f"keyfile {files}/broker.key",
        "",
        "# Everybody on the network may knock, so nobody comes in without a password.",
        "allow_anonymous false",
        f"password_file {files}/passwd",
        f"acl_file {files}/acl",
        "",
        *("log_dest stderr", "log_type error", "log_type warning", "log_type notice"),
        "",
        "# The file mosquitto.db of what outlives a restart goes here.",
        f"persistence_location {stored_in}",
        "",
        "# The embedded broker of `hepti` uses exactly the lines below.",
    ]
    for setting in SETTINGS:
        lines += ["", f"# {setting.why[0].upper()}{setting.why[1:]}.", f"{setting.name} {setting.value}"]
    return "\n".join(lines) + "\n"


def password_lines(users: Mapping[str, str]) -> str:
    """Return a Mosquitto password file: PBKDF2 with SHA-512, format $7$iterations$salt$hash.

    Raises `ConfigError` for an invalid user name.
    """
    out = []
    for user, password in users.items():
        if not user or ":" in user or not user.isprintable():
            raise ConfigError(f"user name {user!r} cannot stand in a password file: no colon, no control characters")
        salt = os.urandom(_SALT_BYTES)
        digest = hashlib.pbkdf2_hmac("sha512", password.encode(), salt, _ITERATIONS)
        fields = (str(_ITERATIONS), base64.b64encode(salt).decode(), base64.b64encode(digest).decode())
        out.append(f"{user}:$7${'$'.join(fields)}\n")
    return "".join(out)
