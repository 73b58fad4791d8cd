"""Several requests under a plan: latency and throughput, also of replicas that share them."""

from __future__ import annotations

from collections.abc import Mapping

from hepti_mqtt.cluster import Cluster
from hepti_mqtt.plan import Plan
from hepti_mqtt.plan_programs import programs
from hepti_mqtt.program import Program
from hepti_mqtt.simulate.bytes import Naming
from hepti_mqtt.simulate.clock import play, simulate
from hepti_mqtt.simulate.load import Load, load_of
from hepti_mqtt.simulate.outcome import Replica, Request
from hepti_mqtt.spec import RequestShape, Spec


def request_of(
    naming: Naming,
    spec: Spec,
    plan: Plan,
    shape: RequestShape,
    cluster: Cluster,
    parts: Mapping[str, Program] | None = None,
) -> Request:
    """Return a request under a plan; parts: its Programs where they are known already.

    Of replicas it may run under each, and which one is chosen by the times that one request takes there.
    """
    if not plan.replicas:
        return Request(shape, parts or programs(spec, plan, shape))
    made = [programs(spec, replica, shape) for replica in plan.replicas]
    choices = (Replica(p, simulate(naming, spec, shape, p, cluster).seconds) for p in made)
    return Request(shape, made[0], replicas=tuple(choices))


def under_load(naming: Naming, spec: Spec, request: Request, cluster: Cluster, in_flight: int, requests: int) -> Load:
    """Return latency and throughput of so many requests like this one, of whole Programs; raises as `play` does.

    Of replicas, so many requests for each of them.
    """
    several = len(request.choices)
    runs = play(naming, spec, (request,) * (requests * several), cluster, in_flight).runs
    return load_of(runs, in_flight * several)
