"""A model's plans in their table: which steps a site takes, what goes with them, and how they read."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_site import LOST_S, ROW, Site, everyone

from hepti_mqtt.errors import PlanError
from hepti_mqtt.plan import Plan
from hepti_mqtt.runtime import coordination as co
from hepti_mqtt.runtime.dispatcher import OVERDUE_S
from hepti_mqtt.runtime.flight import Pins
from hepti_mqtt.runtime.plans import PLANS, Plans
from hepti_mqtt.runtime.rollout import PREPARE_S, STORY
from hepti_mqtt.runtime.states import IllegalStepError, Machine
from hepti_mqtt.wire import messages

NEVER = PlanError("no")


def refuse(site: Site, device: str, code: str = "memory") -> None:
    message = site.prepares()[device]
    epoch = Plan.from_dict(message.plan).epoch
    site.event(co.UpMessage(device, messages.Failed(message.txn, "m", epoch, code, "too much", 10)))


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
    site.event(co.Pin("m", Pins()))
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
    site.event(co.Pin("m", ROW))
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


SCENES = (
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
    shown = [c for c in site.seen if isinstance(c, co.ShowPlan)]
    assert shown[-1].story == story.last(STORY)
    assert [t.after for t in shown[-1].story][-1] == "gone", "also what happened since the plan became active"
    site.seen.clear()
    site.tick(0.25)
    assert not [c for c in site.seen if isinstance(c, co.ShowPlan)], "nothing new, nothing shown"


def test_a_published_story_is_bounded() -> None:
    site = settled("a")
    for _ in range(3 * STORY):
        site.event(co.Pin("m", Pins()))
    shown = [c for c in site.seen if isinstance(c, co.ShowPlan)]
    assert max(len(c.story) for c in shown) == STORY


def illegal(site: Site) -> None:
    plans = site.session._models["m"].plans
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


# -- pins -------------------------------------------------------------------------------------------------------------


def test_pins_are_those_of_the_latest_search_or_plan() -> None:
    site = Site(decider=everyone, searches=False)
    plans = site.session._models["m"].plans
    site.join("a", "b")
    site.tick(1.1)
    assert plans.pins == Pins()
    site.submit("r", pins=ROW)
    assert plans.wanted is not None
    assert plans.pins == ROW
    assert plans.searching is not None
    assert plans.searching.pins == Pins(), "the search that runs keeps to what it began with"
    site.solve(site.solves[-1])
    site.solve(site.solves[-1])
    site.ready()
    assert plans.active is not None
    assert plans.active.pins == plans.pins == ROW


def test_a_plan_that_a_search_finds_as_good_takes_over_its_pins() -> None:
    site = settled("a", "b")
    plans = site.session._models["m"].plans
    before = plans.active
    site.submit("r", pins=Pins(devices=("a", "b")))
    assert plans.active is before
    assert plans.pins == Pins(devices=("a", "b"))
    assert list(site.work) == [1]


# -- any order of events ----------------------------------------------------------------------------------------------


def test_nobody_can_be_ready_for_a_plan_that_waits_for_the_old_one() -> None:
    site = settled("a")
    site.submit("r")
    site.join("b")
    site.tick(1.1)
    refuse(site, "a")
    swapping = site.session._models["m"].plans.preparing
    assert swapping is not None
    for device in "ab":
        site.event(co.UpMessage(device, messages.Ready(swapping.txn, "m", swapping.epoch, 1, bytes(8))))
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
                f"r{number}", pins=rng.choice((None, ROW, Pins(devices=("c",)))), within=rng.choice((1.0, 100.0))
            )
        elif what == "answer" and site.work:
            site.answer(rng.choice(sorted(site.work)[-3:]))
        elif what == "refuse" and name in site.prepares():
            refuse(site, name, rng.choice(("memory", "wire")))
        elif what == "solve" and site.solves and not site.searches:
            site.solve(rng.choice(site.solves[-2:]))
        elif what == "pin":
            site.event(co.Pin("m", rng.choice((Pins(), ROW))))
    assert not site.session.counters["illegal_step"]


def test_plans_alone_keep_to_their_invariants() -> None:
    plans = Plans("m", Pins(), Site().session.counters)
    plans.want(1.0, 0.0, "to begin with")
    plans.want(2.0, 0.0, "again", forced=True)
    assert plans.wanted is not None
    assert (plans.wanted.due_s, plans.wanted.forced) == (2.0, True)
    assert plans.busy()
    plans.check()
