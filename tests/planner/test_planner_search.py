"""The planner prices real Programs: it splits where that pays, says so where it does not, and respects memory."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from sites import FAMILIES
from swarm import profile_curve

from hepti_mqtt import models
from hepti_mqtt.cost.memory import live_bytes, programs_bytes, weight_total
from hepti_mqtt.cost.profiles import Cluster, Curve, DeviceProfile, Link
from hepti_mqtt.cost.simulator import Naming, largest_packet_bytes, sent_bytes
from hepti_mqtt.errors import ConfigError, PacketLimitError, PlanError
from hepti_mqtt.ids import Epoch
from hepti_mqtt.models import largest_shape
from hepti_mqtt.models.shapes import PackedTokens
from hepti_mqtt.models.transformer import ModelSpec, TextStem
from hepti_mqtt.plan_programs import program, programs, resident_weights
from hepti_mqtt.planner import Decision, Question, decide, price
from hepti_mqtt.planner.price import needed_bytes, plan_packet, tile_packet
from hepti_mqtt.planner.search import WORTH, _initial
from hepti_mqtt.spec import TaskHead
from hepti_mqtt.strategies import STRATEGIES

BASE = ModelSpec(
    "bert",
    "BertModel",
    12,
    768,
    12,
    3072,
    norm_first=False,
    activation="gelu",
    norm_eps=1e-12,
    max_tokens=512,
    head=TaskHead("embedding", "mean"),
    text=TextStem(30522, 512, 2),
)


# Of searches as long as these others measure the coverage: tracing makes them take three times as long.
no_cover = pytest.mark.no_cover


def device(name: str, gflops: float, memory: float = 8e9) -> DeviceProfile:
    return DeviceProfile(name, profile_curve(gflops * 1e9), gflops * 1e8, 4e9, memory_bytes=memory)


def cluster(*devices: DeviceProfile, mbit: float = 940.0) -> Cluster:
    rate = mbit * 1e6 / 8
    return Cluster({d.name: d for d in devices}, {d.name: Link(0.2e-3, rate, rate) for d in devices})


def question(spec: ModelSpec, site: Cluster, tokens: int = 128, **pins) -> Question:
    return Question(Naming("home", "m"), spec, site, PackedTokens((tokens,)), Epoch(1, 1), **pins)


def four_pis(mbit: float, memory: float = 8e9) -> Cluster:
    return cluster(*(device(f"pi{i}", 24.6, memory) for i in range(4)), mbit=mbit)


@cache
def on_a_good_network() -> Decision:
    """Return what is chosen for four equal devices: several tests look at it."""
    return decide(question(BASE, four_pis(940)))


def test_splits_over_equal_devices_on_a_good_network():
    decision = on_a_good_network()
    assert decision.chosen.plan.strategy in {"row", "block"}
    assert len(decision.chosen.plan.devices) == 4
    assert decision.single is not None
    assert decision.chosen.price.seconds < 0.6 * decision.single.price.seconds


@no_cover
def test_one_device_alone_wins_on_a_slow_network_and_is_told():
    decision = decide(question(BASE, four_pis(1), tokens=16))
    assert decision.chosen.plan.strategy == "single"
    assert "single" in decision.reason


def test_others_that_are_predicted_to_gain_next_to_nothing_are_left_out():
    """What predictions are off by is more than what they promise."""
    found = decide(question(BASE, four_pis(54)))
    fastest = min(found.ranking, key=lambda c: c.price.seconds)
    assert (found.chosen.plan.strategy, found.ranking[0]) == ("single", found.single)
    assert 1 < found.chosen.price.seconds / fastest.price.seconds <= WORTH


def test_a_slow_device_is_left_out_or_gets_little():
    site = cluster(device("fast", 70.6), device("slow", 2.0), mbit=240)
    plan = decide(question(BASE, site)).chosen.plan
    rows = dict(zip(plan.devices, plan.weights.get("rows", (1.0,)), strict=True))
    assert rows.get("slow", 0.0) < 0.2 * sum(rows.values())


@pytest.mark.parametrize(
    ("pins", "words"),
    [
        ({"strategy": "megatron", "options": {"variant": "kv"}}, "megatron has no option variant=kv; it has reduce="),
        ({"strategy": "block", "options": {"nt": "2"}}, "block has no option nt=2; it has none"),
        (
            {"strategy": "voltage", "options": {"shares": "equal", "order": "reordered"}, "storage": "w8a32"},
            "voltage with shares=equal order=reordered needs weights in f32, and w8a32 is asked for",
        ),
        (
            {"strategy": "grid", "options": {"nt": "3"}, "devices": ("pi0", "pi1", "pi2", "pi3")},
            "grid has no option nt=3 on 4 devices; there it has nt=1, nt=2, nt=4",
        ),
    ],
)
def test_options_of_another_method_are_refused_with_those_that_there_are(pins, words):
    with pytest.raises(ConfigError, match=words):
        decide(question(FAMILIES["bert-embedding"], four_pis(940), **pins))


def test_a_pinned_method_that_memory_forbids_names_what_is_missing_where():
    with pytest.raises(PlanError, match=r"pipeline.* on .*: pi\d needs [\d.]+ MiB and has 0.1 MiB"):
        decide(question(FAMILIES["bert-embedding"], four_pis(940, memory=2**17 - 2**15), strategy="pipeline"))


@no_cover
def test_memory_tiers_choose_the_strategy():
    """Where no device holds a full copy, `row` and `single` do not fit and say how much is missing."""
    whole = weight_total(resident_weights(BASE, _plan_of("single", four_pis(940)), "pi0"))
    decision = decide(question(BASE, four_pis(940, memory=0.6 * whole)))
    assert decision.chosen.plan.strategy in {"block", "column", "galaxy"}
    assert decision.single is None
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
    assert decision.chosen.plan.head != "tiny"


@no_cover
@pytest.mark.parametrize(
    "speeds",
    [
        (150, 140, 3, 2),
        *(pytest.param(s, marks=pytest.mark.wide) for s in ((100, 100, 100, 100), (140, 20, 15, 10), (90, 88, 87, 1))),
    ],
)
def test_equal_budgets_that_hold_equal_shares_fit_whatever_the_speeds(speeds):
    whole = weight_total(resident_weights(BASE, _plan_of("single", four_pis(940)), "pi0"))
    site = cluster(*(device(f"d{i}", speed, 0.55 * whole) for i, speed in enumerate(speeds)))
    decision = decide(question(BASE, site, devices=("d0", "d1", "d2", "d3")))
    assert all(need <= 0.55 * whole for need in decision.chosen.price.needs.values())


@no_cover
def test_nothing_fits_says_how_much_is_missing_where():
    with pytest.raises(PlanError, match=r"pi0 needs [\d.]+ MiB and has 1[.\d]* MiB \([\d.]+ MiB missing\)"):
        decide(question(BASE, four_pis(940, memory=1.5 * 2**20)))


@no_cover
def test_pins_are_obeyed():
    whole = models.graph(BASE, models.largest_shape(BASE))
    for name in (n for n, s in STRATEGIES.items() if s.unsupported(whole) is None):
        decision = decide(question(BASE, four_pis(100), strategy=name))
        assert decision.chosen.plan.strategy == name
    decision = decide(question(BASE, four_pis(100), strategy="row", options={"variant": "heads"}))
    assert decision.chosen.plan.options == {"variant": "heads"}
    decision = decide(question(BASE, four_pis(940), devices=("pi2", "pi1")))
    assert set(decision.chosen.plan.devices) <= {"pi1", "pi2"}


def test_splitting_strategies_compete_only_where_there_is_something_to_split():
    site = cluster(device("a", 24.6))
    assert decide(question(BASE, site)).chosen.plan.strategy == "single"
    assert decide(question(BASE, site, strategy="row")).chosen.plan.devices == ("a",)
    pair = cluster(device("a", 24.6), device("b", 24.6), mbit=1)
    assert len(decide(question(BASE, pair, strategy="row")).chosen.plan.devices) == 2


def test_pins_that_cannot_be():
    with pytest.raises(ConfigError, match="single, row, column, block"):
        decide(question(BASE, four_pis(100), strategy="magic"))
    with pytest.raises(PlanError, match="pi9 are not online"):
        decide(question(BASE, four_pis(100), devices=("pi9",)))
    with pytest.raises(PlanError, match="no device is online"):
        decide(question(BASE, cluster()))


@no_cover
@pytest.mark.parametrize("method", ["single", "row", "column", "block"])
def test_the_short_models_price_is_the_full_price(method):
    """Memory and bytes follow exactly from two and three layers, time within a hundredth."""
    ask = question(BASE, four_pis(240), strategy=method)
    plan = decide(ask).chosen.plan
    quick, full = price(ask, plan), price(ask, plan, full=True)
    # Topics of layers 10 and 11 have one character more than those of the short model.
    assert 0 <= full.nbytes - quick.nbytes < 400
    assert quick.seconds == pytest.approx(full.seconds, rel=0.01)
    for name in plan.devices:
        exact = weight_total(resident_weights(BASE, plan, name))
        shape = largest_shape(BASE)
        live = max(
            live_bytes(program(BASE, plan, shape, name)),
            live_bytes(program(BASE, plan, replace(shape, want="hidden"), name)),
        )
        kept = programs_bytes(BASE, plan, name)
        assert needed_bytes(ask, plan, name) == pytest.approx(exact + live + kept, rel=0.02)


def test_predicted_bytes_are_those_of_the_programs():
    spec = FAMILIES["vit-classifier"]
    ask = question(spec, four_pis(240), tokens=17, strategy="block")
    decision = decide(ask)
    shape = PackedTokens((17,))
    parts = programs(spec, decision.chosen.plan, shape)
    assert decision.chosen.price.nbytes == sent_bytes(ask.naming, spec, shape, parts)


def test_balancing_gives_the_stronger_device_more():
    site = cluster(device("strong", 70.6), device("weak", 24.6))
    plan = decide(question(BASE, site, strategy="row", devices=("strong", "weak"))).chosen.plan
    share = dict(zip(plan.devices, plan.weights["rows"], strict=True))
    assert 1.5 < share["strong"] / share["weak"] < 5


def test_curves_interpolate_and_extrapolate():
    curve = Curve(64, 64, ((1, 1.0), (8, 2.0), (32, 8.0)))
    assert curve.seconds(1) == 1.0
    assert curve.seconds(20) == 5.0
    assert curve.seconds(64) == pytest.approx(16.0)
    assert curve.seconds(0) == 0.0


@no_cover
def test_a_plan_whose_packets_do_not_get_through_is_not_chosen():
    free, decision = question(BASE, four_pis(940)), on_a_good_network()
    best = decision.chosen.plan
    sizes = {c.name: plan_packet(free, c.plan) for c in decision.ranking}
    limited = decide(replace(free, packet_bytes=sizes[best.method] - 1))
    assert limited.chosen.name != best.method or len(limited.chosen.plan.devices) != len(best.devices)
    assert plan_packet(free, limited.chosen.plan) < sizes[best.method]
    allowed = decide(replace(free, packet_bytes=sizes[best.method])).chosen.plan
    assert replace(allowed, reason=best.reason) == best, "other candidates may not get through, so another is next best"


@no_cover
def test_shares_are_not_moved_to_where_packets_do_not_get_through():
    """A device that computes slowly beside its matmuls gives rows away: the other's packets become larger."""
    spec = replace(BASE, layers=2, hidden=384, heads=12, mlp=1536)
    slow = replace(device("b", 18.0), attention_flops_per_s=2e8, rowwise_bytes_per_s=1e8)
    asked = question(spec, cluster(device("a", 20.0), slow), devices=("a", "b"), strategy="row")
    asked = replace(asked, options={"variant": "kv"})
    sizes = [plan_packet(asked, found) for found in (next(_initial(asked)).plan, decide(asked).chosen.plan)]
    assert sizes[0] < sizes[1]
    limited = decide(replace(asked, packet_bytes=sum(sizes) // 2)).chosen.plan
    assert plan_packet(asked, limited) <= sum(sizes) // 2


@no_cover
def test_a_plan_packet_bounds_every_request_of_one_sequence():
    spec = FAMILIES["bert-embedding"]
    asked = question(spec, four_pis(940), tokens=20)
    for candidate in decide(asked).ranking:
        bound = plan_packet(asked, candidate.plan)
        for length in (20, 7, 1):
            shape = PackedTokens((length,))
            parts = programs(spec, candidate.plan, shape)
            assert largest_packet_bytes(asked.naming, spec, shape, parts) <= bound


def test_a_broker_that_takes_no_weights_is_named_with_its_setting():
    with pytest.raises(PacketLimitError, match=r"weights of m needs packets of 2\d{5} bytes.*max_packet_size"):
        decide(question(BASE, four_pis(940), packet_bytes=100_000))
    limit = tile_packet(question(BASE, four_pis(940)))
    with pytest.raises(PacketLimitError, match="every plan of m"):
        decide(question(BASE, four_pis(940), strategy="row", devices=("pi0", "pi1"), packet_bytes=limit))
