"""`hepti agent`, `hepti planner`, `hepti broker`: commands that run until a signal stops them."""

from __future__ import annotations

import argparse
import contextlib
from functools import partial
from typing import Final

from hepti_mqtt.cli import output
from hepti_mqtt.config.options import PlannerOptions, settings_from_args
from hepti_mqtt.config.process import stop_event
from hepti_mqtt.core.errors import ConfigError

LOOPBACK: Final = "127.0.0.1"
EVERYWHERE: Final = "0.0.0.0"
_KEEPS_NOTHING: Final = (
    "queued requests and answers are lost when this broker ends; the broker of a closed site keeps them (hepti site, "
    "hepti broker --closed)"
)


def agent(args: argparse.Namespace) -> int:
    """Run this device's agent, or manage its service."""
    if args.broker is None and args.action in (None, "install"):
        take_found_broker(args)
    if args.action is not None:
        from hepti_mqtt.cli.install import manage

        return manage(args)
    if args.dry_run:
        raise ConfigError("--dry-run is of `install`; leave it out to run the agent here")
    from device_agent import AgentConfig, run_agent

    run_agent(AgentConfig.from_args(args, on_load_event=partial(_show_load, output.ProgressLines())))
    return 0


def take_found_broker(args: argparse.Namespace) -> None:
    """Take the broker that the network announces, and its site unless one was named; raises ConfigError."""
    from hepti_mqtt.client.discovery import choose, look

    announced = choose(look(), args.named_site)
    args.broker, args.site = announced.broker, args.named_site or announced.site or args.site
    output.err.print(f"no --broker was given: taking {announced}, announced by mDNS", markup=False)


def _show_load(view: output.ProgressLines, event: object) -> None:
    from hepti_mqtt.runtime.worker.interface import Loaded, LoadFailed, LoadProgress

    if isinstance(event, LoadProgress):
        view.print_load(event.model, event.done_bytes, event.total_bytes)
    elif isinstance(event, Loaded):
        view.finish(event.model, f"weights of {event.model} are here, for plan {event.plan_version}")
    elif isinstance(event, LoadFailed):
        view.finish(event.model, f"weights of {event.model} could not be loaded: {event.error}")


def planner(args: argparse.Namespace) -> int:
    """Run the site's planner."""
    from hepti_mqtt.client.discovery import Announcement
    from hepti_mqtt.service.planner import run_planner
    from hepti_mqtt.service.setup import PlannerConfig

    config = PlannerConfig.of(settings_from_args(args), PlannerOptions.from_args(args))
    with contextlib.ExitStack() as stack:
        if args.announce:
            stack.callback(Announcement("planner", config.site, config.url).close)
        run_planner(config, stop_event())
    return 0


def broker(args: argparse.Namespace) -> int:
    """Run a broker on this machine and print its URL."""
    from hepti_mqtt.client.discovery import announced_broker
    from hepti_mqtt.embedded_broker import start_broker
    from hepti_mqtt.transport.broker_limits import is_loopback, open_line

    stop = stop_event()
    if args.closed is None:
        starting = partial(start_broker, address=args.bind or LOOPBACK, port=args.port or 0)
    else:
        from hepti_mqtt.closed_site.folder import SiteFolder

        folder = SiteFolder.open(args.closed)
        address, port = args.bind or EVERYWHERE, args.port or folder.port
        starting = partial(start_broker, address=address, port=port, closed=folder.broker, stored=folder.state)
    with starting(args.kind) as running:
        if args.json:
            output.print_json({"url": running.url, "kind": running.kind, "reason": running.reason})
        else:
            output.print_lines([running.url])
            output.err.print(running.reason, markup=False)
        if args.closed is None:
            output.err.print(_KEEPS_NOTHING, markup=False)
        if args.closed is None and not is_loopback(running.address):
            output.err.print(open_line(f"{running.address}:{running.port}"), markup=False)
        with contextlib.ExitStack() as stack:
            if args.closed is None:  # a closed one takes TLS, which `_mqtt._tcp` cannot say: its planner announces it
                stack.enter_context(announced_broker(running.address, running.port))
            running.serve(stop)
    return 0
