"""`python -m hepti_mqtt.service`: the planner process without the command line's comforts."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import threading
from collections.abc import Sequence

from hepti_mqtt.errors import HeptiError
from hepti_mqtt.runtime.flight import Pins
from hepti_mqtt.service.planner import PlannerConfig, run_planner
from hepti_mqtt.transport import BrokerUrl


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a planner until SIGTERM or SIGINT; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m hepti_mqtt.service", description="Plan and coordinate for a site.")
    parser.add_argument("--broker", required=True, metavar="URL")
    parser.add_argument("--site", default="home")
    parser.add_argument("--model", action="append", required=True, metavar="NAME=DIR")
    parser.add_argument("--strategy")
    parser.add_argument("--devices", metavar="A,B,C")
    parser.add_argument("--wire", default="f32")
    parser.add_argument("--weights", default="f32")
    parser.add_argument("--in-flight", type=int, default=2)
    args = parser.parse_args(arguments)
    models = dict(entry.partition("=")[::2] for entry in args.model)
    pins = Pins(args.strategy, {}, tuple(args.devices.split(",")) if args.devices else None, args.wire, args.weights)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    try:
        url = BrokerUrl.parse(args.broker)
        run_planner(PlannerConfig(url, args.site, models, dict.fromkeys(models, pins), args.in_flight), stop)
    except HeptiError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
