"""A site with faults: requests end once, with the right answer or an error that names the cause."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from sites import FAMILIES, METHODS, TOLERANCE, always, everyone, plan, request, tensors
from swarm import MODEL, Swarm, plan_of, profile_curve

from hepti_mqtt import models
from hepti_mqtt.cost.profiles import Cluster, DeviceProfile, Link
from hepti_mqtt.errors import DeadlineError, OverloadedError, PlanError, RemoteError
from hepti_mqtt.planner import price
from hepti_mqtt.protocol import frames
from hepti_mqtt.runtime.coordinator import interface, scheduler
from hepti_mqtt.runtime.coordinator.fleet import RETURN_S
from hepti_mqtt.runtime.coordinator.requests import Pins
from hepti_mqtt.runtime.worker import session as worker_session
from hepti_mqtt.runtime.worker.runs import EARLY_BYTES
from hepti_mqtt.strategies import STRATEGIES

SPEC = FAMILIES["bert-embedding"]
TENSORS = tensors(SPEC)
PLENTY = 1 << 30
ROOMY = DeviceProfile("any", profile_curve(1e9), 1e9, 1e9, memory_bytes=PLENTY)
SPLIT = [m for m in METHODS if STRATEGIES[m[0]].most_devices is None]
IDS = ["-".join([m[0], *m[1].values()]) for m in SPLIT]
# Every moment with some of the methods, and every method at a third of the moments; all of both are wide. Half of them
# go over mesh.
LOSSES = [
    pytest.param(
        method,
        moment,
        ("broker", "mesh")[(i // 3 + j // 3) % 2],
        id=f"{name}-{moment}",
        marks=[] if (i + j) % 3 == 0 else pytest.mark.wide,
    )
    for (i, method), name in zip(enumerate(SPLIT), IDS, strict=True)
    for j, moment in enumerate(range(0, 60, 7))
]


def expected(shape, inputs):
    return models.reference(SPEC, TENSORS, inputs, shape)[1]


def site(*, method=("row", {"variant": "kv"}), n: int = 3, **network) -> Swarm:
    devices = {f"d{i}": (1e9 * (i + 1), PLENTY) for i in range(n)}
    return Swarm(SPEC, TENSORS, devices, decider=everyone(method), **network)


def settle(swarm: Swarm) -> None:
    swarm.run(30, until=lambda: plan_of(swarm) is not None)
    assert plan_of(swarm) is not None, [n.text for n in swarm.notes]


@pytest.mark.parametrize(("method", "moment", "route"), LOSSES)
def test_a_device_lost_at_any_moment_costs_no_answer(method, moment, route):
    """The plug is pulled after `moment` packets of the request; the answer is right and comes once."""
    swarm = site(method=method, jitter_s=0.002, seed=moment, pins=Pins(route=route))
    settle(swarm)
    shape, inputs = request(SPEC, (9, 4))
    victim = random.Random(moment).choice(plan_of(swarm).devices)
    seen = [0]

    def count(topic: str, target: str) -> bool:
        seen[0] += 1
        if seen[0] == moment and swarm.hosts[victim].alive:
            swarm.kill(victim)
        return not swarm.hosts[victim].alive and target == victim

    swarm.lost_filter = count
    swarm.submit("r", shape, inputs)
    swarm.run(60, until=lambda: "r" in swarm.answers or "r" in swarm.errors)
    swarm.run(3)
    assert "r" not in swarm.errors
    assert len(swarm.answers["r"]) == 1
    np.testing.assert_allclose(swarm.answers["r"][0][0], expected(shape, inputs), atol=TOLERANCE)


def test_a_lost_exchange_is_noticed_and_the_request_issued_again():
    swarm = site()
    settle(swarm)
    dropped = []

    def drop_once(topic: str, target: str) -> bool:
        if "/x/" in topic and not dropped:
            dropped.append(topic)
            return True
        return False

    swarm.lost_filter = drop_once
    shape, inputs = request(SPEC, (12,))
    swarm.submit("r", shape, inputs)
    swarm.run(60, until=lambda: "r" in swarm.answers)
    assert dropped
    assert any(n.kind == "overdue" for n in swarm.notes)
    np.testing.assert_allclose(swarm.answers["r"][0][0], expected(shape, inputs), atol=TOLERANCE)


def test_a_network_that_loses_every_exchange_ends_in_an_error():
    swarm = site()
    settle(swarm)
    swarm.lost_filter = lambda topic, target: "/x/" in topic
    shape, inputs = request(SPEC, (12,))
    swarm.submit("r", shape, inputs)
    swarm.run(120, until=lambda: "r" in swarm.errors)
    assert isinstance(swarm.errors["r"][0], RemoteError)
    assert "r" not in swarm.answers
    assert not swarm.planner.slots.own(MODEL).runs


@pytest.mark.parametrize("room", ["for both", "for one"])
def test_pins_hold_for_their_request_alone_whether_or_not_both_plans_fit(room):
    """Budgets as the devices keep them; the planner's own plan stays, or makes room and comes back by itself."""
    ask = site(n=2).planner._question(site(n=2).planner.slots.own(MODEL), 0.0)
    ask = replace(ask, cluster=Cluster(dict.fromkeys(("d0", "d1"), ROOMY), {d: Link() for d in ("d0", "d1")}))
    need = max(price(ask, plan(SPEC, ("row", {"variant": "kv"}), (1.0, 1.0))).needs.values())
    memory = int(need * (2.5 if room == "for both" else 1.02))
    swarm = Swarm(
        SPEC, TENSORS, {"d0": (1e9, memory), "d1": (1e9, memory)}, decider=everyone(("row", {"variant": "kv"}))
    )
    settle(swarm)
    first = plan_of(swarm).epoch
    shape, inputs = request(SPEC, (12,))
    narrow = Pins(storage="f16")
    for i in range(6):
        swarm.submit(i, shape, inputs, pins=narrow if i % 2 else None)
    swarm.run(60, until=lambda: len(swarm.answers) == 6)
    assert not swarm.errors
    want = expected(shape, inputs)
    for i in range(6):
        ((got, (stats,)),) = swarm.answers[i]
        assert stats.plan.storage == ("f16" if i % 2 else "f32")
        np.testing.assert_allclose(got, want, atol=5e-3 if i % 2 else TOLERANCE)
    swarm.run(60, until=lambda: plan_of(swarm) is not None)
    assert (plan_of(swarm).epoch == first) is (room == "for both")
    swarm.submit("last", shape, inputs)
    swarm.run(60, until=lambda: "last" in swarm.answers)
    assert np.array_equal(swarm.answers["last"][0][0], swarm.answers[0][0][0]), "the same bits as before"


