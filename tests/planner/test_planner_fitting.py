"""What the search need not work out: devices that differ in name alone, what is too slow, what memory forbids."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sites import EVERY_FAMILY, FAMILIES
from test_planner_search import cluster, device, four_pis, question

from hepti_mqtt.cost.profiles import Link, PeerLink
from hepti_mqtt.models import largest_shape
from hepti_mqtt.planner import decide
from hepti_mqtt.planner.candidates import subsets
from hepti_mqtt.planner.search import Guess, _initial, _queue, _whole_bytes, fitting, guessed

SPEC = FAMILIES["bert-embedding"]
NAMES = ("pi0", "pi1", "pi2", "pi3")


def tried(site, relayed=frozenset()):
    return list(subsets(question(SPEC, site, relayed=relayed), NAMES, pinned=False))


def test_of_devices_that_differ_in_name_alone_one_subset_of_each_size_is_tried():
    assert tried(four_pis(100)) == [NAMES[:n] for n in range(1, 5)]
    assert list(subsets(question(SPEC, four_pis(100)), NAMES, pinned=True)) == [NAMES]


@pytest.mark.parametrize(
    "other",
    [
        lambda site: replace(site, devices=site.devices | {"pi3": device("pi3", 24.6, memory=1e9)}),
        lambda site: replace(site, links={**site.links, "pi3": Link(1e-3, 1e6, 1e6)}),
        lambda site: replace(site, endpoints=frozenset(NAMES[:3])),
        lambda site: replace(site, shared=frozenset(NAMES[3:])),
        lambda site: replace(site, peer_links={("pi3", name): PeerLink(1e-3) for name in NAMES[:3]}),
    ],
    ids=["memory", "link", "endpoint", "shared", "peers"],
)
def test_a_device_that_differs_is_tried_with_and_without_the_others(other):
    alike = [NAMES[:n] for n in range(4)]
    with_it = [(*names, "pi3") for names in alike]
    assert sorted(tried(other(four_pis(100)))) == sorted([*alike[1:], *with_it])


def test_two_that_cannot_connect_are_unlike_the_others():
    apart = frozenset({("pi0", "pi1"), ("pi1", "pi0")})
    assert [s for s in tried(four_pis(100), apart) if len(s) == 2] == [("pi0", "pi1"), ("pi0", "pi2"), ("pi2", "pi3")]


def slow_links(site, *names):
    """Return a site on which some devices have links that are hundreds of times slower."""
    return replace(site, links=site.links | dict.fromkeys(names, Link(2.5e-3, 2.5e5, 2.5e5)))


def test_devices_with_good_links_are_tried_without_faster_ones_with_bad_links():
    names = ("fast0", "fast1", *NAMES)
    pis = (device(name, 0.02 - 1e-4 * i) for i, name in enumerate(NAMES))
    site = slow_links(cluster(device("fast0", 0.03), device("fast1", 0.029), *pis), "fast0", "fast1")
    asked = question(SPEC, site, tokens=20, strategy="row", options={"variant": "kv"})
    sets = list(subsets(asked, names, pinned=False))
    assert {NAMES[:2], NAMES[:3], NAMES} <= set(sets)
    assert set(decide(asked).chosen.plan.devices) == set(NAMES)


@pytest.mark.parametrize(("count", "most"), [(5, 16), (8, 32), (16, 33), (64, 89)])
def test_of_many_devices_few_sets_are_tried(count, most):
    """The price of a set grows with the square of its size: beyond a few devices not every size is tried."""
    names = tuple(f"d{i}" for i in range(count))
    site = cluster(*(device(name, 20 - 0.1 * i) for i, name in enumerate(names)))
    for known in (site, slow_links(site, *names[::3])):
        sets = list(subsets(question(SPEC, known), names, pinned=False))
        assert len(set(sets)) == len(sets) <= most
        assert {*((name,) for name in names), names[:2], names[:3], names[:4], names} <= set(sets)
        assert all(some == tuple(sorted(some, key=names.index)) for some in sets), "the fastest first"
        large = [some for some in sets if len(some) > 8]
        assert len(large) <= 2 * len({len(some) for some in large})


@pytest.mark.parametrize("mbit", [20, 940])
@pytest.mark.parametrize("family", ["bert-embedding", "tiny-convnet"])
def test_no_plan_takes_less_than_its_bound(family, mbit):
    site = cluster(device("a", 40), device("b", 20), device("c", 4), mbit=mbit)
    spec = EVERY_FAMILY[family]
    asked = question(spec, site, tokens=largest_shape(spec).tokens)
    steps, _ = _queue(asked, list(_initial(asked)))
    bounds = [(least, plan) for least, _, plan, _ in steps if isinstance(plan, Guess)]
    assert len(bounds) > 10
    assert all((0, 0) < least <= guessed(asked, plan).price.cost for least, plan in bounds)


def test_what_has_no_room_for_all_weights_together_is_told_once_for_each_method():
    asked = question(SPEC, four_pis(100, memory=0.2 * _whole_bytes(SPEC, "f32")))
    guesses = list(_initial(asked))
    found, short, _ = fitting(asked, guesses)
    assert not found
    assert sorted(draft.name for draft in short) == sorted({guess.name for guess in guesses})
    assert all(len(draft.plan.devices) == 4 or draft.name == "single" for draft in short), "what lacks the least"


def test_shares_are_not_moved_where_a_device_has_no_room_for_the_least():
    """`row` holds all weights on every device, whatever its share."""
    asked = question(SPEC, four_pis(100, memory=0.9 * _whole_bytes(SPEC, "f32")), strategy="row", devices=NAMES)
    guesses = list(_initial(asked))
    found, short, _ = fitting(asked, guesses)
    assert not found
    assert {draft.weights for draft in short} == {guess.weights for guess in guesses}
