"""`python -m benchmarks lab up|run|down`: hosts to measure on, by hand."""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import files
from benchmarks.lab import lab as labs
from benchmarks.lab.calibrate import calibrate
from benchmarks.lab.changes import Script, load_script
from benchmarks.lab.lab import Lab
from benchmarks.lab.spec import HUB, load
from hepti_mqtt.cli import output


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `lab`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="up|run|down")
    up = actions.add_parser("up", help="make a lab, calibrate it and keep it until interrupted")
    run = actions.add_parser("run", help="make a lab, run one command on it and remove it")
    actions.add_parser("down", help="remove what labs have left behind whose processes were killed")
    for action in (up, run):
        action.add_argument("file", type=Path, metavar="FILE", help="a lab file, or a name in benchmarks/labs")
        action.add_argument("--rate", type=float, metavar="MBIT", help="goodput of every link instead of the file's")
        action.add_argument("--dilation", type=float, metavar="TIMES", help="slow hosts and links down so many times")
    run.add_argument("--script", type=Path, metavar="YAML", help="changes at set times")
    run.add_argument("--host", default=HUB, help="where the command runs (default: the hub)")
    run.add_argument("words", nargs="+", metavar="-- COMMAND", help="the command")


def lab(args: argparse.Namespace) -> int:
    """Run it; return the exit code, of `run` that of the command."""
    if args.action == "down":
        left = labs.leftovers()
        for name in left:
            labs.remove(name)
        output.print_lines([f"removed lab {name}" for name in left] or ["nothing to remove"])
        return 0
    spec = load(files.find("labs", args.file), args.dilation).with_rate(args.rate)
    changes = load_script(args.script, spec) if args.action == "run" and args.script else ()
    with Lab(spec, Path(tempfile.mkdtemp(prefix=f"hepti-lab-{spec.name}-"))) as made:
        _calibrated(made)
        if args.action == "up":
            names = ", ".join([HUB, *made.hosts])
            output.print_lines([f"lab {spec.name} is up ({names}) until you press Ctrl-C; logs in {made.directory}"])
            for name in (HUB, *made.hosts):
                output.print_lines([f"on {name}: {shlex.join(made.host(name).entering([]))} COMMAND"])
            sys.stdout.flush()
            signal.pause()
        with Script(changes, made.apply, lambda record: print(json.dumps(record), file=sys.stderr, flush=True)):
            host = made.host(args.host)
            return subprocess.run(host.entering(args.words), env=host.environment, check=False).returncode


def _calibrated(made: Lab) -> None:
    if made.spec.kind == "emulated" and any(host.gflops for host in made.spec.hosts):
        found = calibrate(made, made.spec, output.err.print)
        for line in found.lines():
            output.err.print(line, markup=False)
        made.throttle(True)
