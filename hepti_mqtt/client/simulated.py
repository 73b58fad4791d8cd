"""What a request would take under a plan of a site, by simulation here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hepti_mqtt.core.plan import Plan
from hepti_mqtt.core.profiles import Cluster
from hepti_mqtt.core.program import Program
from hepti_mqtt.core.spec import RequestShape, Spec
from hepti_mqtt.cost.simulator import Simulation, TopicNames, simulate, simulate_requests, simulated_request
from hepti_mqtt.strategies.plan_programs import device_programs


@dataclass(frozen=True, slots=True)
class SimulatedPlan:
    """A request of `shape` under a plan, as the simulator saw it."""

    spec: Spec
    plan: Plan
    shape: RequestShape
    programs: Mapping[str, Program]
    result: Simulation

    def title(self) -> str:
        """Return what pictures of it are called."""
        return f"{self.plan.method}, {self.shape.size} tokens"


def simulate_plan(site: str, spec: Spec, plan: Plan, shape: RequestShape, cluster: Cluster) -> SimulatedPlan:
    """Return what happens in a request under a plan, by simulation."""
    naming = TopicNames(site, plan.model)
    if plan.replicas:  # a request for each of them
        request = simulated_request(naming, spec, plan, shape, cluster)
        several = simulate_requests(naming, spec, (request,) * len(plan.replicas), cluster, 1, record=True)
        parts = {d: p for choice in request.choices for d, p in choice.programs.items()}
        return SimulatedPlan(spec, plan, shape, parts, several)
    parts = device_programs(spec, plan, shape)
    return SimulatedPlan(spec, plan, shape, parts, simulate(naming, spec, shape, parts, cluster, record=True))
