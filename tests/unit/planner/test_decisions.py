"""The rule by which a model moves: sure gains that pay, trials that tell, and what a plan takes under other speeds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import median

import numpy as np
import pytest

from hepti_mqtt.checkpoint import spec_of_kind
from hepti_mqtt.config import settings
from hepti_mqtt.config.sites import load_site
from hepti_mqtt.cost.profiles import Cluster, FrameCost
from hepti_mqtt.cost.simulator import TopicNames
from hepti_mqtt.ids import PlanVersion
from hepti_mqtt.models import representative_shape
from hepti_mqtt.plan import Plan
from hepti_mqtt.planner import Candidate, Price, Question, price
from hepti_mqtt.planner.decisions import (
    KNOWN_SD,
    Option,
    Situation,
    decide,
    pays_to_hold,
)
from hepti_mqtt.planner.estimates import strategy_key
from hepti_mqtt.planner.refine import divided
from hepti_mqtt.planner.search import _initial_plans
from hepti_mqtt.planner.surface import NO_DRAWS, factors_of, surfaces

DRAWS = 48
NOISE = np.random.default_rng(3).standard_normal(DRAWS)


def option(seconds: float, strategy: str = "row", sd: float = 0.0, **more: object) -> Option:
    """Return a plan that takes so long, known to so much."""
    plan = Plan("m", PlanVersion(1, 1), strategy, ("a", "b"), "a")
    cost = seconds * np.exp(sd * NOISE)
    return Option(Candidate(plan, Price(seconds, 0, {}, {}, {}), (1.0, 1.0)), cost, cost, **more)


def situation(active: Option | None, *options: Option, **more: object) -> Situation:
    return Situation(active, options, more.pop("period_s", 1.5), **more)


def test_without_a_gain_nothing_moves() -> None:
    verdict = decide(situation(option(1.0), option(1.0, "block"), option(1.2, "galaxy")))
    assert verdict.move is None
    assert {a.kind for a in verdict.considered} == {None}


@pytest.mark.parametrize(("gain", "moves"), [(0.03, False), (0.2, True)])
def test_a_sure_gain_counts_from_five_parts_of_a_hundred_on(gain: float, moves: bool) -> None:
    verdict = decide(situation(option(1.0), option(1.0 - gain, "block")))
    assert (verdict.move is not None) is moves
    assert not moves or verdict.move.kind == "go"


def test_bytes_that_nobody_loads_come_before_some() -> None:
    heavy = option(0.79, "block", load_s=20.0, load_bytes=1 << 28)
    light = option(0.8, "galaxy")
    verdict = decide(situation(option(1.0), heavy, light))
    assert verdict.move is not None
    assert verdict.move.option is light
    assert decide(situation(option(1.0), replace(heavy, load_s=400.0))).move is None


def test_a_gain_that_ends_before_it_pays_is_left() -> None:
    better = option(0.8, "block", load_s=5.0)
    assert decide(situation(option(1.0), better)).move is not None
    short = replace(better, remaining_s=10.0, before=1.2)
    assert decide(situation(replace(option(1.0), before=0.9), short)).move is None


def test_more_noise_means_fewer_moves() -> None:
    gains = np.linspace(-0.2, 0.4, 25)

    def moves(sd: float) -> int:
        found = (decide(situation(option(1.0), option(1 - g, "block", sd), may_try=False)) for g in gains)
        return sum(verdict.move is not None for verdict in found)

    counts = [moves(sd) for sd in (0.0, 0.05, 0.15, 0.4)]
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] < counts[0]


def test_a_method_that_may_be_better_is_tried_if_little_is_known_of_it() -> None:
    unknown = option(0.97, "block", 0.15, method_sd=0.15)
    verdict = decide(situation(option(1.0), unknown))
    assert verdict.move is not None
    assert verdict.move.kind == "try"
    key = strategy_key(unknown.plan)
    for changed, more in (
        (replace(unknown, method_sd=0.9 * KNOWN_SD), {}),
        (replace(unknown, beside=False), {}),
        (replace(unknown, load_s=300.0), {}),
        (option(1.5, "block", 0.1, method_sd=0.1), {}),
        (unknown, {"may_try": False}),
        (unknown, {"tried": frozenset([key])}),
        (unknown, {"period_s": 200.0}),
    ):
        assert decide(situation(option(1.0), changed, **more)).move is None


def test_where_nothing_serves_the_plan_that_is_ready_soonest_counts() -> None:
    fast, soon = option(0.5, "row", load_s=60.0), option(1.0, "single")
    verdict = decide(situation(None, fast, soon))
    assert verdict.move is not None
    assert (verdict.move.option, verdict.move.kind) == (soon, "must")
    assert decide(situation(None, replace(fast, load_s=1.0), soon)).move.option.plan.strategy == "row"


def test_another_unit_of_cost_changes_nothing() -> None:
    """Throughput and memory are decided as a part of the cost, whatever its unit."""
    for unit in (1e-3, 1e6):
        active, other = option(1.0), option(0.8, "block")
        scaled = [replace(o, cost=unit * o.cost) for o in (active, other)]
        found, same = decide(situation(*scaled)).considered[0], decide(situation(active, other)).considered[0]
        assert found.kind == same.kind == "go"
        assert (found.gain, found.value_s) == pytest.approx((same.gain, same.value_s))


def test_what_is_said_has_the_numbers() -> None:
    verdict = decide(situation(option(1.0), option(0.8, "block"), option(1.3, "galaxy")))
    assert verdict.move is not None
    for text in ("block on a, b", "20%", "probability 1.00", "galaxy"):
        assert text in str(verdict)
    told = verdict.considered[1].to_dict()
    assert (told["name"], told["verdict"]) == ("galaxy", "stay")


def test_a_standby_pays_where_its_load_costs_less_than_the_wait() -> None:
    assert pays_to_hold(0.6, 10.0, period_s=1.5, busy=0.7, load_factor=2.0)
    assert not pays_to_hold(0.01, 10.0, period_s=1.5, busy=0.7, load_factor=2.0)
    assert pays_to_hold(0.01, 10.0, period_s=60.0, busy=1e-5, load_factor=2.0), "loads beside no request cost nothing"


# -- what a plan takes under other speeds -----------------------------------------------------------------------------


def question(kind: str, site: str, tokens: int = 128) -> Question:
    cluster = load_site(settings.find_bundled_config("sites", Path(f"{site}.yaml")))
    spec = spec_of_kind(kind)
    return Question(TopicNames("home", "m"), spec, cluster, representative_shape(spec, tokens), PlanVersion(1, 1))


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
        asked = question(kind, site)
        plans = [divided(asked, d).plan for d in _initial_plans(asked) if not d.plan.replicas]
        for plan in rng.sample(plans, 8):
            before = price(asked, plan)
            now = changed(asked.cluster, rng)
            guess = surfaces(before, plan, asked.cluster)[0].under(factors_of(plan, asked.cluster, now, NO_DRAWS))
            true = price(replace(asked, cluster=now), plan).seconds
            off.append(abs(np.log(float(guess.mean()) / true)))
    assert median(off) <= 0.08
    assert np.quantile(off, 0.9) <= 0.3