def test_the_last_device_leaves_and_one_comes_back():
    swarm = site(n=1)
    settle(swarm)
    swarm.kill("d0")
    swarm.run(5)
    assert plan_of(swarm) is None
    shape, inputs = request(SPEC, (6,))
    swarm.submit("early", shape, inputs)
    swarm.run(RETURN_S)
    assert isinstance(swarm.errors["early"][0], PlanError)
    swarm.join("d0", 1e9, PLENTY)
    settle(swarm)
    swarm.submit("r", shape, inputs)
    swarm.run(10, until=lambda: "r" in swarm.answers)
    np.testing.assert_allclose(swarm.answers["r"][0][0], expected(shape, inputs), atol=TOLERANCE)


def test_a_device_that_restarts_at_once_is_a_new_device():
    swarm = site(method=("block", {}))
    settle(swarm)
    before = plan_of(swarm).epoch
    swarm.join("d1", 2e9, PLENTY)  # boot counter grows; the old will comes late
    swarm.run(10, until=lambda: plan_of(swarm) is not None and plan_of(swarm).epoch > before)
    shape, inputs = request(SPEC, (6,))
    swarm.submit("r", shape, inputs)
    swarm.run(10, until=lambda: "r" in swarm.answers)
    np.testing.assert_allclose(swarm.answers["r"][0][0], expected(shape, inputs), atol=TOLERANCE)


