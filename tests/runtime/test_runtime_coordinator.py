"""The coordinator's requests on a virtual clock: what waits, is issued again, ended."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_site import MANIFEST, ROW, SPEC, Site, everyone
from sites import FAMILIES, request, tensors
from swarm import Swarm

from hepti_mqtt.errors import DeadlineError, IdInUseError, OverloadedError, PlanError, RemoteError
from hepti_mqtt.models.shapes import PackedTokens
from hepti_mqtt.plan import Plan
from hepti_mqtt.planner import decide
from hepti_mqtt.protocol import messages
from hepti_mqtt.protocol.messages import Status
from hepti_mqtt.runtime.coordinator import interface
from hepti_mqtt.runtime.coordinator.plans import Served
from hepti_mqtt.runtime.coordinator.requests import Batching, Chunk, Generation, Job, Pins, RequestKey
from hepti_mqtt.runtime.coordinator.scheduler import ATTEMPTS, DISTURBED_S, OVERDUE_S, QUEUE
from hepti_mqtt.runtime.coordinator.session import CoordinatorSession
from hepti_mqtt.runtime.worker import session


def test_devices_that_join_together_get_one_plan() -> None:
    site = Site()
    site.join("a", "b")
    assert not site.solves, "it waits for others that come up at the same time"
    site.tick(1.1)
    assert len(site.solves) == 1
    assert set(site.solves[0].question.cluster.devices) == {"a", "b"}
    plan = site.prepares().popitem()[1].plan
    assert site.session.plan("m") is None, "a plan is active only when every device is ready"
    site.ready()
    active = site.session.plan("m")
    assert active is not None
    assert active.to_dict() == plan


def test_answer_carries_output_plan_and_counters() -> None:
    site = Site()
    site.join("a")
    plan = site.settle()
    site.submit("r1", 8)
    site.answer(1)
    answer = site.answers["r1"]
    assert answer.plan == plan
    assert answer.job.output().tolist() == [[8.0] * SPEC.hidden]
    (stats,) = answer.stats
    assert (stats.compute_us, stats.wait_us, stats.sent_bytes) == ({"a": 2000}, {"a": 500}, {"a": 100})
    assert stats.dispatch_bytes > len(site.work[1].body)


def test_requests_before_the_first_plan_wait_for_it() -> None:
    site = Site()
    site.join("a")
    site.submit("r1")
    assert not site.work
    site.settle()
    assert list(site.work) == [1]


def test_chunks_are_answered_together_in_order_whatever_the_order_of_arrival() -> None:
    site = Site(in_flight=3)
    site.join("a")
    site.settle()
    site.submit("r1", 3, 5, 7)
    for admission in (3, 1, 2):
        assert not site.answers
        site.answer(admission)
    assert site.answers["r1"].job.output()[:, 0].tolist() == [3, 5, 7]


def test_a_request_that_computes_nothing_is_answered_when_its_plan_is_up() -> None:
    site = Site(decider=everyone)
    site.join("a", "b")
    site.settle()
    site.submit("r1", 8)
    site.submit("r2", 3, 5, pins=Pins("column", {}, ("a", "b")), computes=False)
    assert "r2" not in site.answers, "its pins are not those of the plan"
    site.answer(1)
    site.tick(0.1)
    site.ready()
    answer = site.answers["r2"]
    assert answer.plan.strategy == "column"
    assert site.session.plan("m") != answer.plan, "which pins it changed for nobody else"
    assert [(run.shape.tokens, run.compute_us, run.dispatch_bytes) for run in answer.stats] == [(3, {}, 0), (5, {}, 0)]
    assert list(site.work) == [1]


def test_a_request_that_computes_nothing_ends_without_a_plan_too() -> None:
    site = Site()
    site.submit("r1", computes=False, within=2.0)
    site.tick(10.0)
    assert isinstance(site.errors["r1"], PlanError | DeadlineError)


def test_no_more_runs_at_once_than_devices_have_room_for() -> None:
    site = Site(in_flight=2)
    site.join("a")
    site.settle()
    for name in ("r1", "r2", "r3"):
        site.submit(name)
    assert list(site.work) == [1, 2]
    site.answer(1)
    assert list(site.work) == [1, 2, 3]


def test_overdue_run_is_issued_again_and_fails_after_several_attempts() -> None:
    site = Site()
    site.join("a")
    site.settle()
    site.submit("r1", within=1e6)
    for attempt in range(ATTEMPTS):
        for _ in range(2 + 2 ** (attempt + 1)):
            site.tick(2)
        site.ready()
    assert isinstance(site.errors["r1"], RemoteError)
    assert len(site.work) == ATTEMPTS


def test_plan_under_which_a_run_is_overdue_is_prepared_anew() -> None:
    site = Site(decider=everyone)
    site.join("a", "b")
    first = site.settle()
    site.submit("r1", within=1e6)
    site.submit("r2", within=1e6)
    site.answer(2)
    site.told.clear()
    for _ in range(4):
        site.tick(2)
    assert set(site.prepares()) == {"a", "b"}
    assert not any(isinstance(m, messages.Release) for _, m in site.told), "the weights stay while they are needed"
    assert list(site.work) == [1, 2], "nothing more goes to a plan that lost a run"
    site.ready()
    second = site.session.plan("m")
    assert second.epoch > first.epoch
    assert ("a", first.epoch) in [(d, m.epoch) for d, m in site.told if isinstance(m, messages.Release)]
    site.answer(3)
    assert set(site.answers) == {"r1", "r2"}


def test_deadline_ends_waiting_and_running_requests() -> None:
    site = Site(in_flight=1)
    site.join("a")
    plan = site.settle()
    site.submit("r1", within=1.0)
    site.submit("r2", within=1.0)
    site.submit("r3", within=100.0)
    site.tick(1.1)
    assert isinstance(site.errors["r1"], DeadlineError)
    assert isinstance(site.errors["r2"], DeadlineError)
    assert ("a", messages.Cancel("m", plan.epoch, 1)) in site.told
    site.answer(2)
    assert "r3" in site.answers


def test_full_queue_refuses() -> None:
    site = Site(in_flight=1)
    site.join("a")
    site.settle()
    for i in range(QUEUE + 2):
        site.submit(f"r{i}")
    assert [n for n, e in site.errors.items() if isinstance(e, OverloadedError)] == [f"r{QUEUE + 1}"]
    for admission in range(1, QUEUE + 2):
        site.answer(admission)
    assert len(site.answers) == QUEUE + 1


def test_repeated_request_on_its_way_runs_once() -> None:
    site = Site(in_flight=1)
    site.join("a")
    site.settle()
    site.submit("r1")
    site.submit("r2")
    site.submit("r1")
    site.submit("r2")
    for admission in list(site.work):
        site.answer(admission)
    site.answer(2)
    assert set(site.answers) == {"r1", "r2"}
    assert len(site.work) == 2


def test_another_request_under_the_id_of_one_on_its_way_is_refused() -> None:
    site = Site(in_flight=1)
    site.join("a")
    site.settle()
    job = site.submit("r1", 8)
    site.submit("r2", 8)
    for name, admission in (("r1", 1), ("r2", 2)):
        other = Job(RequestKey("m", "c", name), job.chunks, "other", 60.0, digest=b"other")
        refused = [c for c in site.session.handle(interface.Submit(other), site.now) if isinstance(c, interface.Refuse)]
        assert [c.job.token for c in refused] == ["other"]
        assert isinstance(refused[0].error, IdInUseError)
        assert name in str(refused[0].error)
        site.answer(admission)
    assert set(site.answers) == {"r1", "r2"}


def test_request_that_a_device_cannot_compute_fails_with_its_words() -> None:
    site = Site()
    site.join("a")
    plan = site.settle()
    site.submit("r1")
    site.event(interface.UpMessage("a", messages.RequestFailed("m", plan.epoch, 1, "device", "a: linear failed: nan")))
    assert not site.errors, "it is tried once more"
    site.event(interface.UpMessage("a", messages.RequestFailed("m", plan.epoch, 2, "device", "a: linear failed: nan")))
    assert "linear failed" in str(site.errors["r1"])


@pytest.mark.parametrize(("device", "number"), [("b", 0), ("a", 1)])
def test_a_failure_of_another_device_or_epoch_is_none_of_a_run(device: str, number: int) -> None:
    site = Site()
    site.join("a")
    plan = site.settle()
    site.submit("r1")
    epoch = plan.epoch._replace(number=plan.epoch.number + number)
    for code in ("device", "request", "wire"):
        site.event(interface.UpMessage(device, messages.RequestFailed("m", epoch, 1, code, "no")))
    assert list(site.work) == [1]
    assert not site.errors
    site.answer(1)
    assert set(site.answers) == {"r1"}


@pytest.mark.parametrize("forged_first", [True, False])
@pytest.mark.parametrize("what", ["numbers", "row", "shape", "another part", "parts sent"])
def test_of_answers_that_contradict_each_other_none_is_taken_and_the_run_is_issued_again(
    what: str, forged_first: bool
) -> None:
    site = Site()
    site.join("a")
    site.settle()
    site.submit("r1")
    frame, output = site.work[1], np.ones((1, SPEC.hidden), np.float32)
    sent = replace(frame, kind="output", source="a", dtype="f32", shape=output.shape, body=output)
    done = replace(frame, kind="done", source="a", dtype="u8", shape=(0,), numbers=(1, 1, 1, 1), body=b"")
    forged = {
        "numbers": replace(sent, body=output * 2),
        "row": replace(sent, row_start=1),
        "shape": replace(sent, shape=(2, SPEC.hidden), body=np.ones((2, SPEC.hidden), np.float32)),
        "another part": replace(sent, part=sent.part + 1),
        "parts sent": replace(done, numbers=(1, 1, 1, 2)),
    }[what]
    for said in (forged, sent, done) if forged_first else (sent, forged, done):
        site.event(interface.UpFrame("a", said))
    assert not site.answers
    assert not site.errors
    site.answer(2)
    assert site.answers["r1"].job.output()[0, 0] == 8


def test_a_run_of_a_session_whose_parts_do_not_fit_is_issued_again() -> None:
    """A step of a decoder was forgotten then: its request had no end."""
    site = Site()
    site.join("a")
    site.settle()
    chunk = Chunk(PackedTokens((3,), cache=8), np.zeros(4, np.int32))
    job = Job(RequestKey("m", "c", "r"), (chunk,), None, 60.0, generation=Generation((1, 2, 3), 2, chunk.shape))
    site.event(interface.Submit(job))
    for part, width in enumerate((SPEC.hidden, SPEC.hidden + 1)):
        body = np.ones((1, width), np.float32)
        sent = replace(site.work[1], kind="output", source="a", dtype="f32", shape=body.shape, body=body, part=part)
        site.event(interface.UpFrame("a", sent))
    site.event(
        interface.UpFrame("a", replace(sent, kind="done", dtype="u8", shape=(0,), numbers=(1, 1, 1, 1), body=b""))
    )
    assert list(site.work) == [1, 2, 3], "the second began with the first part, which is in doubt then"
    assert not site.session.slots.own("m").runs.keys() & {1, 2}


def test_an_answer_that_comes_twice_is_taken_once() -> None:
    site = Site()
    site.join("a")
    site.settle()
    site.submit("r1")
    output = np.full((1, SPEC.hidden), np.nan, np.float32)
    sent = replace(site.work[1], kind="output", source="a", dtype="f32", shape=output.shape, body=output)
    site.event(interface.UpFrame("a", sent))
    site.event(interface.UpFrame("a", replace(sent, body=output.copy())))
    assert list(site.work) == [1]
    done = replace(sent, kind="done", dtype="u8", shape=(0,), numbers=(1, 1, 1, 1), body=b"")
    site.event(interface.UpFrame("a", done))
    assert set(site.answers) == {"r1"}


def test_request_whose_frames_were_bad_is_issued_again() -> None:
    site = Site()
    site.join("a")
    plan = site.settle()
    site.submit("r1")
    site.event(interface.UpMessage("a", messages.RequestFailed("m", plan.epoch, 1, "wire", "shape")))
    assert list(site.work) == [1, 2]


def test_one_lost_connection_is_one_attempt_however_many_runs_it_costs() -> None:
    """Both ends tell of its loss and both of its return; only one that is lost again and again ends the request."""
    site = Site()
    site.join("a")
    plan = site.settle()
    site.submit("r1", within=1e6)
    for _ in range(3 * ATTEMPTS):
        site.event(interface.UpMessage("a", messages.RequestFailed("m", plan.epoch, max(site.work), "link", "cut")))
    assert not site.errors
    for _ in range(ATTEMPTS - 1):
        site.tick(DISTURBED_S / 2)
        site.tick(DISTURBED_S / 2 + 0.1)
        site.event(interface.UpMessage("a", messages.RequestFailed("m", plan.epoch, max(site.work), "link", "cut")))
    assert isinstance(site.errors["r1"], RemoteError)


def test_two_models_do_not_plan_with_the_same_memory() -> None:
    site = Site("m", "n")
    site.join("a")
    site.tick(1.1)
    first, second = site.solves
    need = next(iter(decide(first.question).chosen.price.needs.values()))
    room = (s.question.cluster.devices["a"].memory_bytes for s in (first, second))
    assert next(room) - next(room) == need


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_request_ends_once_whatever_happens(data: st.DataObject) -> None:
    batching = data.draw(st.sampled_from([Batching(1), Batching(16), Batching(4, 0.2)]))
    site = Site(decider=everyone, batching=batching)
    names = ("a", "b")
    pins = (None, ROW, Pins(devices=("b",)), Pins(storage="w8a8"), *(Pins(wire=wire) for wire in ("f16", "i8")))
    boot = Counter[str]()
    submitted = 0
    for _ in range(data.draw(st.integers(5, 40))):
        what = data.draw(
            st.sampled_from(["join", "leave", "tick", "ready", "submit", "answer", "fail", "broken", "offline"])
        )
        name = data.draw(st.sampled_from(names))
        if what == "join":
            boot[name] += 1
            site.join(name, boot=boot[name])
        elif what == "leave" and name in site.boots:
            site.leave(name)
        elif what == "tick":
            site.tick(data.draw(st.sampled_from([0.1, 1.1, 5.0])))
        elif what == "ready":
            site.ready(name)
        elif what == "submit":
            submitted += 1
            lengths = data.draw(st.lists(st.integers(1, 64), min_size=1, max_size=3))
            client, pinned = data.draw(st.sampled_from("cd")), data.draw(st.sampled_from(pins))
            site.submit(f"r{submitted}", *lengths, pins=pinned, within=30, client=client)
        elif what == "answer" and site.work:
            site.answer(data.draw(st.sampled_from(sorted(site.work))))
        elif what == "fail" and name in site.prepares():
            message = site.prepares()[name]
            plan = Plan.from_dict(message.plan)
            code = data.draw(st.sampled_from(["memory", "wire"]))
            site.event(interface.UpMessage(name, messages.Failed(message.txn, "m", plan.epoch, code, "no", 10)))
        elif what == "broken" and site.work:
            frame, code = (
                data.draw(st.sampled_from(list(site.work.values()))),
                data.draw(st.sampled_from(["wire", "x"])),
            )
            broken = messages.RequestFailed("m", frame.epoch, frame.admission, code, "no")
            site.event(interface.UpMessage(name, broken))
        elif what == "offline":
            site.event(interface.Connection(online=data.draw(st.booleans())))
    for _ in range(8):
        site.tick(5)
    assert len(site.answers) + len(site.errors) == submitted
    for answer in site.answers.values():
        wanted = answer.job.pins or Pins()
        assert (answer.plan.wire, answer.plan.storage) == (wanted.wire, wanted.storage), "each under its own pins"
        lengths = [c.shape.tokens for c in answer.job.chunks]
        assert answer.job.output()[:, 0].tolist() == lengths


def test_counters_and_foreign_frames_change_nothing() -> None:
    site = Site(decider=everyone)
    site.join("a", "b")
    plan = site.settle()
    site.submit("r1")
    other = next(d for d in plan.devices if d != plan.head)
    output = np.zeros((1, SPEC.hidden), np.float32)
    stray = replace(site.work[1], kind="output", source=other, dtype="f32", shape=output.shape, body=output)
    site.event(interface.UpFrame(other, stray))  # says later that it has sent none
    site.event(interface.UpFrame("stranger", stray))
    assert site.session.counters["late"] == 1
    site.answer(1)
    assert site.session.counters["foreign_frame"] == 1
    assert site.answers["r1"].job.output()[0, 0] == 8


@pytest.mark.parametrize("shape", [(64,), (1,)])
def test_default_plan_length_is_bounded_by_the_model(shape: tuple[int]) -> None:
    site = Site()
    site.join("a")
    site.submit("r1", *shape)
    site.tick(1.1)
    assert site.solves[0].question.shape.tokens == shape[0]


def test_a_new_planner_counts_its_requests_from_the_beginning() -> None:
    spec = FAMILIES["bert-embedding"]
    swarm = Swarm(spec, tensors(spec), {"d0": (1e9, 1 << 30)})
    shape, inputs = request(spec, (6,))
    swarm.submit("r", shape, inputs)
    swarm.run(10, until=lambda: "r" in swarm.answers)
    former = swarm.planner
    swarm.planner = CoordinatorSession("home", former.boot + 1, (Served("m", spec, MANIFEST, 16),))
    host = swarm.hosts["d0"]
    swarm._host_commands("d0", host, host.session.handle(session.PlannerLost(former.boot + 1), swarm.now))
    member = former.membership.members["d0"]
    swarm.tell_planner(interface.DeviceCaps("d0", member.caps))
    swarm.tell_planner(interface.DeviceStatus("d0", Status("online", member.boot)))
    swarm.submit("s", shape, inputs)
    swarm.run(OVERDUE_S - 1, until=lambda: "s" in swarm.answers)
    np.testing.assert_array_equal(swarm.answers["s"][0][0], swarm.answers["r"][0][0])
