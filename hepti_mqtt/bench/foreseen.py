"""What the simulator says of a plan that was measured: under load, with unlimited links, and the least that is left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import inf
from typing import Any

from hepti_mqtt.client.described import cluster_described
from hepti_mqtt.cost.explain import flops
from hepti_mqtt.cost.profiles import Cluster, Link, PeerLink
from hepti_mqtt.cost.simulator import Naming, load_of, play, request_of, simulate
from hepti_mqtt.ids import Epoch
from hepti_mqtt.lab.calibrate import Calibration
from hepti_mqtt.lab.site import SITE
from hepti_mqtt.models import shape_for, spec_from_dict
from hepti_mqtt.plan import Plan
from hepti_mqtt.plan_programs import lowered, programs
from hepti_mqtt.spec import Spec


def plan_of(turn: Mapping[str, Any]) -> tuple[Spec, Plan, Cluster] | None:
    """Return what a turn ran under, and its devices as they described themselves; None where it does not say."""
    active = turn.get("active")
    if not active or list(active["epoch"]) != list(turn["plan"]["epoch"]):
        return None
    plan = Plan.from_dict(active)
    return spec_from_dict(turn["spec"]), plan, cluster_described(turn["devices"], plan.devices)


def requests_per_s(turn: Mapping[str, Any]) -> float | None:
    """Return what comes out per second by simulation of as many requests, packed as they were packed."""
    found, batches = plan_of(turn), turn.get("batches")
    if found is None or not batches:
        return None
    spec, plan, cluster = found
    naming = Naming(SITE, plan.model)
    # Each of a batch of four says four: a run for every fourth of them.
    runs = [size for size in sorted(set(batches)) for _ in range(max(1, round(batches.count(size) / size)))]
    made = {n: request_of(naming, spec, plan, shape_for(spec, turn["tokens"], n), cluster) for n in set(runs)}
    done = play(naming, spec, [made[n] for n in runs], cluster, turn["in_flight"])
    under_way = max(1, round(turn["of"]["requests"] * len(runs) / len(batches)))
    return load_of(done.runs, under_way).sequences_per_s


def unlimited_ms(turn: Mapping[str, Any]) -> float | None:
    """Return how long one request takes under the same plan by simulation, if links carried everything at once."""
    found = plan_of(turn)
    if found is None or found[1].replicas:
        return None
    spec, plan, cluster = found
    shape = shape_for(spec, turn["tokens"])
    at_once = dict.fromkeys(cluster.links, Link(0.0, inf, inf))
    peers = dict.fromkeys(cluster.peer_links, PeerLink(0.0, inf))
    free = replace(cluster, links=at_once, peer_links=peers, broker_bytes_per_s=inf, planner_link=Link(0.0, inf, inf))
    return simulate(Naming(SITE, plan.model), spec, shape, programs(spec, plan, shape), free).seconds * 1e3


def least_ms(turn: Mapping[str, Any], calibration: Calibration) -> float | None:
    """Return all work of a request, none of it done twice, at the speed that all hosts were calibrated to have."""
    if not turn.get("spec"):
        return None
    spec = spec_from_dict(turn["spec"])
    shape = shape_for(spec, turn["tokens"])
    work = flops(lowered(spec, Plan(turn["of"]["model"], Epoch(1, 1), "single", ("one",), "one"), shape))
    hosts = [h for h in calibration.hosts if h.host in turn["of"]["devices"]]
    return work / sum(h.kernel_gflops for h in hosts) * 1e-6 if hosts else None
