"""Plans for objectives, replicas, CNNs and mixed sites."""

from __future__ import annotations

from dataclasses import replace

import pytest
import questions
from questions import bundled
from sites import FAMILIES

from hepti_mqtt.checkpoint import spec_of_kind
from hepti_mqtt.config.sites import load_site
from hepti_mqtt.core.errors import ConfigError, PlanError
from hepti_mqtt.core.profiles import Cluster, Curve, DeviceProfile, Link
from hepti_mqtt.cost.simulator import simulate
from hepti_mqtt.models import largest_shape, representative_shape
from hepti_mqtt.models.cnn.nodes import Activation, Flatten, Linear
from hepti_mqtt.planner import decide
from hepti_mqtt.planner.candidates import as_chain
from hepti_mqtt.planner.estimates import Corrections
from hepti_mqtt.strategies.plan_programs import device_programs

SPEC = replace(FAMILIES["bert-embedding"], layers=4)
ROOM = 1 << 30


def question(speeds, rooms=None, spec=SPEC, **pins):
    names = [f"d{i}" for i in range(len(speeds))]
    profiles = {
        n: DeviceProfile(n, (Curve(32, 32, ((1, 1e-4 / s), (20, 2e-3 / s))),), 2e7 * s, 1e7 * s, memory_bytes=room)
        for n, s, room in zip(names, speeds, rooms or [ROOM] * len(names), strict=True)
    }
    cluster = Cluster(profiles, dict.fromkeys(names, Link(2e-4, 3e7, 3e7)))
    return questions.question(spec, cluster, 20, in_flight=2, **pins)


def per_s(speed):
    """Return the requests per second of a single device."""
    load = decide(question([speed], strategy="single", requests=12)).chosen.price.load
    assert load is not None
    return load.requests_per_s


@pytest.mark.parametrize(
    ("speeds", "least"),
    [
        ((1, 1), 1.7),
        pytest.param((1, 1, 1, 1), 3.4, marks=pytest.mark.nightly),
        pytest.param((3, 1, 1, 0.5), 0.85 * 5.5, marks=pytest.mark.nightly),
    ],
)
def test_most_throughput_comes_near_the_sum_of_the_devices(speeds, least):
    decision = decide(question(speeds, objective="throughput"))
    best = decision.chosen.price.load
    assert best is not None
    assert best.requests_per_s >= least * per_s(1)
    assert decision.chosen.price.cost[0] <= 1.05 * min(c.price.cost[0] for c in decision.ranking if c.price.feasible)
    assert {"replicas", "pipeline", "single"} <= {c.plan.strategy for c in decision.ranking}


def test_of_throughputs_that_are_alike_the_plan_that_sends_least_is_chosen():
    """A little experience with one device must not bring devices to wait for each other."""
    slower = Corrections({("single", 1, 0, "f32", "f32", "broker"): 1.03})
    query = question((1, 1), objective="throughput", is_exhaustive=False, learned=slower)
    fast = dict.fromkeys(query.cluster.devices, Link(1e-5, 1e9, 1e9))
    decision = decide(replace(query, cluster=replace(query.cluster, links=fast, endpoints=frozenset(fast))))
    assert decision.chosen.name == decision.ranking[0].name == "replicas"
    assert min(c.price.cost[0] for c in decision.ranking) < decision.chosen.price.cost[0]


def test_replicas_are_priced_by_what_they_have_taught_themselves():
    query = question((1, 1), objective="throughput", strategy="replicas", is_exhaustive=False)
    price = decide(query).chosen.price
    alone, side_by_side = ("single", 1, 0, "f32", "f32", "broker"), ("replicas", 2, 2, "f32", "f32", "broker")
    for factors, learned in (({alone: 1.5}, 1.5), ({alone: 1.5, side_by_side: 2.5}, 2.5), ({side_by_side: 0.9}, 0.9)):
        price_of_plan = decide(replace(query, learned=Corrections(factors))).chosen.price
        assert price_of_plan.correction == pytest.approx(learned)
        assert price_of_plan.expected_period_s == pytest.approx(learned * price.expected_period_s)
    single = decide(replace(query, strategy="single", devices=("d0",), learned=Corrections({side_by_side: 2.5})))
    assert single.chosen.price.correction == 1.0


def test_replicas_and_pipeline_are_not_offered_for_the_latency_of_one_request():
    names = {c.name.partition("/")[0] for c in decide(question((1, 1))).ranking}
    assert names.isdisjoint({"replicas", "pipeline"})


