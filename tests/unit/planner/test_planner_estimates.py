"""What runs teach, what is tried beside the plan that serves, when plans drift, and whether one stays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from hepti_mqtt.checkpoint import spec_of_kind
from hepti_mqtt.config import settings
from hepti_mqtt.config.sites import load_site
from hepti_mqtt.cost.profiles import Cluster
from hepti_mqtt.cost.simulator import TopicNames
from hepti_mqtt.ids import PlanVersion
from hepti_mqtt.models import representative_shape
from hepti_mqtt.plan import Plan
from hepti_mqtt.planner import (
    KNOWN,
    Candidate,
    Corrections,
    Decision,
    MethodEstimates,
    Question,
    decide,
    fits_beside,
    next_trial,
    ranked_with_previous,
    revalidate,
    with_exploration,
)
from hepti_mqtt.planner.decisions import LOADS_S
from hepti_mqtt.planner.estimates import ENOUGH, EXPLORATION_BONUS, strategy_key

SPLIT = Plan("m", PlanVersion(1, 1), "row", ("a", "b"), "a", {"attention": "kv"}, predicted_s=0.2, predicted_tokens=100)


OTHER = replace(SPLIT, strategy="column", options={})


SINGLE = replace(SPLIT, strategy="single", devices=("a",), options={})


def after(*seconds, plan=SPLIT, tokens=100, at=0.0):
    learned = MethodEstimates()
    for s in seconds:
        learned.record_run(plan, tokens, s, at)
    return learned


def side_by_side(*groups, **options):
    """Return replicas of one device each, or of several that a split divides."""
    inside = [replace(SPLIT, devices=g) if len(g) > 1 else replace(SINGLE, devices=g, root=g[0]) for g in groups]
    devices = tuple(device for group in groups for device in group)
    return replace(SPLIT, strategy="replicas", options=options, devices=devices, replicas=tuple(inside))


def test_a_way_has_its_turn_until_it_has_run():
    hopeful = replace(after().corrections(0.0), exploration_bonus=0.9)
    assert hopeful.bonus_for(SINGLE) == 0.9
    learned = after(0.2).corrections(0.0)
    assert replace(learned, exploration_bonus=0.9).bonus_for(SPLIT) == 1.0
    assert replace(learned, exploration_bonus=0.9).bonus_for(OTHER) == 0.9
    assert learned.bonus_for(OTHER) == 1.0, "only where a search is for trying"


def test_the_first_plan_of_several_devices_may_promise_twice_as_much():
    alone = replace(after(*[0.2] * ENOUGH, plan=SINGLE).corrections(0.0), exploration_bonus=0.9)
    assert alone.bonus_for(SPLIT) == pytest.approx(0.81), "no runs have told what exchanges take"
    assert alone.bonus_for(replace(SINGLE, wire="f16")) == 0.9
    assert alone.bonus_for(side_by_side(("a",), ("b",))) == 0.9, "replicas exchange nothing"


SHALLOW = replace(spec_of_kind("bert-base"), layers=2)


SITE = load_site(settings.find_bundled_config("sites", Path("four-pi4")))


QUESTION = Question(TopicNames("home", "m"), SHALLOW, SITE, representative_shape(SHALLOW, 128), PlanVersion(1, 1))


@pytest.fixture(scope="module")
def compared_last() -> Decision:
    found = decide(QUESTION)
    assert len(found.ranking) > 3
    return found


def taking(c: Candidate, seconds: float) -> Candidate:
    return replace(c, price=replace(c.price, seconds=seconds))


def between(compared_last: Decision, other_s: float) -> Decision:
    """Return a decision in which the chosen plan takes a second and the next one another time, and nothing is near."""
    first, second, *others = compared_last.ranking
    ranking = (taking(first, 1.0), taking(second, other_s), *(taking(c, 9.0) for c in others))
    return replace(compared_last, chosen=ranking[0], ranking=ranking)


@pytest.mark.parametrize(
    ("other_s", "runs", "other", "tried"),
    [
        (0.99 * KNOWN / EXPLORATION_BONUS, 1.0, None, True),
        (1.01 * KNOWN / EXPLORATION_BONUS, 1.0, None, False),
        (1.01 * KNOWN / EXPLORATION_BONUS, 1.1, None, True),  # ours takes longer than it was to take
        (0.99 * KNOWN, 1.0, 1.0, True),  # it has run: no hope
        (1.01 * KNOWN, 1.0, 1.0, False),
        (1.2, 1.0, 0.7, True),
        (0.5, None, None, False),  # nobody knows what ours takes
    ],
)
def test_the_next_way_tried_where_it_may_be_faster(
    compared_last: Decision, other_s: float, runs: float | None, other: float | None, tried: bool
) -> None:
    first, second, *_ = compared_last.ranking
    told = {strategy_key(c.plan): factor for c, factor in ((first, runs), (second, other)) if factor is not None}
    # Where ours is known and alone, another split is taken to be as far off; one that has run is not.
    if runs == 1.1:
        told |= {strategy_key(replace(second.plan, strategy="block")): 1 / 1.1}
    found = next_trial(between(compared_last, other_s), Corrections(told))
    assert (found is not None) is tried
    if found is not None:
        assert found.name == second.name
        assert next_trial(between(compared_last, other_s), Corrections(told), {strategy_key(found.plan)}) is None


def test_the_first_plan_of_several_devices_tried_from_further_behind(compared_last: Decision) -> None:
    alone = next(c for c in compared_last.ranking if len(c.plan.devices) == 1)
    split = next(c for c in compared_last.ranking if len(c.plan.devices) > 1)
    learned = Corrections({strategy_key(alone.plan): 1.0})
    for seconds, tried in [(0.99 * KNOWN / EXPLORATION_BONUS**2, True), (1.01 * KNOWN / EXPLORATION_BONUS**2, False)]:
        ranking = (taking(alone, 1.0), taking(split, seconds))
        found = next_trial(replace(compared_last, chosen=ranking[0], ranking=ranking), learned)
        assert (found is not None) is tried


def test_nothing_tried_for_other_objectives(compared_last: Decision) -> None:
    found = between(compared_last, 0.9)
    throughput = replace(found.chosen, price=replace(found.chosen.price, objective="throughput"))
    known = Corrections({strategy_key(found.chosen.plan): 1.0})
    assert next_trial(found, known) is not None
    assert next_trial(replace(found, chosen=throughput), known) is None


def test_what_fits_beside_has_the_memory_of_both_and_loads_soon(compared_last: Decision) -> None:
    other = next(
        c
        for c in compared_last.ranking
        if c.plan.strategy != compared_last.chosen.plan.strategy and len(c.plan.devices) > 1
    )
    assert fits_beside(SHALLOW, compared_last, other)
    tight = replace(other, price=replace(other.price, memory_bytes=other.price.needs))
    assert not fits_beside(SHALLOW, compared_last, tight)
    same = replace(
        compared_last.chosen,
        price=replace(compared_last.chosen.price, memory_bytes={d: 2 * n for d, n in other.price.memory_bytes.items()}),
    )
    assert fits_beside(SHALLOW, compared_last, same), "its weights are there already"
    slow = {n: replace(link, down_bytes_per_s=1e6 / LOADS_S) for n, link in SITE.links.items()}
    assert not fits_beside(SHALLOW, replace(compared_last, cluster=replace(SITE, links=slow)), other)


def test_after_a_trial_the_ways_before_it_are_ranked_beside_it_by_the_prices_of_now(compared_last: Decision) -> None:
    slower = replace(SITE, devices={n: replace(d, slowdown=1.5 * d.slowdown) for n, d in SITE.devices.items()})
    tried = compared_last.ranking[1].plan
    asked = replace(
        QUESTION, cluster=slower, learned=with_exploration(Corrections({strategy_key(compared_last.chosen.plan): 1.0}))
    )
    found = decide(replace(asked, strategy=tried.strategy, options=tried.options, devices=tried.devices))
    assert {c.plan.strategy for c in found.ranking} == {tried.strategy}
    assert found.chosen.price.cost[0] == pytest.approx(EXPLORATION_BONUS * found.chosen.price.expected_s)
    ranked = ranked_with_previous(asked, found, compared_last)
    assert ranked.chosen == ranked.ranking[0] == found.chosen
    names = [c.name for c in ranked.ranking]
    assert compared_last.chosen.name in names
    assert len(set(names)) == len(names)
    now = next(c for c in ranked.ranking if c.name == compared_last.chosen.name)
    assert now.price.seconds > 1.2 * compared_last.chosen.price.seconds


SPEC = replace(spec_of_kind("bert-base"), layers=4)


def question(cluster: Cluster = SITE, tokens: int = 128, **more) -> Question:
    return Question(
        TopicNames("home", "m"),
        SPEC,
        cluster,
        representative_shape(SPEC, tokens),
        PlanVersion(1, 1),
        is_exhaustive=False,
        **more,
    )


@pytest.fixture(scope="module")
def last() -> Decision:
    return decide(question())


def slower(by: Mapping[str, float], cluster: Cluster = SITE) -> Cluster:
    devices = {n: replace(d, slowdown=d.slowdown * by.get(n, 1.0)) for n, d in cluster.devices.items()}
    return replace(cluster, devices=devices)


def rated(by: float, *names: str) -> Cluster:
    links = {
        n: replace(link, up_bytes_per_s=link.up_bytes_per_s * by, down_bytes_per_s=link.down_bytes_per_s * by)
        if n in names
        else link
        for n, link in SITE.links.items()
    }
    return replace(SITE, links=links)


def test_a_plan_that_costs_about_what_it_did_stays_with_the_prices_of_now(last) -> None:
    drifted = question(slower(dict.fromkeys(SITE.devices, 1.05)))
    kept = revalidate(drifted, last)
    assert kept is not None
    assert kept.chosen.plan.shares == last.chosen.plan.shares
    assert kept.chosen.plan.devices == last.chosen.plan.devices
    assert kept.cluster is drifted.cluster
    assert last.chosen.price.seconds < kept.chosen.price.seconds == kept.chosen.plan.predicted_s
    assert kept.ranking[0] is kept.chosen
    assert kept.digest == last.digest, "devices hold the same Programs"
    assert f"{kept.chosen.price.seconds * 1e3:.1f} ms" in kept.chosen.plan.reason
    played = kept.chosen.price.simulated
    assert [p.shape for p in played] == [drifted.shape], "what requests will cost is known at once"


def reasons() -> Iterator[tuple[str, Question]]:
    fewer = replace(SITE, devices={n: SITE.devices[n] for n in list(SITE.devices)[:3]})
    yield "a device has become slow", question(slower({"pi2": 2.0}))
    yield "all links are slow", question(rated(0.1, *SITE.links))
    yield "a device has become fast: others' shares are too large", question(slower({"pi2": 0.4}))
    yield "a device has left", question(fewer)
    yield "requests have another length", question(tokens=64)
    yield "another objective", question(objective="memory")


@pytest.mark.parametrize("asked", [q for _, q in reasons()], ids=[why for why, _ in reasons()])
def test_a_search_is_needed_where_more_has_changed(asked, last) -> None:
    assert revalidate(asked, last) is None


def test_a_search_is_needed_where_links_that_were_too_slow_for_any_division_are_fast() -> None:
    alone = decide(question(rated(0.01, *SITE.links)))
    assert len(alone.chosen.plan.devices) == 1
    assert revalidate(question(rated(0.01, *SITE.links)), alone) is not None
    assert revalidate(question(), alone) is None
    its_own = rated(0.01, *(n for n in SITE.links if n not in alone.chosen.plan.devices))
    assert revalidate(question(its_own), alone) is not None, "its peers' links are as slow as they were"


def test_a_search_is_needed_where_runs_have_taught_that_the_plan_is_slow(last) -> None:
    assert revalidate(question(learned=Corrections({strategy_key(last.chosen.plan): 1.5})), last) is None


def test_a_search_is_needed_where_a_device_that_was_left_out_has_become_faster() -> None:
    weak = slower({"pi4": 40.0})
    first = decide(question(weak))
    assert "pi4" not in first.chosen.plan.devices
    assert revalidate(question(weak), first) is not None
    assert revalidate(question(slower({"pi4": 1 / 8}, weak)), first) is None


def test_a_plan_that_needs_more_memory_than_there_is_now_is_searched_for_again(last) -> None:
    needs = last.chosen.price.needs
    devices = {n: replace(d, memory_bytes=needs[n] - 1.0) for n, d in SITE.devices.items()}
    assert revalidate(question(replace(SITE, devices=devices)), last) is None


@pytest.mark.parametrize(
    ("names", "by"), [(("pi1",), 0.8), (("pi2",), 1.4), (("pi1", "pi3"), 1.2), (tuple(SITE.devices), 0.9)]
)
def test_what_stays_is_hardly_slower_than_what_a_search_finds(names, by, last) -> None:
    drifted = question(slower(dict.fromkeys(names, by)))
    kept = revalidate(drifted, last)
    if kept is not None:
        assert kept.chosen.price.seconds < 1.1 * decide(drifted).chosen.price.seconds
