"""Processor seconds of a whole search: `python -m benchmarks search devices=16`.

Devices have links of 240 Mbit/s and are equal, or each one is 7 % slower than the one before.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from benchmarks.tables import table
from hepti_mqtt.checkpoint import spec_of_kind
from hepti_mqtt.config.settings import find_bundled_site
from hepti_mqtt.config.sites import load_site
from hepti_mqtt.core.ids import PlanVersion
from hepti_mqtt.core.profiles import Cluster
from hepti_mqtt.cost.simulator import TopicNames
from hepti_mqtt.models import representative_shape
from hepti_mqtt.runtime.coordinator.interface import Solve
from hepti_mqtt.runtime.coordinator.requests import Pins
from hepti_mqtt.runtime.coordinator.search_kinds import SearchKind
from hepti_mqtt.service.solver import solve


def main(devices: int = 16, model: str = "bert-large", tokens: int = 128) -> None:
    """Print a line for equal devices and one for unequal ones."""
    spec, rows = spec_of_kind(model), []
    shape, naming = representative_shape(spec, tokens), TopicNames("home", "model")
    for kind, count, step in (("warm-up", 2, 0.0), ("equal", devices, 0.0), ("unequal", devices, 0.07)):
        site = site_of(count, step)
        question = Pins().question(naming, spec, site, shape, PlanVersion(1, 1), in_flight=2, is_exhaustive=False)
        begun_s = time.process_time()
        decision = solve(Solve("model", 1, question, None, SearchKind.WHOLE)).decision
        took_s = time.process_time() - begun_s
        assert decision is not None
        plan = f"{decision.chosen.name} on {len(decision.chosen.plan.devices)}"
        rows.append((kind, f"{took_s:.2f}", plan, f"{decision.chosen.price.expected_s:.3f}"))
    print("\n".join(table((f"{devices} devices", "processor s", "plan", "request s"), rows[1:])))


def site_of(count: int, step: float) -> Cluster:
    """Return a site of boards; step: by how much each is slower than the one before."""
    one = load_site(find_bundled_site(Path("four-pi4-240")))
    name = next(iter(one.devices))
    names = [f"d{i:02}" for i in range(count)]
    devices = {other: replace(one.devices[name], slowdown=1 + step * i) for i, other in enumerate(names)}
    links = dict.fromkeys(names, one.links[name])
    return replace(one, devices=devices, links=links, endpoints=frozenset(names), peer_links={})
