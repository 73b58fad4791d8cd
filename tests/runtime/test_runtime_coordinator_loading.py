"""The coordinator as devices load what a plan needs of them, or refuse it, on a virtual clock."""

from __future__ import annotations

import pytest
from scripted_site import SPEC, Site, everyone

from hepti_mqtt.errors import ModelError, RemoteError
from hepti_mqtt.ids import Epoch
from hepti_mqtt.plan import Plan
from hepti_mqtt.plan_programs import programs_digest
from hepti_mqtt.protocol import messages
from hepti_mqtt.runtime.coordinator import interface
from hepti_mqtt.runtime.coordinator.requests import Pins
from hepti_mqtt.runtime.coordinator.rollout import ASK_AGAIN_S, PREPARE_S, REFUSALS, RETRY_S


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
    site.event(interface.UpMessage("a", messages.Failed(refused.txn, "m", epoch, "memory", "too much", 1000)))
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
    site.event(interface.UpMessage("a", messages.Failed(refused.txn, "m", epoch, "memory", "too much", 5 << 20)))
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
        site.event(interface.UpMessage("a", messages.Failed(message.txn, "m", epoch, "wire", "corrupt tile", 0)))
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
    site.event(interface.Unreadable("m", "b", cut))
    assert "r1" not in site.errors, "the plan is not for that device"
    site.event(interface.Unreadable("m", "a", cut))
    assert site.errors["r1"] is cut
    site.submit("r2", within=1000)
    site.tick(RETRY_S + 0.1)
    site.event(interface.Unreadable("m", "a", cut))
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
        site.event(interface.UpMessage("a", messages.Progress(second.txn, "m", plan.epoch, 1, 2)))
    assert site.prepares()["a"] == second, "progress keeps it alive"
    site.event(interface.UpMessage("a", messages.Ready(first.txn, "m", epoch, 0, bytes(8))))
    assert site.session.plan("m") is None, "a Ready of the one given up activates nothing"


def test_progress_of_weights_is_shown_at_most_once_a_second() -> None:
    site = Site()
    site.join("a")
    site.tick(1.1)
    prepare = site.prepares()["a"]
    epoch = Plan.from_dict(prepare.plan).epoch
    shown = []
    for part in range(10):
        out = site.event(interface.UpMessage("a", messages.Progress(prepare.txn, "m", epoch, part, 10)))
        shown += [c.progress for c in out if isinstance(c, interface.ShowPlan)]
        site.now += 0.25
    assert shown == [{"a": (0, 10)}, {"a": (4, 10)}, {"a": (8, 10)}]
    site.ready()
    last = [c for c in site.seen if isinstance(c, interface.ShowPlan)][-1]
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
            site.event(interface.UpMessage("b", messages.Progress(prepare.txn, "m", epoch, 0, 0)))
        if "b" not in site.session.membership.usable():
            break
    assert site.now - begun < (25 if speaks else 8)
    site.ready("a")
    assert site.session.plan("m").devices == ("a",)


def told_until_lost(site: Site, device: str, *told: messages.Message, seconds: float = 60.0) -> float:
    """Let a device say the same again and again while all others are ready; return how long plans use it."""
    begun = site.now
    while site.now - begun < seconds and device in site.session.membership.usable():
        site.tick(0.5)
        for other in sorted(set(site.boots) - {device}):
            site.ready(other)
        for message in told:
            site.event(interface.UpMessage(device, message))
    return site.now - begun


@pytest.mark.parametrize("there_bytes", [100, 0], ids=["it loads", "it hangs"])
def test_a_device_that_loads_for_another_plan_first_is_not_taken_for_one_that_hangs(there_bytes: int) -> None:
    """Loads run one after the other there, so that of the second plan does not move."""
    site = Site(decider=everyone)
    site.join("a", "b")
    site.submit("pinned", pins=Pins(strategy="column"), within=1000)
    first = site.prepares()["b"]
    site.ready("a")
    site.tick(1.1)
    second = site.prepares()["b"]
    epochs = [Plan.from_dict(prepare.plan).epoch for prepare in (first, second)]
    assert len(set(epochs)) == 2
    moves = messages.Progress(first.txn, "m", epochs[0], there_bytes, 10 * there_bytes)
    lasts = told_until_lost(site, "b", moves, messages.Progress(second.txn, "m", epochs[1], 0, 0))
    assert lasts >= 60 if there_bytes else lasts < 25


@pytest.mark.parametrize("there_bytes", [100, 0], ids=["it loads", "it hangs"])
def test_what_a_device_still_loads_for_a_plan_that_was_given_up_is_progress(there_bytes: int) -> None:
    site = Site(decider=everyone)
    site.join("a", "b", "c")
    site.tick(1.1)
    given_up = site.prepares()["b"]
    epoch = Plan.from_dict(given_up.plan).epoch
    site.leave("a")
    assert site.prepares()["b"].txn > given_up.txn
    lasts = told_until_lost(site, "b", messages.Progress(given_up.txn, "m", epoch, there_bytes, 10 * there_bytes))
    assert lasts >= 60 if there_bytes else lasts < 25


def test_what_was_ready_before_is_only_a_word() -> None:
    """A device that runs under another plan says so whenever it is asked, whether it loads or not."""
    site = Site(decider=everyone)
    site.join("a", "b")
    plan = site.settle()
    active = site.prepares()["b"]
    site.join("c")
    site.tick(1.1)
    assert site.prepares()["b"].txn > active.txn
    ready = messages.Ready(active.txn, "m", plan.epoch, 1000, programs_digest(SPEC, plan))
    assert told_until_lost(site, "b", ready) < 25


def test_a_plan_is_not_given_up_while_its_devices_load_for_others() -> None:
    """There may be many, and each may take long."""
    site = Site()
    site.join("a")
    site.tick(1.1)
    prepare = site.prepares()["a"]
    told_until_lost(site, "a", messages.Progress(prepare.txn - 1, "m", Epoch(7, 9), 1, 2), seconds=2 * PREPARE_S)
    assert site.prepares()["a"].txn == prepare.txn
    told_until_lost(site, "a", seconds=PREPARE_S + 10)
    assert site.prepares()["a"].txn > prepare.txn
