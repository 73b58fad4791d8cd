"""`hepti simulate --weather`: what the planner would do on a site over time, on a virtual clock."""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hepti_mqtt.cli import output
from hepti_mqtt.cli.show import write_picture
from hepti_mqtt.config.options import PinOptions
from hepti_mqtt.cost.profiles import Cluster
from hepti_mqtt.errors import ConfigError
from hepti_mqtt.service.solver import solve
from hepti_mqtt.spec import Spec
from hepti_mqtt.weather import KINDS, History, Truth, Verdict, judge, make_truth, play, recorded_truth, weather_svg
from hepti_mqtt.weather.truth import WARM_S

LEAST_MINUTES = 3


def simulate_weather(args: argparse.Namespace, cluster: Cluster, spec: Spec) -> int:
    """Play a site, and print what its planner's decisions were worth; --svg writes the picture."""
    for option in ("explain", "layout_svg", "requests", "accuracy"):
        if getattr(args, option):
            raise ConfigError(f"--weather cannot be combined with --{option.replace('_', '-')}; leave one of them out")
    if args.sequences > 1:
        raise ConfigError("--weather sends requests of one sequence; leave out --sequences")
    truth, pins = _truth(args, cluster), PinOptions.from_args(args).to_pins()
    history = play(cluster, spec, truth, solve, tokens=args.tokens, pins=pins, in_flight=args.in_flight)
    verdict = judge(history)
    if args.svg:
        title = f"{args.model} on {args.devices_file.stem}, {args.weather}, seed {args.seed}"
        write_picture("--svg", args.svg, weather_svg(history, title))
    if args.json:
        output.print_json({**asdict(verdict), "changes": [change.text for change in history.changes]})
    else:
        _print(args, history, verdict)
    return 0


def _truth(args: argparse.Namespace, cluster: Cluster) -> Truth:
    if args.weather in KINDS:
        if args.minutes < LEAST_MINUTES:
            raise ConfigError(f"the first {WARM_S:.0f} s do not count; simulate at least {LEAST_MINUTES} --minutes")
        return make_truth(args.weather, cluster, args.minutes, args.seed)
    return recorded_truth(cluster, read_recording(Path(args.weather)))


def read_recording(path: Path) -> Sequence[Any]:
    """Return the lines of a recording, JSON lines that may be packed by gzip; raises ConfigError."""
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode()
        return [json.loads(line) for line in text.splitlines()]
    except (OSError, ValueError, EOFError) as error:
        kinds = ", ".join(KINDS)
        raise ConfigError(f"--weather {path} is none of {kinds}, and no recording that can be read: {error}") from error


def _print(args: argparse.Namespace, history: History, verdict: Verdict) -> None:
    rows = [
        (
            f"{p.start_s:.0f}",
            p.name,
            p.requests,
            p.changes,
            p.loads,
            f"{p.mean_s * 1e3:.0f}",
            f"{p.best_s * 1e3:.0f}",
            f"{100 * p.regret:.1f}",
            "never" if p.right_s is None else f"{p.right_s:.0f}",
            f"{p.worst_s * 1e3:.0f}",
            p.best,
        )
        for p in verdict.phases
    ]
    columns = ("from s", "phase", "requests", "changes", "loading", "mean ms", "best ms", "regret %", "right after s")
    title = f"{args.model} on {args.devices_file.stem}, {args.weather}, {history.truth.seconds / 60:.0f} min simulated"
    output.print_table(title, (*columns, "worst ms", "best plan"), rows)
    per_hour = (
        f"{verdict.changes_per_hour:.1f} changes of plan an hour, {verdict.loads_per_hour:.1f} of them load weights"
    )
    searches = f"{verdict.searches_per_hour:.0f} searches an hour"
    regret = f"requests took {100 * verdict.regret:.1f} % longer than under the best plan of each phase"
    refused = f"; {verdict.refused} requests were refused" if verdict.refused else ""
    output.print_lines([f"{per_hour}, {searches}; {regret}{refused}", *(change.text for change in history.changes)])