def test_a_joining_device_is_used_without_losing_a_request():
    swarm = site(n=2, jitter_s=0.001)
    settle(swarm)
    shape, inputs = request(SPEC, (12,))
    for i in range(40):
        swarm.after(i * 0.05, lambda i=i: swarm.submit(i, shape, inputs))
    swarm.after(0.3, lambda: swarm.join("d9", 9e9, PLENTY))
    swarm.run(30, until=lambda: len(swarm.answers) == 40)
    assert not swarm.errors
    assert all(len(a) == 1 for a in swarm.answers.values())
    assert "d9" in plan_of(swarm).devices
    swarm.run(5)
    assert all(len(h.session.epochs) == 1 for n, h in swarm.hosts.items() if n in plan_of(swarm).devices)


def test_several_requests_run_at_once_and_all_answers_are_right():
    swarm = site(method=("block", {}), jitter_s=0.01, duplicates=0.3)
    settle(swarm)
    wanted = {}
    for i in range(20):
        shape, inputs = request(SPEC, (1 + i % 7, 3), seed=i)
        wanted[i] = expected(shape, inputs)
        swarm.submit(i, shape, inputs)
    swarm.run(60, until=lambda: len(swarm.answers) == 20)
    for i, want in wanted.items():
        assert len(swarm.answers[i]) == 1
        np.testing.assert_allclose(swarm.answers[i][0][0], want, atol=TOLERANCE)


def test_an_old_and_a_new_plan_that_do_not_fit_together_are_swapped():
    """Budgets for one plan only: the old one is given up before the new one is loaded."""
    first, second = plan(SPEC, ("block", {}), (1.0, 3.0)), plan(SPEC, ("block", {}), (3.0, 1.0))
    ask = site(n=2).planner._question(site(n=2).planner.slots.own(MODEL), 0.0)
    ask = replace(ask, cluster=Cluster(dict.fromkeys(first.devices, ROOMY), {d: Link() for d in first.devices}))
    memory = int(1.02 * max(need for p in (first, second) for need in price(ask, p).needs.values()))
    swarm = Swarm(SPEC, TENSORS, {"d0": (1e9, memory), "d1": (1e9, memory)}, decider=always(first))
    settle(swarm)
    swarm.decider = always(second)
    swarm.tell_planner(interface.Pin(MODEL, Pins()))
    before = plan_of(swarm).epoch
    shape, inputs = request(SPEC, (12,))
    swarm.submit("r", shape, inputs)
    swarm.run(20, until=lambda: plan_of(swarm) is not None and plan_of(swarm).epoch > before)
    assert any(n.kind == "refused" for n in swarm.notes)
    swarm.submit("s", shape, inputs)
    swarm.run(20, until=lambda: {"r", "s"} <= set(swarm.answers))
    for token in ("r", "s"):
        np.testing.assert_allclose(swarm.answers[token][0][0], expected(shape, inputs), atol=TOLERANCE)


def test_a_full_queue_says_overloaded():
    swarm = site(n=1)
    settle(swarm)
    swarm.lost_filter = lambda topic, target: "/work/" in topic
    shape, inputs = request(SPEC, (2,))
    for i in range(scheduler.QUEUE + 10):
        swarm.submit(i, shape, inputs)
    refused = [e for errors in swarm.errors.values() for e in errors]
    assert refused
    assert all(isinstance(e, OverloadedError) for e in refused)


def test_a_deadline_that_passes_ends_the_request_and_frees_the_devices():
    swarm = site()
    settle(swarm)
    swarm.lost_filter = lambda topic, target: "/x/" in topic
    shape, inputs = request(SPEC, (8,))
    swarm.submit("r", shape, inputs, deadline_s=swarm.now + 1)
    swarm.run(5)
    assert isinstance(swarm.errors["r"][0], DeadlineError)
    assert all(h.session.runs.idle for h in swarm.hosts.values())


def test_the_same_request_twice_is_computed_once():
    swarm = site(n=2)
    settle(swarm)
    shape, inputs = request(SPEC, (8,))
    swarm.submit("r", shape, inputs)
    swarm.submit("r", shape, inputs)
    swarm.run(10)
    assert len(swarm.answers["r"]) == 1


