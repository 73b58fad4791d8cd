"""A model's plans in their table: which steps a site takes, what goes with them, and how they read."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_site import LOST_S, ROW, SPEC, Site, everyone

from hepti_mqtt.errors import PlanError
from hepti_mqtt.plan import Plan
from hepti_mqtt.plan_programs import programs_digest
from hepti_mqtt.protocol import messages
from hepti_mqtt.runtime.coordinator import interface
from hepti_mqtt.runtime.coordinator.plans import PLANS, Plans
from hepti_mqtt.runtime.coordinator.requests import Pins
from hepti_mqtt.runtime.coordinator.rollout import PREPARE_S, STORY
from hepti_mqtt.runtime.coordinator.scheduler import OVERDUE_S
from hepti_mqtt.runtime.machinery import IllegalStepError, Machine, Story

NEVER = PlanError("no")


def refuse(site: Site, device: str, code: str = "memory") -> None:
    message = site.prepares()[device]
    epoch = Plan.from_dict(message.plan).epoch
    site.event(interface.UpMessage(device, messages.Failed(message.txn, "m", epoch, code, "too much", 10)))


def settled(*devices: str, **options: object) -> Site:
    site = Site(decider=everyone, **options)
    site.join(*devices)
    site.settle()
    return site


def overdue(site: Site) -> None:
    site.submit("r", within=1e6)
    site.tick(OVERDUE_S / 2)
    site.tick(OVERDUE_S)


def replaced() -> Site:
    site = settled("a")
    site.join("b")
    site.tick(1.1)
    site.ready()
    return site


def kept() -> Site:
    site = settled("a")
    site.event(interface.Pin("m", Pins()))
    return site


def nothing_to_plan_with() -> Site:
    site = Site(decider=everyone)
    site.tick(1.1)
    site.tick(1.1)
    return site


def outdated() -> Site:
    site = Site(decider=everyone, searches=False)
    site.join("a")
    site.tick(1.1)
    site.event(interface.Pin("m", ROW))
    site.solve(site.solves[0])
    return site


def refused() -> Site:
    site = Site(decider=everyone)
    site.join("a")
    site.tick(1.1)
    refuse(site, "a", "wire")
    return site


def silent() -> Site:
    site = Site(decider=everyone)
    site.join("a")
    site.tick(1.1)
    for _ in range(int(PREPARE_S / 5) + 1):
        site.tick(5)
    return site


def lost_on_the_way() -> Site:
    site = Site(decider=everyone)
    site.join("a", "b")
    site.tick(1.1)
    site.leave("b")
    return site


def lost_while_swapping() -> Site:
    site = settled("a")
    site.submit("r")
    site.join("b")
    site.tick(1.1)
    refuse(site, "a")
    site.leave("b")
    return site


def swapped() -> Site:
    site = settled("a")
    site.join("b")
    site.tick(1.1)
    refuse(site, "a")
    site.ready()
    return site


def lost_active() -> Site:
    site = settled("a", "b")
    site.leave("b")
    return site


def suspect_replaced() -> Site:
    site = settled("a")
    overdue(site)
    site.ready()
    return site


def suspect_makes_room() -> Site:
    site = settled("a")
    overdue(site)
    refuse(site, "a")
    return site


def suspect_lost() -> Site:
    site = settled("a", "b")
    overdue(site)
    site.leave("b")
    return site


def suspect_without_another() -> Site:
    site = settled("a")
    site.decider = lambda question: (_ for _ in ()).throw(NEVER)
    overdue(site)
    return site


NARROW = Pins(storage="w8a8")
OTHERS = (Pins(wire="f16"), Pins(wire="i8"), Pins(storage="f16"), Pins(storage="w8a32"))


def pinned(**options: object) -> Site:
    """Return a site with a plan of its own, and one on its way for what r1 has pinned."""
    site = settled("a", **options)
    site.submit("r1", pins=NARROW, within=2.0)
    return site


def crowded(site: Site) -> Site:
    """Let others' pins take the place of those that nobody waits for."""
    for number, pins in enumerate(OTHERS):
        site.submit(f"other {number}", pins=pins)
    assert NARROW not in [slot.plans.pins for slot in site.session.slots.pinned()]
    return site


def pinned_and_lost() -> Site:
    site = settled("a", "b")
    site.submit("r1", pins=Pins(devices=("b",)))
    site.ready()
    site.answer(1)
    site.leave("b")
    assert not site.session.slots.pinned(), "nobody waits for these pins"
    return site


