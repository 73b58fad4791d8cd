"""A request from its arrival to its end, on a virtual clock: runs, reports, retries, and errors."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_site import ROW, SPEC, Site, everyone, settled

from hepti_mqtt.core.errors import DeadlineError, PlanError, RemoteError
from hepti_mqtt.core.plan import Plan
from hepti_mqtt.models.shapes import TokenBatch
from hepti_mqtt.protocol import messages
from hepti_mqtt.protocol.frames import Frame, decode_work
from hepti_mqtt.runtime.coordinator import interface
from hepti_mqtt.runtime.coordinator.admission import CANCELLED_S
from hepti_mqtt.runtime.coordinator.batches import Batch
from hepti_mqtt.runtime.coordinator.fair_queue import Batching
from hepti_mqtt.runtime.coordinator.moves import Moves
from hepti_mqtt.runtime.coordinator.requests import Pins, Request, RequestKey
from hepti_mqtt.runtime.coordinator.run_tracker import LINK_LOSS_WINDOW_S, MAX_ATTEMPTS


def part(site: Site, run_id: int = 1, source: str = "a", rows: int = 1, width: int = SPEC.hidden, **more) -> Frame:
    """Return a part of the output of a run."""
    return site.part(run_id, source, np.ones((rows, width), np.float32), **more)


def test_answer_carries_output_plan_and_counters() -> None:
    site = settled("a")
    plan = site.plan
    site.compute_us = 2000
    site.serve("r1", 8)
    answer = site.answers["r1"]
    assert answer.plan == plan
    assert answer.request.output().tolist() == [[8.0] * SPEC.hidden]
    (stats,) = answer.stats
    assert (stats.compute_us, stats.wait_us, stats.sent_bytes) == ({"a": 2000}, {"a": 500}, {"a": 100})
    assert stats.dispatch_bytes > len(site.work[1].body)


def test_a_request_for_a_forecast_is_answered_when_its_plan_is_active_and_ends_without_one() -> None:
    site = settled("a", "b", decider=everyone)
    site.submit("r1", 8)
    site.submit("r2", 3, 5, pins=Pins("column", {}, ("a", "b")), computes=False)
    assert "r2" not in site.answers
    site.answer(1)
    site.tick(0.1)
    site.ready()
    answer = site.answers["r2"]
    assert answer.plan.strategy == "column"
    assert site.plan != answer.plan
    assert [(run.shape.tokens, run.compute_us, run.dispatch_bytes) for run in answer.stats] == [(3, {}, 0), (5, {}, 0)]
    assert list(site.work) == [1]
    site = Site()
    site.submit("r1", computes=False, within=2.0)
    site.tick(10.0)
    assert isinstance(site.errors["r1"], PlanError | DeadlineError)


def test_an_overdue_run_is_retried_a_few_times() -> None:
    site = settled("a")
    site.submit("r1", within=1e6)
    for attempt in range(MAX_ATTEMPTS):
        site.pass_by(2 + 2 ** (attempt + 1), 2)
        site.ready()
    assert isinstance(site.errors["r1"], RemoteError)
    assert len(site.work) == MAX_ATTEMPTS


def test_a_plan_with_an_overdue_run_is_replaced() -> None:
    site = settled("a", "b", decider=everyone)
    first = site.plan
    site.submit("r1", within=1e6)
    site.serve("r2", within=1e6)
    site.sent.clear()
    site.pass_by(4, 2)
    assert set(site.prepares()) == {"a", "b"}
    assert not site.released(), "the weights stay"
    assert list(site.work) == [1, 2]
    site.ready()
    second = site.plan
    assert second.version > first.version
    assert ("a", first.version) in site.released()
    site.answer(3)
    assert set(site.answers) == {"r1", "r2"}


def test_a_step_that_raises_loses_no_commands_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site("m", "n", searches=False)
    site.submit("r1", within=3.0)
    site.submit("r2", within=3.0, model="n")

    def fail(*_args: object) -> bool:
        raise ZeroDivisionError

    with monkeypatch.context() as patched:
        patched.setattr(Moves, "is_due", fail)
        site.now += 4.0
        with pytest.raises(ExceptionGroup) as failed:
            site.event(interface.Tick())
    assert [type(error) for error in failed.value.exceptions] == [ZeroDivisionError] * 2, "one of each model"
    site.join("a")
    assert {name: type(error) for name, error in site.errors.items()} == {"r1": DeadlineError, "r2": DeadlineError}


@pytest.mark.parametrize("end", ["deadline", "cancelled"])
def test_a_deadline_or_a_cancel_ends_queued_and_running_requests(end: str) -> None:
    site = settled("a", in_flight=1)
    plan = site.plan
    for name, within in (("r1", 1.0), ("r2", 1.0), ("r3", 100.0)):
        site.submit(name, within=within)
    if end == "deadline":
        site.tick(1.1)
    for name in ("r1", "r2", "unknown") if end == "cancelled" else ():
        site.event(interface.RequestCancelled(RequestKey("m", "c", name)))
    assert {name: error.code for name, error in site.errors.items()} == {"r1": end, "r2": end}
    assert ("a", messages.Cancel("m", plan.version, 1)) in site.sent
    site.answer(max(site.work))
    assert "r3" in site.answers


def test_a_request_that_arrives_after_its_cancellation_is_refused_for_a_while() -> None:
    site = settled("a")
    for name in ("r1", "r2"):
        site.event(interface.RequestCancelled(RequestKey("m", "c", name)))
    site.submit("r1")
    assert site.errors["r1"].code == "cancelled"
    assert not site.work
    site.now += CANCELLED_S
    site.serve("r2")
    assert "r2" in site.answers, "later it is another request with the same id"


def test_a_request_that_a_device_cannot_compute_ends_with_the_devices_error_after_two_attempts() -> None:
    site = settled("a")
    site.submit("r1")
    site.run_failed("a", 1, "device")
    assert not site.errors
    failed = messages.RunFailed("m", site.plan.version, 2, "device", "linear failed: nan")
    site.receive("a", failed)
    assert site.errors["r1"].code == RemoteError.code
    assert failed.text in str(site.errors["r1"])


@pytest.mark.parametrize(("device", "number"), [("b", 0), ("a", 1)])
def test_a_failure_from_another_device_or_plan_version_is_ignored(device: str, number: int) -> None:
    site = settled("a")
    plan = site.plan
    site.submit("r1")
    version = plan.version._replace(number=plan.version.number + number)
    for code in ("device", "request", "wire"):
        site.receive(device, messages.RunFailed("m", version, 1, code, "no"))
    assert list(site.work) == [1]
    assert not site.errors
    site.answer(1)
    assert set(site.answers) == {"r1"}


@pytest.mark.parametrize("forged_first", [True, False])
@pytest.mark.parametrize("what", ["numbers", "row", "shape", "another part", "parts sent"])
def test_contradicting_answers_are_not_delivered_and_the_run_is_retried(what: str, forged_first: bool) -> None:
    site = settled("a")
    site.submit("r1")
    sent, end = part(site), site.done(1, "a", 1)
    forged = {
        "numbers": replace(sent, body=sent.body * 2),
        "row": replace(sent, row_start=1),
        "shape": part(site, rows=2),
        "another part": replace(sent, part=1),
        "parts sent": site.done(1, "a", 2),
    }[what]
    site.hear(*((forged, sent, end) if forged_first else (sent, forged, end)))
    assert not site.answers
    assert not site.errors
    site.answer(2)
    assert site.answers["r1"].request.output()[0, 0] == 8


def test_a_repeated_answer_counts_once() -> None:
    site = settled("a")
    site.submit("r1")
    sent = replace(part(site), body=np.full((1, SPEC.hidden), np.nan, np.float32))
    site.hear(sent, replace(sent, body=sent.body.copy()))
    assert list(site.work) == [1]
    site.hear(site.done(1, "a", 1))
    assert set(site.answers) == {"r1"}


def test_a_lost_connection_counts_as_one_attempt() -> None:
    """Both ends report its loss and its return."""
    site = settled("a")
    site.submit("r1", within=1e6)
    for _ in range(3 * MAX_ATTEMPTS):
        site.run_failed("a", max(site.work), "link")
    assert not site.errors
    for _ in range(MAX_ATTEMPTS - 1):
        site.tick(LINK_LOSS_WINDOW_S / 2)
        site.tick(LINK_LOSS_WINDOW_S / 2 + 0.1)
        site.run_failed("a", max(site.work), "link")
    assert isinstance(site.errors["r1"], RemoteError)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_request_ends_once_under_random_events(data: st.DataObject) -> None:
    batching = data.draw(st.sampled_from([Batching(1), Batching(16), Batching(4, 0.2)]))
    site = Site(decider=everyone, batching=batching)
    pins = (None, ROW, Pins(devices=("b",)), Pins(weight_dtype="w8a8"), *(Pins(wire=wire) for wire in ("f16", "i8")))
    boot, submitted = Counter[str](), 0
    acts = ["join", "leave", "tick", "ready", "submit", "answer", "fail", "broken", "offline"]
    for _ in range(data.draw(st.integers(5, 40))):
        what, name = data.draw(st.sampled_from(acts)), data.draw(st.sampled_from("ab"))
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
            site.failed(name, data.draw(st.sampled_from(["memory", "wire"])))
        elif what == "broken" and site.work:
            run, code = data.draw(st.sampled_from(list(site.work))), data.draw(st.sampled_from(["wire", "x"]))
            site.run_failed(name, run, code)
        elif what == "offline":
            site.event(interface.BrokerState(online=data.draw(st.booleans())))
    site.pass_by(8, 5)
    assert len(site.answers) + len(site.errors) == submitted
    for answer in site.answers.values():
        wanted = answer.request.pins or Pins()
        assert (answer.plan.wire, answer.plan.weight_dtype) == (wanted.wire, wanted.weight_dtype)
        assert answer.request.output()[:, 0].tolist() == [c.shape.tokens for c in answer.request.batches]


# -- reports ----------------------------------------------------------------------------------------------------------


def running(**options) -> tuple[Site, Plan]:
    site = settled("a", "b", pins=ROW, **options)
    return site, site.plan


def ask(site: Site, name: str, *lengths: int, report: bool = False) -> Request:
    batches = tuple(Batch(TokenBatch((n,)), np.zeros(n, np.int32)) for n in lengths or (8,))
    arrived = Request(RequestKey("m", "c", name), batches, None, site.now + 60, wants_report=report)
    site.event(interface.RequestArrived(arrived))
    return arrived


def output(site: Site, plan: Plan, run_id: int, rows: slice = slice(None), part: int = 0, source: str = "") -> None:
    """Send rows of the output, which are the lengths of the sequences."""
    whole = np.repeat(np.array(decode_work(site.work[run_id])[0].sizes, np.float32)[:, None], SPEC.hidden, axis=1)
    site.hear(site.part(run_id, source or plan.root, whole[rows], part=part, row_start=rows.start or 0))


def report(site: Site, plan: Plan, run_id: int, *devices: str, parts: int = 1) -> None:
    site.hear(*(site.done(run_id, device, parts if device == plan.root else 0) for device in devices))


def test_only_requests_with_wants_report_wait_for_the_reports_of_their_run():
    site, plan = running(in_flight=1, batching=Batching(4))
    ask(site, "first")
    ask(site, "soon", 3)
    ask(site, "whole", 5, report=True)
    output(site, plan, 1)
    report(site, plan, 1, "a", "b")
    output(site, plan, 2)
    assert set(site.answers) == {"first", "soon"}
    report(site, plan, 2, "a", "b")
    (stats,) = site.answers["whole"].stats
    assert stats.reported
    assert set(stats.sent_bytes) == {"a", "b"}
    for name, length in (("soon", 3), ("whole", 5)):
        np.testing.assert_array_equal(site.answers[name].request.output(), np.full((1, SPEC.hidden), length))


def test_the_parts_of_an_output_are_delivered_when_all_have_arrived():
    site, plan = running()
    batch = Batch(TokenBatch((4, 5)), np.zeros(9, np.int32))
    site.event(interface.RequestArrived(Request(RequestKey("m", "c", "two"), (batch,), None, 60.0, wants_report=False)))
    output(site, plan, 1, slice(1, 2), part=1)
    output(site, plan, 1, slice(1, 2), part=2, source="b")  # its device reports no parts later
    output(site, plan, 1, slice(0, 1))
    assert not site.answers, "repeated rows: the reports decide which ones count"
    report(site, plan, 1, "a", "b", parts=2)
    np.testing.assert_array_equal(site.answers["two"].request.output()[:, 0], [4, 5])
    assert site.session.counters["foreign_frame"] == 1


@pytest.mark.parametrize("shape", [(), (1,), (1, SPEC.hidden + 1), (1, SPEC.hidden, 1)])
def test_an_output_of_another_shape_is_not_delivered_before_the_reports(shape):
    site, _plan = running()
    ask(site, "r")
    site.hear(site.part(1, "a", np.zeros(shape, np.float32)))
    assert not site.answers
    assert not site.errors


@pytest.mark.parametrize("lost", ["reports", "a device", "a failure"])
def test_an_answered_run_without_reports_ends_and_is_not_retried(lost):
    site, plan = running()
    ask(site, "r")
    output(site, plan, 1)
    assert set(site.answers) == {"r"}
    if lost == "a device":
        site.leave("b")
    elif lost == "a failure":
        site.run_failed("b", 1, "internal")
    else:
        for _ in range(400):
            site.tick(1.0)
            if not site.session.groups.default("m").runs:
                break
    assert not site.session.groups.default("m").runs
    assert set(site.work) == {1}
    assert not site.errors


def test_a_delivered_batch_is_not_computed_again_when_its_run_is_lost():
    site, plan = running(in_flight=1)
    ask(site, "r", 3, 4)
    output(site, plan, 1)
    site.event(interface.BrokerState(online=False))
    site.event(interface.BrokerState(online=True))
    site.tick(0.5)
    assert site.session.groups.default("m").runs.keys() == {2}
    output(site, plan, 2)
    assert [s.shape.lengths for s in site.answers["r"].stats] == [(3,), (4,)]
