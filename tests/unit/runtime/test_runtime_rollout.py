"""The preparation of a plan: loads, refusals, Programs built ahead, and weights on a standby device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from scripted_site import ROW, Site, caps, everyone, preparing, settled

from hepti_mqtt import __version__
from hepti_mqtt.core.errors import ModelError, PlanError, RemoteError
from hepti_mqtt.core.ids import PlanVersion
from hepti_mqtt.core.plan import Plan
from hepti_mqtt.models import spec_from_dict
from hepti_mqtt.planner import Decision, Question, decide, price_plans
from hepti_mqtt.protocol import messages
from hepti_mqtt.runtime.coordinator import interface
from hepti_mqtt.runtime.coordinator.fair_queue import Batching
from hepti_mqtt.runtime.coordinator.next_batch import MAX_URGENT_SHAPES
from hepti_mqtt.runtime.coordinator.plan_groups import MAX_PREBUILT_SHAPES
from hepti_mqtt.runtime.coordinator.requests import Pins
from hepti_mqtt.runtime.coordinator.rollout import ENDS_S, MAX_FAILED_PREPARATIONS, REPEAT_PREPARE_S, RETRY_S
from hepti_mqtt.runtime.coordinator.search_kinds import SearchKind
from hepti_mqtt.runtime.machinery import Publish


def last_prepare(site: Site, device: str = "a") -> tuple[messages.Prepare, PlanVersion]:
    """Return the last Prepare of a device and its plan version."""
    prepare = site.prepares()[device]
    return prepare, Plan.from_dict(prepare.plan).version


def test_memory_refusal_without_another_plan_makes_the_next_question_tighter() -> None:
    site = Site()
    site.join("a", memory=1 << 24)
    site.tick(1.1)
    site.failed("a", missing=5 << 20)
    site.tick(1.1)
    assert site.solves[-1].question.cluster.devices["a"].memory_bytes == (1 << 24) - (5 << 20)


@pytest.mark.parametrize("error", [RemoteError, ModelError], ids=["device refuses", "weights unreadable"])
def test_failed_preparations_refuse_the_queued_requests_and_are_repeated_later(error: type) -> None:
    site = Site()
    site.join("a")
    site.submit("r1", within=1000)
    for _ in range(MAX_FAILED_PREPARATIONS if error is RemoteError else 1):
        site.tick(1.1)
        if error is RemoteError:
            site.failed("a", "wire")
            continue
        site.event(interface.WeightsUnreadable("m", "b", ModelError("the file ends early")))
        assert "r1" not in site.errors, "the plan does not use that device"
        site.event(interface.WeightsUnreadable("m", "a", ModelError("the file ends early")))
    assert isinstance(site.errors["r1"], error)
    site.tick(RETRY_S + 0.1)
    site.ready()
    assert site.plan is not None


def test_prepare_that_was_lost_is_sent_again_to_those_who_are_not_ready() -> None:
    site = preparing("a", "b", decider=everyone)
    first = site.prepares()
    site.ready("a")
    site.sent.clear()
    site.tick(REPEAT_PREPARE_S - 0.5)
    assert not site.prepares()
    site.tick(1)
    assert site.prepares() == {"b": first["b"]}
    site.ready("b")
    assert site.plan is not None


def test_preparation_without_progress_is_given_up() -> None:
    site = preparing("a")
    first, version = last_prepare(site)
    site.pass_by(30, 5)
    second, _ = last_prepare(site)
    assert second.transaction_id > first.transaction_id
    for _ in range(30):
        site.tick(5)
        site.progress("a", 1, 2)
    assert site.prepares()["a"] == second, "progress keeps it alive"
    site.receive("a", messages.Ready(first.transaction_id, "m", version, 0, bytes(8)))
    assert site.plan is None, "a Ready for the abandoned plan activates nothing"


def test_progress_of_weights_is_shown_at_most_once_a_second() -> None:
    site = preparing("a")
    for part in range(10):
        site.progress("a", part, 10)
        site.now += 0.25
    site.ready()
    shown = [c for c in site.commands if isinstance(c, interface.PublishPlan)]
    assert [c.progress for c in shown if c.progress] == [{"a": (0, 10)}, {"a": (4, 10)}, {"a": (8, 10)}]
    assert (shown[-1].preparing, shown[-1].progress) == (None, {})


def time_until_lost(site: Site, device: str, *repeated: messages.Message, seconds: float = 60.0) -> float:
    """Repeat messages of a device while all others are ready; return the seconds until plans do not use it."""
    begun = site.now
    while site.now - begun < seconds and device in site.session.fleet.usable():
        site.tick(0.5)
        for other in sorted(set(site.boots) - {device}):
            site.ready(other)
        for message in repeated:
            site.receive(device, message)
    return site.now - begun


@pytest.mark.parametrize("speaks", [True, False])
def test_a_device_that_prepares_without_progress_is_dropped(speaks: bool) -> None:
    site = preparing("a", "b", decider=everyone)
    prepare, version = last_prepare(site, "b")
    site.submit("r1")
    repeated = (messages.PrepareProgress(prepare.transaction_id, "m", version, 0, 0),) if speaks else ()
    assert time_until_lost(site, "b", *repeated, seconds=30.0) < (25 if speaks else 8)
    site.ready("a")
    assert site.plan.devices == ("a",)


@pytest.mark.parametrize("loaded_bytes", [100, 0], ids=["it loads", "it hangs"])
@pytest.mark.parametrize("other", ["another plan", "an abandoned plan"])
def test_progress_with_other_plans_counts_because_a_device_loads_one_after_another(other, loaded_bytes: int) -> None:
    site = Site(decider=everyone)
    site.join("a", "b", "c")
    if other == "another plan":
        site.submit("pinned", pins=Pins(strategy="column"), within=1000)
    site.tick(1.1)
    first, version = last_prepare(site, "b")
    if other == "another plan":
        site.ready("a", "c")
        site.tick(1.1)
    else:
        site.leave("a")
    second, second_version = last_prepare(site, "b")
    assert version != second_version
    loads = messages.PrepareProgress(first.transaction_id, "m", version, loaded_bytes, 10 * loaded_bytes)
    repeated = messages.PrepareProgress(second.transaction_id, "m", second_version, 0, 0)
    seconds = time_until_lost(site, "b", loads, repeated)
    assert seconds >= 60 if loaded_bytes else seconds < 25


# -- devices outside of the plan --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("site_of_plan", "report"),
    [
        *((state, code) for state in (preparing, settled) for code in ("mesh", "forgotten")),
        *((preparing, kind) for kind in ("memory", "wire", "ready", "progress")),
    ],
)
def test_a_report_of_a_device_outside_of_the_plan_changes_nothing(
    site_of_plan: Callable[..., Site], report: str
) -> None:
    site = site_of_plan("a", "b", "c", pins=ROW)
    prepare, version = last_prepare(site)
    about = (prepare.transaction_id, "m", version)
    reports = {"ready": messages.Ready(*about, 5, b"otherone"), "progress": messages.PrepareProgress(*about, 1, 2)}
    stray = reports.get(report, messages.PrepareFailed(*about, report, "no", 0, ("a",)))
    for count in range(1, 9):
        assert site.receive("c", stray) == []
        assert site.session.counters["foreign_message"] == count
    site.ready("a", "b")
    assert site.plan.version == version
    site.serve("r")


# -- standby ----------------------------------------------------------------------------------------------------------


def alone(question: Question) -> Decision:
    """Decide for the first device alone."""
    return decide(replace(question, strategy="single"))


def serving(*devices: str, in_use: bool = True, **options: Any) -> tuple[Site, str, str]:
    """Return a site with a plan on one device, that device, and another one."""
    site = settled(*devices, **{"decider": alone, **options})
    if in_use:
        site.serve("r")
    return site, site.plan.root, min(set(devices) - set(site.plan.devices))


def standby_searches(site: Site) -> list[interface.Solve]:
    """Return the searches for a standby plan."""
    return [solve for solve in site.solves if solve.kind is SearchKind.HURRIED and solve.active is None]


def test_a_standby_device_loads_the_weights_and_serves_after_a_loss() -> None:
    site, head, _ = serving("a", "b", "c")
    first = site.plan
    site.pass_by(5)
    (released,) = [(device, m) for device, m in site.sent if isinstance(m, messages.Release)]
    device = released[0]
    sent = [c for c in site.commands if isinstance(c, Publish) and c.topic.endswith(f"/{device}/cmd")]
    prepares = [m for m in map(messages.decode, (c.payload for c in sent)) if isinstance(m, messages.Prepare)]
    assert prepares[-1].build_first == len(prepares[-1].shapes) > 0, "with the Programs of recent requests"
    assert device != head
    assert site.plan.version == first.version
    site.leave(first.root)
    site.submit("next")
    site.tick(0.1)
    site.ready()
    assert site.plan.devices == (device,)
    site.answer(max(site.work))
    assert "next" in site.answers


def test_a_hurried_search_prefers_a_plan_with_loaded_weights_if_it_serves_sooner() -> None:
    site = settled("a", "b", "c", decider=everyone)
    site.searches = False
    site.submit("r1")
    site.leave("c")
    (search,) = site.solves[1:]
    assert search.kind is SearchKind.HURRIED
    row = everyone(search.question)
    heavy = replace(row.chosen, load_bytes={"a": 1 << 33, "b": 1 << 33})
    light = replace(alone(search.question).chosen, load_bytes={"a": 0})
    site.event(interface.Solved("m", search.ticket, replace(row, chosen=heavy, ranking=(heavy, light))))
    priced = site.solves[-1]
    assert [plan.strategy for plan in priced.plans] == ["single"]
    site.event(interface.Solved("m", priced.ticket, price_plans(priced.question, priced.plans)))
    site.ready()
    assert site.plan.strategy == "single"
    site.answer(max(site.work))
    site.pass_by(3)
    whole = site.solves[-1]
    assert (whole.kind, whole.plans) == (SearchKind.WHOLE, ()), "the whole search follows"


def test_a_standby_is_prepared_once_per_plan_and_start_of_its_device() -> None:
    site, _, other = serving("a", "b")
    site.pass_by(11)
    assert len(standby_searches(site)) == 1
    site.leave(other)
    site.join(other, boot=2)
    site.pass_by(11)
    assert [device for device, _ in site.released()].count(other) > 1


@pytest.mark.parametrize("options", [{"in_use": False}, {"pins": Pins(devices=("a",))}], ids=["unused", "pinned"])
def test_unused_and_pinned_models_have_no_standby(options: dict) -> None:
    site, _, _ = serving("a", "b", **options)
    site.pass_by(5)
    assert not standby_searches(site)


def test_only_its_device_reports_on_a_standby_plan() -> None:
    site, _, other = serving("a", "b")
    site.mute = {other}
    site.pass_by(5)
    version = standby_searches(site)[0].question.plan_version
    assert site.receive(site.plan.root, messages.Ready(0, "m", version, 5, bytes(8))) == []
    released = [command.topic for command in site.receive(other, messages.Ready(0, "m", version, 5, bytes(8)))]
    assert len(released) == 1, "it keeps the weights"
    assert other in released[0]


@pytest.mark.parametrize("refuses", [True, False])
def test_a_standby_device_that_refuses_or_is_silent_is_tried_again_later(refuses: bool) -> None:
    site, head, other = serving("a", "b")
    site.mute = {other}
    site.pass_by(5)
    assert len(standby_searches(site)) == 1
    if refuses:
        failed = messages.PrepareFailed(0, "m", standby_searches(site)[0].question.plan_version, "memory", "no room", 1)
        site.receive(other, failed)
    site.pass_by(int(ENDS_S / 2) + 2)
    assert len(standby_searches(site)) == 1
    site.mute = set()
    for n in range(int(2 * ENDS_S)):
        site.tick(1.0)
        if n % 20 == 0:
            site.serve(f"{n}", within=1e6)
    assert len(standby_searches(site)) > 1
    assert site.released()[-1] == (other, standby_searches(site)[-1].question.plan_version), "it keeps the weights"
    assert site.plan.root == head
    site.leave(head)
    site.submit("next")
    site.tick(0.1)
    site.ready()
    assert site.plan.devices == (other,)


@pytest.mark.parametrize("again", [False, True])
def test_a_standby_plan_is_released_for_a_plan_that_lacks_memory(again: bool) -> None:
    site, _, other = serving("a", "b")
    site.mute = {other}
    site.pass_by(5)
    site.submit("pinned", pins=Pins(strategy="single", devices=(other,)), within=1e6)
    site.tick(0.1)
    before = len(site.sent)
    refused = site.failed(other, missing=1 << 30)
    release, repeated = (m for device, m in site.sent[before:] if device == other)
    assert isinstance(release, messages.Release)
    assert release.plan_version == standby_searches(site)[0].question.plan_version
    assert repeated.plan == refused.plan
    if again:  # although the standby plan is released
        site.failed(other, missing=1 << 30)
        site.pass_by(4)
        assert isinstance(site.errors["pinned"], PlanError)
    else:
        site.ready(other)
        site.answer(max(site.work))
        assert "pinned" in site.answers


# -- Programs built ahead ---------------------------------------------------------------------------------------------


def foreseen(site: Site, device: str = "a") -> tuple[list[int], int]:
    """Return the lengths of the shapes in a device's Prepare, and the number to build first."""
    prepare = site.prepares()[device]
    reads = spec_from_dict(prepare.spec).input_spec
    return [reads.shape_of(plain).tokens for plain in prepare.shapes], prepare.build_first


