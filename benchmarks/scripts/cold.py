"""Requests from the first second of a site, with empty or full caches, beside the best static plan in hindsight.

`python -m benchmarks cold rate=240 caches=empty minutes=5`. The site's clock starts with planner and agents; these load
their kernels and measure their hosts first. The client has started before and is no part of the hub. One request
follows the other. Afterwards each plan that served is pinned and timed on the warm site: the fastest is the best
static plan. Full caches are those of a site that has served the best plan and was idle for some seconds.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from math import inf
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

import numpy as np

from benchmarks.files import find
from benchmarks.lab.beside import say
from benchmarks.lab.calibrate import calibrate
from benchmarks.lab.hosts import Process
from benchmarks.lab.lab import Lab
from benchmarks.lab.site import LabSite
from benchmarks.lab.spec import load
from benchmarks.tables import table
from hepti_mqtt.checkpoint import Checkpoint, make_model
from hepti_mqtt.client.described import random_input, reference

FREE: Final[dict[str, Any]] = {"devices": None, "wire": "f32", "weights": "f32", "route": None, "objective": "latency"}
CHOICE: Final[dict[str, Any]] = {**FREE, "strategy": "auto", "options": {}}
BEST: Final = ("--strategy", "row", "--variant", "heads")  # on four equal hosts
AS_GOOD: Final = 1.25  # times the best static plan
WARMUP, TIMED = 2, 7  # requests of a static plan
SETTLED_S: Final = 4.0  # without a new file in a cache


class Asked(NamedTuple):
    """One request: seconds from the site's start, its latency, and its plan."""

    at_s: float
    seconds: float
    plan: dict[str, Any]

    @property
    def way(self) -> str:
        """Return method and devices."""
        options = "/".join([self.plan["strategy"], *self.plan["options"].values()])
        return f"{options} on {len(self.plan['devices'])}"


def main(
    lab: str = "four-pi4",
    rate: float = 240.0,
    model: str = "bert-large",
    layers: int | None = None,
    tokens: int = 128,
    minutes: float = 5.0,
    caches: str = "empty",
    logs: str = "",
) -> None:
    """Print a line for each half minute; caches: empty or full. logs: a directory for the logs of all processes."""
    spec = replace(load(find("labs", Path(lab))), rate_mbit=rate)
    with TemporaryDirectory(prefix="hepti-cold-") as scratch, Lab(spec, Path(scratch) / "lab") as hosts:
        directory = make_model(model, Path(scratch) / "model", 0, layers)
        with Checkpoint.open(directory, "model") as checkpoint:
            body = random_input(checkpoint.spec, tokens, 0)
            np.save(place := Path(scratch) / "reference.npy", reference(checkpoint, body))
        calibrate(hosts, spec, lambda line: print(line, file=sys.stderr))
        order = {"do": "load", "key": "a", "model": "model", "body": body, "reference": str(place)}
        models = {"model": directory}
        if caches == "full":
            with LabSite(hosts, models, BEST):
                _wait_for_copies(hosts)
        drivers: list[Process] = []

        def start_driver(site: LabSite) -> None:
            drivers.append(site.talk("driver", "benchmarks.driver"))
            say(drivers[0], **order)

        with LabSite(hosts, models, before_start=start_driver) as site:
            [driver] = drivers
            asked = list(_ask(driver, site.started_s, 60 * minutes))
            online_s = site.online_s()
            best = {way: _alone(driver, plan) for way, plan in {a.way: a.plan for a in asked}.items()}
            if logs:
                site.write_logs(Path(logs))
    print(f"the last agent was online after {online_s:.0f} s")
    _report(asked, best, f"{model}, {spec.name}, {rate:g} Mbit/s, {caches} caches")


def _wait_for_copies(hosts: Lab) -> None:
    """Return when agents have written the packed copies of their weights: their caches grow no more."""
    nbytes, since = 0, time.monotonic()
    while time.monotonic() - since < SETTLED_S:
        time.sleep(1)
        now = sum(map(_size_of, chain.from_iterable(host.kept.rglob("*") for host in hosts.hosts.values())))
        if now != nbytes:
            nbytes, since = now, time.monotonic()


def _size_of(path: Path) -> int:
    """Return a file's size, 0 for a file that an agent has just renamed."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _ask(driver: Process, begun_s: float, most_s: float) -> Iterator[Asked]:
    while (at_s := time.monotonic() - begun_s) < most_s:
        answer = say(driver, do="once", key="a", **CHOICE)
        if answer["ok"]:
            yield Asked(at_s, answer["latency_ms"][0] / 1e3, answer["plan"])
        else:
            print(json.dumps(answer), file=sys.stderr)
            time.sleep(1)


def _alone(driver: Process, plan: dict[str, Any]) -> float:
    """Return the median seconds of requests under one plan that has been pinned."""
    pins = {key: plan[key] for key in ("strategy", "options", "devices", "wire", "route")}
    keys = {**FREE, **pins, "key": "a"}
    say(driver, do="bring", **keys)
    answers = [say(driver, do="once", **keys) for _ in range(WARMUP + TIMED)][WARMUP:]
    return median(a["latency_ms"][0] / 1e3 if a["ok"] else inf for a in answers)


def _report(asked: list[Asked], best: dict[str, float], title: str) -> None:
    least_s = min(best.values())
    good = next((a.at_s for a in asked if best[a.way] <= AS_GOOD * least_s), None)
    rows = []
    for begin in range(0, int(asked[-1].at_s) + 1, 30):
        some = [a for a in asked if begin <= a.at_s < begin + 30]
        if some:
            middle = median(a.seconds for a in some)
            rows.append((begin, len(some), f"{middle:.2f}", f"{middle / least_s:.2f}", some[-1].way))
    print(f"{title}; first answer after {asked[0].at_s + asked[0].seconds:.0f} s; ", end="")
    print("a plan as good as the best " + ("never served" if good is None else f"served after {good:.0f} s"))
    print("static plans: " + ", ".join(f"{way} {seconds:.2f} s" for way, seconds in best.items()) + "\n")
    print("\n".join(table(("from s", "requests", "median s", "over the best", "plan"), rows)))
