"""The search: it splits where that pays, respects memory and packets, and leaves out only what it would not choose."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import permutations
from random import Random

import pytest
from questions import bundled, cluster, device, meshed, question
from sites import FAMILIES

from hepti_mqtt import models
from hepti_mqtt.checkpoint import spec_of_kind
from hepti_mqtt.core.errors import ConfigError, PacketLimitError, PlanError
from hepti_mqtt.core.profiles import Cluster, Link, PeerLink
from hepti_mqtt.core.spec import TaskHead
from hepti_mqtt.cost.memory import live_bytes, programs_bytes, weights_bytes
from hepti_mqtt.models import largest_shape, representative_shape
from hepti_mqtt.planner import Decision, Question, decide, decide_hurried, price
from hepti_mqtt.planner.candidates import candidate_routes, relayed, subsets, with_route
from hepti_mqtt.planner.price import needed_bytes, plan_packet, tile_packet
from hepti_mqtt.planner.search import MIN_SPEEDUP
from hepti_mqtt.runtime.coordinator.interface import Solve
from hepti_mqtt.runtime.coordinator.search_kinds import SearchKind
from hepti_mqtt.service.solver import solve
from hepti_mqtt.strategies import STRATEGIES
from hepti_mqtt.strategies.plan_programs import device_program, resident_weights

BASE = replace(spec_of_kind("bert-base"), head=TaskHead("embedding", "mean"))

# Of searches as long as these others measure the coverage: tracing makes them take three times as long.
no_cover = pytest.mark.no_cover


def four_pis(mbit: float, memory: float = 8e9, count: int = 4) -> Cluster:
    return cluster(*(device(f"pi{i}", 24.6, memory) for i in range(count)), mbit=mbit)


def two_pis(mbit: float, memory: float = 8e9) -> Cluster:
    return four_pis(mbit, memory, 2)


@cache
def on_a_good_network() -> Decision:
    """Return the decision for four equal devices, which several tests share."""
    return decide(question(BASE, four_pis(940)))


def test_splits_over_equal_devices_on_a_good_network():
    decision = on_a_good_network()
    assert decision.chosen.plan.strategy in {"row", "block"}
    assert len(decision.chosen.plan.devices) == 4
    alone = next(c for c in decision.ranking if len(c.plan.devices) == 1)
    assert decision.chosen.price.seconds < 0.6 * alone.price.seconds


def test_others_that_are_predicted_to_gain_next_to_nothing_are_left_out():
    """What predictions are off by is more than what they promise."""
    decision = decide(question(BASE, four_pis(54)))
    fastest = min(decision.ranking, key=lambda c: c.price.seconds)
    assert decision.chosen.plan.strategy == decision.ranking[0].plan.strategy == "single"
    assert 1 < decision.chosen.price.seconds / fastest.price.seconds <= MIN_SPEEDUP


def test_a_slow_device_is_left_out_or_gets_little():
    site = cluster(device("fast", 70.6), device("slow", 2.0), mbit=240)
    plan = decide(question(BASE, site)).chosen.plan
    rows = dict(zip(plan.devices, plan.shares.get("rows", (1.0,)), strict=True))
    assert rows.get("slow", 0.0) < 0.2 * sum(rows.values())


@no_cover
def test_memory_tiers_choose_the_strategy():
    """Where no device holds a full copy, `row` and `single` do not fit and say how much is missing."""
    whole = weights_bytes(resident_weights(BASE, _plan_of("single", four_pis(940)), "pi0"))
    decision = decide(question(BASE, four_pis(940, memory=0.6 * whole)))
    assert decision.chosen.plan.strategy in {"block", "column", "galaxy"}
    assert not any(len(c.plan.devices) == 1 and c.price.feasible for c in decision.ranking)
    assert "single does not fit" in decision.reason
    for name, need in decision.chosen.price.needs.items():
        assert need <= 0.6 * whole, name


def _plan_of(strategy, site):
    return decide(question(BASE, site, strategy=strategy)).chosen.plan


def test_one_tiny_memory_gets_a_small_share():
    tiny = 90e6
    site = cluster(device("a", 24.6), device("b", 24.6), device("tiny", 24.6, tiny))
    decision = decide(question(BASE, site, devices=("a", "b", "tiny"), strategy="block"))
    assert decision.chosen.price.feasible
    assert decision.chosen.price.needs["tiny"] <= tiny
    assert decision.chosen.plan.root != "tiny"


@no_cover
def test_pins_are_obeyed():
    whole = models.graph(BASE, models.largest_shape(BASE))
    for name in (n for n, s in STRATEGIES.items() if s.why_unsupported(whole) is None):
        decision = decide(question(BASE, two_pis(100), strategy=name))
        assert decision.chosen.plan.strategy == name
    decision = decide(question(BASE, two_pis(100), strategy="row", options={"variant": "heads"}))
    assert decision.chosen.plan.options == {"variant": "heads"}
    decision = decide(question(BASE, four_pis(940), devices=("pi2", "pi1")))
    assert set(decision.chosen.plan.devices) <= {"pi1", "pi2"}


@no_cover
@pytest.mark.parametrize("method", ["row", "block"])
def test_the_short_models_price_is_the_full_price(method):
    """Memory and bytes follow exactly from two and three layers, time within a hundredth."""
    ask = question(BASE, four_pis(240), strategy=method)
    plan = decide(ask).chosen.plan
    quick, full = price(ask, plan), price(ask, plan, full=True)
    # Topics of layers 10 and 11 have one character more than those of the short model.
    assert 0 <= full.nbytes - quick.nbytes < 400
    assert quick.seconds == pytest.approx(full.seconds, rel=0.01)
    for name in plan.devices:
        exact = weights_bytes(resident_weights(BASE, plan, name))
        shape = largest_shape(BASE)
        live = max(
            live_bytes(device_program(BASE, plan, shape, name)),
            live_bytes(device_program(BASE, plan, replace(shape, want="hidden"), name)),
        )
        kept = programs_bytes(BASE, plan, name)
        assert needed_bytes(ask, plan, name) == pytest.approx(exact + live + kept, rel=0.02)


def limits(nbytes: int) -> dict[str, int]:
    """Return a packet limit that every device has met."""
    return dict.fromkeys(NAMES, nbytes)


@no_cover
def test_a_plan_whose_packets_do_not_get_through_is_not_chosen():
    free, decision = question(BASE, four_pis(940)), on_a_good_network()
    best = decision.chosen.plan
    sizes = {c.name: plan_packet(free, c.plan) for c in decision.ranking}
    limited = decide(replace(free, packet_bytes=limits(sizes[best.method] - 1)))
    assert limited.chosen.name != best.method or len(limited.chosen.plan.devices) != len(best.devices)
    assert plan_packet(free, limited.chosen.plan) < sizes[best.method]
    allowed = decide(replace(free, packet_bytes=limits(sizes[best.method]))).chosen.plan
    assert replace(allowed, reason=best.reason) == best, "other candidates may not get through, so another is next best"


def test_a_broker_that_takes_no_weights_is_named_with_its_setting():
    with pytest.raises(PacketLimitError) as caught:
        decide(question(BASE, two_pis(940), packet_bytes=limits(100_000)))
    assert "max_packet_size" in str(caught.value)
    limit = tile_packet(question(BASE, four_pis(940)))
    with pytest.raises(PacketLimitError):
        decide(question(BASE, four_pis(940), strategy="row", devices=("pi0", "pi1"), packet_bytes=limits(limit)))


SMALL = FAMILIES["bert-embedding"]


def mesh_question(gflops: list[float], mbit: float, endpoints: bool, latency_s: float = 0.2e-3) -> Question:
    site = cluster(*(device(f"d{i}", g) for i, g in enumerate(gflops)), mbit=mbit, latency_s=latency_s)
    return question(SMALL, meshed(site) if endpoints else site, largest_shape(SMALL))


def both(query: Question) -> tuple[Decision, Decision]:
    """Return the decisions of an exhaustive and of a pruned search."""
    return decide(query), decide(replace(query, is_exhaustive=False))


def site_of(seed: int) -> Question:
    rng = Random(seed)
    # From sites where one device alone is best by far to such where all of them together are.
    speeds = [10 ** rng.uniform(-3, 0)] * rng.choice((3, 4))
    if rng.random() < 0.6:
        speeds = [s * 10 ** rng.uniform(-0.8, 0) for s in speeds]
    return mesh_question(speeds, 10 ** rng.uniform(1, 3), rng.random() < 0.7, 10 ** rng.uniform(-4, -3))


@no_cover
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(1, 20))])
def test_the_same_plan_is_chosen_without_comparing_every_method(seed):
    whole, quick = both(site_of(seed))
    assert replace(quick.chosen.plan, reason="") == replace(whole.chosen.plan, reason="")
    assert quick.digest == whole.digest
    others = [c for c in whole.ranking[1:] if c.price.feasible]
    assert f"the next best, {min(others, key=lambda c: c.price.cost).name} " in whole.reason


def test_methods_that_are_too_slow_are_named():
    whole, quick = both(mesh_question([30.0, 20.0], 10, endpoints=True))
    assert quick.chosen.plan.strategy == "single"
    assert {c.name for c in quick.pruned} >= {"row/kv", "block", "galaxy/ring"}
    assert {c.name for c in quick.ranking} | {c.name for c in quick.pruned} == {c.name for c in whole.ranking}
    assert min(c.price.seconds for c in quick.pruned) > quick.chosen.price.seconds
    assert not whole.pruned


NAMES = ("pi0", "pi1", "pi2", "pi3")


def tried(site, relayed_pairs=frozenset()):
    return list(subsets(question(SMALL, site, relayed_pairs=relayed_pairs), NAMES, pinned=False))


def test_of_devices_that_differ_in_name_alone_one_subset_of_each_size_is_tried():
    assert tried(four_pis(100)) == [NAMES[:n] for n in range(1, 5)]
    assert list(subsets(question(SMALL, four_pis(100)), NAMES, pinned=True)) == [NAMES]


@pytest.mark.parametrize(
    "other",
    [
        lambda site: replace(site, devices=site.devices | {"pi3": device("pi3", 24.6, memory=1e9)}),
        lambda site: replace(site, links={**site.links, "pi3": Link(1e-3, 1e6, 1e6)}),
        lambda site: replace(site, endpoints=frozenset(NAMES[:3])),
        lambda site: replace(site, shared_medium=frozenset(NAMES[3:])),
        lambda site: replace(site, peer_links={("pi3", name): PeerLink(1e-3) for name in NAMES[:3]}),
    ],
    ids=["memory", "link", "endpoint", "shared", "peers"],
)
def test_a_device_that_differs_is_tried_with_and_without_the_others(other):
    alike = [NAMES[:n] for n in range(4)]
    with_it = [(*names, "pi3") for names in alike]
    assert sorted(tried(other(four_pis(100)))) == sorted([*alike[1:], *with_it])


def slow_links(site, *names):
    """Return a site on which some devices have links that are hundreds of times slower."""
    return replace(site, links=site.links | dict.fromkeys(names, Link(2.5e-3, 2.5e5, 2.5e5)))


def test_devices_with_good_links_are_tried_without_faster_ones_with_bad_links():
    names = ("fast0", "fast1", *NAMES)
    pis = (device(name, 0.02 - 1e-4 * i) for i, name in enumerate(NAMES))
    site = slow_links(cluster(device("fast0", 0.03), device("fast1", 0.029), *pis), "fast0", "fast1")
    query = question(SMALL, site, 20, strategy="row", options={"variant": "kv"})
    sets = list(subsets(query, names, pinned=False))
    assert {NAMES[:2], NAMES[:3], NAMES} <= set(sets)
    assert set(decide(query).chosen.plan.devices) == set(NAMES)


@pytest.mark.parametrize(("count", "most"), [(5, 16), (8, 32), (16, 33), (64, 89)])
def test_of_many_devices_few_sets_are_tried(count, most):
    """The price of a set grows with the square of its size: beyond a few devices not every size is tried."""
    names = tuple(f"d{i}" for i in range(count))
    site = cluster(*(device(name, 20 * 0.94**i) for i, name in enumerate(names)))
    for cluster_of_many in (site, slow_links(site, *names[::3])):
        sets = list(subsets(question(SMALL, cluster_of_many), names, pinned=False))
        assert len(set(sets)) == len(sets) <= most
        assert {*((name,) for name in names), names[:2], names[:3], names[:4], names} <= set(sets)
        assert all(some == tuple(sorted(some, key=names.index)) for some in sets), "the fastest first"
        large = [some for some in sets if len(some) > 8]
        assert len(large) <= 2 * len({len(some) for some in large})


@no_cover
def test_mesh_makes_splitting_worth_it_on_a_network_on_which_a_broker_does_not():
    assert decide(question(BASE, four_pis(50))).chosen.plan.strategy == "single"
    decision = decide(question(BASE, meshed(four_pis(50))))
    chosen = decision.chosen
    assert (chosen.plan.route, chosen.plan.relayed_pairs, len(chosen.plan.devices)) == ("mesh", (), 4)
    assert "over mesh" in decision.reason


def test_the_broker_carries_what_a_slow_uplink_would_have_to_send_to_each():
    """Every device has a slow uplink; the broker, on a fast one, makes the copies."""
    site = meshed(four_pis(940))
    slow_up = {n: Link(0.2e-3, 10e6, 117e6) for n in site.devices}
    broker = replace(site, links=slow_up, broker_bytes_per_s=117e6)
    pins = {"strategy": "row", "options": {"variant": "kv"}, "devices": NAMES}
    decision = decide(question(BASE, broker, **pins))
    assert decision.chosen.plan.route == "broker"
    over_mesh = decide(question(BASE, broker, route="mesh", **pins)).chosen
    assert over_mesh.plan.route == "mesh"
    assert over_mesh.price.seconds > decision.chosen.price.seconds


def test_pairs_that_cannot_connect_are_relayed_and_so_is_who_has_no_endpoint():
    site = meshed(four_pis(940))
    apart = frozenset({("pi2", "pi0"), ("elsewhere", "pi1")})
    query = question(BASE, site, strategy="row", devices=NAMES, relayed_pairs=apart)
    chosen = decide(query).chosen.plan
    assert (chosen.route, chosen.relayed_pairs) == ("mesh", (("pi2", "pi0"),))
    some = question(BASE, replace(site, endpoints=frozenset(NAMES[:3])), route="mesh", devices=NAMES)
    assert relayed(some, NAMES) == tuple(pair for pair in permutations(NAMES, 2) if "pi3" in pair)


@pytest.mark.parametrize(
    ("endpoints", "devices", "pins", "has_mesh"),
    [
        (NAMES, NAMES, {}, True),
        (NAMES, NAMES[:1], {}, False),
        (NAMES, NAMES[:1], {"route": "mesh"}, False),
        (NAMES[:3], NAMES, {}, False),
        (NAMES[:3], NAMES[:3], {}, True),
        (NAMES, NAMES, {"relayed_pairs": frozenset(permutations(NAMES, 2))}, False),
    ],
)
def test_mesh_is_no_choice_where_somebody_cannot_or_nobody_connects(endpoints, devices, pins, has_mesh):
    site = replace(four_pis(940), endpoints=frozenset(endpoints))
    assert candidate_routes(question(BASE, site, **pins), devices) == ("mesh", "broker")[not has_mesh :]


def test_a_slow_pair_is_seen_in_the_price():
    query = question(BASE, meshed(four_pis(940)), strategy="row", devices=NAMES)
    plan = decide(query).chosen.plan
    slow = {pair: PeerLink(5e-3, 2e6) for pair in (("pi0", "pi1"), ("pi1", "pi0"))}
    slowed = replace(query, cluster=replace(query.cluster, peer_links=slow))
    assert price(slowed, plan).seconds > 1.5 * price(query, plan).seconds
    over_broker = with_route(query, plan, "broker")
    assert price(slowed, over_broker).seconds == price(query, over_broker).seconds


def test_what_the_broker_does_not_carry_does_not_meet_its_packet_limit():
    """With f32 rows of 512 tokens a broker of small packets lets no exchange through, and mesh every one."""
    query = question(BASE, meshed(four_pis(940)), 512, strategy="row", devices=NAMES)
    plan = decide(query).chosen.plan
    by_broker = plan_packet(query, with_route(query, plan, "broker"))
    assert plan_packet(query, plan) < by_broker
    limit = replace(query, packet_bytes=limits(by_broker - 1), options=plan.options)
    assert decide(limit).chosen.plan.route == "mesh"


SHALLOW = replace(spec_of_kind("bert-base"), layers=4)
FOUR = bundled("four-pi4")
ALL = tuple(FOUR.devices)


def question_of_four(*names: str, mbit: float | None = None, memory_bytes: float | None = None, **pins) -> Question:
    room = {} if memory_bytes is None else {"memory_bytes": memory_bytes}
    rate = {} if mbit is None else {"up_bytes_per_s": mbit * 125e3, "down_bytes_per_s": mbit * 125e3}
    devices = {n: replace(FOUR.devices[n], **room) for n in names}
    links = {n: replace(link, **rate) for n, link in FOUR.links.items()}
    site = replace(FOUR, devices=devices, links=links)
    return question(SHALLOW, site, representative_shape(SHALLOW, 128), **pins)


def planned(strategy: str, **options: str):
    return decide(question_of_four(*ALL, strategy=strategy, options=options, devices=ALL)).chosen.plan


@pytest.mark.parametrize("variant", ["kv", "heads"])
def test_the_devices_that_are_left_go_on_as_before_where_that_is_faster_than_one(variant):
    last = planned("row", variant=variant)
    decision = decide_hurried(replace(question_of_four(*ALL[:3]), active=last))
    assert decision.chosen.plan.method == last.method
    assert set(decision.chosen.plan.devices) == set(ALL[:3])
    assert {c.name for c in decision.ranking} == {last.method, "single"}
    assert decision.chosen.price.seconds < decide_hurried(question_of_four(*ALL[:3])).chosen.price.seconds
    assert decision.chosen.plan.predicted_tokens == 128


def test_a_first_plan_is_one_of_several_whose_loads_are_known_and_later_ones_go_on_with_what_stands():
    query = question_of_four(*ALL)
    first = solve(Solve("m", 1, query, None, SearchKind.HURRIED)).decision
    assert {len(c.plan.devices) for c in first.ranking} == {1, 4}
    assert all(any(c.load_bytes.values()) for c in first.ranking)
    standing = replace(query, residents=(planned("row", variant="kv"),))
    second = solve(Solve("m", 1, standing, None, SearchKind.HURRIED)).decision
    assert {c.name for c in second.ranking} == {"row/kv", "single"}


def test_devices_of_which_none_has_the_memory_alone_go_on_together():
    last = planned("megatron", reduce="direct")
    single = decide_hurried(question_of_four(*ALL[:3])).chosen.price.needs
    query = question_of_four(*ALL[:3], memory_bytes=max(single.values()) * 0.8)
    assert len(decide_hurried(query).chosen.plan.devices) > 1, "the first plan that fits"
    assert decide_hurried(replace(query, active=last)).chosen.plan.method == last.method
    with pytest.raises(PlanError):
        decide_hurried(replace(question_of_four(*ALL[:3], memory_bytes=1e6), active=last))


def test_a_wire_that_nobody_has_measured_is_not_taken_in_a_hurry():
    last = replace(planned("row", variant="kv"), wire="f16")
    assert decide_hurried(replace(question_of_four(*ALL[:3], wire="f16"), active=last)).chosen.plan.wire == "f16"
    assert decide_hurried(replace(question_of_four(*ALL[:3], accuracy=1e-2), active=last)).chosen.plan.wire == "f32"


@pytest.mark.parametrize(
    "pins",
    [
        {"strategy": "magic"},
        {"strategy": "megatron", "options": {"variant": "kv"}},
        {"strategy": "block", "options": {"nt": "2"}},
        {"strategy": "voltage", "options": {"shares": "equal", "order": "reordered"}, "weight_dtype": "w8a32"},
        {"strategy": "grid", "options": {"nt": "3"}, "devices": ("pi0", "pi1", "pi2", "pi3")},
        {"strategy": "single", "devices": ("pi0", "pi1")},
    ],
    ids=str,
)
def test_pins_that_cannot_be_are_refused(pins):
    with pytest.raises(ConfigError):
        decide(question(FAMILIES["bert-embedding"], four_pis(940), **pins))


def test_without_a_device_there_is_no_plan():
    for site, pins in ((four_pis(100), {"devices": ("pi9",)}), (cluster(), {})):
        with pytest.raises(PlanError):
            decide(question(BASE, site, **pins))


@pytest.mark.parametrize("pins", [{"strategy": "pipeline"}, {}], ids=str)
def test_where_memory_forbids_it_what_is_missing_is_named(pins):
    with pytest.raises(PlanError) as caught:
        decide(question(FAMILIES["bert-embedding"], two_pis(940, memory=2**17 - 2**15), **pins))
    assert "0.1 MiB" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    lines = caught.value.detail
    assert lines
    assert lines[0] in str(caught.value), "the one that lacks least"


def test_one_device_answers_where_it_is_faster_or_the_others_cannot_go_on():
    last = planned("row", variant="kv")
    assert decide_hurried(replace(question_of_four(*ALL[:3], mbit=5), active=last)).chosen.name == "single"
    assert decide_hurried(replace(question_of_four(*ALL[:1]), active=last)).chosen.name == "single"
    assert decide_hurried(question_of_four(*ALL[:3])).chosen.name == "single", "nothing has been planned yet"
    other = planned("two_d", x="2")  # cannot be divided by three
    assert decide_hurried(replace(question_of_four(*ALL[:3]), active=other)).chosen.name == "single"
