"""The simulated time line of a plan that was measured, from what the devices then said of themselves."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hepti_mqtt.client.described import cluster_described
from hepti_mqtt.cost.explain import timeline_svg
from hepti_mqtt.cost.simulator import Naming, simulate
from hepti_mqtt.lab.site import SITE
from hepti_mqtt.models import shape_for, spec_from_dict
from hepti_mqtt.plan import Plan
from hepti_mqtt.plan_programs import programs


def draw(turn: Mapping[str, Any], file: Path) -> Path:
    """Write the picture of a turn's `active` plan; return its path."""
    spec = spec_from_dict(turn["spec"])
    plan = Plan.from_dict(turn["active"]).runs[0]  # of replicas, which are alike, the first
    shape = shape_for(spec, turn["tokens"])
    cluster = cluster_described(turn["devices"], plan.devices)
    result = simulate(Naming(SITE, plan.model), spec, shape, programs(spec, plan, shape), cluster, record=True)
    cell = turn["of"]
    title = f"{cell['model']}, {plan.strategy} {' '.join(plan.options.values())}, {turn['tokens']} tokens, simulated"
    file.write_text(timeline_svg(result.events, plan.devices, result.seconds, title), encoding="utf-8")
    return file
