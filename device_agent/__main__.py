"""`python -m device_agent`: an agent without the rest of the command line."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from device_agent.agent import run_agent
from device_agent.config import AgentConfig
from hepti_mqtt.config import process
from hepti_mqtt.config.options import AgentOptions, add_site_arguments, settings_from_args
from hepti_mqtt.errors import HeptiError


def main(argv: Sequence[str] | None = None) -> int:
    """Run an agent; return its exit code: 0, 2 for wrong options, or that of the error."""
    parser = argparse.ArgumentParser(prog="python -m device_agent", description=__doc__)
    add_site_arguments(parser)
    AgentOptions.add_arguments(parser)
    try:
        given = parser.parse_args(argv)
    except SystemExit as end:  # argparse has said why
        return int(end.code or 0)
    process.setup_logging(logging.StreamHandler(sys.stderr), "%(asctime)s %(levelname)s %(message)s")
    try:
        run_agent(AgentConfig.from_options(settings_from_args(given), AgentOptions.from_args(given)))
    except HeptiError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return exc.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
