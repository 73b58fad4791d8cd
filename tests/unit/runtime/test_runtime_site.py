"""A site of real sessions under faults: every request ends once, with the right answer or an error of its class."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from sites import FAMILIES, METHODS, MODEL, TOLERANCE, always, plan, request, tensors
from sites import everyone as divided
from swarm import ALONE, SECRET, Swarm, plan_of

from hepti_mqtt import models
from hepti_mqtt.checkpoint import spec_of_kind
from hepti_mqtt.core.errors import DeadlineError, RemoteError
from hepti_mqtt.core.ids import PlanVersion
from hepti_mqtt.planner import Question
from hepti_mqtt.protocol import frames
from hepti_mqtt.protocol.messages import Endpoint, Peer, Prepare
from hepti_mqtt.runtime.coordinator.fair_queue import Batching
from hepti_mqtt.runtime.coordinator.plans import Ids
from hepti_mqtt.runtime.coordinator.requests import Pins
from hepti_mqtt.runtime.worker import interface
from hepti_mqtt.runtime.worker.runs import EARLY_BYTES
from hepti_mqtt.runtime.worker.session import MeshRoutes
from hepti_mqtt.strategies import STRATEGIES

Method = tuple[str, Mapping[str, str]]
SPEC = FAMILIES["bert-embedding"]
TENSORS = tensors(SPEC)
PLENTY = 1 << 30
SPLIT = [m for m in METHODS if STRATEGIES[m[0]].max_devices is None]
IDS = ["-".join([m[0], *m[1].values()]) for m in SPLIT]
# Every moment with some of the methods, and every method at some of the moments; all of both wait for the night. Half
# of them go over mesh.
LOSSES = [
    pytest.param(
        method,
        moment,
        ("broker", "mesh")[(i // 3 + j // 3) % 2],
        id=f"{name}-{moment}",
        marks=[] if (i + j) % 6 == 0 else pytest.mark.nightly,
    )
    for (i, method), name in zip(enumerate(SPLIT), IDS, strict=True)
    for j, moment in enumerate(range(0, 60, 7))
]
ROW = ("row", {"variant": "kv"})
SHAPE, INPUTS = request(SPEC, (9, 4))


def expected(shape=SHAPE, inputs=INPUTS, spec=SPEC, weights=TENSORS):
    hidden, task = models.reference(spec, weights, inputs, shape)
    return hidden if shape.want == "hidden" else task


def site(method: Method = ROW, n: int = 3, spec=SPEC, flops=lambda i: 1e9 * (i + 1), walls=(), **network) -> Swarm:
    """Return a site with an active plan of a method."""
    devices = {f"d{i}": (flops(i), PLENTY) for i in range(n)}
    swarm = Swarm(spec, TENSORS if spec is SPEC else tensors(spec), devices, decider=divided(method), **network)
    swarm.walls = set(walls)
    settle(swarm)
    return swarm


def over(route: str | None = "mesh", n: int = 3, **network) -> Swarm:
    return site(n=n, pins=Pins(route=route), **network)


def settle(swarm: Swarm) -> None:
    swarm.run(60, until=lambda: plan_of(swarm) is not None)
    assert plan_of(swarm) is not None, [n.text for n in swarm.notes]


def answer(swarm: Swarm, token: object = "r", shape=SHAPE, inputs=INPUTS) -> np.ndarray:
    """Return the one answer to a request, which is right."""
    swarm.run(60, until=lambda: token in swarm.answers or token in swarm.errors)
    assert token not in swarm.errors
    ((got, _),) = swarm.answers[token]
    np.testing.assert_allclose(got, expected(shape, inputs, swarm.spec, swarm.tensors), atol=TOLERANCE)
    return got


def ask(swarm: Swarm, token: object = "r", shape=SHAPE, inputs=INPUTS) -> np.ndarray:
    swarm.submit(token, shape, inputs)
    return answer(swarm, token, shape, inputs)


def after_packets(swarm: Swarm, moment: int, act: Callable[[], None], lost: str = "") -> None:
    """Let something happen with the packet of that number; none reaches a device that is lost then."""
    packets = [0]

    def count(topic: str, target: str) -> bool:
        packets[0] += 1
        if packets[0] == moment:
            act()
        return target == lost and not swarm.hosts[lost].alive

    swarm.lost_filter = count


@pytest.mark.parametrize(("method", "moment", "route"), LOSSES)
def test_a_device_lost_at_any_moment_costs_no_answer(method, moment, route):
    """The plug is pulled after `moment` packets of the request; the answer is right and comes once."""
    swarm = site(method, jitter_s=0.002, seed=moment, pins=Pins(route=route))
    victim = random.Random(moment).choice(plan_of(swarm).devices)
    after_packets(swarm, moment, lambda: swarm.kill(victim), victim)
    ask(swarm)
    swarm.run(3)
    assert len(swarm.answers["r"]) == 1


def test_a_lost_exchange_is_noticed_and_the_request_issued_again():
    swarm, dropped = site(), []
    swarm.lost_filter = lambda topic, target: "/x/" in topic and not dropped and not dropped.append(topic)
    ask(swarm)
    assert dropped
    assert any(n.kind == "overdue" for n in swarm.notes)


@pytest.mark.parametrize(("within", "error"), [(1e6, RemoteError), (1.0, DeadlineError)])
def test_a_network_that_loses_every_exchange_ends_in_an_error_and_frees_the_devices(within, error):
    swarm = site()
    swarm.lost_filter = lambda topic, target: "/x/" in topic
    swarm.submit("r", SHAPE, INPUTS, deadline_s=swarm.now + within)
    swarm.run(120, until=lambda: "r" in swarm.errors)
    swarm.run(3)
    assert [type(e) for e in swarm.errors["r"]] == [error]
    assert "r" not in swarm.answers
    assert not swarm.planner.groups.default(MODEL).runs
    assert all(h.session.runs.idle for h in swarm.hosts.values())


def tight(memory: int, decider: Callable[[Question], object]) -> Swarm:
    swarm = Swarm(SPEC, TENSORS, {"d0": (1e9, memory), "d1": (1e9, memory)}, decider=decider)
    settle(swarm)
    return swarm


def needed(decider: Callable[[Question], object]) -> int:
    """Return the memory that the neediest device of a plan needs."""
    record = tight(PLENTY, decider).planner.groups.default(MODEL).plans.active
    return max(record.needed_bytes(device) for device in record.plan.devices)


@pytest.mark.parametrize("room", ["for both", "for one"])
def test_pins_hold_for_their_request_alone_whether_or_not_both_plans_fit(room):
    """The default plan stays, or is evicted and returns."""
    swarm = tight(int(needed(divided(ROW)) * (2.5 if room == "for both" else 1.02)), divided(ROW))
    first = plan_of(swarm).version
    for i in range(6):
        swarm.submit(i, SHAPE, INPUTS, pins=Pins(weight_dtype="f16") if i % 2 else None)
    swarm.run(60, until=lambda: len(swarm.answers) == 6)
    assert not swarm.errors
    for i in range(6):
        ((got, (stats,)),) = swarm.answers[i]
        assert stats.plan.weight_dtype == ("f16" if i % 2 else "f32")
        np.testing.assert_allclose(got, expected(), atol=5e-3 if i % 2 else TOLERANCE)
    settle(swarm)
    assert (plan_of(swarm).version == first) is (room == "for both")
    assert np.array_equal(ask(swarm, "last"), swarm.answers[0][0][0]), "the same bits as before"


def test_an_old_and_a_new_plan_that_do_not_fit_together_are_swapped():
    """Budgets for one plan only: the old one is given up before the new one is loaded."""
    first, second = plan(SPEC, ("block", {}), (1.0, 3.0)), plan(SPEC, ("block", {}), (3.0, 1.0))
    swarm = tight(int(1.02 * max(needed(always(first)), needed(always(second)))), always(first))
    swarm.decider = always(second)
    swarm.pin(Pins())
    before = plan_of(swarm).version
    swarm.submit("r", SHAPE, INPUTS)
    swarm.run(20, until=lambda: plan_of(swarm) is not None and plan_of(swarm).version > before)
    assert any(n.kind == "refused" for n in swarm.notes)
    answer(swarm, "r")
    ask(swarm, "s")


def test_a_joining_device_is_used_without_losing_a_request():
    swarm = site(n=2, jitter_s=0.001)
    for i in range(40):
        swarm.after(i * 0.05, lambda i=i: swarm.submit(i, SHAPE, INPUTS))
    swarm.after(0.3, lambda: swarm.join("d9", 9e9, PLENTY))
    swarm.run(30, until=lambda: len(swarm.answers) == 40)
    assert not swarm.errors
    assert all(len(a) == 1 for a in swarm.answers.values())
    assert "d9" in plan_of(swarm).devices
    swarm.run(5)
    assert all(len([*h.session.plans]) == 1 for n, h in swarm.hosts.items() if n in plan_of(swarm).devices)


def stranger(swarm: Swarm, **changes) -> frames.Frame:
    """Return a frame of zeros in the name of d1."""
    body = np.zeros(4, np.float32).tobytes()
    frame = frames.Frame("tensor", MODEL, plan_of(swarm).version, 1, 0, 1, "d1", 0, "f32", (2, 2), 0, (), body)
    return frames.decode(frames.encode(replace(frame, **changes)))


def test_early_frames_of_a_wrong_shape_cost_an_attempt_and_no_answer():
    swarm = site(n=2)
    ask(swarm, "first")
    host = swarm.hosts["d0"].session
    template = host.plans.get(MODEL, plan_of(swarm).version).programs[SHAPE].template
    exchanges = [key for key in template.slot_of_exchange if key[2] == "d1"]
    assert len(exchanges) > 1
    ids = Ids(1, SECRET)
    first, second = ids.next_run(), ids.next_run()
    assert first < second
    for node, part, _ in exchanges:
        frame = stranger(swarm, run_id=second, node=node, part=part)
        assert host.handle(interface.FrameIn(frame), swarm.now) == []
    ask(swarm, "second")
    assert host.counters["bad_shape"] == 1, "the first one ends the run"


def test_early_frames_are_bounded():
    swarm = site(n=2)
    host, body = swarm.hosts["d0"].session, np.zeros(1 << 20, np.float32)
    for run_id in range(100, 140):
        host.handle(interface.FrameIn(stranger(swarm, run_id=run_id, shape=body.shape, body=body)), swarm.now)
        host.check()
    assert 0 < host.runs.early.nbytes <= EARLY_BYTES
    assert host.counters["early_dropped"] > 0


# -- requests that run together ---------------------------------------------------------------------------------------


def together_at_most(answers: Mapping[object, list[Any]]) -> int:
    """Return how many requests the largest run was of."""
    return max(stats.requests for runs in answers.values() for stats in runs[0][1])


CONTRACT = [(f, m) for i, f in enumerate(FAMILIES) for j, m in enumerate(METHODS) if (i + j) % len(FAMILIES) == 0]


@pytest.mark.parametrize(
    ("family", "method"), CONTRACT, ids=[f"{f}-{'-'.join([m[0], *m[1].values()])}" for f, m in CONTRACT]
)
def test_any_mix_of_requests_gives_each_its_own_answer_under_every_method(family: str, method: Method) -> None:
    """Over a network with duplicates and delays; batches and single runs come under the same plan."""
    spec, single = FAMILIES[family], method[0] == "single"
    swarm = site(method, 1 if single else 3, spec, batching=Batching(), duplicates=0.1, jitter_s=0.002)
    rng = np.random.default_rng(len(family))
    requests = {}
    for i in range(14):
        lengths = rng.integers(1, 8, rng.integers(1, 3) if spec.text is not None else 1).tolist()
        requests[f"r{i}"] = request(spec, lengths, ("task", "hidden")[int(i % 5 == 4)], seed=i)
        swarm.submit(f"r{i}", *requests[f"r{i}"])
    for name, each in requests.items():
        answer(swarm, name, *each)
    if spec.text is not None:
        assert together_at_most(swarm.answers) > 1


# Under the other methods the place where rows are cut between devices decides the order of some sums.
SAME_BITS = ("single", "column", "block", "megatron-direct", "two_d-1", "galaxy-direct", "pipeline")
QUICK = ("single", "galaxy-direct")


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(m, id=name, marks=[] if name in QUICK else pytest.mark.nightly)
        for m in METHODS
        if (name := "-".join([m[0], *m[1].values()])) in SAME_BITS
    ],
)
def test_answers_of_a_batch_are_the_bits_of_single_runs(method: Method) -> None:
    spec = FAMILIES["bert-embedding"]
    answers = []
    for together in (True, False):
        swarm = site(method, 1 if method[0] == "single" else 3, spec, batching=Batching())
        for i in range(12):
            shape, inputs = request(spec, (1 + i,), seed=i)
            swarm.submit(i, shape, inputs)
            if not together:
                swarm.run(30, until=lambda swarm=swarm, i=i: i in swarm.answers)
        swarm.run(30, until=lambda swarm=swarm: len(swarm.answers) == 12)
        answers.append(swarm.answers)
    assert together_at_most(answers[0]) > 1
    assert together_at_most(answers[1]) == 1
    assert all(np.array_equal(answers[0][i][0][0], answers[1][i][0][0]) for i in range(12))


# -- between peers ----------------------------------------------------------------------------------------------------


ALL_PAIRS = {*permutations(("d0", "d1", "d2"), 2)}


@pytest.mark.parametrize("walls", [{("d0", "d2"), ("d2", "d0")}, ALL_PAIRS], ids=["one", "all"])
def test_pairs_that_cannot_connect_go_over_the_broker_and_the_others_do_not(walls):
    swarm = over(walls=walls)
    assert set(plan_of(swarm).relayed_pairs) == walls
    ask(swarm)
    assert bool(swarm.direct) is (walls != ALL_PAIRS)
    swarm.join("d3", 1e9, PLENTY)
    swarm.run(30, until=lambda: len(plan_of(swarm).devices) == 4)
    assert set(plan_of(swarm).relayed_pairs) == walls, "what could not connect is not tried again"


@pytest.mark.parametrize(
    "moment", [pytest.param(m, marks=[] if m % 3 == 0 else pytest.mark.nightly) for m in range(24)]
)
def test_a_connection_that_is_cut_at_any_moment_costs_no_answer_and_no_waiting(moment):
    """Its requests are issued again when it is lost, not when they are overdue."""
    swarm = over(jitter_s=0.002, seed=moment)
    source, target = random.Random(moment).sample(plan_of(swarm).devices, 2)
    after_packets(swarm, moment, lambda: swarm.cut(source, target))
    ask(swarm)
    assert not any(note.kind == "overdue" for note in swarm.notes)


def test_a_pair_that_does_not_come_back_is_planned_round():
    swarm = over()
    first = plan_of(swarm)
    swarm.walls = {("d0", "d1")}
    swarm.submit("r", SHAPE, INPUTS)
    swarm.run(0.005)
    swarm.cut("d0", "d1")
    answer(swarm)
    assert plan_of(swarm).version > first.version
    assert plan_of(swarm).relayed_pairs == (("d0", "d1"),)
    assert not any(note.kind == "overdue" for note in swarm.notes)


def test_a_peer_that_is_only_sent_to_concerns_the_epochs_under_which_it_reads():
    routes, first, second = MeshRoutes(), ("m", PlanVersion(1, 1)), ("m", PlanVersion(1, 2))
    place = Endpoint("10.0.0.2", 7)
    before, after = Peer("d2", place, "out", ""), Peer("d1", place, "", "in")  # as in a ring
    for key in (first, second):
        routes.admit(key, Prepare(1, {}, {}, bytes(32), 1, peers=(after, before)))
    routes.join(first, (before,), 0.0)
    assert routes.plans_read_by("d1") == [first, second]
    assert routes.plans_read_by("d2") == []
    assert routes.leave(second)
    assert routes.plans_read_by("d1") == [first]
    assert routes.leave(second) == []


# -- replicas ---------------------------------------------------------------------------------------------------------

REPLICA_REQUESTS = {f"r{i}": request(SPEC, (12,), seed=i) for i in range(8)}


def replicas(options=None, devices=3, spec=SPEC, batching=ALONE) -> Swarm:
    method = ("replicas", options or {})
    return site(method, devices, spec, lambda _: 1e8, jitter_s=0.002, batching=batching)


def submit(swarm: Swarm) -> None:
    for token, each in REPLICA_REQUESTS.items():
        swarm.submit(token, *each)


def answered(swarm: Swarm) -> dict[str, tuple[str, ...]]:
    """Return on which devices each request ran; all answers are right."""
    for token, each in REPLICA_REQUESTS.items():
        answer(swarm, token, *each)
    return {token: swarm.answers[token][0][1][0].plan.devices for token in REPLICA_REQUESTS}


@pytest.mark.parametrize(("options", "devices", "parts"), [({}, 3, 3), ({"groups": "2"}, 4, 2)])
def test_requests_that_wait_are_shared_among_all_replicas(options, devices, parts):
    swarm = replicas(options, devices)
    submit(swarm)
    runs = list(answered(swarm).values())
    assert len(set(runs)) == parts
    assert max(map(runs.count, runs)) < len(REPLICA_REQUESTS) / parts + 2
    plan = swarm.planner.groups.default(MODEL).active
    assert {part.version for part in plan.replicas}.isdisjoint({plan.version})
    assert not any(host.session.counters["illegal_step"] for host in swarm.hosts.values())


def test_requests_that_could_run_together_are_shared_out_first():
    swarm = replicas(batching=Batching())
    submit(swarm)
    assert len(set(answered(swarm).values())) == 3


def test_a_lost_device_takes_its_replica_away_and_the_others_go_on_until_the_next_plan():
    swarm = replicas()
    before = swarm.planner.groups.default(MODEL).active
    submit(swarm)
    swarm.kill("d1")
    swarm.run(0.02)  # its will is there, and no search has ended
    after = swarm.planner.groups.default(MODEL).active
    assert (after.version, after.devices) == (before.version, ("d0", "d2"))
    assert {part.version for part in after.replicas} < {part.version for part in before.replicas}
    assert set(answered(swarm).values()) <= {("d0",), ("d2",)}
    swarm.run(5)
    last = swarm.planner.groups.default(MODEL).active
    assert set(last.devices) == {"d0", "d2"}


def test_a_replica_whose_run_never_ended_is_left_out_while_the_others_go_on():
    swarm = replicas()
    before = swarm.planner.groups.default(MODEL).active
    deaf = swarm.planner.topics.work(MODEL, "d1")
    swarm.lost_filter = lambda topic, _: topic == deaf  # it has lost that subscription, beats and answers probes
    submit(swarm)
    swarm.run(60, until=lambda: any(note.kind == "overdue" for note in swarm.notes))
    during = swarm.planner.groups.default(MODEL).active
    assert during is not None, "requests go on"
    assert during.version == before.version
    assert {run.devices for run in swarm.planner.groups.default(MODEL).usable_executables} == {("d0",), ("d2",)}
    assert set(answered(swarm).values()) == {("d0",), ("d2",)}
    swarm.lost_filter = lambda *_: False
    swarm.run(20, until=lambda: swarm.planner.groups.default(MODEL).active.version != before.version)
    assert swarm.planner.groups.default(MODEL).active.devices == before.devices
    assert len(swarm.planner.groups.default(MODEL).usable_executables) == 3
    assert not any(note.kind == "left" for note in swarm.notes)


def test_where_only_doubted_replicas_are_left_the_plan_serves_nobody_and_another_one_is_made():
    swarm = replicas(devices=2)
    before = swarm.planner.groups.default(MODEL).active
    assert before is not None
    deaf = swarm.planner.topics.work(MODEL, "d0")
    swarm.lost_filter = lambda topic, _: topic == deaf
    submit(swarm)
    swarm.run(60, until=lambda: any(note.kind == "overdue" for note in swarm.notes))
    swarm.kill("d1")
    swarm.run(0.02)  # its will is there, and no search has ended
    assert swarm.planner.groups.default(MODEL).active is None
    swarm.lost_filter = lambda *_: False
    assert set(answered(swarm).values()) <= {("d0",), ("d1",)}
    assert swarm.planner.groups.default(MODEL).active.devices == ("d0",)


def test_a_group_that_loses_a_device_is_released_by_those_that_are_left_of_it():
    swarm = replicas({"groups": "2"}, 4)
    lost = next(part for part in swarm.planner.groups.default(MODEL).active.replicas if "d1" in part.devices)
    [left] = set(lost.devices) - {"d1"}
    swarm.kill("d1")
    swarm.run(0.05)
    assert swarm.planner.groups.default(MODEL).active.devices == tuple(
        d for d in ("d0", "d1", "d2", "d3") if d not in lost.devices
    )
    assert swarm.hosts[left].session.plans.get(MODEL, lost.version) is None
    submit(swarm)
    answered(swarm)


def test_a_session_stays_on_the_replica_where_it_began():
    spec = spec_of_kind("tiny-gpt2")
    rng = np.random.default_rng(4)
    prompts = {f"g{i}": rng.integers(0, 50, 5 + i).astype(np.int32) for i in range(3)}
    texts = []
    for devices in (1, 3):
        swarm = replicas(devices=devices, spec=spec)
        for token, ids in prompts.items():
            swarm.generate(token, spec, ids, 6)
        swarm.run(60, until=lambda swarm=swarm: len(swarm.answers) == len(prompts) or bool(swarm.errors))
        assert not swarm.errors
        texts.append([swarm.answers[token][0][0].tolist() for token in prompts])
        where = [{s.plan.devices for s in swarm.answers[token][0][1]} for token in prompts]
        assert all(len(devices) == 1 for devices in where)
        assert len(set.union(*where)) >= min(devices, 2)
    assert texts[0] == texts[1]
