"""Requests with pins on a virtual clock: plans of their own beside the planner's, and room for all of them."""

from __future__ import annotations

from scripted_site import ROW, Site, everyone

from hepti_mqtt.errors import OverloadedError, PlanError
from hepti_mqtt.plan import Plan
from hepti_mqtt.protocol import messages
from hepti_mqtt.runtime.coordinator import interface
from hepti_mqtt.runtime.coordinator.fleet import RETURN_S
from hepti_mqtt.runtime.coordinator.models import COMES_BACK_S, PINNED
from hepti_mqtt.runtime.coordinator.requests import Pins


def test_a_pinned_request_waits_for_its_plan_and_others_do_not() -> None:
    site = Site()
    site.join("a", "b")
    first = site.settle()
    assert first.strategy == "single"
    site.submit("r1", pins=ROW)
    site.submit("r2", pins=ROW)
    assert not site.work
    site.submit("r3")
    site.answer(1)
    assert site.answers["r3"].plan == first, "weights for somebody's pins are on their way, nobody else waits for them"
    site.ready()
    for admission in (2, 3):
        site.answer(admission)
    assert [site.answers[name].plan.strategy for name in ("r1", "r2")] == ["row", "row"]
    assert site.session.plan("m") == first


def test_pins_change_the_answers_of_their_own_request_alone() -> None:
    site = Site(decider=everyone)
    site.join("a", "b")
    first = site.settle()
    narrow = Pins(storage="w8a8")
    site.submit("r1", pins=narrow)
    site.ready()
    site.answer(1)
    released = [d for d, m in site.told if isinstance(m, messages.Release)]
    for admission, (name, pins) in enumerate({"r2": None, "r3": narrow, "r4": Pins()}.items(), 2):
        site.submit(name, pins=pins)
        site.answer(admission)
    assert {n: a.plan.storage for n, a in site.answers.items()} == {
        "r1": "w8a8",
        "r2": "f32",
        "r3": "w8a8",
        "r4": "f32",
    }
    assert site.answers["r4"].plan == site.answers["r2"].plan == first, "what is pinned is what the planner has anyway"
    assert site.answers["r3"].plan == site.answers["r1"].plan, "the plan for these pins is still there"
    assert not released, "both fit"


def test_pins_are_each_served_under_their_own() -> None:
    site = Site()
    site.join("a", "b")
    site.settle()
    wanted = {"r1": ROW, "r2": Pins("column"), "r3": ROW, "r4": Pins(devices=("b",))}
    for name, pin in wanted.items():
        site.submit(name, pins=pin)
    for _ in range(3):  # one division after the other is prepared
        site.ready()
        site.tick(0.1)
    for admission in range(1, 5):
        site.answer(admission)
    assert {n: a.plan.strategy for n, a in site.answers.items()} == {
        "r1": "row",
        "r2": "column",
        "r3": "row",
        "r4": "single",
    }
    assert site.answers["r4"].plan.devices == ("b",)


def test_no_more_runs_at_once_whatever_their_pins() -> None:
    site = Site(in_flight=2, decider=everyone)
    site.join("a", "b")
    site.settle()
    site.submit("r1", pins=ROW)
    site.ready()
    site.submit("r2")
    site.submit("r3")
    site.submit("r4", pins=ROW)
    assert len(site.work) == 2
    for admission in range(1, 5):
        site.answer(admission)
    assert list(site.answers) == ["r1", "r2", "r3", "r4"], "in the order in which they came"


def test_few_pinned_plans_are_kept_those_asked_for_last() -> None:
    site = Site(decider=everyone)
    site.join("a", "b")
    first = site.settle()
    kinds = [Pins(wire="f16"), Pins(wire="i8"), Pins(storage="f16"), Pins(storage="w8a8"), Pins(storage="w8a32")]
    assert len(kinds) == PINNED + 1
    for number, pins in enumerate([*kinds[:PINNED], kinds[0], kinds[PINNED]], 1):
        site.tick(0.1)
        site.submit(f"r{number}", pins=pins)
        site.ready()
        site.answer(number)
    assert max(len(c.pinned_preparing) for c in site.seen if isinstance(c, interface.ShowPlan)) == 1
    assert len(site.answers) == PINNED + 2
    gone = site.answers["r2"].plan.epoch
    assert {m.epoch for _, m in site.told if isinstance(m, messages.Release)} == {gone}
    assert [d for d, m in site.told if isinstance(m, messages.Release)] == ["a", "b"]
    assert site.session.plan("m") == first
    shown = [c for c in site.seen if isinstance(c, interface.ShowPlan)][-1]
    assert (shown.active, len(shown.pinned)) == (first, PINNED)


def test_more_pins_than_there_is_room_for_are_refused_while_all_are_in_use() -> None:
    site = Site(decider=everyone)
    site.join("a", "b")
    site.settle()
    kinds = [Pins(wire="f16"), Pins(wire="i8"), Pins(storage="f16"), Pins(storage="w8a8"), Pins(storage="w8a32")]
    for number, pins in enumerate(kinds):
        site.submit(f"r{number}", pins=pins)
    assert list(site.errors) == [f"r{PINNED}"]
    assert isinstance(site.errors[f"r{PINNED}"], OverloadedError)
    site.submit("own")
    site.answer(1)
    assert "own" in site.answers


