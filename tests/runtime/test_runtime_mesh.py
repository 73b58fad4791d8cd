"""Exchanges between peers directly: ready when all are joined, lost connections noticed at once, walls gone round."""

from __future__ import annotations

import random
from itertools import permutations

import numpy as np
import pytest
from sites import FAMILIES, TOLERANCE, everyone, request, tensors
from swarm import Swarm, plan_of

from hepti_mqtt import models
from hepti_mqtt.ids import Epoch
from hepti_mqtt.protocol.messages import Endpoint, Peer, Prepare
from hepti_mqtt.runtime.coordinator.requests import Pins
from hepti_mqtt.runtime.worker.session import MeshRoutes

SPEC = FAMILIES["bert-embedding"]
TENSORS = tensors(SPEC)
PLENTY = 1 << 30
ROW = ("row", {"variant": "kv"})
SHAPE, INPUTS = request(SPEC, (9, 4))


def site(route: str | None = "mesh", n: int = 3, **network) -> Swarm:
    devices = {f"d{i}": (1e9 * (i + 1), PLENTY) for i in range(n)}
    return Swarm(SPEC, TENSORS, devices, decider=everyone(ROW), pins=Pins(route=route), **network)


def settle(swarm: Swarm) -> None:
    swarm.run(60, until=lambda: plan_of(swarm) is not None)
    assert plan_of(swarm) is not None, [n.text for n in swarm.notes]


def answer(swarm: Swarm, token: str = "r") -> np.ndarray:
    """Return the one answer to a request."""
    swarm.run(60, until=lambda: token in swarm.answers or token in swarm.errors)
    assert token not in swarm.errors
    ((got, _),) = swarm.answers[token]
    return got


def right() -> np.ndarray:
    return models.reference(SPEC, TENSORS, INPUTS, SHAPE)[1]


def ask(swarm: Swarm, token: str = "r") -> np.ndarray:
    swarm.submit(token, SHAPE, INPUTS)
    return answer(swarm, token)


def test_the_same_bits_by_either_way_and_nothing_of_it_over_the_broker():
    over = {"broker": [], "mesh": []}
    got = {}
    for route, topics in over.items():
        swarm = site(route)
        settle(swarm)
        swarm.lost_filter = lambda topic, target, topics=topics: topics.append(topic) or False
        got[route] = ask(swarm)
        exchanges = [t for t in topics if "/x/" in t]
        assert exchanges
        assert (swarm.direct == len(exchanges)) is (route == "mesh")
        filters = {f for host in swarm.hosts.values() for f in host.filters}
        assert bool(filters) is (route == "broker")
    assert np.array_equal(got["mesh"], got["broker"])
    np.testing.assert_allclose(got["mesh"], right(), atol=TOLERANCE)


def test_tokens_are_of_one_pair_and_one_epoch_and_end_with_it():
    swarm = site()
    settle(swarm)
    first = {(name, *entry): token for name, host in swarm.hosts.items() for entry, token in host.admitted.items()}
    assert len(set(first.values())) == len(first) == 6
    for name, host in swarm.hosts.items():
        for (peer, key), token in host.joins.items():
            assert swarm.hosts[peer].admitted[name, key] == token
    swarm.join("d3", 1e9, PLENTY)
    swarm.run(30, until=lambda: len(plan_of(swarm).devices) == 4)
    swarm.run(5)
    now = {token for host in swarm.hosts.values() for token in host.admitted.values()}
    assert len(now) == 12
    assert not now & set(first.values())


def test_a_pair_that_cannot_connect_goes_over_the_broker_and_the_others_do_not():
    swarm = site()
    swarm.walls = {("d0", "d2"), ("d2", "d0")}
    settle(swarm)
    assert set(plan_of(swarm).relayed) == swarm.walls
    assert sum(note.kind == "relayed" for note in swarm.notes) == 2
    np.testing.assert_allclose(ask(swarm), right(), atol=TOLERANCE)
    assert swarm.direct
    swarm.join("d3", 1e9, PLENTY)
    swarm.run(30, until=lambda: len(plan_of(swarm).devices) == 4)
    assert set(plan_of(swarm).relayed) == swarm.walls, "what could not connect is not tried again"


def test_where_nobody_can_connect_the_broker_carries_all():
    swarm = site()
    swarm.walls = set(permutations(swarm.hosts, 2))
    settle(swarm)
    assert set(plan_of(swarm).relayed) == swarm.walls
    np.testing.assert_allclose(ask(swarm), right(), atol=TOLERANCE)
    assert not swarm.direct
    assert sum(step.after == "preparing" for step in swarm.planner.stories()[0].last(1000)) == 2


@pytest.mark.parametrize("moment", [pytest.param(m, marks=[] if m % 3 == 0 else pytest.mark.wide) for m in range(24)])
def test_a_connection_that_is_cut_at_any_moment_costs_no_answer_and_no_waiting(moment):
    """Its requests are issued again when it is lost, not when they are overdue."""
    swarm = site(jitter_s=0.002, seed=moment)
    settle(swarm)
    source, target = random.Random(moment).sample(plan_of(swarm).devices, 2)
    seen = [0]

    def count(topic: str, _target: str) -> bool:
        seen[0] += 1
        if seen[0] == moment:
            swarm.cut(source, target)
        return False

    swarm.lost_filter = count
    np.testing.assert_allclose(ask(swarm), right(), atol=TOLERANCE)
    assert not any(note.kind == "overdue" for note in swarm.notes)


def test_a_pair_that_does_not_come_back_is_planned_round():
    swarm = site()
    settle(swarm)
    first = plan_of(swarm)
    swarm.walls = {("d0", "d1")}
    swarm.submit("r", SHAPE, INPUTS)
    swarm.run(0.005)
    swarm.cut("d0", "d1")
    np.testing.assert_allclose(answer(swarm), right(), atol=TOLERANCE)
    assert plan_of(swarm).epoch > first.epoch
    assert plan_of(swarm).relayed == (("d0", "d1"),)
    assert not any(note.kind == "overdue" for note in swarm.notes)


def test_a_peer_that_is_only_sent_to_concerns_the_epochs_under_which_it_reads():
    routes, first, second = MeshRoutes(), ("m", Epoch(1, 1)), ("m", Epoch(1, 2))
    place = Endpoint("10.0.0.2", 7)
    before, behind = Peer("d2", place, "out", ""), Peer("d1", place, "", "in")  # as in a ring: d1 is sent to, d2 heard
    for key in (first, second):
        routes.admit(key, Prepare(1, {}, {}, bytes(32), 1, peers=(behind, before)))
    routes.join(first, (before,), 0.0)
    assert routes.sends_to("d1") == [first, second]
    assert routes.sends_to("d2") == []
    assert routes.part(second)
    assert routes.sends_to("d1") == [first]
    assert routes.part(second) == []