def test_frames_of_dead_epochs_duplicates_and_lies_change_nothing():
    swarm = site(n=2)
    settle(swarm)
    host = swarm.hosts["d0"].session
    plan_now = plan_of(swarm)
    common = {"model": MODEL, "layer": 0, "node": 1, "source": "d1", "dtype": "f32", "shape": (2, 2)}
    body = np.zeros(4, np.float32).tobytes()
    dead = frames.Frame("tensor", epoch=plan_now.epoch._replace(number=9999), admission=5, body=body, **common)
    assert host.handle(worker_session.FrameIn(frames.decode(frames.encode(dead))), swarm.now) == []
    assert host.counters["dead_epoch"] == 1
    shape, inputs = request(SPEC, (12,))
    lied = []

    def lie(topic: str, target: str) -> bool:
        if "/x/" in topic and not lied:
            lied.append(True)
            frame = frames.Frame("tensor", epoch=plan_now.epoch, admission=1, body=body, **common)
            event = worker_session.FrameIn(frames.decode(frames.encode(frame)))
            swarm._host_commands("d0", swarm.hosts["d0"], host.handle(event, swarm.now))
        return False

    swarm.lost_filter = lie
    swarm.submit("r", shape, inputs)
    swarm.run(30, until=lambda: "r" in swarm.answers or "r" in swarm.errors)
    assert lied
    np.testing.assert_allclose(swarm.answers["r"][0][0], expected(shape, inputs), atol=TOLERANCE)


@pytest.mark.parametrize("n", [1, 2])
def test_a_plan_that_a_device_has_given_up_in_doubt_is_prepared_anew_at_once(n):
    """As when another model's plan needs its memory after the broker was restarted."""
    swarm = site(n=n)
    settle(swarm)
    swarm.run(1)
    first, session = plan_of(swarm).epoch, swarm.hosts["d0"].session
    session.epochs.doubt(swarm.now, "test")
    out = session._forget_doubted(session.epochs.doubted(), "memory", swarm.now)
    swarm._host_commands("d0", swarm.hosts["d0"], out)
    shape, inputs = request(SPEC, (12,))
    swarm.submit("r", shape, inputs)
    swarm.run(scheduler.DOUBT_LEAST_S, until=lambda: "r" in swarm.answers)
    np.testing.assert_allclose(swarm.answers["r"][0][0], expected(shape, inputs), atol=TOLERANCE)
    assert plan_of(swarm).epoch > first


def test_early_frames_are_bounded_and_forgotten():
    swarm = site(n=2)
    settle(swarm)
    host, epoch = swarm.hosts["d0"].session, plan_of(swarm).epoch
    body = bytes(4 << 20)
    for admission in range(100, 140):
        frame = frames.Frame("tensor", MODEL, epoch, admission, 0, 1, "d1", 0, "f32", (1 << 20,), 0, (), body)
        host.handle(worker_session.FrameIn(frame), swarm.now)
        host.check()
    assert 0 < host.runs.early_bytes <= EARLY_BYTES
    assert host.counters["early_dropped"] > 0


def test_early_frames_of_a_wrong_shape_cost_an_attempt_and_no_answer():
    swarm = site(n=2)
    settle(swarm)
    shape, inputs = request(SPEC, (12,))
    swarm.submit("first", shape, inputs)
    swarm.run(30, until=lambda: "first" in swarm.answers)
    host, epoch = swarm.hosts["d0"].session, plan_of(swarm).epoch
    exchanges = [k for k in host.epochs.get(MODEL, epoch).bound[shape].template.recv if k[2] == "d1"]
    assert len(exchanges) > 1
    for node, part, source in exchanges:
        body = np.zeros(4, np.float32).tobytes()
        frame = frames.Frame("tensor", MODEL, epoch, 2, 0, node, source, part, "f32", (2, 2), 0, (), body)
        assert host.handle(worker_session.FrameIn(frame), swarm.now) == []
    swarm.submit("second", shape, inputs)
    swarm.run(30, until=lambda: "second" in swarm.answers or "second" in swarm.errors)
    assert host.counters["bad_shape"] == 1, "the first one ends the run"
    np.testing.assert_allclose(swarm.answers["second"][0][0], expected(shape, inputs), atol=TOLERANCE)
