"""A model's plans: every step of their table, pinned plans next to the default one, and evictions."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_site import LOST_S, ROW, SPEC, Site, everyone, settled

from hepti_mqtt.core.errors import OverloadedError, PlanError
from hepti_mqtt.core.plan import Plan
from hepti_mqtt.protocol import messages
from hepti_mqtt.runtime import machinery
from hepti_mqtt.runtime.coordinator import interface
from hepti_mqtt.runtime.coordinator.dispatch import OVERDUE_S
from hepti_mqtt.runtime.coordinator.fleet import RETURN_S
from hepti_mqtt.runtime.coordinator.plan_groups import MAX_PINNED_GROUPS, RESTORE_AFTER_S
from hepti_mqtt.runtime.coordinator.plans import PLANS, Ids
from hepti_mqtt.runtime.coordinator.requests import Pins
from hepti_mqtt.runtime.coordinator.rollout import PREPARE_TIMEOUT_S, PUBLISHED_TRANSITIONS
from hepti_mqtt.runtime.coordinator.runs import RUN_STATES
from hepti_mqtt.runtime.worker.residents import RESIDENT_STATES
from hepti_mqtt.strategies.plan_programs import programs_digest


def overdue(site: Site) -> None:
    site.submit("r", within=1e6)
    site.tick(OVERDUE_S / 2)
    site.tick(OVERDUE_S)


def test_run_ids_ascend_and_are_unpredictable() -> None:
    own, others = (Ids(1, secret) for secret in (b"1" * 32, b"2" * 32))
    runs = [own.next_run() for _ in range(100)]
    assert runs == sorted(set(runs))
    assert not set(runs) & {others.next_run() for _ in range(100)}


NARROW = Pins(weight_dtype="w8a8")
OTHERS = (Pins(wire="f16"), Pins(wire="i8"), Pins(weight_dtype="f16"), Pins(weight_dtype="w8a32"))
PINNABLE = (None, ROW, Pins(devices=("c",)), NARROW, *OTHERS)
ACTIONS = ("join", "leave", "tick", "tick", "tick", "ready", "ready", "submit", "submit", "answer", "answer", "refuse")
ACTIONS += ("refuse", "solve", "pin", "silence", "searches")


def walk(seed: int) -> Iterator[machinery.Transition]:
    """Apply random events to a site, and yield the steps of its plans."""
    rng = random.Random(seed)
    site = Site(*(("m", "n") if rng.random() < 0.3 else ()), decider=everyone, searches=rng.random() < 0.7)
    boots = dict.fromkeys("abc", 0)
    for number in range(rng.randrange(60)):
        what, name = rng.choice(ACTIONS), rng.choice("abc")
        if what == "join":
            boots[name] += 1
            site.join(name, boot=boots[name])
        elif what == "leave" and name in site.boots:
            site.leave(name)
        elif what == "silence" and rng.random() < 0.3:
            site.boots.pop(name, None)
        elif what == "searches" and rng.random() < 0.5:
            site.searches = not site.searches
        elif what == "tick":
            site.tick(rng.choice((0.1, 1.1, 1.1, OVERDUE_S, OVERDUE_S, LOST_S, PREPARE_TIMEOUT_S)))
        elif what == "ready":
            site.ready(*rng.choice((("a",), ("b", "c"), ())))
        elif what == "submit":
            site.submit(f"r{number}", pins=rng.choice(PINNABLE), within=rng.choice((1.0, 4.0, 100.0)))
        elif what == "answer" and site.work:
            site.answer(rng.choice(sorted(site.work)[-3:]))
        elif what == "refuse" and name in site.prepares():
            site.failed(name, rng.choice(("memory", "memory", "wire")))
        elif what == "solve" and site.solves and not site.searches:
            site.solve(rng.choice(site.solves[-2:]))
        elif what == "pin":
            site.pin(rng.choice((Pins(), ROW, Pins(wire="f16"))))
        for story in site.session.stories():
            yield from story.last()


def lost_while_swapping() -> Site:
    site = settled("a", decider=everyone)
    site.submit("r")
    site.join("b")
    site.tick(1.1)
    site.failed("a")
    site.leave("b")
    return site


def suspect_replaced() -> Site:
    site = settled("a", decider=everyone)
    overdue(site)
    site.ready()
    return site


def suspect_without_another() -> Site:
    site = settled("a", decider=everyone)
    site.decider = lambda question: (_ for _ in ()).throw(PlanError("no"))
    overdue(site)
    return site


def pinned() -> Site:
    """Return a site with a default plan, and a plan being prepared for the pins of r1."""
    site = settled("a", decider=everyone)
    site.submit("r1", pins=NARROW, within=2.0)
    return site


def crowded(site: Site) -> Site:
    """Let other pins replace idle ones."""
    for number, pins in enumerate(OTHERS):
        site.submit(f"other {number}", pins=pins)
    assert NARROW not in [group.plans.pins for group in site.session.groups.pinned()]
    return site


def given_up_while_swapping() -> Site:
    site = settled("a", decider=everyone)
    site.submit("own", within=4.0)
    site.submit("r1", pins=NARROW, within=2.0)
    site.failed("a")
    site.tick(3.0)
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
    site.pin(Pins())
    site.failed("a")
    assert site.session.groups.default("m").evicted
    return site


def pins_that_swap_make_room_for_another_model() -> Site:
    site = Site("m", "n", decider=everyone)
    site.join("a")
    site.tick(1.1)
    first, other = [message for _, message in site.sent if isinstance(message, messages.Prepare)]
    plan = Plan.from_dict(first.plan)
    site.receive("a", messages.Ready(first.transaction_id, "m", plan.version, 1, programs_digest(SPEC, plan)))
    site.submit("own")
    site.submit("r1", pins=NARROW)
    site.failed("a")
    version = Plan.from_dict(other.plan).version
    site.receive("a", messages.PrepareFailed(other.transaction_id, "n", version, "memory", "too much", 10))
    assert [group.evicted for group in site.session.groups.pinned()] == [True]
    return site


RARE = (
    lost_while_swapping,
    suspect_replaced,
    suspect_without_another,
    given_up_while_swapping,
    given_up_while_suspect,
    own_search_makes_room,
    pins_that_swap_make_room_for_another_model,
)


def test_random_events_take_every_step_of_the_table_and_no_illegal_one() -> None:
    """An illegal step raises, because tests set `StateMachine.strict`."""
    walked = (step for seed in range(240) for step in walk(seed))
    rare = (step for scene in RARE for story in scene().session.stories() for step in story.last())
    taken = {(t.before, t.event, t.after) for t in (*walked, *rare)}
    steps = {(s, e, after) for s, by_event in PLANS.steps.items() for e, after in by_event.items()}
    assert steps - taken == set()
    assert taken - steps == {("-", "want", "wanted")}


def test_the_published_record_carries_the_story_and_follows_it_within_a_tick() -> None:
    site = settled("a", decider=everyone)
    site.join("b")
    site.settle()
    site.tick(0.25)
    shown = [c for c in site.commands if isinstance(c, interface.PublishPlan)]
    assert shown[-1].story == site.session.stories()[0].last(PUBLISHED_TRANSITIONS)
    assert [t.after for t in shown[-1].story][-1] == "gone", "including transitions after the activation"
    assert max(len(c.story) for c in shown) <= PUBLISHED_TRANSITIONS
    site.commands.clear()
    site.tick(0.25)
    assert not [c for c in site.commands if isinstance(c, interface.PublishPlan)]


def illegal(site: Site) -> None:
    plans = site.session.groups.default("m").plans
    record = plans.active
    assert record is not None
    plans.activate(record, site.now)


@pytest.mark.parametrize("running", [False, True])
def test_in_service_a_plan_after_an_illegal_step_is_released_and_replaced(
    monkeypatch: pytest.MonkeyPatch, running: bool
) -> None:
    monkeypatch.setattr(machinery.StateMachine, "strict", False)
    site = settled("a", decider=everyone)
    first = site.plan
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
    second = site.plan
    assert second.version > first.version
    assert ("a", first.version) in [(d, m.plan_version) for d, m in site.sent if isinstance(m, messages.Release)]
    site.serve("r2")


def test_a_ready_for_a_swapping_plan_does_not_count() -> None:
    site = settled("a", decider=everyone)
    site.submit("r")
    site.join("b")
    site.tick(1.1)
    site.failed("a")
    swapping = site.session.groups.default("m").plans.preparing
    for device in "ab":
        site.receive(device, messages.Ready(swapping.transaction_id, "m", swapping.version, 1, bytes(8)))
    assert swapping.state == "swapping"
    site.answer(1)
    site.ready()
    assert swapping.state == "active"


# -- tables of states -------------------------------------------------------------------------------------------------

DOOR = machinery.StateTable(
    name="door",
    states=("closed", "open", "gone"),
    first=("build", "closed"),
    steps={"closed": {"push": "open", "burn": "gone"}, "open": {"pull": "closed"}, "gone": {}},
    safe={"closed": "closed", "open": "closed", "gone": "gone"},
)
TABLES = (PLANS, RESIDENT_STATES, RUN_STATES, DOOR)


def machine(table: machinery.StateTable = DOOR) -> tuple[machinery.StateMachine, machinery.TransitionLog, Counter[str]]:
    story, counters = machinery.TransitionLog("tests"), Counter[str]()
    return machinery.StateMachine(table, story, counters), story, counters


@pytest.mark.parametrize("table", TABLES, ids=[table.name for table in TABLES])
def test_a_step_is_in_the_table_or_illegal(table: machinery.StateTable) -> None:
    for state in table.states:
        for event in {event for steps in table.steps.values() for event in steps}:
            steps, story, counters = machine(table)
            if (after := table.steps[state].get(event)) is None:
                with pytest.raises(machinery.IllegalStepError):
                    steps.step("it", state, event, 1.0)
                continue
            assert steps.step("it", state, event, 1.0, "so") == after
            assert story.last() == (machinery.Transition(1.0, "it", state, event, after, "so"),)
            assert not counters


@pytest.mark.parametrize(
    "change",
    [
        {"steps": {k: v for k, v in DOOR.steps.items() if k != "gone"}},
        {"safe": {"closed": "closed"}},
        {"safe": {**DOOR.safe, "open": "ajar"}},
        {"steps": {**DOOR.steps, "open": {"pull": "ajar"}}},
        {"steps": {**DOOR.steps, "closed": {"burn": "gone"}}},
        {"steps": {**DOOR.steps, "open": {"push": "open"}}},
        {"first": ("build", "gone")},
    ],
)
def test_a_table_with_a_hole_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        replace(DOOR, **change)


@given(st.integers(0, 3 * machinery.MAX_TRANSITIONS), st.integers(0, 2 * machinery.MAX_TRANSITIONS))
def test_a_story_is_bounded_and_counts_all_transitions(count: int, wanted: int) -> None:
    story = machinery.TransitionLog("doors")
    for i in range(count):
        story.append(machinery.Transition(float(i), f"door {i}", "closed", "push", "open"))
    assert story.count == count
    assert [t.now for t in story.last()] == list(range(max(count - machinery.MAX_TRANSITIONS, 0), count))
    assert len(story.as_text()) == min(count, machinery.MAX_TRANSITIONS)
    assert story.last(wanted) == story.last()[max(len(story.last()) - wanted, 0) :]


# -- pins -------------------------------------------------------------------------------------------------------------


def test_only_requests_with_pins_wait_for_their_plan() -> None:
    site = settled("a", "b")
    first = site.plan
    assert first.strategy == "single"
    site.submit("r1", pins=ROW)
    site.submit("r2", pins=ROW)
    assert not site.work
    site.serve("r3")
    assert site.answers["r3"].plan == first
    site.ready()
    for run_id in (2, 3):
        site.answer(run_id)
    assert [site.answers[name].plan.strategy for name in ("r1", "r2")] == ["row", "row"]
    assert site.plan == first


def test_the_limit_of_concurrent_runs_holds_over_all_pins() -> None:
    site = settled("a", "b", in_flight=2, decider=everyone)
    site.submit("r1", pins=ROW)
    site.ready()
    site.submit("r2")
    site.submit("r3")
    site.submit("r4", pins=ROW)
    assert len(site.work) == 2
    for run_id in range(1, 5):
        site.answer(run_id)
    assert list(site.answers) == ["r1", "r2", "r3", "r4"], "in order of arrival"


MANY = [*OTHERS, NARROW]
assert len(MANY) == MAX_PINNED_GROUPS + 1


def test_the_pinned_plans_that_were_used_last_are_kept() -> None:
    site = settled("a", "b", decider=everyone)
    first = site.plan
    for number, pins in enumerate([*MANY[:MAX_PINNED_GROUPS], MANY[0], MANY[MAX_PINNED_GROUPS]], 1):
        site.tick(0.1)
        site.submit(f"r{number}", pins=pins)
        site.ready()
        site.answer(number)
    assert max(len(c.pinned_preparing) for c in site.commands if isinstance(c, interface.PublishPlan)) == 1
    assert len(site.answers) == MAX_PINNED_GROUPS + 2
    evicted = site.answers["r2"].plan.version
    assert site.released() == [("a", evicted), ("b", evicted)]
    assert site.plan == first
    shown = [c for c in site.commands if isinstance(c, interface.PublishPlan)][-1]
    assert (shown.active, len(shown.pinned)) == (first, MAX_PINNED_GROUPS)


def test_more_pins_are_refused_while_all_pinned_groups_are_in_use() -> None:
    site = settled("a", "b", decider=everyone)
    for number, pins in enumerate(MANY):
        site.submit(f"r{number}", pins=pins)
    assert list(site.errors) == [f"r{MAX_PINNED_GROUPS}"]
    assert isinstance(site.errors[f"r{MAX_PINNED_GROUPS}"], OverloadedError)
    site.serve("own")


def test_the_default_plan_returns_after_its_eviction_for_pins() -> None:
    site = settled("a", in_flight=1, decider=everyone)
    first = site.plan
    site.submit("before")
    site.submit("r1", pins=NARROW)
    site.failed("a")
    assert site.plan is None
    assert not site.session.groups.default("m").plans.preparing
    site.answer(1)
    assert "before" in site.answers
    assert ("a", first.version) in site.released()
    site.ready()
    site.answer(2)
    assert site.answers["r1"].plan.weight_dtype == "w8a8"
    site.tick(RESTORE_AFTER_S / 2)
    assert site.plan is None, "the next request may have the same pins"
    site.pass_by(3, RESTORE_AFTER_S / 2)
    site.failed("a")
    assert ("a", site.answers["r1"].plan.version) in site.released()
    site.tick(0.1)
    site.ready()
    back = site.plan
    assert (back.weight_dtype, back.devices) == (first.weight_dtype, first.devices)
    assert not site.session.groups.pinned()


def test_idle_pins_are_evicted_before_the_default_plan() -> None:
    site = settled("a", decider=everyone)
    first = site.plan
    site.submit("r1", pins=Pins(wire="f16"))
    site.ready()
    site.answer(1)
    site.submit("r2", pins=NARROW)
    site.failed("a")
    assert site.plan == first
    site.tick(0.1)
    site.ready()
    site.answer(2)
    assert site.answers["r2"].plan.weight_dtype == "w8a8"
    assert site.plan == first
    assert len(site.session.groups.pinned()) == 1


def test_an_older_plan_is_confirmed_before_a_newer_one_is_activated() -> None:
    """An activation makes a doubting device release earlier plans."""
    site = settled("a", "b", decider=everyone)
    first = site.plan
    site.submit("r1", pins=ROW)
    before = len(site.sent)
    site.ready()
    pinned = site.session.groups.pinned()[0].active
    activated = [m.plan_version for d, m in site.sent[before:] if d == "a" and isinstance(m, messages.Activate)]
    assert activated == [first.version, pinned.version]


def test_pins_without_a_plan_end_only_their_own_requests() -> None:
    site = settled("a")
    plan = site.plan
    site.submit("r1", pins=Pins(devices=("nobody",)))
    assert isinstance(site.errors["r1"], PlanError)
    site.serve("r2")
    assert site.answers["r2"].plan == plan
    site.submit("r3", pins=Pins(devices=("nobody",)))
    assert isinstance(site.errors["r3"], PlanError)
    assert not site.session.groups.pinned()


def test_a_lost_device_ends_its_pins_and_replaces_the_default_plan() -> None:
    site = settled("a", "b")
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
