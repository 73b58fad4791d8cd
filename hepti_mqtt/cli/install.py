"""`hepti-agent install`, `upgrade` and `uninstall`: the agent as a service of systemd."""

from __future__ import annotations

import argparse
import contextlib
import getpass
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hepti_mqtt import __version__
from hepti_mqtt.cli import output
from hepti_mqtt.config.options import add_agent_arguments, host_name
from hepti_mqtt.config.settings import CONFIG_DIR, DEFAULT_SITE
from hepti_mqtt.config.state import PRIVATE, write_atomically
from hepti_mqtt.core.errors import ConfigError, HeptiError, NetworkError
from hepti_mqtt.core.ids import check_name, is_name
from hepti_mqtt.protocol.messages import Status
from hepti_mqtt.protocol.topics import Topics
from hepti_mqtt.transport.broker_connection import BrokerConnection
from hepti_mqtt.transport.name_claim import UNREAD, StatusReader
from hepti_mqtt.transport.url import BrokerUrl

NAME: Final = "hepti-agent"
ROOT: Final = Path("/")
CACHE: Final = "/var/cache/hepti/tiles"  # as the unit has it
ONLINE_S: Final = 900.0  # the first start compiles kernels
LOOK_S: Final = 1.0
RETAINED_S: Final = 0.3
CONNECT_S: Final = 10.0
LOG_LINES: Final = 15

# -- the unit ----------------------------------------------------------------------------------------------------------

# Settings of the system's unit that a user's manager can apply without privileges.
_USERS_TOO: Final = frozenset(
    (
        *("Description", "ExecStart", "Environment", "Restart"),
        *("RestartSec", "RestartPreventExitStatus", "Nice", "MemoryMax"),
        *("NoNewPrivileges", "LockPersonality", "RestrictAddressFamilies", "RestrictNamespaces"),
        *("RestrictRealtime", "RestrictSUIDSGID", "SystemCallArchitectures", "SystemCallFilter"),
        *("SystemCallErrorNumber", "UMask", "WantedBy"),
    )
)
_PLAIN: Final = re.compile(r"[\w@%+=:,./-]+", re.ASCII)


def unit_text(
    bundled: str, command: Sequence[str], environment: Mapping[str, str], *, is_users: bool, about: str = ""
) -> str:
    """Return the unit for a command, based on the bundled unit.

    environment: added to the unit's own, of a user's unit instead of it. is_users: for a user's own manager.
    """
    lines = [f"# {about}"] if about else []
    for line in bundled.splitlines():
        key, is_setting, value = line.partition("=")
        if line.startswith("#") or (is_users and is_setting and key not in _USERS_TOO):
            continue
        if key == "ExecStart":
            line = f"ExecStart={' '.join(map(systemd_word, command))}"
        elif key == "Environment":
            own = [] if is_users else [value]
            line = f"Environment={' '.join([*own, *(systemd_word(f'{k}={v}') for k, v in environment.items())])}"
        elif key == "WantedBy" and is_users:
            line = "WantedBy=default.target"
        lines.append(line)
    return "\n".join(lines) + "\n"


def systemd_word(text: str) -> str:
    """Return a word of a command or an assignment as systemd reads it: %% and $$ are themselves."""
    doubled = text.replace("%", "%%").replace("$", "$$")
    if _PLAIN.fullmatch(doubled):
        return doubled
    return '"' + doubled.replace("\\", "\\\\").replace('"', '\\"') + '"'


def words_of(unit: str, key: str) -> list[str]:
    """Return the words of a setting of a unit by `unit_text`."""
    value = next((line.partition("=")[2] for line in unit.splitlines() if line.startswith(f"{key}=")), "")
    return [word.replace("%%", "%").replace("$$", "$") for word in shlex.split(value)]


def agent_options(args: argparse.Namespace) -> list[str]:
    """Return the agent's options that were given, as words."""
    parser, words = argparse.ArgumentParser(add_help=False), list[str]()
    add_agent_arguments(parser)
    for action in parser._actions:
        value = getattr(args, action.dest)
        if value == action.default or action.dest in ("device", "action"):
            continue
        option = action.option_strings[-1]
        if isinstance(value, tuple):  # an address
            host, port = value
            value = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        words += [option] if isinstance(value, bool) else [option, str(value)]
    return words


