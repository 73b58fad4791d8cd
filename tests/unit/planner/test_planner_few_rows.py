"""From how many rows on a decoder's sums are reduced on own rows: where the simulator finds that faster."""

from __future__ import annotations

from dataclasses import replace

import pytest
from swarm import profile_curve

from hepti_mqtt.checkpoint.make import spec_of_kind
from hepti_mqtt.cost.profiles import Cluster, DeviceProfile, Link
from hepti_mqtt.cost.simulator import TopicNames
from hepti_mqtt.ids import PlanVersion
from hepti_mqtt.models.shapes import TokenBatch
from hepti_mqtt.planner import Question, decide, price
from hepti_mqtt.strategies.method import FEW_ROWS

TINY = spec_of_kind("tiny-llama")
SPEC = replace(TINY, layers=8, hidden=1024, heads=16, mlp=2048, max_tokens=512, block=replace(TINY.block, head_dim=64))
SPEC = replace(SPEC, text=replace(SPEC.text, positions=512))


@pytest.mark.parametrize(
    ("devices", "mbit", "latency_s", "most"),
    [
        (4, 940, 0.1e-3, 16),
        (4, 100, 0.1e-3, 4),
        (3, 940, 0.1e-3, 32),
        (2, 940, 0.1e-3, 128),  # as many bytes either way
    ],
)
def test_runs_of_any_size_are_divided_in_the_way_that_is_faster(devices, mbit, latency_s, most):
    names = tuple(f"d{i}" for i in range(devices))
    profiles = {n: DeviceProfile(n, profile_curve(2e10), 2e9, 4e9) for n in names}
    site = Cluster(
        profiles, {n: Link(latency_s, mbit * 125e3, mbit * 125e3) for n in names}, endpoints=frozenset(names)
    )
    asked = Question(
        TopicNames("home", "m"), SPEC, site, TokenBatch((1,), cache=512), PlanVersion(1, 1), strategy="decoder",
        devices=names,
    )  # fmt: skip
    plan = decide(asked).chosen.plan
    few = plan.ranges[FEW_ROWS][0][1]
    assert few <= most
    for rows in (1, 2, 4, 8, 32, 128):
        question = replace(asked, shape=TokenBatch((rows,), cache=512))
        ways = [replace(plan, ranges={**plan.ranges, FEW_ROWS: ((0, n),) * devices}) for n in (rows, 0)]
        own, one_shot, reduced = (price(question, p, full=True).seconds for p in (plan, *ways))
        assert own == (one_shot if rows <= few else reduced)
        assert own <= 1.001 * min(one_shot, reduced), rows
    again = replace(asked, active=plan)
    assert decide(again).chosen.plan.ranges[FEW_ROWS] == plan.ranges[FEW_ROWS]