def given_up_while_searching() -> Site:
    site = settled("a")
    site.searches = False
    site.submit("r1", pins=NARROW, within=2.0)
    site.tick(3.0)
    assert not site.session.slots.pinned()
    site.solve(site.solves[-1])
    return site


def given_up_while_preparing() -> Site:
    site = pinned()
    site.tick(3.0)
    return crowded(site)


def given_up_while_swapping() -> Site:
    site = settled("a")
    site.submit("own", within=4.0)
    site.submit("r1", pins=NARROW, within=2.0)
    refuse(site, "a")
    site.tick(3.0)
    return crowded(site)


def given_up_while_active() -> Site:
    site = pinned()
    site.ready()
    site.answer(1)
    return crowded(site)


def given_up_while_suspect() -> Site:
    site = pinned()
    site.ready()
    site.answer(1)
    site.searches = False
    site.submit("r2", pins=NARROW, within=OVERDUE_S + 3)
    site.tick(OVERDUE_S / 2)
    site.tick(OVERDUE_S)
    site.tick(OVERDUE_S)
    return crowded(site)


def own_search_makes_room() -> Site:
    site = pinned()
    site.searches = False
    site.event(interface.Pin("m", Pins()))
    refuse(site, "a")
    assert site.session.slots.own("m").displaced
    return site


def pins_on_their_way_make_room() -> Site:
    site = pinned()
    site.event(interface.Pin("m", Pins(wire="f16")))
    refuse(site, "a")
    assert [slot.displaced for slot in site.session.slots.pinned()] == [True]
    return site


def pins_that_swap_make_room_for_another_model() -> Site:
    site = Site("m", "n", decider=everyone)
    site.join("a")
    site.tick(1.1)
    (_, first), (_, other) = [told for told in site.told if isinstance(told[1], messages.Prepare)]
    plan = Plan.from_dict(first.plan)
    ready = messages.Ready(first.txn, "m", plan.epoch, 1, programs_digest(SPEC, plan))
    site.event(interface.UpMessage("a", ready))
    site.submit("own")
    site.submit("r1", pins=NARROW)
    refuse(site, "a")
    epoch = Plan.from_dict(other.plan).epoch
    site.event(interface.UpMessage("a", messages.Failed(other.txn, "n", epoch, "memory", "too much", 10)))
    assert [slot.displaced for slot in site.session.slots.pinned()] == [True]
    return site


SCENES = (
    pinned_and_lost,
    given_up_while_searching,
    given_up_while_preparing,
    given_up_while_swapping,
    given_up_while_active,
    given_up_while_suspect,
    own_search_makes_room,
    pins_on_their_way_make_room,
    pins_that_swap_make_room_for_another_model,
    replaced,
    kept,
    nothing_to_plan_with,
    outdated,
    refused,
    silent,
    lost_on_the_way,
    lost_while_swapping,
    swapped,
    lost_active,
    suspect_replaced,
    suspect_makes_room,
    suspect_lost,
    suspect_without_another,
)


def test_every_step_of_the_table_is_taken_by_some_site() -> None:
    taken = {(t.before, t.event, t.after) for scene in SCENES for s in scene().session.stories() for t in s.last()}
    steps = {(s, e, after) for s, by_event in PLANS.steps.items() for e, after in by_event.items()}
    assert steps - taken == set()
    assert taken - steps == {("-", "want", "wanted")}


def test_the_story_says_what_happened_and_why() -> None:
    assert [str(t).split(maxsplit=1)[1] for t in swapped().session.stories()[0].last()][-8:] == [
        "m: - -> wanted  (want: b has joined)",
        "m 7.2: wanted -> searching  (search)",
        "m 7.2: searching -> preparing  (found)",
        "m 7.2: preparing -> swapping  (lacks memory: a refused it; it comes again as 7.3)",
        "m 7.1: active -> retiring  (make room: for 7.3)",
        "m 7.1: retiring -> gone  (idle)",
        "m 7.3: swapping -> preparing  (room)",
        "m 7.3: preparing -> active  (ready)",
    ]


def test_the_published_record_carries_the_story_and_follows_it_within_a_tick() -> None:
    site = replaced()
    story = site.session.stories()[0]
    site.tick(0.25)
    shown = [c for c in site.seen if isinstance(c, interface.ShowPlan)]
    assert shown[-1].story == story.last(STORY)
    assert [t.after for t in shown[-1].story][-1] == "gone", "also what happened since the plan became active"
    site.seen.clear()
    site.tick(0.25)
    assert not [c for c in site.seen if isinstance(c, interface.ShowPlan)], "nothing new, nothing shown"


