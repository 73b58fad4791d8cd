"""A plan whose measurements have drifted: a few prices say whether it stays or another one is searched for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from hepti_mqtt.checkpoint import spec_of_kind
from hepti_mqtt.config import settings
from hepti_mqtt.config.sites import load_site
from hepti_mqtt.cost.profiles import Cluster
from hepti_mqtt.cost.simulator import Naming
from hepti_mqtt.ids import Epoch
from hepti_mqtt.models import shape_for
from hepti_mqtt.planner import Decision, Learned, Question, decide, still_best
from hepti_mqtt.planner import decisions as module
from hepti_mqtt.planner.estimates import way

SPEC = replace(spec_of_kind("bert-base"), layers=4)
SITE = load_site(settings.find_bundled_config("sites", Path("four-pi4")))


def question(cluster: Cluster = SITE, tokens: int = 128, **more) -> Question:
    return Question(Naming("home", "m"), SPEC, cluster, shape_for(SPEC, tokens), Epoch(1, 1), compare=False, **more)


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
    kept = still_best(drifted, last)
    assert kept is not None
    assert kept.chosen.plan.weights == last.chosen.plan.weights
    assert kept.chosen.plan.devices == last.chosen.plan.devices
    assert kept.cluster is drifted.cluster
    assert last.chosen.price.seconds < kept.chosen.price.seconds == kept.chosen.plan.predicted_s
    assert kept.ranking[0] is kept.chosen
    assert kept.digest == last.digest, "devices hold the same Programs"
    assert f"{kept.chosen.price.seconds * 1e3:.1f} ms" in kept.chosen.plan.reason
    played = kept.chosen.price.played
    assert [p.shape for p in played] == [drifted.shape], "what requests will cost is known at once"


def test_it_takes_few_prices(last, monkeypatch) -> None:
    seen = []
    real = module.price

    def counted(*args, **kwargs):
        seen.append(args[1].method)
        return real(*args, **kwargs)

    monkeypatch.setattr(module, "price", counted)
    assert still_best(question(), last) is not None
    assert 2 <= len(seen) <= 2 + module.OTHERS


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
    assert still_best(asked, last) is None


def test_a_search_is_needed_where_links_that_were_too_slow_for_any_division_are_fast() -> None:
    alone = decide(question(rated(0.01, *SITE.links)))
    assert len(alone.chosen.plan.devices) == 1
    assert still_best(question(rated(0.01, *SITE.links)), alone) is not None
    assert still_best(question(), alone) is None
    its_own = rated(0.01, *(n for n in SITE.links if n not in alone.chosen.plan.devices))
    assert still_best(question(its_own), alone) is not None, "its peers' links are as slow as they were"


def test_a_search_is_needed_where_runs_have_taught_that_the_plan_is_slow(last) -> None:
    assert still_best(question(learned=Learned({way(last.chosen.plan): 1.5})), last) is None


def test_a_search_is_needed_where_a_device_that_was_left_out_has_become_faster() -> None:
    weak = slower({"pi4": 40.0})
    first = decide(question(weak))
    assert "pi4" not in first.chosen.plan.devices
    assert still_best(question(weak), first) is not None
    assert still_best(question(slower({"pi4": 1 / 8}, weak)), first) is None


def test_a_plan_that_needs_more_memory_than_there_is_now_is_searched_for_again(last) -> None:
    needs = last.chosen.price.needs
    devices = {n: replace(d, memory_bytes=needs[n] - 1.0) for n, d in SITE.devices.items()}
    assert still_best(question(replace(SITE, devices=devices)), last) is None


@pytest.mark.parametrize("names", [("pi1",), ("pi2",), ("pi1", "pi3"), tuple(SITE.devices)])
@pytest.mark.parametrize("by", [0.8, 0.9, 1.2, 1.4])
def test_what_stays_is_hardly_slower_than_what_a_search_finds(names, by, last) -> None:
    drifted = question(slower(dict.fromkeys(names, by)))
    kept = still_best(drifted, last)
    if kept is not None:
        assert kept.chosen.price.seconds < 1.1 * decide(drifted).chosen.price.seconds
