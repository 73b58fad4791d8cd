"""Replicas: runs are shared among complete plans side by side, and a lost device takes only its own away."""

from __future__ import annotations

import numpy as np
import pytest
from sites import FAMILIES, MODEL, TOLERANCE, everyone, request, tensors
from swarm import ALONE, Swarm

from hepti_mqtt import models
from hepti_mqtt.checkpoint import spec_of_kind
from hepti_mqtt.ids import Epoch
from hepti_mqtt.plan import Plan
from hepti_mqtt.runtime.coordinator.requests import (
    Batching,
    Chunk,
    Item,
    Job,
    RequestKey,
    Waiting,
    micro_batches,
    packed,
)
from hepti_mqtt.runtime.coordinator.scheduler import Hand, Lane, next_hand
from hepti_mqtt.schedule import deal

SPEC = FAMILIES["bert-embedding"]
HELD = tensors(SPEC)
ASKED = {f"r{i}": request(SPEC, (12,), seed=i) for i in range(8)}


def site(options=None, devices=3, spec=SPEC, held=HELD, batching=ALONE):
    hosts = dict.fromkeys((f"d{i}" for i in range(devices)), (1e8, 1 << 30))
    made = Swarm(spec, held, hosts, jitter_s=0.002, decider=everyone(("replicas", options or {})), batching=batching)
    made.run(20, until=lambda: made.planner.plan(MODEL) is not None)
    return made


def ask(swarm):
    for token, (shape, inputs) in ASKED.items():
        swarm.submit(token, shape, inputs)


def answered(swarm):
    """Return on which devices each request ran; all answers are right."""
    swarm.run(60, until=lambda: set(ASKED) <= set(swarm.answers) or bool(swarm.errors))
    assert not swarm.errors, [note.text for note in swarm.notes]
    found = {}
    for token, (shape, inputs) in ASKED.items():
        [(got, stats)] = swarm.answers[token]
        np.testing.assert_allclose(got, models.reference(SPEC, HELD, inputs, shape)[1], atol=TOLERANCE)
        found[token] = stats[0].plan.devices
    return found


@pytest.mark.parametrize(("options", "devices", "parts"), [({}, 3, 3), ({"groups": "2"}, 4, 2)])
def test_requests_that_wait_are_shared_among_all_replicas(options, devices, parts):
    swarm = site(options, devices)
    ask(swarm)
    runs = list(answered(swarm).values())
    assert len(set(runs)) == parts
    assert max(map(runs.count, runs)) < len(ASKED) / parts + 2  # nobody has much more than others
    plan = swarm.planner.plan(MODEL)
    assert plan is not None
    assert {part.epoch for part in plan.replicas}.isdisjoint({plan.epoch})
    assert not any(host.session.counters["illegal_step"] for host in swarm.hosts.values())


def test_the_devices_of_other_replicas_are_not_told_of_a_run():
    swarm = site({"groups": "2"}, 4)
    ask(swarm)
    answered(swarm)
    swarm.run(1)
    counted = [host.session.counters for host in swarm.hosts.values()]
    assert not any(counter["dead_epoch"] for counter in counted)
    topics = {swarm.planner.topics.work(MODEL, part.devices[0]) for part in swarm.planner.plan(MODEL).replicas}
    for name, host in swarm.hosts.items():
        [own] = host.works & topics
        assert own == swarm.planner.topics.work(MODEL, swarm.planner.plan(MODEL).of(name).devices[0])


def test_requests_that_could_run_together_are_shared_out_first():
    swarm = site(batching=Batching())
    ask(swarm)
    assert len(set(answered(swarm).values())) == 3


def test_a_batch_is_cut_into_micro_batches_in_its_order():
    spec = FAMILIES["bert-mask"]
    shape, inputs = request(spec, (40, 30, 20, 50, 3, 2))
    parts = micro_batches([Chunk(shape, inputs)])
    assert [part.shape.lengths for part in parts] == [(40, 30), (20, 50, 3, 2)]
    assert all(len(part.inputs) == part.shape.tokens for part in parts)
    again = packed(parts)
    assert again.shape == shape
    assert again.inputs.tolist() == inputs.tolist()


def test_a_lost_device_takes_its_replica_away_and_the_others_go_on_until_the_next_plan():
    swarm = site()
    before = swarm.planner.plan(MODEL)
    ask(swarm)
    swarm.kill("d1")
    swarm.run(0.02)  # its will is there, and no search has ended
    after = swarm.planner.plan(MODEL)
    assert after is not None
    assert (after.epoch, after.devices) == (before.epoch, ("d0", "d2"))
    assert {part.epoch for part in after.replicas} < {part.epoch for part in before.replicas}
    assert set(answered(swarm).values()) <= {("d0",), ("d2",)}
    swarm.run(5)
    last = swarm.planner.plan(MODEL)
    assert last is not None
    assert set(last.devices) == {"d0", "d2"}


