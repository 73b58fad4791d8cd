"""`hepti` and `hepti-agent`: parse, run one command, translate errors to exit codes."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Final

from hepti_mqtt.cli import output
from hepti_mqtt.cli.parser import build
from hepti_mqtt.config.environment import check_environment
from hepti_mqtt.config.options import settings_of
from hepti_mqtt.errors import HeptiError

# Modules are imported when their command runs: `hepti --help` must not wait for Numba.
_COMMANDS: Final[Mapping[str, tuple[str, str]]] = {
    "agent": ("hepti_mqtt.cli.processes", "agent"),
    "planner": ("hepti_mqtt.cli.processes", "planner"),
    "broker": ("hepti_mqtt.cli.processes", "broker"),
    "infer": ("hepti_mqtt.cli.infer", "infer"),
    "plan": ("hepti_mqtt.cli.show", "plan"),
    "devices": ("hepti_mqtt.cli.show", "devices"),
    "simulate": ("hepti_mqtt.cli.simulate", "simulate"),
    "model": ("hepti_mqtt.cli.model", "model"),
    "demo": ("hepti_mqtt.cli.demo", "demo"),
    "bench": ("hepti_mqtt.cli.bench", "bench"),
    "lab": ("hepti_mqtt.cli.lab", "lab"),
    "site": ("hepti_mqtt.cli.site", "site"),
    "health": ("hepti_mqtt.cli.health", "health"),
    "doctor": ("hepti_mqtt.cli.doctor", "doctor"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run `hepti`; return its exit code (0 done, 1 failed, 2 usage, 3 broker, 4 no plan, 5 deadline, 6 refused)."""
    output.bear_any_text()
    args = build().parse_args(argv)
    output.setup_logging(args.verbose)
    module, name = _COMMANDS[args.command]
    try:
        check_environment()
        settings = settings_of(args)
        args.broker, args.site = settings.broker, settings.site
        command: Callable[[argparse.Namespace], int] = getattr(import_module(module), name)
        return command(args)
    except HeptiError as error:
        if args.json:
            output.print_json({"ok": False, "error": {"code": error.code, "message": str(error)}})
        else:
            output.err.print(f"hepti: {error}", markup=False)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def agent_main() -> int:
    """Run `hepti-agent`, the same as `hepti agent`."""
    return main(["agent", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
