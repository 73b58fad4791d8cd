"""Families that are no plain encoder, under every method that can divide them: the result of their reference."""

from __future__ import annotations

import numpy as np
import pytest
from programs_run import run_programs
from sites import TOLERANCE, plan, request, tensors
from swarm import Swarm

from hepti_mqtt import models
from hepti_mqtt.checkpoint import spec_of_kind
from hepti_mqtt.cost.simulator import Naming, sent_bytes
from hepti_mqtt.errors import ConfigError
from hepti_mqtt.models.shapes import Text
from hepti_mqtt.plan_programs import programs, resident_weights
from hepti_mqtt.program import check
from hepti_mqtt.strategies import STRATEGIES

SPECS = {
    kind: spec_of_kind(kind)
    for kind in ("tiny-debert", "tiny-devit", "tiny-convnet", "tiny-resnet", "tiny-mobilenet", "tiny-yolo")
}
LONG = {"tiny-mobilenet"}
ABLE = [
    pytest.param(kind, name, marks=[pytest.mark.wide] if kind in LONG else [])
    for kind, spec in SPECS.items()
    for name, method in STRATEGIES.items()
    if method.unsupported(models.graph(spec, models.largest_shape(spec))) is None
]
# Pictures in parts are new under `decoupled` alone; what they share with texts runs in CI.
RUN = [
    pytest.param(*able, marks=pytest.mark.wide) if able[0] == "tiny-devit" and able[1] != "decoupled" else able
    for able in ABLE
]
SHARES = ((1.0,), (1.0, 2.0), (0.0, 1.0, 3.0), (1.0, 0.5, 2.0, 1.0, 1.0))


def batches(spec):
    return ((13,), (5, 7, 3)) if isinstance(spec.reads, Text) else ((1,),)


def test_each_of_them_has_methods_of_its_own():
    able = {case.values for case in ABLE}
    assert ("tiny-debert", "decoupled") in able
    for name in ("map_rows", "modnn", "coedge", "edgeflow", "fused_tiles", "pipeline"):
        assert {(kind, name) for kind in SPECS if not kind.startswith("tiny-de")} <= able, name
    assert ("tiny-convnet", "row") not in able


@pytest.mark.parametrize(("kind", "name"), RUN)
@pytest.mark.parametrize("want", ["task", "hidden"])
def test_equals_the_reference(kind, name, want):
    spec, method = SPECS[kind], STRATEGIES[name]
    held = tensors(spec)
    for weights in SHARES:
        if method.most_devices is not None and len(weights) > method.most_devices:
            continue
        for options in method.choices(len(weights), models.graph(spec, models.largest_shape(spec))):
            for lengths in batches(spec):
                shape, inputs = request(spec, lengths, want)
                fixed = plan(spec, (name, options), weights)
                parts = programs(spec, fixed, shape)
                for device, program in parts.items():
                    check(program)
                    assert set(program.weights()) <= set(resident_weights(spec, fixed, device))
                hidden, output = models.reference(spec, held, inputs, shape)
                got = run_programs(parts, held, inputs)
                np.testing.assert_allclose(got, hidden if want == "hidden" else output, atol=TOLERANCE, rtol=1e-5)


@pytest.mark.parametrize("kind", ["tiny-debert", "tiny-convnet", "tiny-resnet"])
def test_the_planner_chooses_for_a_site_with_faults_and_counts_its_bytes(kind):
    """Priced, planned, loaded, run on a network with duplicates, and counted exactly."""
    spec = SPECS[kind]
    swarm = Swarm(spec, tensors(spec), {f"d{i}": (1e7, 1 << 30) for i in range(3)}, duplicates=0.2, jitter_s=0.01)
    shape, inputs = request(spec, batches(spec)[0])
    swarm.submit("r", shape, inputs)
    swarm.run(60, until=lambda: "r" in swarm.answers or "r" in swarm.errors)
    assert "r" in swarm.answers, swarm.errors
    got, stats = swarm.answers["r"][0]
    np.testing.assert_allclose(got, models.reference(spec, tensors(spec), inputs, shape)[1], atol=TOLERANCE, rtol=1e-5)
    counted = sum(s.dispatch_bytes + sum(s.sent_bytes.values()) for s in stats)
    chosen = stats[0].plan
    assert counted == sent_bytes(Naming("home", "m"), spec, shape, programs(spec, chosen, shape))


def test_a_method_that_cannot_divide_a_family_says_so_when_it_is_pinned():
    from hepti_mqtt.cost.profiles import Cluster
    from hepti_mqtt.ids import Epoch
    from hepti_mqtt.planner import Question, decide

    spec = SPECS["tiny-convnet"]
    swarm = Swarm(spec, {}, {"d0": (1e7, 1 << 30), "d1": (1e7, 1 << 30)})
    cluster: Cluster = swarm.planner.membership.cluster({})
    question = Question(Naming("home", "m"), spec, cluster, models.largest_shape(spec), Epoch(1, 1), strategy="row")
    with pytest.raises(
        ConfigError,
        match=r"row divides models with attention and MLP.* can be divided by: single, pipeline, map_rows, modnn",
    ):
        decide(question)
