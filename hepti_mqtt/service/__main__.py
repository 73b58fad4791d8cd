"""`python -m hepti_mqtt.service`: the planner process without the command line's comforts."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from hepti_mqtt.config import process
from hepti_mqtt.config.options import PlannerOptions, add_site_arguments, settings_from_args
from hepti_mqtt.config.process import stop_event
from hepti_mqtt.config.settings import check_environment
from hepti_mqtt.errors import HeptiError
from hepti_mqtt.service.planner import run_planner
from hepti_mqtt.service.setup import PlannerConfig


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a planner until SIGTERM, SIGINT or SIGHUP; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m hepti_mqtt.service", description="Plan and coordinate for a site.")
    add_site_arguments(parser)
    PlannerOptions.add_arguments(parser)
    args = parser.parse_args(arguments)
    stop = stop_event()
    process.setup_logging(logging.StreamHandler(), "%(asctime)s %(name)s: %(message)s")
    try:
        check_environment()
        run_planner(PlannerConfig.of(settings_from_args(args), PlannerOptions.from_args(args)), stop)
    except HeptiError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
