"""`hepti lab`: hosts to measure on."""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from platformdirs import user_cache_path

from hepti_mqtt.cli import output
from hepti_mqtt.config import settings
from hepti_mqtt.errors import ConfigError, LabError

if TYPE_CHECKING:
    from hepti_mqtt.lab.changes import Stamp
    from hepti_mqtt.lab.lab import Lab
    from hepti_mqtt.lab.spec import LabSpec

_LONGEST_S: Final = 7 * 86_400.0


def arguments(sub: argparse.ArgumentParser) -> None:
    """Add the arguments of `hepti lab`."""
    actions = sub.add_subparsers(dest="action", required=True, metavar="up|status|down|run")
    up = actions.add_parser("up", help="make a lab, calibrate it and leave it up")
    down = actions.add_parser("down", help="end what runs in a lab and remove it")
    status = actions.add_parser("status", help="list labs and leftovers of labs on this machine")
    run = actions.add_parser("run", help="make a lab, run one command on it and remove it")
    for action in (up, down, status, run):
        # Not set here again where it stands before the action.
        action.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print JSON")
    for action in (up, run):
        action.add_argument("file", type=Path, metavar="FILE", help="a lab file (configs/lab)")
        action.add_argument("--rate", type=float, metavar="MBIT", help="goodput of every link instead of the file's")
        action.add_argument("--dilation", type=float, metavar="TIMES", help="so many times as slow: hosts and links")
        action.add_argument("--dir", type=Path, metavar="DIR", help="where logs go (default: a new directory)")
    which = down.add_mutually_exclusive_group(required=True)
    which.add_argument("name", nargs="?", metavar="NAME", help="the lab")
    which.add_argument("--all", action="store_true", help="every lab whose maker has ended, and all leftovers")
    run.add_argument("--script", type=Path, metavar="YAML", help="changes at set times")
    run.add_argument("--host", default="hub", help="where the command runs (default: the hub)")
    run.add_argument("words", nargs="+", metavar="-- COMMAND", help="the command")


def lab(args: argparse.Namespace) -> int:
    """Run `hepti lab`."""
    return _ACTIONS[args.action](args)


def _up(args: argparse.Namespace) -> int:
    from hepti_mqtt.lab.lab import Lab

    spec = _spec(args)
    if spec.kind != "emulated":
        raise ConfigError(f"lab {spec.name} is of kind {spec.kind}: there is nothing to leave up; use `hepti lab run`")
    made = Lab(spec, _directory(args, spec), keep=True)
    with made:
        calibration = _calibrate(made)
        enter = shlex.join(made.entering(spec.hosts[0].name, ["COMMAND"]) or [])
        made.leave()
    if args.json:
        output.print_json({"ok": True, "lab": spec.name, "directory": str(made.directory), "calibration": calibration})
    else:
        output.print_lines([f"lab {spec.name} is up; logs in {made.directory}", f"on {spec.hosts[0].name}: {enter}"])
    return 0


def _down(args: argparse.Namespace) -> int:
    from hepti_mqtt.lab import leftovers

    found = leftovers.records()
    if args.all:
        chosen = [record for record in found if not record.in_use]
        strays = leftovers.strays(found)
    else:
        chosen = [record for record in found if record.lab == args.name]
        strays = leftovers.Strays([], [])
        if not chosen:
            names = ", ".join(record.lab for record in found) or "none"
            raise ConfigError(f"there is no lab {args.name!r} on this machine; there are: {names}")
        if chosen[0].in_use:
            raise LabError(
                f"lab {args.name} is in use by process {chosen[0].owner[0]}; end that process, and it removes the lab"
            )
    for record in chosen:
        leftovers.remove(record)
    leftovers.remove_strays(strays)
    removed = [record.lab for record in chosen]
    left = [record.lab for record in found if args.all and record.in_use]
    if args.json:
        output.print_json({"ok": True, "removed": removed, **strays.data(), "in_use": left})
        return 0
    things = [*(f"lab {name}" for name in removed), *strays.names()]
    output.print_lines([f"removed {thing}" for thing in things] or ["nothing to remove"])
    output.print_lines([f"lab {name} is in use by a running process and stays" for name in left])
    return 0


