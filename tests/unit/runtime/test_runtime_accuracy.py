"""A budget for the wire, from the planner's pins to the answer, on a virtual clock with real kernels."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from sites import FAMILIES, request, tensors
from swarm import Swarm

from hepti_mqtt import models
from hepti_mqtt.core.profiles import Link
from hepti_mqtt.planner import Decision, Question
from hepti_mqtt.runtime.coordinator.interface import Solve
from hepti_mqtt.runtime.coordinator.requests import Pins
from hepti_mqtt.service.solver import MeasuredErrors, solve

SPEC = FAMILIES["bert-embedding"]
TENSORS = tensors(SPEC)
DEVICES = {"a": (1e9, 1 << 30), "b": (1e9, 1 << 30)}
SPLIT = Pins(strategy="row", options={"variant": "kv"}, devices=("a", "b"))


def searching(accuracy: MeasuredErrors):
    """Search as the planner process does, for links so slow that narrow numbers pay."""

    def decider(question: Question) -> Decision:
        slow = {name: Link(1e-4, 1e5, 1e5) for name in question.cluster.links}
        solved = solve(Solve("m", 1, replace(question, cluster=replace(question.cluster, links=slow)), None), accuracy)
        assert solved.decision is not None, solved.error
        return solved.decision

    return decider


@pytest.mark.parametrize(("budget", "wire"), [(None, "f32"), (1e-6, "f32"), (1e-3, "f16"), (0.05, "i8")])
def test_answers_stay_within_the_budget_of_the_planner_or_the_request(budget, wire):
    shape, inputs = request(SPEC, (9, 7), "hidden", seed=5)
    exact, _ = models.reference(SPEC, TENSORS, inputs, shape)
    within = replace(SPLIT, accuracy=budget)
    for own, pins in ((within, None), (Pins(), within)):
        accuracy = MeasuredErrors(SPEC, TENSORS)
        swarm = Swarm(SPEC, TENSORS, DEVICES, decider=searching(accuracy), pins=own)
        swarm.submit("r", shape, inputs, pins=pins)
        swarm.run(30, until=lambda swarm=swarm: bool(swarm.answers or swarm.errors))
        got, (stats,) = swarm.answers["r"][0]
        assert stats.plan.wire == wire
        assert (stats.plan.wire_error is None) == (wire == "f32")
        assert np.linalg.norm(got - exact) / np.linalg.norm(exact) <= (budget if wire != "f32" else 1e-6)
        assert bool(accuracy.wire) == (budget is not None)
