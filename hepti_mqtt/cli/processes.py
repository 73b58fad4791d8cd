"""`hepti agent`, `hepti planner`, `hepti broker`: commands that run until they are told to stop."""

from __future__ import annotations

import argparse
import signal
import threading
from dataclasses import replace
from functools import partial

from hepti_mqtt.cli import output
from hepti_mqtt.cli.progress import LoadView
from hepti_mqtt.cli.site import require_broker
from hepti_mqtt.errors import ConfigError
from hepti_mqtt.ids import check_name


def _stop_event() -> threading.Event:
    """Return an event that SIGTERM and SIGINT set."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    return stop


def agent(args: argparse.Namespace) -> int:
    """Run this device's agent."""
    from device_agent import AgentConfig, run_agent
    from hepti_mqtt.transport import BrokerUrl

    config = AgentConfig(
        url=BrokerUrl.parse(require_broker(args)),
        site=check_name("site", args.site),
        device_id=check_name("device", args.id),
        memory_bytes=args.memory,
        cache_dir=args.cache,
    )
    view = LoadView()
    if args.threads is not None:
        config = replace(config, threads=args.threads)
    if args.cache_size is not None:
        config = replace(config, cache_bytes=args.cache_size)
    with view:
        run_agent(replace(config, watch=partial(_show_load, view)))
    return 0


def _show_load(view: LoadView, event: object) -> None:
    from hepti_mqtt.runtime.worker import Loaded, LoadFailed, LoadProgress

    if isinstance(event, LoadProgress):
        view.show(event.model, event.done_bytes, event.total_bytes)
    elif isinstance(event, Loaded):
        view.end(event.model, f"weights of {event.model} are here, for plan {event.epoch}")
    elif isinstance(event, LoadFailed):
        view.end(event.model, f"weights of {event.model} could not be loaded: {event.error}")


def planner(args: argparse.Namespace) -> int:
    """Run the site's planner."""
    from hepti_mqtt.service import Pins, PlannerConfig, run_planner
    from hepti_mqtt.transport import BrokerUrl

    models = {}
    for name, directory in args.model:
        if check_name("model", name) in models:
            raise ConfigError(f"--model {name} is given twice")
        models[name] = directory
    pins = Pins(
        strategy=args.strategy,
        options={"variant": args.variant} if args.variant else {},
        devices=args.devices,
        wire=args.wire or "f32",
        storage=args.weights or "f32",
    )
    config = PlannerConfig(
        url=BrokerUrl.parse(require_broker(args)),
        site=check_name("site", args.site),
        models=models,
        pins=dict.fromkeys(models, pins),
        in_flight=args.in_flight,
        broker_mbit=args.broker_mbit,
    )
    run_planner(config, _stop_event())
    return 0


def broker(args: argparse.Namespace) -> int:
    """Run a broker on a free port of this machine and print its URL."""
    from hepti_mqtt.embedded_broker import start_broker

    stop = _stop_event()
    with start_broker(args.kind) as running:
        if args.json:
            output.print_json({"url": running.url, "kind": running.kind, "reason": running.reason})
        else:
            output.print_lines([running.url])
            output.err.print(running.reason, markup=False)
        stop.wait()
    return 0
