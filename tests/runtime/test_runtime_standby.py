"""Weights loaded ahead of the loss of the one device that has them, on a virtual clock."""

from __future__ import annotations

from dataclasses import replace

from scripted_site import Site

from hepti_mqtt.plan import Plan
from hepti_mqtt.planner import Decision, Question, decide
from hepti_mqtt.protocol import messages
from hepti_mqtt.runtime.coordinator import interface
from hepti_mqtt.runtime.coordinator.requests import Pins
from hepti_mqtt.runtime.coordinator.rollout import CALM_S, ENDS_S


def alone(question: Question) -> Decision:
    """Decide for the first device alone."""
    return decide(replace(question, strategy="single"))


def site(*devices: str, memory: int = 1 << 30, asked: bool = True) -> Site:
    """A model in use on one of some devices."""
    made = Site(decider=alone)
    made.join(*devices, memory=memory)
    made.settle()
    if asked:
        made.submit("r")
        made.answer(max(made.work))
    return made


def calm(made: Site, seconds: float = CALM_S) -> None:
    for _ in range(int(seconds) + 2):
        made.tick(1.0)


def sought(made: Site) -> list[interface.Solve]:
    """Return the searches for who would serve next."""
    return [solve for solve in made.solves if solve.hurried and solve.running is None]


def test_who_would_serve_next_has_the_weights_and_no_plan_before_the_device_is_lost() -> None:
    made = site("a", "b", "c")
    first = made.session.plan("m")
    (other, another) = sorted({"a", "b", "c"} - set(first.devices))
    calm(made)
    (released,) = [(device, m) for device, m in made.told if isinstance(m, messages.Release)]
    device = released[0]
    assert device in (other, another)
    assert made.session.plan("m") == first, "nobody is to notice"
    made.leave(first.head)
    made.submit("next")
    made.tick(0.1)
    made.ready()
    assert made.session.plan("m").devices == (device,), "not the one that would have to load first"
    made.answer(max(made.work))
    assert "next" in made.answers


def test_it_is_done_once_for_a_plan_and_again_when_that_device_has_started_anew() -> None:
    made = site("a", "b")
    other = ({"a", "b"} - set(made.session.plan("m").devices)).pop()
    calm(made, 3 * CALM_S)
    assert len(sought(made)) == 1
    made.leave(other)
    made.join(other, boot=2)
    calm(made, 3 * CALM_S)
    assert [m for d, m in made.told if d == other and isinstance(m, messages.Release)][1:]


def test_nothing_is_loaded_ahead_for_a_model_that_nobody_asks() -> None:
    made = site("a", "b", asked=False)
    calm(made)
    assert not sought(made)


def test_nothing_is_loaded_ahead_where_pins_name_the_device() -> None:
    made = Site(decider=alone, pins=Pins(devices=("a",)))
    made.join("a", "b")
    made.settle()
    made.submit("r")
    made.answer(max(made.work))
    calm(made)
    assert not sought(made)


def test_a_device_that_refuses_or_says_nothing_is_tried_again_much_later() -> None:
    for refuses in (True, False):
        made = site("a", "b")
        other = ({"a", "b"} - set(made.session.plan("m").devices)).pop()
        made.mute = {other}
        calm(made)
        assert len(sought(made)) == 1
        if refuses:
            failed = messages.Failed(0, "m", sought(made)[0].question.epoch, "memory", "no room", 1)
            made.event(interface.UpMessage(other, failed))
        calm(made, ENDS_S / 2)
        assert len(sought(made)) == 1
        for n in range(int(2 * ENDS_S)):
            made.tick(1.0)
            if n % 20 == 0:
                made.submit(f"{n}", within=1e6)
                made.answer(max(made.work))
        assert len(sought(made)) > 1
        plan = made.session.plan("m")
        assert isinstance(plan, Plan)
        assert plan.devices != (other,)


def test_what_is_loaded_ahead_gives_way_to_a_plan_that_lacks_its_memory() -> None:
    made = site("a", "b")
    other = ({"a", "b"} - set(made.session.plan("m").devices)).pop()
    made.mute = {other}
    calm(made)
    ahead = sought(made)[0].question.epoch
    made.submit("pinned", pins=Pins(strategy="single", devices=(other,)), within=1e6)
    made.tick(0.1)
    refused = made.prepares()[other]
    epoch = Plan.from_dict(refused.plan).epoch
    before = len(made.told)
    made.event(interface.UpMessage(other, messages.Failed(refused.txn, "m", epoch, "memory", "no room", 1 << 30)))
    release, again = (m for device, m in made.told[before:] if device == other)
    assert isinstance(release, messages.Release)
    assert release.epoch == ahead, "first, so that there is room when the plan comes again"
    assert isinstance(again, messages.Prepare)
    assert again.plan == refused.plan, "the device is not thought to be smaller than it is"
    made.ready(other)
    made.answer(max(made.work))
    assert "pinned" in made.answers


def test_a_plan_that_is_refused_though_nothing_is_loaded_ahead_any_more_is_searched_anew() -> None:
    made = site("a", "b")
    other = ({"a", "b"} - set(made.session.plan("m").devices)).pop()
    made.mute = {other}
    calm(made)
    made.submit("pinned", pins=Pins(strategy="single", devices=(other,)), within=1e6)
    made.tick(0.1)
    for _ in range(2):
        asked = made.prepares()[other]
        epoch = Plan.from_dict(asked.plan).epoch
        made.event(interface.UpMessage(other, messages.Failed(asked.txn, "m", epoch, "memory", "no room", 1 << 30)))
    calm(made, 2.0)
    assert f"{other} needs" in str(made.errors["pinned"])


def test_who_refused_to_load_ahead_once_serves_after_it_has_at_the_second_time() -> None:
    made = site("a", "b")
    first = made.session.plan("m").head
    other = ({"a", "b"} - {first}).pop()
    made.mute = {other}
    calm(made)
    failed = messages.Failed(0, "m", sought(made)[0].question.epoch, "memory", "no room", 1)
    made.event(interface.UpMessage(other, failed))
    made.mute = set()
    for n in range(int(ENDS_S) // 10 + 2):
        made.submit(f"{n}")
        made.answer(max(made.work))
        calm(made, 8.0)
    assert len(sought(made)) == 2
    (*_, released) = [m for device, m in made.told if device == other and isinstance(m, messages.Release)]
    assert released.epoch == sought(made)[1].question.epoch, "it has loaded, and keeps the weights"
    made.leave(first)
    made.submit("next")
    made.tick(0.1)
    made.ready()
    assert made.session.plan("m").devices == (other,)
    made.answer(max(made.work))
    assert "next" in made.answers