def _status(args: argparse.Namespace) -> int:
    from hepti_mqtt.lab import leftovers

    found = leftovers.records()
    strays = leftovers.strays(found)
    if args.json:
        labs = [{**asdict(record), "state": record.state} for record in found]
        output.print_json({"ok": True, "labs": labs, **strays.data()})
        return 0
    if not found and not strays.names():
        output.print_lines(["no labs on this machine"])
    for record in found:
        rows = [
            (name, host["address"], _dash(host["rate_mbit"]), _dash(host["gflops"]), _share(host["cpu"]), len(running))
            for (name, host), running in zip(record.hosts.items(), leftovers.running(record), strict=True)
        ]
        title = f"lab {record.lab}: {record.state}, made by process {record.owner[0]}; logs in {record.directory}"
        output.print_table(title, ("host", "address", "Mbit/s", "GFLOP/s", "of a core", "processes"), rows)
    output.print_lines([f"{name}: called like a lab's, but of no lab that is written down" for name in strays.names()])
    if strays.names() or any(record.state == "leftover" for record in found):
        output.print_lines(["`hepti lab down --all` removes leftovers and labs that were left up"])
    return 0


def _run(args: argparse.Namespace) -> int:
    from hepti_mqtt.lab.changes import Script, load_script
    from hepti_mqtt.lab.lab import Lab

    spec = _spec(args)
    changes = load_script(args.script, spec) if args.script else ()
    if args.host != "hub":
        spec.host(args.host)
    with Lab(spec, _directory(args, spec)) as made:
        _calibrate(made)
        with Script(changes, made.apply, _report):
            return _foreground(made, args.host, args.words)


def _calibrate(made: Lab) -> dict[str, Any] | None:
    """Give hosts their speeds, throttle all and print what they have on stderr; None where there is no target."""
    from hepti_mqtt.lab.calibrate import calibrate, markdown

    spec = made.spec
    if spec.kind != "emulated" or not any(host.gflops for host in spec.hosts):
        return None
    cache = user_cache_path("hepti") / "lab"
    found = calibrate(spec, made.hub, made.hosts, cache, lambda line: output.err.print(line, markup=False))
    for host in (made.hub, *made.hosts.values()):
        host.throttle(True)
    for line in (markdown(found), *(f"off its target: {miss}" for miss in found.misses())):
        output.err.print(line, markup=False)
    return found.to_dict()


def _foreground(made: Lab, host: str, words: Sequence[str]) -> int:
    """Run a command on a host as if it were run here, and return its exit code as a shell gives it."""
    command = made.entering(host, words)
    if command is None:
        remote = made.host(host).start("command", words)
        code = remote.wait(_LONGEST_S)
        sys.stdout.write(remote.log())
        return _exit_code(code)
    try:
        with subprocess.Popen(command) as process:
            try:
                return _exit_code(process.wait())
            except BaseException:
                process.kill()
                raise
    except OSError as error:
        raise LabError(f"{words[0]} cannot be run: {error.strerror}") from error


def _exit_code(code: int) -> int:
    return code if code >= 0 else 128 - code


def _report(stamp: Stamp) -> None:
    sys.stderr.write(json.dumps(stamp.record()) + "\n")
    sys.stderr.flush()


def _spec(args: argparse.Namespace) -> LabSpec:
    from hepti_mqtt.lab.spec import load

    spec = load(settings.find_bundled_config("lab", args.file), args.dilation)
    return spec if args.rate is None else spec.with_rate(args.rate)


def _directory(args: argparse.Namespace, spec: LabSpec) -> Path:
    return args.dir or Path(tempfile.mkdtemp(prefix=f"hepti-lab-{spec.name}-"))


def _dash(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


_ACTIONS: Final[Mapping[str, Callable[[argparse.Namespace], int]]] = {
    "up": _up,
    "down": _down,
    "status": _status,
    "run": _run,
}