# -- where it lies -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Service:
    """The agent's service on this machine: of the system, or (is_users) of one user.

    data: directories of what it keeps: weights, measurements, kernels, state.
    """

    unit: Path
    login: Path
    data: tuple[Path, ...]
    is_users: bool

    @classmethod
    def of(cls, is_users: bool) -> Service:
        """Return the service of the system or of this user."""
        if not is_users:
            data = ("var/lib/hepti-agent", "var/lib/private/hepti-agent", "var/cache/hepti", "var/cache/private/hepti")
            unit = ROOT / f"etc/systemd/system/{NAME}.service"
            return cls(unit, ROOT / "etc/hepti/login", tuple(ROOT / place for place in data), is_users)
        config = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        unit = config / "systemd/user" / f"{NAME}.service"
        return cls(unit, config / "hepti/agent.login", (cache / NAME,), is_users)

    def systemctl(self, *words: str, check: bool = True) -> str:
        """Run systemctl and return what it prints; raises ConfigError with its words if it fails."""
        command = [*shlex.split(self.manager), *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if check and done.returncode:
            why = (done.stderr or done.stdout).strip() or f"exit code {done.returncode}"
            raise ConfigError(f"{shlex.join(command)} failed: {why}")
        return done.stdout.strip()

    @property
    def manager(self) -> str:
        """Return the command of the service's manager."""
        return "systemctl --user" if self.is_users else "systemctl"

    @property
    def log_command(self) -> str:
        """Return the command that shows its log."""
        return f"journalctl {'--user ' if self.is_users else ''}-u {NAME}"


def manage(args: argparse.Namespace) -> int:
    """Install, upgrade or uninstall the agent's service.

    Raises ConfigError where it cannot be installed here, NetworkError where it does not come online.
    """
    service = Service.of(args.user)
    if args.dry_run:
        if args.action != "install":
            raise ConfigError(f"--dry-run is of install alone, not of {args.action}; leave it out")
        return _preview(args, service)
    if shutil.which("systemctl") is None:
        raise ConfigError(
            f"there is no systemctl here, so no service can be installed; run `{NAME}` by your own means "
            "(docs/guide/install.md)"
        )
    if not service.is_users and os.geteuid():
        raise ConfigError("a service of the system is root's: use sudo, or install one of your own with --user")
    if args.action == "install":
        return _install(args, service)
    if not service.unit.exists():
        other = "without --user" if service.is_users else "with --user"
        raise ConfigError(f"{service.unit} is not there: nothing is installed here. Try {other}, or install it")
    return _upgrade(service) if args.action == "upgrade" else _uninstall(service)


def _preview(args: argparse.Namespace, service: Service) -> int:
    """Print what `_install` writes and runs; raises ConfigError as it does."""
    _, _, command, environment = _what_to_install(args, service)
    run = [f"{service.manager} {words}" for words in ("daemon-reload", f"enable {NAME}", f"restart {NAME}")]
    unit = _unit(service, command, environment)
    output.print_lines(
        [f"writes {service.login}: the broker's login", f"writes {service.unit}:", *unit.splitlines(), "runs:", *run]
    )
    return 0


def _what_to_install(args: argparse.Namespace, service: Service) -> tuple[BrokerUrl, str, list[str], dict[str, str]]:
    """Return the broker, the device's name, the service's command and its environment."""
    if args.cache is not None:
        raise ConfigError("--cache is not for a service: it has directories of its own; leave it out")
    url = BrokerUrl.parse(args.broker)
    device = check_name("device", args.device or (url.user if is_name(url.user) else host_name()))
    cache = str(service.data[0] / "tiles") if service.is_users else CACHE
    command = [str(_program(service)), "--id", device, "--cache", cache, *agent_options(args)]
    return url, device, command, {} if args.site == DEFAULT_SITE else {"HEPTI_SITE": args.site}


def _install(args: argparse.Namespace, service: Service) -> int:
    """Write login and unit, and start the service; a first installation that fails leaves the files as they were."""
    url, device, command, environment = _what_to_install(args, service)
    login = Path(args.broker).expanduser().read_bytes() if "://" not in args.broker else f"{args.broker}\n".encode()
    is_first = not service.unit.exists()
    with _writing(service.login):
        before = service.login.read_bytes() if service.login.exists() else None
    try:
        with _writing(service.login):
            service.login.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            write_atomically(service.login, login, PRIVATE)
        _write_unit(service, command, environment)
        service.systemctl("enable", NAME)
        if service.is_users:
            _linger()
        return _start(service, url, args.site, device)
    except HeptiError:
        # A service that still starts may come online later.
        if is_first and service.systemctl("is-active", NAME, check=False) not in ("active", "activating"):
            service.systemctl("disable", "--now", NAME, check=False)
            _delete(service, service.unit, *([] if before is not None else [service.login]), check=False)
            if before is not None:
                with _writing(service.login):
                    write_atomically(service.login, before, PRIVATE)
        raise


def _upgrade(service: Service) -> int:
    """Take the unit and the program of the version that is installed now, and restart with the same options."""
    unit = service.unit.read_text()
    _, *options = words_of(unit, "ExecStart")
    kept = dict(word.split("=", 1) for word in words_of(unit, "Environment") if word.startswith("HEPTI_SITE="))
    _write_unit(service, [str(_program(service)), *options], kept)
    device = options[options.index("--id") + 1]
    site = kept.get("HEPTI_SITE", DEFAULT_SITE)
    return _start(service, BrokerUrl.parse(str(service.login)), site, device)


def _uninstall(service: Service) -> int:
    unit = service.unit.read_text()
    _, *options = words_of(unit, "ExecStart")
    sites = [word.partition("=")[2] for word in words_of(unit, "Environment") if word.startswith("HEPTI_SITE=")]
    service.systemctl("disable", "--now", NAME)
    service.systemctl("clean", "--what=all", NAME, check=False)  # knows where its own user's directories lie
    _forget(service, sites[0] if sites else DEFAULT_SITE, options[options.index("--id") + 1])
    _delete(service, service.unit, service.unit.with_name(f"{service.unit.name}.d"), service.login, *service.data)
    output.print_lines(["the service, its login and everything it kept are removed; the package stays"])
    return 0


def _delete(service: Service, *paths: Path, check: bool = True) -> None:
    """Delete files and directories of a service that has ended, and let systemd forget it."""
    for path in paths:
        with _writing(path), contextlib.suppress(FileNotFoundError):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
    with contextlib.suppress(OSError):  # others have files there
        service.login.parent.rmdir()
    service.systemctl("daemon-reload", check=check)
    service.systemctl("reset-failed", NAME, check=False)


def _write_unit(service: Service, command: Sequence[str], environment: Mapping[str, str]) -> None:
    text = _unit(service, command, environment)
    with _writing(service.unit):
        service.unit.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        write_atomically(service.unit, text.encode(), 0o644)
    service.systemctl("daemon-reload")


def _unit(service: Service, command: Sequence[str], environment: Mapping[str, str]) -> str:
    if service.is_users:
        kernels = str(service.data[0] / "numba")
        environment = {"HEPTI_BROKER": str(service.login), "NUMBA_CACHE_DIR": kernels, **environment}
    bundled = (CONFIG_DIR / "systemd" / f"{NAME}.service").read_text()
    about = f"Written by `{NAME} install`, version {__version__}; change it with `{service.manager} edit {NAME}`."
    return unit_text(bundled, command, environment, is_users=service.is_users, about=about)


def _program(service: Service) -> Path:
    """Return this installation's own `hepti-agent`; raises ConfigError where the service could not read it."""
    program = Path(sys.executable).parent / NAME
    if not program.exists():
        raise ConfigError(f"there is no {program}: install the package into an environment, by pip, pipx or uv tool")
    hidden = (Path("/home"), Path("/root"), Path("/run/user"))
    if not service.is_users and any(program.is_relative_to(place) for place in hidden):
        raise ConfigError(
            f"a service of the system does not see {program}: install the package elsewhere, such as /opt/hepti "
            "(docs/guide/install.md), or use --user"
        )
    return program


def _linger() -> None:
    """Let the user's services run without a login; only root may where the system's policy says so."""
    command = ["loginctl", "enable-linger"]
    if shutil.which(command[0]) is None or subprocess.run(command, capture_output=True, check=False).returncode:
        line = f"it ends when you log out: sudo loginctl enable-linger {getpass.getuser()} lets it run without you"
        output.err.print(line, markup=False)


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error


# -- how it stands -----------------------------------------------------------------------------------------------------


def _start(service: Service, url: BrokerUrl, site: str, device: str) -> int:
    """Restart the service, wait until the device is online, and print how it stands."""
    with StatusReader(url, Topics(site).status(device), f"hepti-{site}-install") as reader:
        before = reader.connect(CONNECT_S).status(RETAINED_S) or UNREAD  # perhaps since the power was cut
        service.systemctl("restart", NAME)
        _wait_online(service, reader, device, before)
    output.print_lines(
        [
            f"{device} is online at site {site}, broker {url.place}, version {__version__}",
            f"unit {service.unit}, login {service.login}; options: {service.manager} edit {NAME}",
            f"log: {service.log_command} -f",
        ]
    )
    return 0


def _wait_online(service: Service, reader: StatusReader, device: str, before: Status) -> None:
    """Return when a start of the device other than `before` is online."""
    until, progress = time.monotonic() + ONLINE_S, output.ProgressLines()
    while time.monotonic() < until:
        status = reader.status(LOOK_S) or UNREAD
        if status.state == "online" and status.boot != before.boot:
            return
        if status.state == "starting":
            state = {"status": status.state, "doing": status.doing, "done": status.done, "total": status.total}
            progress.print(device, output.status_text(state))
        if service.systemctl("is-active", NAME, check=False) in ("failed", "inactive"):
            break
    last = _last_lines(service)
    ends = f", which ends with: {last}" if last else ""
    raise NetworkError(f"{device} does not come online; its log says why: {service.log_command}{ends}")


def _last_lines(service: Service) -> str:
    """Return the end of the service's log."""
    command = [*shlex.split(service.log_command), "-n", str(LOG_LINES), "--no-pager", "-o", "cat"]
    if shutil.which(command[0]) is None:
        return ""
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _forget(service: Service, site: str, device: str) -> None:
    """Clear what the broker retains of the device, where it can be reached."""
    try:
        name = f"hepti-{site}-install-{uuid.uuid4().hex[:12]}"
        transport = BrokerConnection(BrokerUrl.parse(str(service.login)), name, name="install")
        transport.connect(CONNECT_S)
        for topic in (Topics(site).caps(device), Topics(site).status(device)):
            transport.publish(topic, b"", 1, retain=True)
        transport.close()
    except HeptiError as error:
        line = f"the broker still knows {device} ({error}): hepti site forget --device {device}"
        output.err.print(line, markup=False)
