"""Objectives: least latency, most throughput, least memory; replicas among the candidates for throughput."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sites import FAMILIES

from hepti_mqtt.checkpoint import spec_of_kind
from hepti_mqtt.cost.profiles import Cluster, Curve, DeviceProfile, Link
from hepti_mqtt.cost.simulator import Naming, simulate
from hepti_mqtt.errors import ConfigError, PlanError
from hepti_mqtt.ids import Epoch
from hepti_mqtt.models import largest_shape
from hepti_mqtt.models.cnn.nodes import Activation, Flatten, Linear
from hepti_mqtt.models.shapes import PackedTokens
from hepti_mqtt.plan_programs import programs
from hepti_mqtt.planner import Question, decide
from hepti_mqtt.planner.estimates import Learned

SPEC = replace(FAMILIES["bert-embedding"], layers=4)
ROOM = 1 << 30


def question(speeds, rooms=None, spec=SPEC, **asked):
    names = [f"d{i}" for i in range(len(speeds))]
    profiles = {
        n: DeviceProfile(n, (Curve(32, 32, ((1, 1e-4 / s), (20, 2e-3 / s))),), 2e7 * s, 1e7 * s, memory_bytes=room)
        for n, s, room in zip(names, speeds, rooms or [ROOM] * len(names), strict=True)
    }
    cluster = Cluster(profiles, dict.fromkeys(names, Link(2e-4, 3e7, 3e7)))
    return Question(Naming("home", "m"), spec, cluster, PackedTokens((20,)), Epoch(1, 1), in_flight=2, **asked)


def per_s(speed):
    """Return the requests per second of one device by itself."""
    load = decide(question([speed], strategy="single", requests=12)).chosen.price.load
    assert load is not None
    return load.requests_per_s


@pytest.mark.parametrize(
    ("speeds", "least"),
    [
        ((1, 1), 1.7),
        pytest.param((1, 1, 1, 1), 3.4, marks=pytest.mark.wide),
        pytest.param((3, 1, 1, 0.5), 0.85 * 5.5, marks=pytest.mark.wide),
    ],
)
def test_most_throughput_comes_near_the_sum_of_the_devices(speeds, least):
    found = decide(question(speeds, objective="throughput"))
    best = found.chosen.price.load
    assert best is not None
    assert best.requests_per_s >= least * per_s(1)
    assert "requests/s" in found.reason
    assert found.chosen.price.cost[0] <= 1.05 * min(c.price.cost[0] for c in found.ranking if c.price.feasible)
    assert {"replicas", "pipeline", "single"} <= {c.plan.strategy for c in found.ranking}


def test_of_throughputs_that_are_alike_the_plan_that_sends_least_is_chosen():
    """A little experience with one device must not bring devices to wait for each other."""
    slower = Learned({("single", 1, 0, "f32", "f32", "broker"): 1.03})
    asked = question((1, 1, 1, 1), objective="throughput", compare=False, learned=slower)
    fast = dict.fromkeys(asked.cluster.devices, Link(1e-5, 1e9, 1e9))
    found = decide(replace(asked, cluster=replace(asked.cluster, links=fast, endpoints=frozenset(fast))))
    assert found.chosen.name == found.ranking[0].name == "replicas"
    assert min(c.price.cost[0] for c in found.ranking) < found.chosen.price.cost[0]


def test_replicas_are_priced_by_what_they_have_taught_themselves():
    asked = question((1, 1), objective="throughput", strategy="replicas", compare=False)
    price = decide(asked).chosen.price
    alone, side_by_side = ("single", 1, 0, "f32", "f32", "broker"), ("replicas", 2, 2, "f32", "f32", "broker")
    for factors, learned in (({alone: 1.5}, 1.5), ({alone: 1.5, side_by_side: 2.5}, 2.5), ({side_by_side: 0.9}, 0.9)):
        found = decide(replace(asked, learned=Learned(factors))).chosen.price
        assert found.learned == pytest.approx(learned)
        assert found.between_s == pytest.approx(learned * price.between_s)
    single = decide(replace(asked, strategy="single", devices=("d0",), learned=Learned({side_by_side: 2.5})))
    assert single.chosen.price.learned == 1.0


def test_replicas_and_pipeline_are_not_offered_for_the_latency_of_one_request():
    names = {c.name.partition("/")[0] for c in decide(question((1, 1))).ranking}
    assert names.isdisjoint({"replicas", "pipeline"})


@pytest.mark.wide
def test_a_decoupled_model_is_divided_as_it_was_made_for_where_links_are_slow():
    spec = replace(spec_of_kind("debert-base"), layers=6, groups=2)
    asked = question((1, 1, 1, 1), [1 << 33] * 4, spec)
    slow = Cluster(asked.cluster.devices, dict.fromkeys(asked.cluster.devices, Link(2e-4, 1e4, 1e4)))
    found = decide(replace(asked, cluster=slow))
    assert found.chosen.plan.strategy == "decoupled"
    assert {"row", "voltage", "galaxy"} <= {c.plan.strategy for c in found.ranking}


def test_least_memory_is_the_least_share_of_any_budget():
    wide = replace(SPEC, hidden=256, mlp=1024)  # of which matrices are most, not Programs
    found = decide(question((1, 1), spec=wide, objective="memory"))
    shares = [c.price.share for c in found.ranking]
    assert shares[0] == min(shares) < next(c.price.share for c in found.ranking if c.name == "single")
    assert "memory" in found.reason


def test_a_replica_of_several_devices_is_planned_by_itself():
    found = decide(question((1, 1, 1, 1), strategy="replicas", options={"groups": "2"})).chosen.plan
    assert [len(part.devices) for part in found.replicas] == [2, 2]
    assert sorted(d for part in found.replicas for d in part.devices) == ["d0", "d1", "d2", "d3"]
    assert all(part.predicted_s > 0 and part.strategy != "single" for part in found.replicas)


def test_a_device_without_room_for_a_replica_is_left_out_unless_it_is_pinned():
    asked = question((1, 1, 1), [ROOM, ROOM, 1000], strategy="replicas", options={})
    assert decide(asked).chosen.plan.devices == ("d0", "d1")
    with pytest.raises(PlanError, match=r"d1 needs .* MiB missing"):
        decide(question((1, 1), [ROOM, 1000], strategy="replicas", devices=("d0", "d1")))
    with pytest.raises(PlanError, match=r"d0 needs .* MiB missing"):
        decide(question((1, 1), [1000, 1000], strategy="replicas"))


def test_a_model_that_no_method_divides_has_replicas_of_one_device_each():
    nodes = (
        Flatten(name="flat", inputs=("image",)),
        Linear(name="first", inputs=("flat",), columns=16, weight="w"),
        Activation(name="relu", inputs=("first",), function="relu"),
        Linear(name="last", inputs=("relu",), columns=5, weight="v"),
    )
    spec = replace(spec_of_kind("tiny-vgg"), nodes=nodes)
    asked = replace(question((1, 1, 1, 1), spec=spec), shape=largest_shape(spec))
    for pins in ({"objective": "throughput"}, {"strategy": "replicas"}, {"devices": ("d0", "d1", "d2", "d3")}):
        found = decide(replace(asked, **{"objective": "throughput", **pins})).chosen.plan
        assert [part.strategy for part in found.replicas] == ["single"] * 4
    with pytest.raises(ConfigError, match=r"m cannot have such replicas: no method divides this model over 2 devices;"):
        decide(replace(asked, strategy="replicas", options={"groups": "2"}))


def test_what_a_method_cannot_be_asked_for_is_an_error_that_names_the_limits():
    with pytest.raises(ConfigError, match=r"row has no option groups=3; it has .*heads"):
        decide(question((1, 1), strategy="row", options={"groups": "3"}))


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"objective": "throughput"},
        {"strategy": "row", "options": {"variant": "kv"}, "wire": "f16"},
        {"strategy": "replicas", "options": {"groups": "2"}},
    ],
    ids=["free", "throughput", "pinned", "replicas"],
)
def test_a_decision_has_the_simulation_of_the_very_plan_that_it_found(asked):
    wanted = question((1, 1, 1, 1), **asked)
    found = decide(wanted)
    for run in found.chosen.plan.runs:
        parts = programs(wanted.spec, run, wanted.shape)
        alone = simulate(wanted.naming, wanted.spec, wanted.shape, parts, found.cluster)
        assert found.played(run) == (wanted.shape, alone)