def test_a_published_story_is_bounded() -> None:
    site = settled("a")
    for _ in range(3 * STORY):
        site.event(interface.Pin("m", Pins()))
    shown = [c for c in site.seen if isinstance(c, interface.ShowPlan)]
    assert max(len(c.story) for c in shown) == STORY


def illegal(site: Site) -> None:
    plans = site.session.slots.own("m").plans
    record = plans.active
    assert record is not None
    plans.ready(record, site.now)


def test_an_illegal_step_fails_a_test() -> None:
    with pytest.raises(IllegalStepError, match=r"plans of m: m 7\.1: ready: illegal"):
        illegal(settled("a"))


@pytest.mark.parametrize("running", [False, True])
def test_in_service_a_plan_that_took_an_illegal_step_is_released_and_another_searched_for(
    monkeypatch: pytest.MonkeyPatch, running: bool
) -> None:
    monkeypatch.setattr(Machine, "strict", False)
    site = settled("a")
    first = site.session.plan("m")
    assert first is not None
    if running:
        site.submit("r1")
    illegal(site)
    site.tick(0.1)
    site.tick(0.1)
    assert site.session.counters["illegal_step"] == site.notes()["illegal_step"] == 1
    if running:
        site.answer(1)
        assert "r1" in site.answers
    site.ready()
    second = site.session.plan("m")
    assert second is not None
    assert second.epoch > first.epoch
    assert ("a", first.epoch) in [(d, m.epoch) for d, m in site.told if isinstance(m, messages.Release)]
    site.submit("r2")
    site.answer(max(site.work))
    assert "r2" in site.answers


# -- any order of events ----------------------------------------------------------------------------------------------


def test_nobody_can_be_ready_for_a_plan_that_waits_for_the_old_one() -> None:
    site = settled("a")
    site.submit("r")
    site.join("b")
    site.tick(1.1)
    refuse(site, "a")
    swapping = site.session.slots.own("m").plans.preparing
    assert swapping is not None
    for device in "ab":
        site.event(interface.UpMessage(device, messages.Ready(swapping.txn, "m", swapping.epoch, 1, bytes(8))))
    assert swapping.state == "swapping"
    site.answer(1)
    site.ready()
    assert swapping.state == "active"


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32))
def test_no_order_of_events_leads_to_an_illegal_step(seed: int) -> None:
    rng = random.Random(seed)
    site = Site(decider=everyone, searches=rng.random() < 0.5)
    boots = dict.fromkeys("abc", 0)
    actions = (
        "join",
        "leave",
        "tick",
        "tick",
        "ready",
        "ready",
        "submit",
        "answer",
        "refuse",
        "solve",
        "pin",
        "silence",
    )
    for number in range(rng.randrange(60)):
        what, name = rng.choice(actions), rng.choice("abc")
        if what == "join":
            boots[name] += 1
            site.join(name, boot=boots[name])
        elif what == "leave" and name in site.boots:
            site.leave(name)
        elif what == "silence":
            site.boots.pop(name, None)
        elif what == "tick":
            site.tick(rng.choice((0.1, 1.1, OVERDUE_S, LOST_S, PREPARE_S)))
        elif what == "ready":
            site.ready(*rng.choice((("a",), ("b", "c"), ())))
        elif what == "submit":
            site.submit(
                f"r{number}",
                pins=rng.choice((None, ROW, Pins(devices=("c",)), NARROW, *OTHERS)),
                within=rng.choice((1.0, 100.0)),
            )
        elif what == "answer" and site.work:
            site.answer(rng.choice(sorted(site.work)[-3:]))
        elif what == "refuse" and name in site.prepares():
            refuse(site, name, rng.choice(("memory", "wire")))
        elif what == "solve" and site.solves and not site.searches:
            site.solve(rng.choice(site.solves[-2:]))
        elif what == "pin":
            site.event(interface.Pin("m", rng.choice((Pins(), ROW))))
    assert not site.session.counters["illegal_step"]


def test_plans_alone_keep_to_their_invariants() -> None:
    plans = Plans("m", Pins(), Site().session.counters, Story("plans of m"))
    plans.want(1.0, 0.0, "to begin with")
    plans.want(2.0, 0.0, "again", forced=True)
    assert plans.wanted is not None
    assert (plans.wanted.due_s, plans.wanted.forced) == (2.0, True)
    assert plans.busy()
    plans.check()
