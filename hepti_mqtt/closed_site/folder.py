"""The directory of a closed site: the broker's files, a login file for each user, and the authority's key."""

from __future__ import annotations

import datetime
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import quote

from hepti_mqtt.closed_site.certificates import make_authority, make_certificate, make_self_signed
from hepti_mqtt.closed_site.roles import ROLES, Role, acl_text
from hepti_mqtt.config.state import PRIVATE, write_atomically
from hepti_mqtt.core.errors import ConfigError
from hepti_mqtt.core.ids import PLANNER, check_name
from hepti_mqtt.embedded_broker.broker import closed_configuration, password_lines
from hepti_mqtt.transport.url import BrokerUrl

INSTALLED: Final = "/etc/mosquitto"  # directory of the broker's files on its machine
_SERVICE: Final = {PLANNER: "/etc/hepti/planner.login", "device": "/etc/hepti/login"}  # as in configs/systemd
_OWN: Final = "~/.config/hepti/login"
_ABOUT: Final = "site.json"
_PASSWORD_BYTES: Final = 24


class Copy(NamedTuple):
    """A file to copy to a machine."""

    file: Path
    machine: str
    to: str  #: path on the machine


@dataclass(frozen=True, slots=True)
class SiteFolder:
    """A closed site in its directory."""

    path: Path
    site: str
    hosts: tuple[str, ...]  #: names and addresses of the broker; login files contain the first
    port: int
    users: Mapping[str, Role]

    @classmethod
    def create(cls, path: Path, site: str, hosts: Sequence[str], port: int, now: datetime.datetime) -> SiteFolder:
        """Create the directory with authority, certificate, configuration and the planner's user.

        Raises ConfigError if the directory is not empty or not writable, or `cryptography` is missing.
        """
        for host in hosts:
            BrokerUrl.parse(f"mqtts://{_in_url(host)}:{port}")  # raises early for an invalid host
        authority = make_authority(f"hepti site {check_name('site', site)}", now)
        broker = make_certificate(authority, hosts, now)
        folder = cls(path, site, tuple(hosts), port, {})
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if any(path.iterdir()):
                raise ConfigError(f"{path} is not empty; name a new directory, or add users with `hepti site add`")
            for directory in (folder.broker, path / "logins"):
                directory.mkdir(mode=0o700)
        except OSError as error:
            raise ConfigError(f"cannot create {path}: {error.strerror or error}; choose another directory") from error
        folder._write("ca.crt", authority.certificate.decode())
        folder._write("ca.key", authority.key.decode())
        folder._write("broker/broker.crt", broker.certificate.decode())
        folder._write("broker/broker.key", broker.key.decode())
        folder._write("broker/mosquitto.conf", closed_configuration(INSTALLED, port))
        return folder._with(PLANNER, "planner")

    @classmethod
    def open(cls, path: Path) -> SiteFolder:
        """Return the site in a directory. Raises ConfigError if there is none."""
        file = path / _ABOUT
        try:
            about = json.loads(file.read_text())
            users = about["users"]
            if not set(users.values()) <= set(ROLES):
                raise ValueError(f"its users have other roles than {', '.join(ROLES)}")
            return cls(path, about["site"], tuple(about["hosts"]), about["port"], users)
        except OSError as error:
            raise ConfigError(
                f"no site in {path} ({error.strerror or error}); name its directory with --dir, or make one with "
                "`hepti site init DIR`"
            ) from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{file} is not a file of `hepti site`: {error}") from error

    def add(self, role: Role, user: str) -> SiteFolder:
        """Add a user, write its login file and return the site. Raises ConfigError for a name in use."""
        check_name(role, user)
        if user in self.users:
            raise ConfigError(f"{user} is a {self.users[user]} of site {self.site} already; revoke it first")
        return self._with(user, role)

    def revoke(self, user: str) -> SiteFolder:
        """Remove a user's login and return the site; the planner gets a new login. Raises ConfigError if unknown."""
        if user not in self.users:
            raise ConfigError(f"no user {user} at site {self.site}; there are: {', '.join(self.users)}")
        left = SiteFolder(
            self.path, self.site, self.hosts, self.port, {u: r for u, r in self.users.items() if u != user}
        )
        left._store("")
        self.login(user).unlink(missing_ok=True)
        return left._with(user, "planner") if user == PLANNER else left

    @property
    def broker(self) -> Path:
        """Return the directory of the broker's files."""
        return self.path / "broker"

    @property
    def state(self) -> Path:
        """Return the directory of the state of an embedded broker with these files."""
        return self.path / "state"

    def login(self, user: str) -> Path:
        """Return a user's login file."""
        return self.path / "logins" / f"{user}.login"

    def copies(self, user: str | None = None) -> list[Copy]:
        """Return the files to copy after a change of `user`, or after `create` (None)."""
        changed = ("passwd", "acl") if user else ("mosquitto.conf", "broker.crt", "broker.key", "passwd", "acl")
        out = [Copy(self.broker / name, "the broker", f"{INSTALLED}/{name}") for name in changed]
        owner = user or PLANNER
        if (role := self.users.get(owner)) is not None:
            machine = "the planner" if role == PLANNER else f"{role} {owner}"
            out.append(Copy(self.login(owner), machine, _SERVICE.get(role, _OWN)))
        return out

    def _with(self, user: str, role: Role) -> SiteFolder:
        password = secrets.token_urlsafe(_PASSWORD_BYTES)
        extended = SiteFolder(self.path, self.site, self.hosts, self.port, {**self.users, user: role})
        place = f"{_in_url(self.hosts[0])}:{self.port}"
        own = b""
        if role == "device":  # peers pin this certificate
            own = b"".join(make_self_signed(user, datetime.datetime.now(datetime.UTC)))
        self._write(
            str(self.login(user).relative_to(self.path)),
            f"# Login of {role} {user} at Hepti's site {self.site}: anyone with this file can log in.\n"
            f"mqtts://{quote(user, safe='')}:{quote(password, safe='')}@{place}\n"
            f"{own.decode()}{(self.path / 'ca.crt').read_text()}",
        )
        extended._store(password_lines({user: password}))
        return extended

    def _store(self, added: str) -> None:
        """Write users, access list and passwords; added: lines of new passwords, because the file holds hashes."""
        passwd = self.broker / "passwd"
        before = passwd.read_text().splitlines(keepends=True) if passwd.exists() else []
        kept = [line for line in before if line.partition(":")[0] in self.users]
        self._write("broker/passwd", "".join(kept) + added)
        self._write("broker/acl", acl_text(self.site, self.users))
        about = {"site": self.site, "hosts": self.hosts, "port": self.port, "users": dict(self.users)}
        self._write(_ABOUT, json.dumps(about, indent=1) + "\n")

    def _write(self, name: str, text: str) -> None:
        try:
            write_atomically(self.path / name, text.encode(), PRIVATE)
        except OSError as error:
            raise ConfigError(f"cannot write {self.path / name}: {error.strerror or error}") from error


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
