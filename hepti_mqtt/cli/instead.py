"""What a plan would take by the other route, or with narrower numbers on the wire, by simulation."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

from hepti_mqtt.cluster import Cluster
from hepti_mqtt.plan import NARROW, Plan, Route
from hepti_mqtt.plan_programs import programs
from hepti_mqtt.planner import Question
from hepti_mqtt.planner.routes import on_route, relayed
from hepti_mqtt.program import Program
from hepti_mqtt.simulate import Naming, Simulation, simulate
from hepti_mqtt.spec import RequestShape, Spec


def instead(site: str, spec: Spec, plan: Plan, shape: RequestShape, cluster: Cluster) -> list[str]:
    """Return a line on the routes and one on narrow numbers, of one division; none for one device, which sends none."""
    plan = plan.runs[0]  # of replicas all are alike in this
    if len(plan.devices) == 1:
        return []
    question = Question(Naming(site, plan.model), spec, cluster, shape, plan.epoch, relayed=frozenset(plan.relayed))

    def played(other: Plan) -> Simulation:
        parts: dict[str, Program] = programs(spec, other, shape)
        return simulate(question.naming, spec, shape, parts, cluster)

    apart = relayed(question, plan.devices)
    pairs = len(plan.devices) * (len(plan.devices) - 1)
    words = []
    for route in get_args(Route):
        if route == "mesh" and len(apart) == pairs:
            words.append("over mesh: no two of these devices can connect")
            continue
        beside = f", {len(apart)} of {pairs} pairs over the broker" if route == "mesh" and apart else ""
        words.append(f"over {route} {_costs(played(on_route(question, plan, route)))}{beside}")
    lines = [f"routes of {plan.method}: " + "; ".join(words)]
    if plan.wire == "f32":
        now, words = played(plan), []
        for wire in reversed(NARROW):
            narrow = played(replace(plan, wire=wire))
            words.append(f"{wire} {_costs(narrow)}, {now.seconds / narrow.seconds:.2f} times as fast")
        lines.append(f"numbers on the wire: f32 {_costs(now)}; {'; '.join(words)}; --accuracy lets the planner choose")
    return lines


def _costs(played: Simulation) -> str:
    return f"{played.seconds * 1e3:.1f} ms ({played.nbytes / 1e6:.1f} MB)"