def test_a_replica_whose_run_never_ended_is_left_out_while_the_others_go_on():
    swarm = site()
    before = swarm.planner.plan(MODEL)
    assert before is not None
    deaf = swarm.planner.topics.work(MODEL, "d1")
    swarm.lost_filter = lambda topic, _: topic == deaf  # it has lost that subscription, beats and answers probes
    ask(swarm)
    swarm.run(60, until=lambda: any(note.kind == "overdue" for note in swarm.notes))
    during = swarm.planner.plan(MODEL)
    assert during is not None, "requests go on"
    assert during.epoch == before.epoch
    assert {run.devices for run in swarm.planner.slots.own(MODEL).able} == {("d0",), ("d2",)}
    assert set(answered(swarm).values()) == {("d0",), ("d2",)}
    swarm.lost_filter = lambda *_: False
    swarm.run(20, until=lambda: swarm.planner.plan(MODEL).epoch != before.epoch)
    assert swarm.planner.plan(MODEL).devices == before.devices, "all of it is prepared anew"
    assert len(swarm.planner.slots.own(MODEL).able) == 3
    assert not any(note.kind == "left" for note in swarm.notes)


def test_where_only_doubted_replicas_are_left_the_plan_serves_nobody_and_another_one_is_made():
    swarm = site(devices=2)
    before = swarm.planner.plan(MODEL)
    assert before is not None
    deaf = swarm.planner.topics.work(MODEL, "d0")
    swarm.lost_filter = lambda topic, _: topic == deaf
    ask(swarm)
    swarm.run(60, until=lambda: any(note.kind == "overdue" for note in swarm.notes))
    swarm.kill("d1")
    swarm.run(0.02)  # its will is there, and no search has ended
    assert swarm.planner.plan(MODEL) is None
    swarm.lost_filter = lambda *_: False
    assert set(answered(swarm).values()) <= {("d0",), ("d1",)}
    assert swarm.planner.plan(MODEL).devices == ("d0",)


def test_a_group_that_loses_a_device_is_released_by_those_that_are_left_of_it():
    swarm = site({"groups": "2"}, 4)
    lost = next(part for part in swarm.planner.plan(MODEL).replicas if "d1" in part.devices)
    [left] = set(lost.devices) - {"d1"}
    swarm.kill("d1")
    swarm.run(0.05)
    assert swarm.planner.plan(MODEL).devices == tuple(d for d in ("d0", "d1", "d2", "d3") if d not in lost.devices)
    assert swarm.hosts[left].session.epochs.get(MODEL, lost.epoch) is None
    ask(swarm)
    answered(swarm)


def test_a_session_stays_on_the_replica_where_it_began():
    spec = spec_of_kind("tiny-gpt2")
    held, rng = tensors(spec), np.random.default_rng(4)
    prompts = {f"g{i}": rng.integers(0, 50, 5 + i).astype(np.int32) for i in range(3)}
    texts = []
    for devices in (1, 3):
        swarm = site(devices=devices, spec=spec, held=held)
        for token, ids in prompts.items():
            swarm.generate(token, spec, ids, 6)
        swarm.run(60, until=lambda swarm=swarm: len(swarm.answers) == len(prompts) or bool(swarm.errors))
        assert not swarm.errors
        texts.append([swarm.answers[token][0][0].tolist() for token in prompts])
        where = [{s.plan.devices for s in swarm.answers[token][0][1]} for token in prompts]
        assert all(len(devices) == 1 for devices in where)
        assert len(set.union(*where)) >= min(devices, 2)
    assert texts[0] == texts[1]


def test_each_request_goes_where_it_is_answered_first_behind_those_before_it():
    assert list(deal(10.0, [(9.0, 4.0), (12.0, 1.0)], [1.0])) == [1]
    assert list(deal(10.0, [(9.0, 2.0), (12.0, 1.0)], [1.0])) == [0]
    assert list(deal(10.0, [(0.0, 1.0), (0.0, 1.0)], [1.0])) == [0]
    unequal = [(0.0, 0.95), (0.0, 2.8), (0.0, 5.7)]
    assert list(deal(0.0, unequal, [1.0] * 8)) == [0, 0, 1, 0, 0, 0, 1, 0], "the slowest would be last"
    assert list(deal(0.0, unequal, [1.0] * 9))[-1] == 2
    assert list(deal(0.0, unequal, [4.0, 1.0])) == [0, 1]


def test_what_a_busy_fast_replica_answers_sooner_waits_for_it():
    def plan(name, seconds):
        return Plan(MODEL, Epoch(1, 1), "single", (name,), name, predicted_s=seconds, predicted_tokens=128)

    def lanes(fast_until_s, has_room):
        return [Lane(plan("fast", 1.0), fast_until_s, 1 / 128, has_room), Lane(plan("slow", 6.0), 0.0, 6 / 128, True)]

    shape, inputs = request(SPEC, (12,))  # as long as one of 64 tokens, half of what plans are made for
    queue = Waiting()
    for number in range(8):
        job = Job(RequestKey(MODEL, "c", f"r{number}"), (Chunk(shape, inputs),), None, None)
        queue.add([Item(job, 0)])
        hand = next_hand(0.0, lanes(2.0, False), queue)
        assert hand == (None if number < 2 else Hand(lanes(0, True)[1].plan, 1)), number
    assert next_hand(0.0, lanes(0.0, True), queue) == Hand(lanes(0, True)[0].plan, 7)
    assert next_hand(0.0, lanes(0.0, True)[1:], queue) == Hand(lanes(0, True)[1].plan)
