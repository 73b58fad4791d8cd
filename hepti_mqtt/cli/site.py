"""`hepti site`: create a closed site, add and revoke its users, say which files to copy, and forget a site."""

from __future__ import annotations

import argparse
import datetime
import ipaddress
import shlex
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Final, get_args

from hepti_mqtt.cli import output
from hepti_mqtt.closed_site.roles import AddedRole
from hepti_mqtt.config.options import HOME_ASSISTANT, discovery_prefix, tcp_port
from hepti_mqtt.config.settings import DEFAULT_SITE

if TYPE_CHECKING:
    from hepti_mqtt.closed_site.folder import SiteFolder

PORT: Final = 8883  # of MQTT over TLS
ALWAYS: Final = ("localhost", "127.0.0.1", "::1")  # of the broker's own machine
_START: Final = {
    "planner": "hepti planner --broker {to} --model NAME=DIR",
    "device": "hepti-agent --broker {to} --id {user}",
    "client": "hepti infer MODEL --broker {to} --text ...",
    "viewer": "hepti devices --broker {to}",
    "home": "in Home Assistant's MQTT integration: the name and password of {to}",
}


def arguments(sub: argparse.ArgumentParser) -> None:
    """Add the actions of `hepti site`."""
    actions = sub.add_subparsers(dest="action", required=True, metavar="init|add|revoke|forget")
    init = actions.add_parser("init", help="make authority, certificate, access list and configuration of the broker")
    host = "name or address of the broker that devices can reach; may be repeated; logins name the first "
    host += "(default: this machine's)"
    init.add_argument("--host", action="append", metavar="NAME|ADDRESS", help=host)
    init.add_argument("--port", type=tcp_port, default=PORT, help=f"the broker's port (default {PORT})")
    init.add_argument("--site", default=argparse.SUPPRESS, help=f"name of the site (default: {DEFAULT_SITE})")
    add = actions.add_parser("add", help="add a user of a role: writes its login file")
    role = "its role: to compute, to send requests, only to look, or to be Home Assistant"
    add.add_argument("role", choices=get_args(AddedRole), help=role)
    add.add_argument("name", metavar="NAME", help="name of the user: a device's --id, a client's --client")
    revoke = actions.add_parser("revoke", help="revoke a user; `planner` gets a new login")
    revoke.add_argument("name", metavar="NAME", help="name of the user")
    for action in (init, add, revoke):
        help_text = "the site's directory (default .); anyone who can read it owns the site"
        action.add_argument("--dir", type=Path, default=Path(), metavar="DIR", dest="directory", help=help_text)
    gone = actions.add_parser("forget", help="clear what the broker retains of a site, a device or a model")
    _forget(gone)
    for action in (init, add, revoke, gone):
        help_text = "print one JSON object on stdout"
        action.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help=help_text)


def _forget(sub: argparse.ArgumentParser) -> None:
    what = sub.add_mutually_exclusive_group()
    what.add_argument("--device", metavar="NAME", help="forget this device alone, which must be offline")
    what.add_argument("--model", metavar="NAME", help="forget this model alone")
    sub.add_argument("--yes", action="store_true", help="do not ask")
    home = f"prefix of Home Assistant's MQTT discovery (default {HOME_ASSISTANT}; off: there is none)"
    sub.add_argument("--home-assistant", type=discovery_prefix, default=HOME_ASSISTANT, metavar="PREFIX", help=home)
    for option, meaning in (("--broker", "the broker's URL, or the planner's login file"), ("--site", "its name")):
        sub.add_argument(option, default=argparse.SUPPRESS, help=f"{meaning} (default: HEPTI_{option[2:].upper()})")


def site(args: argparse.Namespace) -> int:
    """Make a closed site, or let a user in or out, and print what to copy where; or forget a site."""
    if args.action == "forget":
        from hepti_mqtt.cli.forget import forget

        return forget(args)
    from hepti_mqtt.closed_site.folder import SiteFolder

    if args.action == "init":
        hosts = tuple(dict.fromkeys([*(args.host or own_addresses()), *ALWAYS]))
        folder = SiteFolder.create(args.directory, args.site, hosts, args.port, datetime.datetime.now(datetime.UTC))
        _tell(args, folder, f"site {folder.site} is in {folder.path}; its broker is {folder.hosts[0]}:{folder.port}")
        return 0
    folder = SiteFolder.open(args.directory)
    if args.action == "add":
        _tell(args, folder.add(args.role, args.name), f"added {args.role} {args.name}", args.name)
    else:
        _tell(args, folder.revoke(args.name), f"the login of {args.name} is revoked", args.name)
    return 0


def own_addresses() -> list[str]:
    """Return this machine's IPv4 addresses that others can reach, then its names."""
    import psutil

    name = socket.gethostname()
    interfaces = psutil.net_if_addrs().values()
    addresses = [a.address for all_of in interfaces for a in all_of if a.family == socket.AddressFamily.AF_INET]
    reached = [a for a in addresses if not (ip := ipaddress.ip_address(a)).is_loopback and not ip.is_link_local]
    return [*reached, name, *([] if "." in name else [f"{name}.local"])]


def _tell(args: argparse.Namespace, folder: SiteFolder, said: str, user: str | None = None) -> None:
    about = {
        "site": folder.site,
        "directory": str(folder.path),
        "broker": f"{folder.hosts[0]}:{folder.port}",
        "users": dict(folder.users),
        "copy": [{"file": str(c.file), "machine": c.machine, "to": c.to} for c in folder.copies(user)],
    }
    output.print_result(args.json, about, [said, *_commands(folder, user)])


def _commands(folder: SiteFolder, user: str | None) -> list[str]:
    """Return the next commands: for the broker, the user and others."""
    here, copies = shlex.quote(str(folder.path)), folder.copies(user)
    files = [c for c in copies if c.machine == "the broker"]
    sources = " ".join(shlex.quote(str(c.file)) for c in files)
    names = " ".join(Path(c.to).name for c in files)
    again = f"sudo systemctl {'reload' if user else 'restart'} mosquitto"
    service = f"sudo cp {sources} /etc/mosquitto/ && cd /etc/mosquitto && sudo chown mosquitto: {names} && {again}"
    lines = [
        f"broker here: hepti broker --closed {here}{' (after ending the running one)' if user else ''}",
        f"or as Mosquitto's service, which replaces its files: {service}",
    ]
    for copy in copies:
        if copy.file.suffix == ".login":
            name = copy.file.stem
            start = _START[folder.users[name]].format(to=copy.to, user=name)
            lines.append(f"{copy.machine}: copy {copy.file} there as {copy.to}; then {start}")
    if user is None:
        lines.append(f"let others in: hepti site add device|client|viewer|home NAME --dir {here}")
    return lines
