"""Questions to the planner: devices of given speeds, links of a given rate, and the sites of `configs/sites`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from swarm import profile_curve

from hepti_mqtt.config.settings import find_bundled_site
from hepti_mqtt.config.sites import load_site
from hepti_mqtt.core.ids import PlanVersion
from hepti_mqtt.core.profiles import Cluster, DeviceProfile, Link
from hepti_mqtt.core.spec import RequestShape, Spec
from hepti_mqtt.cost.simulator import TopicNames
from hepti_mqtt.models.shapes import TokenBatch
from hepti_mqtt.planner import Question

NAMING = TopicNames("home", "m")


def device(name: str, gflops: float, memory: float = 8e9) -> DeviceProfile:
    return DeviceProfile(name, profile_curve(gflops * 1e9), gflops * 1e8, 4e9, memory_bytes=memory)


def cluster(*devices: DeviceProfile, mbit: float = 940.0, latency_s: float = 0.2e-3) -> Cluster:
    rate = mbit * 1e6 / 8
    return Cluster({d.name: d for d in devices}, {d.name: Link(latency_s, rate, rate) for d in devices})


def meshed(site: Cluster) -> Cluster:
    """Return a site whose devices can all connect to each other."""
    return replace(site, endpoints=frozenset(site.devices))


def bundled(name: str) -> Cluster:
    return load_site(find_bundled_site(Path(name)))


def question(spec: Spec, site: Cluster, shape: RequestShape | int = 128, **more: Any) -> Question:
    """Return a question about one request; shape: of the request, or its tokens."""
    shape = TokenBatch((shape,)) if isinstance(shape, int) else shape
    return Question(NAMING, spec, site, shape, PlanVersion(1, 1), **more)