@pytest.mark.nightly
def test_a_decoupled_model_is_divided_as_it_was_made_for_where_links_are_slow():
    spec = replace(spec_of_kind("debert-base"), layers=6, groups=2)
    query = question((1, 1, 1, 1), [1 << 33] * 4, spec)
    slow = Cluster(query.cluster.devices, dict.fromkeys(query.cluster.devices, Link(2e-4, 1e4, 1e4)))
    decision = decide(replace(query, cluster=slow))
    assert decision.chosen.plan.strategy == "decoupled"
    assert {"row", "voltage", "galaxy"} <= {c.plan.strategy for c in decision.ranking}


def test_least_memory_is_the_least_share_of_any_budget():
    wide = replace(SPEC, hidden=256, mlp=1024)  # its memory is mostly matrices, not Programs
    decision = decide(question((1, 1), spec=wide, objective="memory"))
    shares = [c.price.memory_share for c in decision.ranking]
    assert shares[0] == min(shares) < next(c.price.memory_share for c in decision.ranking if c.name == "single")


def test_a_replica_of_several_devices_is_planned_by_itself():
    plan = decide(question((1, 1, 1, 1), strategy="replicas", options={"groups": "2"})).chosen.plan
    assert [len(part.devices) for part in plan.replicas] == [2, 2]
    assert sorted(d for part in plan.replicas for d in part.devices) == ["d0", "d1", "d2", "d3"]
    assert all(part.predicted_s > 0 and part.strategy != "single" for part in plan.replicas)


def test_a_device_without_room_for_a_replica_is_left_out_unless_it_is_pinned():
    query = question((1, 1, 1), [ROOM, ROOM, 1000], strategy="replicas", options={})
    assert decide(query).chosen.plan.devices == ("d0", "d1")
    with pytest.raises(PlanError):
        decide(question((1, 1), [ROOM, 1000], strategy="replicas", devices=("d0", "d1")))
    with pytest.raises(PlanError):
        decide(question((1, 1), [1000, 1000], strategy="replicas"))


def test_a_model_that_no_method_divides_has_replicas_of_one_device_each():
    nodes = (
        Flatten(name="flat", inputs=("image",)),
        Linear(name="first", inputs=("flat",), columns=16, weight="w"),
        Activation(name="relu", inputs=("first",), function="relu"),
        Linear(name="last", inputs=("relu",), columns=5, weight="v"),
    )
    spec = replace(spec_of_kind("tiny-vgg"), nodes=nodes)
    query = replace(question((1, 1, 1, 1), spec=spec), shape=largest_shape(spec))
    for pins in ({"objective": "throughput"}, {"strategy": "replicas"}, {"devices": ("d0", "d1", "d2", "d3")}):
        plan = decide(replace(query, **{"objective": "throughput", **pins})).chosen.plan
        assert [part.strategy for part in plan.replicas] == ["single"] * 4
    with pytest.raises(ConfigError):
        decide(replace(query, strategy="replicas", options={"groups": "2"}))


@pytest.mark.parametrize(
    "pins",
    [
        {},
        {"objective": "throughput"},
        {"strategy": "row", "options": {"variant": "kv"}, "wire": "f16"},
        {"strategy": "replicas", "options": {"groups": "2"}},
    ],
    ids=["free", "throughput", "pinned", "replicas"],
)
def test_a_decision_has_the_simulation_of_the_very_plan_that_it_found(pins):
    wanted = question((1, 1, 1, 1) if pins.get("strategy") == "replicas" else (1, 1), **pins)
    decision = decide(wanted)
    for run in decision.chosen.plan.executables:
        parts = device_programs(wanted.spec, run, wanted.shape)
        alone = simulate(wanted.naming, wanted.spec, wanted.shape, parts, decision.cluster)
        assert decision.simulation_of(run) == (wanted.shape, alone)


MIXED = bundled("mixed-four")


def question_of(kind, cluster=MIXED, **pins):
    spec = spec_of_kind(kind)
    return questions.question(spec, cluster, largest_shape(spec), **pins)


def test_shares_begin_with_the_speed_at_the_rows_of_a_map_and_not_at_one():
    """One picture is one token, but its maps are hundreds of rows of a matrix."""
    curves = {"d0": ((1, 1e-6), (512, 1e-4)), "d1": ((1, 1e-6), (512, 4e-4))}
    devices = {n: DeviceProfile(n, (Curve(64, 64, points),), 1e9, 1e9) for n, points in curves.items()}
    cluster = Cluster(devices, dict.fromkeys(curves, Link()))
    query = question_of("tiny-vgg", cluster, strategy="map_rows", options={"cut": "none"}, devices=("d0", "d1"))
    plan = decide(query).chosen.plan
    rows = {device: stop - start for device, (start, stop) in zip(plan.devices, plan.ranges["rows 32"], strict=True)}
    assert rows["d0"] > 2 * rows["d1"]


