"""Settings of Mosquitto for tensors, each with its reason, and its password file."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Mapping
from typing import Final, NamedTuple

from hepti_mqtt.errors import ConfigError

STORED_IN: Final = "/var/lib/mosquitto/"  # by the packages of distributions; it ends with a slash
_ITERATIONS: Final = 20_000
_SALT_BYTES: Final = 12
CLOSED_PORT: Final = 8883
_CLOSED_HEAD: Final = (
    "# Mosquitto for a closed site: runs on 2.0 and 2.1. `hepti site init` writes it, with the files that it names;",
    "# README.md in broker/ says what each of them is for.",
    "",
)


class Setting(NamedTuple):
    """One line of mosquitto.conf and why it is there."""

    name: str
    value: str
    why: str


# broker/mosquitto.conf holds the same lines; a test compares them.
SETTINGS: Final[tuple[Setting, ...]] = (
    Setting("set_tcp_nodelay", "true", "Nagle's algorithm holds small packets back for 40 ms, once per exchange"),
    Setting(
        "max_packet_size", "33554432", "2.1 refuses more than 2,000,000 bytes by default; this is 4096 rows of f32"
    ),
    Setting("max_queued_messages", "256", "the only bound of what waits at QoS 0 for a device that does not read"),
    Setting("max_queued_bytes", "134217728", "bounds what waits at QoS 1 (tiles of weights) for one device"),
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

    user: the account to run as (Mosquitto started by root would change to another), "" for one without a name, which
    cannot change. stored_in: the directory of what
    outlives a restart. password_file: None lets everyone in who reaches the address.
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
    """Return the mosquitto.conf of a closed site, with the reasons: encrypted, with passwords and an access list.

    files: the directory of passwd, acl, broker.crt and broker.key. address: "" for all of the machine's. user: the
    account to run as, "" for Mosquitto's own. stored_in: the directory of what outlives a restart.
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

    Raises `ConfigError` for a user name that would break a line.
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