def site_of(*devices: str) -> Site:
    site = Site(decider=everyone)
    site.join(*devices)
    return site


LONG_QUEUE = range(1, MAX_PREBUILT_SHAPES + 4)


@pytest.mark.parametrize(
    ("served", "queued", "change", "lengths", "urgent"),
    [
        ((), (), "", [16], 1),  # the shape that plans are optimised for
        ((), (5, 9, 5), "", [5, 9], 2),  # queued shapes only
        ((), (7,), "forecast", [7], 1),  # a forecast has no run
        ((), LONG_QUEUE, "", [*LONG_QUEUE[:MAX_PREBUILT_SHAPES]], MAX_URGENT_SHAPES),
        ((3, 4, 3), (), "join", [3, 4], 2),  # while a plan serves, the next one builds all recent shapes first
        ((3,), (4,), "leave", [4, 3], 1),  # after a loss, recent shapes do not delay queued requests
    ],
)
def test_a_prepare_names_queued_shapes_then_recent_ones(served, queued, change, lengths, urgent) -> None:
    site = site_of("a", "b") if change == "leave" else site_of("a")
    if served:
        site.settle()
    for number, length in enumerate(served, 1):
        site.serve(f"served{number}", length)
    if change == "forecast":
        site.submit("forecast", 5, computes=False)
    for number, length in enumerate(queued):
        site.submit(f"queued{number}", length)
    if change == "join":
        site.join("b")
    elif change == "leave":
        site.leave("b")
    site.tick(1.1)
    assert foreseen(site, "b" if change == "join" else "a") == (lengths, urgent)


def test_queued_requests_are_foreseen_as_batches() -> None:
    site = Site(in_flight=1, batching=Batching(16), decider=everyone)
    for i in range(21):
        site.submit(f"r{i}", 4)
    site.join("a")
    site.tick(1.1)
    (prepare,) = site.prepares().values()
    assert [len(shape.sizes) for shape in prepare.shapes[:3]] == [16, 4, 1]
    assert prepare.build_first == MAX_URGENT_SHAPES


# -- incompatible versions --------------------------------------------------------------------------------------------


def test_a_device_that_derives_other_programs_is_refused_until_it_restarts() -> None:
    site = site_of("b")
    site.submit("r")
    site.tick(1.1)
    prepare, version = last_prepare(site, "b")
    site.receive("b", messages.Ready(prepare.transaction_id, "m", version, 5, b"otherone"))
    site.tick(10.0)
    assert isinstance(site.errors["r"], PlanError), "there is no other device"
    (note,) = [c.text for c in site.commands if isinstance(c, interface.LogEvent) and c.kind == "refused"]
    assert caps("b", 1).version in note
    assert __version__ in note
    site.join("a")
    assert site.settle().devices == ("a",)
    site.join("b", boot=2)
    assert site.settle().devices == ("a", "b")
