"""The gain of leased tiles if a device becomes slower during a request: VGG-16 by `fused_tiles`, simulated.

Run manually: `make bench-leasing`. All figures are simulated.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from hepti_mqtt.checkpoint import spec_of_kind
from hepti_mqtt.config import settings
from hepti_mqtt.config.sites import load_site
from hepti_mqtt.core.ids import PlanVersion
from hepti_mqtt.core.plan import Plan
from hepti_mqtt.cost.simulator import Simulation, TopicNames, simulate
from hepti_mqtt.models import representative_shape
from hepti_mqtt.planner import Question, decide
from hepti_mqtt.strategies.plan_programs import device_programs

NAMING = TopicNames("home", "model")
MODEL, CUT, SITES = "vgg16", "3", ("four-pi4-240", "mixed-four")
LEASED = {"owners": "leased"}
SINCE_S, TIMES = 0.05, (2.0, 4.0)


class LeasedRequest(NamedTuple):
    """A plan with two simulated requests: at constant speed, and with slower devices."""

    plan: Plan
    steady: Simulation
    slower: Simulation


def leased_request(model: str, site: str, options: Mapping[str, str], times: Mapping[str, float]) -> LeasedRequest:
    """Simulate a request with the planner's shares on all devices; times: relative op time after SINCE_S by device."""
    spec, cluster = spec_of_kind(model), load_site(settings.find_bundled_site(Path(site)))
    shape = representative_shape(spec, 1)
    devices = tuple(cluster.devices)
    question = Question(
        NAMING, spec, cluster, shape, PlanVersion(1, 1), strategy="fused_tiles", options=options, devices=devices
    )
    plan = decide(question).chosen.plan
    parts = device_programs(spec, plan, shape)
    steady = simulate(NAMING, spec, shape, parts, cluster, record=True)

    def slowness(device: str, now: float) -> float:
        return times.get(device, 1.0) if now >= SINCE_S else 1.0

    return LeasedRequest(plan, steady, simulate(NAMING, spec, shape, parts, cluster, record=True, slowness=slowness))


def main() -> int:
    """Print the table, without the root device, because the layers after the cut wait for it in any case."""
    times = " | ".join(f"at 1/{times:g} of its speed, ms" for times in TIMES)
    print(f"| site | slower from {SINCE_S * 1e3:.0f} ms on | owners | as predicted, ms | {times} |")
    print("|---|---|---|---|" + "---|" * len(TIMES))
    for site in SITES:
        for device in list(load_site(settings.find_bundled_site(Path(site))).devices)[1:]:
            for owners, options in (("fixed", {}), ("leased", LEASED)):
                with_slower = [leased_request(MODEL, site, {"cut": CUT, **options}, {device: times}) for times in TIMES]
                cells = [
                    f"{run.seconds * 1e3:.0f}" for run in (with_slower[0].steady, *(f.slower for f in with_slower))
                ]
                print(f"| {site} | {device} | {owners} | {' | '.join(cells)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