def tight(site: Site, *names: str) -> None:
    """Let devices refuse a plan for want of memory while they hold another one."""
    for name in names:
        message = site.prepares()[name]
        epoch = Plan.from_dict(message.plan).epoch
        site.event(interface.UpMessage(name, messages.Failed(message.txn, "m", epoch, "memory", "no room", 10)))


def without_room() -> tuple[Site, Plan]:
    """Return a site whose own plan has made room for that of r1, and its own plan."""
    site = Site(in_flight=1, decider=everyone)
    site.join("a")
    first = site.settle()
    site.submit("before")
    site.submit("r1", pins=Pins(storage="w8a8"))
    tight(site, "a")
    assert site.session.plan("m") is None, "it ends with its last run"
    assert not site.session.slots.own("m").plans.preparing
    site.answer(1)
    assert "before" in site.answers
    assert ("a", first.epoch) in [(d, m.epoch) for d, m in site.told if isinstance(m, messages.Release)]
    site.ready()
    return site, first


def test_the_planners_own_plan_makes_room_for_pins_and_comes_back_by_itself() -> None:
    site, first = without_room()
    site.answer(2)
    assert site.answers["r1"].plan.storage == "w8a8"
    site.tick(COMES_BACK_S / 2)
    assert site.session.plan("m") is None, "the next request may have the same pins"
    for _ in range(3):
        site.tick(COMES_BACK_S / 2)
    tight(site, "a")
    pinned = site.answers["r1"].plan.epoch
    assert ("a", pinned) in [(d, m.epoch) for d, m in site.told if isinstance(m, messages.Release)]
    site.tick(0.1)
    site.ready()
    back = site.session.plan("m")
    assert back is not None
    assert (back.storage, back.devices) == (first.storage, first.devices)
    assert not site.session.slots.pinned()


def test_plans_that_do_not_fit_beside_each_other_take_turns_in_the_order_of_requests() -> None:
    site, _ = without_room()
    narrow = Pins(storage="w8a8")
    site.submit("r2", pins=narrow)
    site.submit("r3")
    site.submit("r4", pins=narrow)
    searches = len(site.solves)
    assert site.session.plan("m") is None
    site.answer(2)
    assert len(site.solves) == searches + 1, "r3 is next that has no run, and r4 came after it"
    tight(site, "a")
    site.answer(3)
    assert len(site.work) == 3, "r4 waits until r3 has had its turn"
    site.ready()
    assert site.session.plan("m") is not None
    tight(site, "a")
    site.answer(4)
    site.ready()
    site.answer(5)
    assert list(site.answers) == ["before", "r1", "r2", "r3", "r4"]
    assert [a.plan.storage for a in site.answers.values()] == ["f32", "w8a8", "w8a8", "f32", "w8a8"]


def test_pins_that_nobody_waits_for_make_room_before_a_plan_that_serves() -> None:
    site = Site(decider=everyone)
    site.join("a")
    first = site.settle()
    site.submit("r1", pins=Pins(wire="f16"))
    site.ready()
    site.answer(1)
    site.submit("r2", pins=Pins(storage="w8a8"))
    tight(site, "a")
    assert site.session.plan("m") == first
    site.tick(0.1)
    site.ready()
    site.answer(2)
    assert site.answers["r2"].plan.storage == "w8a8"
    assert site.session.plan("m") == first
    assert len(site.session.slots.pinned()) == 1


def test_an_older_plan_is_affirmed_before_a_newer_one_is_activated() -> None:
    """A device in doubt takes the activation of a plan for the end of those before it."""
    site = Site(decider=everyone)
    site.join("a", "b")
    first = site.settle()
    site.submit("r1", pins=ROW)
    before = len(site.told)
    site.ready()
    pinned = site.session.slots.pinned()[0].active
    assert pinned is not None
    activated = [m.epoch for d, m in site.told[before:] if d == "a" and isinstance(m, messages.Activate)]
    assert activated == [first.epoch, pinned.epoch]


def test_pin_that_finds_no_plan_ends_its_requests_only() -> None:
    site = Site()
    site.join("a")
    plan = site.settle()
    site.submit("r1", pins=Pins(devices=("nobody",)))
    assert "nobody" in str(site.errors["r1"])
    site.submit("r2")
    site.answer(1)
    assert site.answers["r2"].plan == plan
    site.submit("r3", pins=Pins(devices=("nobody",)))
    assert isinstance(site.errors["r3"], PlanError), "the same pin is tried again, not waited for"
    assert not site.session.slots.pinned()


def test_pins_whose_device_leaves_end_and_the_planners_own_plan_is_made_anew() -> None:
    site = Site()
    site.join("a", "b")
    site.settle()
    site.submit("r1", pins=Pins(devices=("b",)))
    site.ready()
    site.submit("r2")
    site.leave("b")
    site.ready()
    site.answer(max(site.work))
    for _ in range(int(RETURN_S) + 2):
        assert "r1" not in site.errors or site.now > RETURN_S, "it may come back"
        site.tick(1)
    assert isinstance(site.errors["r1"], PlanError)
    assert site.answers["r2"].plan.devices == ("a",)
