"""The coordinator as devices load what a plan needs of them, or refuse it, on a virtual clock."""

from __future__ import annotations

import pytest
from scripted_site import Site, everyone

from hepti_mqtt.errors import ModelError, RemoteError
from hepti_mqtt.plan import Plan
from hepti_mqtt.runtime.planner import commands, events
from hepti_mqtt.runtime.planner.rollout import ASK_AGAIN_S, REFUSALS, RETRY_S
from hepti_mqtt.wire import messages


def test_device_that_leaves_during_preparation_ends_it() -> None:
    site = Site(decider=everyone)
    site.join("a", "b")
    site.tick(1.1)
    txn = site.prepares()["a"].txn
    site.leave("b")
    assert any(isinstance(m, messages.Release) for d, m in site.told if d == "a")
    assert site.prepares()["a"].txn > txn
    site.ready()
    assert site.session.plan("m").devices == ("a",)


def test_memory_refusal_swaps_plans_when_old_and_new_do_not_fit_together() -> None:
    site = Site(decider=everyone)
    site.join("a")
    old = site.settle()
    site.submit("r1")
    site.join("b")
    site.tick(1.1)
    refused = site.prepares()["a"]
    epoch = Plan.from_dict(refused.plan).epoch
    site.event(events.UpMessage("a", messages.Failed(refused.txn, "m", epoch, "memory", "too much", 1000)))
    assert site.prepares()["a"] == refused, "the run under the old plan comes first"
    site.answer(1)
    assert ("a", "m", old.epoch) in [(d, m.model, m.epoch) for d, m in site.told if isinstance(m, messages.Release)]
    assert site.prepares()["a"].txn > refused.txn
    site.ready()
    assert set(site.session.plan("m").devices) == {"a", "b"}
    assert "r1" in site.answers


def test_memory_refusal_without_another_plan_makes_the_next_question_tighter() -> None:
    site = Site()
    site.join("a", memory=1 << 24)
    site.tick(1.1)
    refused = site.prepares()["a"]
    epoch = Plan.from_dict(refused.plan).epoch
    site.event(events.UpMessage("a", messages.Failed(refused.txn, "m", epoch, "memory", "too much", 5 << 20)))
    site.tick(1.1)
    assert site.solves[-1].question.cluster.devices["a"].memory_bytes == (1 << 24) - (5 << 20)


def test_preparation_that_keeps_failing_ends_the_requests_that_wait() -> None:
    site = Site()
    site.join("a")
    site.submit("r1", within=1000)
    for _ in range(REFUSALS):
        site.tick(1.1)
        message = site.prepares()["a"]
        epoch = Plan.from_dict(message.plan).epoch
        site.event(events.UpMessage("a", messages.Failed(message.txn, "m", epoch, "wire", "corrupt tile", 0)))
    assert isinstance(site.errors["r1"], RemoteError)
    assert "corrupt tile" in str(site.errors["r1"])
    site.tick(RETRY_S + 0.1)
    site.ready()
    assert site.session.plan("m") is not None, "it tries again after a while"


def test_weights_that_cannot_be_read_end_the_requests_that_wait_at_once() -> None:
    site = Site()
    site.join("a")
    site.submit("r1", within=1000)
    site.tick(1.1)
    assert site.prepares()
    cut = ModelError("the file ends early")
    site.event(events.Unreadable("m", "b", cut))
    assert "r1" not in site.errors, "the plan is not for that device"
    site.event(events.Unreadable("m", "a", cut))
    assert site.errors["r1"] is cut
    site.submit("r2", within=1000)
    site.tick(RETRY_S + 0.1)
    site.event(events.Unreadable("m", "a", cut))
    assert site.errors["r2"] is cut
    site.tick(RETRY_S + 0.1)
    site.ready()
    assert site.session.plan("m") is not None, "the file may be whole again"


def test_prepare_that_was_lost_is_sent_again_to_those_who_are_not_ready() -> None:
    site = Site(decider=everyone)
    site.join("a", "b")
    site.tick(1.1)
    first = site.prepares()
    site.ready("a")
    site.told.clear()
    site.tick(ASK_AGAIN_S - 0.5)
    assert not site.prepares()
    site.tick(1)
    assert site.prepares() == {"b": first["b"]}
    site.ready("b")
    assert site.session.plan("m") is not None


def test_preparation_without_progress_is_given_up() -> None:
    site = Site()
    site.join("a")
    site.tick(1.1)
    first = site.prepares()["a"]
    epoch = Plan.from_dict(first.plan).epoch
    for _ in range(30):
        site.tick(5)
    assert site.prepares()["a"].txn > first.txn
    second = site.prepares()["a"]
    for _ in range(30):
        site.tick(5)
        plan = Plan.from_dict(second.plan)
        site.event(events.UpMessage("a", messages.Progress(second.txn, "m", plan.epoch, 1, 2)))
    assert site.prepares()["a"] == second, "progress keeps it alive"
    site.event(events.UpMessage("a", messages.Ready(first.txn, "m", epoch, 0, bytes(8))))
    assert site.session.plan("m") is None, "a Ready of the one given up activates nothing"


def test_progress_of_weights_is_shown_at_most_once_a_second() -> None:
    site = Site()
    site.join("a")
    site.tick(1.1)
    prepare = site.prepares()["a"]
    epoch = Plan.from_dict(prepare.plan).epoch
    shown = []
    for part in range(10):
        out = site.event(events.UpMessage("a", messages.Progress(prepare.txn, "m", epoch, part, 10)))
        shown += [c.progress for c in out if isinstance(c, commands.ShowPlan)]
        site.now += 0.25
    assert shown == [{"a": (0, 10)}, {"a": (4, 10)}, {"a": (8, 10)}]
    site.ready()
    last = [c for c in site.seen if isinstance(c, commands.ShowPlan)][-1]
    assert (last.preparing, last.progress) == (None, {})


@pytest.mark.parametrize("speaks", [True, False])
def test_a_device_that_prepares_without_progress_holds_nobody_up(speaks: bool) -> None:
    site = Site(decider=everyone)
    site.join("a", "b")
    site.tick(1.1)
    prepare = site.prepares()["b"]
    epoch = Plan.from_dict(prepare.plan).epoch
    site.ready("a")
    site.submit("r1")
    begun = site.now
    while site.now < begun + 30:
        site.tick(0.5)
        if speaks:
            site.event(events.UpMessage("b", messages.Progress(prepare.txn, "m", epoch, 0, 0)))
        if "b" not in site.session.membership.usable():
            break
    assert site.now - begun < (25 if speaks else 8)
    site.ready("a")
    assert site.session.plan("m").devices == ("a",)
