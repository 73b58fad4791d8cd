"""The rule by which a model moves: sure gains that pay, trials that tell, and what a plan takes under other speeds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import log
from random import Random
from statistics import median

import numpy as np
import pytest
import questions
from questions import bundled

from hepti_mqtt.checkpoint import spec_of_kind
from hepti_mqtt.core.ids import PlanVersion
from hepti_mqtt.core.plan import Plan
from hepti_mqtt.core.profiles import Cluster, FrameCost
from hepti_mqtt.models import representative_shape
from hepti_mqtt.planner import Candidate, Price, Question, price
from hepti_mqtt.planner import decide as decide_plan
from hepti_mqtt.planner.decisions import (
    RULE,
    Border,
    Option,
    Situation,
    decide,
    load_share,
    pays_to_hold,
    weigh_handover,
)
from hepti_mqtt.planner.estimates import MethodEstimates, SiteEstimates, strategy_key
from hepti_mqtt.planner.quantities import Remaining
from hepti_mqtt.planner.refine import divided
from hepti_mqtt.planner.search import _initial_plans
from hepti_mqtt.planner.surface import NO_DRAWS, Beliefs, Priced, factors_of, outlook, surfaces
from hepti_mqtt.protocol.messages import Heartbeat

DRAWS = 48
NOISE = np.random.default_rng(3).standard_normal(DRAWS)


def option(seconds: float, strategy: str = "row", sd: float = 0.0, **more: object) -> Option:
    """Return a plan that takes so long, known to so much."""
    plan = Plan("m", PlanVersion(1, 1), strategy, ("a", "b"), "a")
    cost = seconds * np.exp(sd * NOISE)
    return Option(Candidate(plan, Price(seconds, 0, {}, {}, {}), (1.0, 1.0)), cost, cost, **more)


def situation(active: Option | None, *options: Option, **more: object) -> Situation:
    return Situation(active, options, more.pop("period_s", 1.5), **more)


ACTIVE, SOON = option(1.0), option(1.0, "single")
HEAVY = option(0.79, "block", load_s=20.0, own_s=5.0, load_bytes=1 << 28)
PASSING = option(0.8, "block", load_s=5.0)
UNKNOWN = option(0.97, "block", 0.15, method_sd=0.15)
TRIED = frozenset([strategy_key(UNKNOWN.plan)])
# A trial costs more than the other one, which gains little, and would keep this one from being tried.
LIKELY = option(0.8, "block", sd=0.2, method_sd=0.15, load_bytes=1 << 30, load_s=20.0, own_s=20.0)
UNLIKELY = option(0.98, "galaxy", sd=0.15, method_sd=0.15)
RECOVERED = replace(option(1.0, "block"), cost=np.resize([0.5, 2.5], DRAWS), no_evidence_s=5.0)
MOVES = {
    "no gain": (situation(ACTIVE, option(1.0, "block"), option(1.2, "galaxy")), None),
    "less than five parts of a hundred": (situation(ACTIVE, option(0.97, "block")), None),
    "a sure gain": (situation(ACTIVE, option(0.8, "block")), ("go", "block")),
    "bytes that nobody loads": (situation(ACTIVE, HEAVY, option(0.8, "galaxy")), ("go", "galaxy")),
    "a load that costs too much": (situation(ACTIVE, replace(HEAVY, own_s=100.0)), None),
    "a gain that lasts": (situation(ACTIVE, PASSING), ("go", "block")),
    "a gain that ends before it pays": (
        situation(replace(ACTIVE, before=0.9), replace(PASSING, remaining=Remaining(2.0, 1.5), before=1.2)),
        None,
    ),
    "a method of which little is known": (situation(ACTIVE, UNKNOWN), ("try", "block")),
    "a known method": (situation(ACTIVE, replace(UNKNOWN, method_sd=0.9 * RULE.known_sd)), None),
    "not beside the active plan": (situation(ACTIVE, replace(UNKNOWN, fits_next_to_others=False)), None),
    "a trial that costs too much": (situation(ACTIVE, replace(UNKNOWN, own_s=100.0)), None),
    "hardly better": (situation(ACTIVE, option(1.5, "block", 0.1, method_sd=0.1)), None),
    "no trials": (situation(ACTIVE, UNKNOWN, may_try=False), None),
    "tried already": (situation(ACTIVE, UNKNOWN, tried=TRIED), None),
    "few requests": (situation(ACTIVE, UNKNOWN, period_s=200.0), None),
    "the likeliest first": (situation(ACTIVE, UNLIKELY, LIKELY), ("try", "block")),
    "likely, unheard": (situation(ACTIVE, option(0.9, "block", sd=0.1, no_evidence_s=5.0)), ("try", "block")),
    "hoped for, just unheard": (situation(ACTIVE, RECOVERED), None),
    "hoped for, long unheard": (situation(ACTIVE, replace(RECOVERED, no_evidence_s=60.0)), ("try", "block")),
    "ready soonest": (situation(None, option(0.5, "row", load_s=60.0), SOON), ("must", "single")),
    "ready soon enough": (situation(None, option(0.5, "row", load_s=1.0), SOON), ("must", "row")),
}


@pytest.mark.parametrize("name", MOVES)
def test_a_model_moves_where_that_surely_pays_and_tries_what_may_pay(name: str) -> None:
    given, wanted = MOVES[name]
    move = decide(given).move
    assert (move and (move.kind, move.option.plan.strategy)) == wanted


def test_the_share_of_a_load_is_the_one_that_costs_least() -> None:
    shares = np.linspace(0.01, 0.5, 491)
    for gain in (0.0, 0.03, 0.1, 0.25, 0.58, 0.95, 1.5):
        least = shares[np.argmin(1 / (1 - shares) + max(gain, 0.05) / shares)]
        assert load_share(gain) == pytest.approx(least, abs=2e-3)


def test_a_load_costs_what_devices_of_the_active_plan_load() -> None:
    """58 % less time is worth some minutes of slower runs; others load without slowing anybody down."""
    heavy = option(0.42, "block", load_bytes=1 << 30, load_s=120.0)
    assert decide(situation(option(1.0), heavy)).move is not None
    costs = [decide(situation(option(1.0), replace(heavy, own_s=own_s))).considered[0] for own_s in (0.0, 30.0, 90.0)]
    assert [a.cost_s - costs[0].cost_s for a in costs[1:]] == pytest.approx(
        [30 / (1 - a.share) for a in costs[1:]] * np.array([1, 3])
    )
    assert costs[2].option.load_s == pytest.approx(90 / costs[2].share), "at a share of a device it takes longer"


def test_more_noise_means_fewer_moves() -> None:
    gains = np.linspace(-0.2, 0.4, 25)

    def moves(sd: float) -> int:
        verdicts = (decide(situation(option(1.0), option(1 - g, "block", sd), may_try=False)) for g in gains)
        return sum(verdict.move is not None for verdict in verdicts)

    counts = [moves(sd) for sd in (0.0, 0.05, 0.15, 0.4)]
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] < counts[0]


@pytest.mark.parametrize(
    ("alone_s", "together_s", "period_s", "waiting", "first"),
    [
        (45.0, 45.0, 60.0, 0, "row"),  # empty caches: tiles travel between devices
        (45.0, 45.0, 1.0, 0, "row"),
        (45.0, 57.0, 60.0, 0, "single"),  # few requests: the first one is answered sooner
        (45.0, 57.0, 60.0, 1, "row"),  # a client that waits asks again: ten seconds later it has the faster plan
        (45.0, 180.0, 60.0, 1, "single"),  # each device loads from the planner
        (0.0, 45.0, 1.0, 0, "single"),  # it serves while the others load
        (0.0, 45.0, 60.0, 1, "single"),
        (4.5, 4.5, 60.0, 0, "row"),  # full caches
    ],
)
def test_a_first_plan_is_chosen_by_its_load_and_by_what_requests_take_until_the_best_one_serves(
    alone_s: float, together_s: float, period_s: float, waiting: int, first: str
) -> None:
    single, row = option(2.7, "single", load_s=alone_s), option(1.1, "row", load_s=together_s)
    verdict = decide(situation(None, single, row, period_s=period_s, waiting=waiting))
    assert verdict.move is not None
    assert verdict.move.option.plan.strategy == first


def test_another_unit_of_cost_changes_nothing() -> None:
    """Throughput and memory are decided as a part of the cost, whatever its unit."""
    for unit in (1e-3, 1e6):
        active, other = option(1.0), option(0.8, "block")
        scaled = [replace(o, cost=unit * o.cost) for o in (active, other)]
        scaled_move, same = decide(situation(*scaled)).considered[0], decide(situation(active, other)).considered[0]
        assert scaled_move.kind == same.kind == "go"
        assert (scaled_move.gain, scaled_move.value_s) == pytest.approx((same.gain, same.value_s))


def test_a_standby_pays_where_its_load_costs_less_than_the_wait() -> None:
    assert pays_to_hold(0.6, 10.0, period_s=1.5, busy=0.7)
    assert not pays_to_hold(0.01, 10.0, period_s=1.5, busy=0.7)
    assert pays_to_hold(0.01, 10.0, period_s=60.0, busy=1e-5), "without requests a load costs nothing"


# -- what a plan takes under other speeds -----------------------------------------------------------------------------


def question(kind: str, site: str) -> Question:
    spec = spec_of_kind(kind)
    return questions.question(spec, bundled(site), representative_shape(spec, 128))


def changed(cluster: Cluster, rng: Random) -> Cluster:
    """Return a cluster whose devices and links are up to twice as fast or slow."""

    def factor() -> float:
        return 2 ** rng.uniform(-1, 1)

    devices, links = dict(cluster.devices), dict(cluster.links)
    for name, profile in devices.items():
        f, cost = factor(), profile.mesh_frame_cost
        slower = None if cost is None else FrameCost(cost.frame_s * f, cost.byte_s * f)
        devices[name] = replace(profile, slowdown=profile.slowdown * factor(), mesh_frame_cost=slower)
        rate = links[name].up_bytes_per_s * factor()
        links[name] = replace(links[name], up_bytes_per_s=rate, down_bytes_per_s=rate)
    most = max(link.up_bytes_per_s for link in links.values())
    return replace(cluster, devices=devices, links=links, broker_bytes_per_s=most)


@pytest.mark.parametrize("kind", ["minilm", "resnet18"])
def test_a_surface_says_what_a_simulation_would(kind: str) -> None:
    rng, off = Random(5), []
    for site in ("four-pi4-240", "mixed-four"):
        query = question(kind, site)
        plans = [divided(query, d).plan for d in _initial_plans(query) if not d.plan.replicas]
        for plan in rng.sample(plans, 8):
            before = price(query, plan)
            now = changed(query.cluster, rng)
            guess = surfaces(before, plan, query.cluster)[0].under(factors_of(plan, query.cluster, now, NO_DRAWS))
            true = price(replace(query, cluster=now), plan).seconds
            off.append(abs(np.log(float(guess.mean()) / true)))
    assert median(off) <= 0.08
    assert np.quantile(off, 0.9) <= 0.3


# -- estimates and the rule together ----------------------------------------------------------------------------------

PERIOD_S = 1.5


@dataclass
class Loop:
    """Requests one after the other on one device, or on two, of which the second has a slowdown of its own.

    real: of the second one at a time, by whether it computes; its meter says the same. late: per request, whether it
    took longer than one device alone.
    """

    real: Callable[[float, bool], float]
    moves: int = 0
    late: list[bool] = field(default_factory=list)
    took: float = 0.0

    def play(self, seconds: float) -> Loop:
        query = question("bert-base", "four-pi4")
        query = replace(query, cluster=replace(query.cluster, devices={n: query.cluster.devices[n] for n in A_AND_B}))
        split = decide_plan(replace(query, strategy="row", options={"variant": "heads"}, devices=A_AND_B))
        alone = decide_plan(replace(query, strategy="single", devices=A_AND_B[:1]))
        plans = [Priced(split.chosen, split.cluster), Priced(alone.chosen, alone.cluster)]
        site, methods, active = SiteEstimates(), MethodEstimates(), 0
        rng = np.random.default_rng(1)
        for name in A_AND_B:
            site.add_device(name, name)
        for number in range(int(seconds / PERIOD_S)):
            now = number * PERIOD_S
            slow = {A_AND_B[0]: 1.0, A_AND_B[1]: self.real(now, active == 0)}
            for name in A_AND_B:
                busy = name in plans[active].candidate.plan.devices
                said = slow[name] * float(np.exp(0.05 * rng.standard_normal()))
                beat = Heartbeat(1, number, now, 1 << 30, None, 1e-3, 3e7, said, 0)
                site.record_heartbeat(name, beat, now, busy=busy, loading=False)
                if busy:
                    site.record_compute(name, log(slow[name] * np.exp(0.03 * rng.standard_normal())), now)
            took, best = (self.seconds(k, query.cluster, slow) for k in (plans[active], plans[1]))
            self.late.append(took > 1.1 * best)
            self.took += took
            believed = with_slowdowns(query.cluster, {name: site.slowdown(name) for name in A_AND_B})
            change = site.youngest_change(A_AND_B, now)
            before, remaining = (None, None) if change is None else (change.before, change.remaining)
            beliefs = Beliefs(believed, site.draws(A_AND_B, now), before, methods.factor, lambda _plan: 0.03)
            outlooks = [outlook(k, beliefs) for k in plans]
            options = [
                Option(k.candidate, o.cost, o.seconds, 0.03, o.before or float("nan"), remaining)
                for k, o in zip(plans, outlooks, strict=True)
            ]
            verdict = decide(situation(options[active], options[1 - active], period_s=PERIOD_S))
            if verdict.move is not None:
                active, self.moves = 1 - active, self.moves + 1
        return self

    @staticmethod
    def seconds(k: Priced, cluster: Cluster, slow: Mapping[str, float]) -> float:
        now = with_slowdowns(cluster, slow)
        factors = factors_of(k.candidate.plan, k.cluster, now, NO_DRAWS)
        return float(surfaces(k.candidate.price, k.candidate.plan, k.cluster)[0].under(factors).mean())

    @property
    def longest_late_s(self) -> float:
        """Return the longest time in which requests took longer than one device alone."""
        runs = "".join("x" if late else " " for late in self.late).split()
        return PERIOD_S * max(map(len, runs), default=0)


A_AND_B = ("pi1", "pi2")


def with_slowdowns(cluster: Cluster, slow: Mapping[str, float]) -> Cluster:
    return replace(cluster, devices={n: replace(d, slowdown=slow[n]) for n, d in cluster.devices.items()})


def test_a_device_that_alternates_between_two_speeds_holds_nobody_up_for_long() -> None:
    played = Loop(lambda now, _computes: 4.0 if int(now / 60) % 2 else 1.0).play(900)
    assert played.longest_late_s <= 10.0
    assert 2 <= played.moves <= 15, "at most there or back in each minute"


def test_a_device_that_is_fast_only_while_it_idles_is_left() -> None:
    played = Loop(lambda _now, computes: 4.0 if computes else 1.0).play(900)
    assert played.longest_late_s <= 10.0
    assert played.moves
    assert sum(played.late) / len(played.late) <= 0.1


@pytest.mark.parametrize(
    ("active_s", "other_s", "sd", "layer", "moved_s", "goes"),
    [
        (10.0, 5.0, 0.0, 4, 0.0, True),  # half the time, and twenty layers to come
        (10.0, 5.0, 0.0, 4, 5.0, False),  # but the border takes longer than that wins
        (10.0, 5.0, 0.0, 24, 0.0, False),  # it ends before it could
        (10.0, 10.0, 0.0, 4, 0.0, False),  # nothing is won
        (10.0, 9.95, 0.0, 4, 0.0, False),  # less than what it costs
        (10.0, 9.0, 0.2, 4, 0.0, False),  # the other plan is only likely to be better
        (1.1, 0.1, 0.0, 4, 0.0, False),  # a short run
    ],
)
def test_a_run_goes_on_where_its_rest_surely_takes_less(active_s, other_s, sd, layer, moved_s, goes) -> None:
    verdict = weigh_handover(option(active_s), option(other_s, "block", sd=sd), Border.of_run(26, layer, moved_s))
    assert verdict.hands_over is goes
    assert verdict.rest_s == pytest.approx(active_s * (26 - layer) / 26)


@pytest.mark.parametrize(
    ("other_s", "most", "again", "goes"),
    [
        (0.25, 60, 8.0, True),  # 30 tokens are expected
        (0.9, 60, 8.0, False),  # they gain less than the rows so far take
        (0.25, 60, 200.0, False),  # a long prompt
        (0.25, 1, 0.0, False),  # it is nearly over
    ],
)
def test_a_text_goes_on_where_its_rest_gains_more_than_its_rows_take(other_s, most, again, goes) -> None:
    assert weigh_handover(option(1.0), option(other_s, "block"), Border.of_text(5, most, again)).hands_over is goes