@pytest.mark.nightly
@pytest.mark.parametrize(("kind", "gain"), [("vgg16", 1.2), ("resnet50", 1.1)])
def test_the_choice_on_a_mixed_site_is_faster_than_its_strongest_device(kind, gain):
    decision = decide(question_of(kind, route="mesh"))
    alone = next(c for c in decision.ranking if len(c.plan.devices) == 1)
    assert decision.chosen.price.seconds * gain <= alone.price.seconds
    published = [c for c in decision.ranking if c.plan.strategy in ("fused_tiles", "modnn", "coedge", "edgeflow")]
    assert {c.plan.strategy for c in published} == {"fused_tiles", "modnn", "coedge", "edgeflow"}
    assert decision.chosen.price.seconds <= 1.05 * min(c.price.seconds for c in published)


def test_the_fastest_device_has_its_neighbours_on_both_sides():
    assert [as_chain("abcde"[:n]) for n in (1, 2, 3, 4, 5)] == [tuple(x) for x in ("a", "ba", "bac", "dbac", "dbace")]
    named = ("hub", "pi1", "pi2", "zero")
    plan = decide(question_of("tiny-vgg", strategy="map_rows", options={"cut": "none"}, devices=named)).chosen.plan
    assert plan.root in plan.devices[1:-1]


WATTS = """
deadline_ms: {deadline}
defaults: {{mbit: 940, round_trip_ms: 0.1, compute_watts: 3, link_watts: 1, frame_ms: 0.04, frame_ms_per_mb: 0.5}}
devices:
  hub: {{gflops: 0.8, compute_watts: 25}}
  pi1: {{gflops: 0.4}}
"""


def test_energy_under_a_deadline_is_kept_by_the_simulator_too(tmp_path):
    def outcome(deadline, **options):
        (tmp_path / "site.yaml").write_text(WATTS.format(deadline=deadline))
        cluster = load_site(tmp_path / "site.yaml")
        best = decide(question_of("tiny-vgg", cluster, strategy="coedge", options=options)).chosen
        return best.price.seconds * 1e3, best.price.joules(cluster)

    fast_ms, fast_j = outcome(1000)
    slow_ms, slow_j = outcome(1000, goal="energy")
    assert (slow_j < 0.5 * fast_j, slow_ms > fast_ms) == (True, True)  # all on the board that draws little
    between = (fast_ms + slow_ms) / 2
    ms, joules = outcome(between, goal="energy")
    assert ms <= between
    assert slow_j < joules < fast_j
    with pytest.raises(ConfigError):
        outcome(0.01, goal="energy")


def test_however_often_shares_are_changed_a_plan_has_parts_of_a_whole():
    """A device checks that what a plan says of shares is no number without end."""
    chosen = decide(question_of("tiny-vgg", strategy="modnn")).chosen
    assert sum(chosen.plan.shares["speeds"]) == pytest.approx(1.0)


@pytest.mark.parametrize(("rate", "gain"), [(940, 1.4), (100, 1.3)])
def test_rows_behind_one_devices_attention_gain_on_a_mixed_site(rate: float, gain: float) -> None:
    site, each = bundled("mixed-four-roomy"), rate * 1e6 / 8
    links = {n: replace(link, up_bytes_per_s=each, down_bytes_per_s=each) for n, link in site.links.items()}
    query = question_of("bert-large", replace(site, links=links, broker_bytes_per_s=each, peer_links={}), wire="f16")
    query = replace(query, shape=representative_shape(query.spec, 128))
    alone = decide(replace(query, strategy="single")).chosen
    split = decide(replace(query, strategy="row", options={"variant": "mlp"})).chosen
    assert alone.plan.devices == ("pc",)
    assert split.plan.root == "pc"
    assert len(split.plan.devices) > 2
    assert alone.price.seconds / split.price.seconds >= gain


@pytest.mark.parametrize(
    ("kind", "pins"),
    [
        ("tiny-convnet", {"weight_dtype": "w8a8"}),
        ("tiny-convnet", {"weight_dtype": "w8a8", "strategy": "map_rows"}),
        ("tiny-vgg", {"strategy": "coedge", "options": {"goal": "energy"}, "devices": ("pi1", "hub")}),
    ],
    ids=["weights", "weights of a method", "no watts"],
)
def test_what_a_cnn_cannot_have_is_refused(kind, pins):
    with pytest.raises(ConfigError):
        decide(question_of(kind, **pins))
