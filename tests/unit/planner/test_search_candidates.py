"""The candidates of a search: what stands comes first, no permutation is one, and a budget may end them at any time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from questions import cluster, device, meshed, question
from sites import FAMILIES

from hepti_mqtt.core.errors import PlanError
from hepti_mqtt.core.plan import Plan
from hepti_mqtt.core.profiles import Cluster
from hepti_mqtt.planner import Candidate, Question, decide
from hepti_mqtt.planner.candidates import THOROUGH
from hepti_mqtt.planner.price import Budget, memory_needs
from hepti_mqtt.planner.refine import whole_bytes
from hepti_mqtt.planner.search import Search
from hepti_mqtt.strategies.plan_programs import resident_weights

SMALL = FAMILIES["bert-embedding"]
ALL = ("pi0", "pi1", "pi2", "pi3")
SPEED = 0.02  # GFLOP/s: to these devices the small model is a large one


def boards(*names: str, speed: float = SPEED, memory: float = 8e9) -> Cluster:
    return meshed(cluster(*(device(name, speed, memory) for name in names or ALL), mbit=940))


def question_on(site: Cluster, **more) -> Question:
    return question(SMALL, site, 40, is_exhaustive=False, **more)


def with_slowdowns(site: Cluster, **slowdowns: float) -> Cluster:
    changed = {n: replace(site.devices[n], slowdown=slowdown) for n, slowdown in slowdowns.items()}
    return replace(site, devices={**site.devices, **changed})


def plan_of(*devices: str, root: str | None = None, variant: str = "heads") -> Plan:
    """Return a plan in which the devices stand in this order."""
    pins = {"strategy": "row", "options": {"variant": variant}, "devices": tuple(sorted(devices))}
    plan = decide(question_on(boards(), **pins)).chosen.plan
    return replace(plan, devices=devices, root=root or devices[0], reason="")


def standing(wanted: Question) -> list[Candidate]:
    """Return what stands: what a search finds before it looks at anything else."""
    search = Search(wanted)
    for c in search.candidates():
        if c is not search.standing[-1]:
            break
    return search.standing


def counted(query: Question, most: float) -> tuple[Question, list[int]]:
    """Return a question whose budget is counted in pauses, of which each price takes at least two, and their count."""
    pauses = [0]

    def pause() -> None:
        pauses[0] += 1

    return replace(query, pause=pause, budget=Budget(most, lambda: float(pauses[0]))), pauses


def test_the_first_candidate_is_there_at_once_with_and_without_an_active_plan():
    for active in (None, plan_of(*ALL)):
        wanted, pauses = counted(question_on(boards(), active=active), 0.0)
        first = next(Search(wanted).candidates())
        assert first.price.feasible
        assert first.plan.devices == (active.devices if active else ("pi0",))
        assert pauses[0] <= 4 * 4, "the price of one plan and its memory"


@pytest.mark.parametrize("order", [("pi2", "pi0", "pi3", "pi1"), ("pi3", "pi2", "pi1", "pi0")])
def test_where_the_devices_stay_so_do_their_order_and_their_head(order):
    site = with_slowdowns(boards(), pi0=1.02, pi1=0.97, pi2=1.03)
    plans = [*Search(question_on(site, active=plan_of(*order))).candidates()]
    same = [c.plan for c in plans if set(c.plan.devices) == set(order)]
    assert len({plan.method for plan in same}) > 2
    assert {(plan.devices, plan.root) for plan in same} == {(order, order[0])}


def test_other_devices_stand_by_kind_and_then_by_name_whatever_the_noise():
    def plans(**slowdowns: float) -> set[tuple[tuple[str, ...], str]]:
        site = with_slowdowns(meshed(cluster(device("pc", 3 * SPEED), *(device(n, SPEED) for n in ALL))), **slowdowns)
        pins = {"strategy": "row", "options": {"variant": "kv"}}
        chosen = (c.plan for c in Search(question_on(site, **pins)).candidates())
        return {(plan.devices, plan.root) for plan in chosen if len(plan.devices) == 5}

    expected = {(("pc", *ALL), "pc")}
    assert plans() == plans(pi3=0.98, pi1=1.02) == plans(pi2=0.97) == expected


def test_rows_move_to_where_devices_finish_together_and_half_of_the_way_without_a_byte():
    active = plan_of(*ALL)
    wanted = question_on(with_slowdowns(boards(), pi2=2.0), active=active)
    as_it_is, *moved = [c for c in standing(wanted) if c.plan.devices == ALL]
    assert as_it_is.plan.shares == active.shares
    shares = [c.plan.shares["rows"][2] / sum(c.plan.shares["rows"]) for c in moved]
    assert len(moved) == 2
    assert shares[0] < shares[1] < 0.25
    assert moved[0].price.seconds < moved[1].price.seconds < as_it_is.price.seconds
    for c in moved:
        assert c.plan.ranges == active.ranges
        for name in ALL:
            held = {*resident_weights(SMALL, active, name)}
            assert held == {*resident_weights(SMALL, c.plan, name)}


def test_plans_left_and_devices_left_stand_where_their_weights_are():
    active, three = plan_of(*ALL, variant="kv"), plan_of(*ALL[:3], variant="kv")
    plans = standing(question_on(boards(), active=active, residents=(three,)))
    assert any(c.plan.devices == three.devices and c.plan.shares == three.shares for c in plans)
    slow = with_slowdowns(boards(), pi3=50.0)
    left = {c.plan.devices for c in standing(question_on(slow, active=active))}
    assert ALL[:3] in left, "every device has all weights"


def test_a_budget_ends_a_search_and_more_of_it_finds_no_worse():
    whole, pauses = counted(question_on(boards()), float("inf"))
    best, used = decide(whole).chosen.price.seconds, pauses[0]
    costs = []
    for part in (0.0, 0.2, 0.5):
        some, pauses = counted(question_on(boards()), part * used)
        costs.append(decide(some).chosen.price.seconds)
        assert pauses[0] <= part * used + 60, "the price that was begun, and the whole simulation of the best"
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] <= 1.1 * best


@pytest.mark.parametrize("part", [0.15, pytest.param(0.6, marks=pytest.mark.nightly)])
def test_every_candidate_fits_and_the_others_are_named(part):
    site = boards(*ALL[:3], memory=part * whole_bytes(SMALL, "f32"))
    search = Search(question_on(site, active=None))
    plans = [*search.candidates()]
    for c in plans:
        assert c.price.feasible
        assert all(c.price.needs[d] <= site.devices[d].memory_bytes for d in c.plan.devices)
    assert all(draft.missing for draft in search.oversized)
    assert plans or search.oversized
    if not plans:
        with pytest.raises(PlanError):
            search.decision()


def test_an_active_plan_that_does_not_fit_any_more_is_no_candidate():
    site = boards(memory=0.6 * whole_bytes(SMALL, "f32"))
    active = plan_of(*ALL, variant="kv")
    pins = {"strategy": "row", "options": {"variant": "kv"}}
    assert not [*Search(question_on(site, active=active, **pins)).candidates()]


def test_a_plan_that_the_question_forbids_does_not_stand():
    active = plan_of(*ALL)
    forbidden = ({"strategy": "row", "options": {"variant": "kv"}}, {"devices": ALL[:2]}, {"route": "broker"})
    for pins in forbidden:
        plans = standing(question_on(boards(), active=active, **pins))
        assert all(c.plan.method != active.method or c.plan.devices != ALL for c in plans), pins


def test_larger_sets_are_looked_at_while_they_gain():
    """Few sets of many devices are priced: each further device costs the others frames."""
    site = meshed(cluster(*(device(f"d{i:02}", 0.2) for i in range(32)), mbit=240))
    pins = {"strategy": "row", "options": {"variant": "kv"}, "is_exhaustive": False}
    wanted, pauses = counted(question(SMALL, site, 20, **pins), float("inf"))
    chosen = decide(wanted).chosen
    assert 1 < len(chosen.plan.devices) < 32
    assert pauses[0] < 1200


def test_memory_of_many_devices_with_plenty_is_worked_out_for_the_plan_that_is_chosen():
    """Of other plans a bound is enough; where memory is short, each is worked out."""
    site = meshed(cluster(*(device(f"d{i:02}", SPEED / 10) for i in range(12)), mbit=800))
    wanted = question_on(site, strategy="row", options={"variant": "kv"})
    decision = decide(wanted)
    large = [c for c in decision.ranking if len(c.plan.devices) > THOROUGH]
    chosen, exact = large[0], memory_needs(wanted, large[0].plan, exactly=True)
    assert chosen.plan.devices == decision.chosen.plan.devices
    assert decision.chosen.price.needs == exact.needs
    bound = memory_needs(wanted, chosen.plan).needs
    assert all(exact.needs[d] < n for d, n in bound.items())
    short = {d: replace(p, memory_bytes=1.5 * bound[d]) for d, p in site.devices.items()}
    assert memory_needs(replace(wanted, cluster=replace(site, devices=short)), chosen.plan) == exact
