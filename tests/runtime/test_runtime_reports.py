"""An answer leaves when its output is there; what devices report later is still counted, and what never comes ends."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scripted_site import ROW, SPEC, Site

from hepti_mqtt.models.shapes import PackedTokens
from hepti_mqtt.plan import Plan
from hepti_mqtt.protocol import messages
from hepti_mqtt.protocol.frames import decode_work
from hepti_mqtt.runtime.coordinator import interface
from hepti_mqtt.runtime.coordinator.requests import Batching, Chunk, Job, RequestKey


def running(**options) -> tuple[Site, Plan]:
    site = Site(pins=ROW, **options)
    site.join("a", "b")
    return site, site.settle()


def ask(site: Site, name: str, *lengths: int, report: bool = False) -> Job:
    chunks = tuple(Chunk(PackedTokens((n,)), np.zeros(n, np.int32)) for n in lengths or (8,))
    job = Job(RequestKey("m", "c", name), chunks, None, site.now + 60, report=report)
    site.event(interface.Submit(job))
    return job


def output(site: Site, plan: Plan, admission: int, rows: slice = slice(None), part: int = 0, source: str = "") -> None:
    """Send rows of the output, which are the lengths of the sequences."""
    frame = site.work[admission]
    whole = np.repeat(np.array(decode_work(frame)[0].sizes, np.float32)[:, None], SPEC.hidden, axis=1)
    body, source = whole[rows], source or plan.head
    first = rows.start or 0
    sent = replace(
        frame, kind="output", source=source, part=part, dtype="f32", shape=body.shape, row_start=first, body=body
    )
    site.event(interface.UpFrame(source, sent))


def report(site: Site, plan: Plan, admission: int, *devices: str, parts: int = 1) -> None:
    for device in devices:
        numbers = (2000, 500, 100, parts if device == plan.head else 0)
        done = replace(site.work[admission], kind="done", source=device, dtype="u8", shape=(0,), numbers=numbers)
        site.event(interface.UpFrame(device, replace(done, body=b"")))


def test_the_answer_leaves_at_the_output_and_late_reports_are_counted():
    site, plan = running()
    ask(site, "r")
    report(site, plan, 1, "b")
    assert not site.answers
    output(site, plan, 1)
    (stats,) = site.answers["r"].stats
    assert not stats.reported
    assert site.session.slots.own("m").runs, "the devices are not through"
    report(site, plan, 1, "a")
    assert not site.session.slots.own("m").runs
    assert not site.session.counters["late"]
    for n in range(2, 5):  # what is learned of runs is learned of these too
        ask(site, f"r{n}")
        output(site, plan, n)
        site.now += 1.0
        report(site, plan, n, "a", "b")
    assert len(site.answers) == 4


def test_who_asks_for_the_reports_waits_for_them_and_others_of_the_run_do_not():
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
        np.testing.assert_array_equal(site.answers[name].job.output(), np.full((1, SPEC.hidden), length))


def test_parts_of_an_output_are_an_answer_once_they_are_all_there():
    site, plan = running()
    ask(site, "r", 4)
    site.event(
        interface.Submit(
            Job(
                RequestKey("m", "c", "two"),
                (Chunk(PackedTokens((4, 5)), np.zeros(9, np.int32)),),
                None,
                60.0,
                report=False,
            )
        )
    )
    output(site, plan, 2, slice(1, 2), part=1)
    output(site, plan, 2, slice(1, 2), part=2, source="b")  # of a device that will say that it sent none
    output(site, plan, 2, slice(0, 1))
    assert not site.answers, "rows that came twice: only the reports say whose are the answer"
    report(site, plan, 2, "a", "b", parts=2)
    np.testing.assert_array_equal(site.answers["two"].job.output()[:, 0], [4, 5])
    assert site.session.counters["foreign_frame"] == 1


def test_chunks_of_one_request_have_full_reports_where_they_came_before_the_answer():
    site, plan = running()
    ask(site, "r", 3, 4)
    output(site, plan, 1)
    report(site, plan, 1, "a", "b")
    assert not site.answers
    output(site, plan, 2)
    assert [s.reported for s in site.answers["r"].stats] == [True, False]
    np.testing.assert_array_equal(site.answers["r"].job.output()[:, 0], [3, 4])


@pytest.mark.parametrize("shape", [(), (1,), (1, SPEC.hidden + 1), (1, SPEC.hidden, 1)])
def test_an_output_of_another_shape_is_no_answer_before_the_reports(shape):
    site, _plan = running()
    ask(site, "r")
    frame = site.work[1]
    body = np.zeros(shape, np.float32)
    site.event(interface.UpFrame("a", replace(frame, kind="output", source="a", dtype="f32", shape=shape, body=body)))
    assert not site.answers
    assert not site.errors


@pytest.mark.parametrize("lost", ["reports", "a device", "a failure"])
def test_a_run_whose_reports_never_come_ends_and_is_not_issued_again(lost):
    site, plan = running()
    ask(site, "r")
    output(site, plan, 1)
    assert set(site.answers) == {"r"}
    if lost == "a device":
        site.leave("b")
    elif lost == "a failure":
        site.event(interface.UpMessage("b", messages.RequestFailed("m", plan.epoch, 1, "internal", "a mistake")))
    else:
        for _ in range(400):
            site.tick(1.0)
            if not site.session.slots.own("m").runs:
                break
    assert not site.session.slots.own("m").runs
    assert set(site.work) == {1}
    assert not site.errors


def test_a_chunk_whose_output_is_there_is_not_computed_again_when_its_run_is_lost():
    site, plan = running(in_flight=1)
    ask(site, "r", 3, 4)
    output(site, plan, 1)
    site.event(interface.Connection(online=False))
    site.event(interface.Connection(online=True))
    site.tick(0.5)
    assert site.session.slots.own("m").runs.keys() == {2}
    output(site, plan, 2)
    assert [s.shape.lengths for s in site.answers["r"].stats] == [(3,), (4,)]
